"""A part of a stored body (I15): RFC 9110 §14.

Pure. One range is answered; several, other units and what cannot be read are ignored, as §14.2
allows: the whole page is a right answer to them.
"""

import re
from enum import Enum
from typing import Final, TypeAlias

SPEC: Final = re.compile(rb"bytes=[ \t]*([0-9]*)-([0-9]*)[ \t]*", re.IGNORECASE)
DIGITS: Final = 18
"""More of them are past the end of any page."""


class Asked(Enum):
    """What is answered but a part."""

    WHOLE = 0
    UNSATISFIABLE = 1


WHOLE: Final = Asked.WHOLE
Part: TypeAlias = tuple[int, int]
"""First byte and the one after the last."""


def part_asked(value: bytes, length: int) -> Part | Asked:
    found = SPEC.fullmatch(value)
    if found is None or not (found[1] or found[2]):
        return WHOLE
    if not found[1]:
        size = _number(found[2])
        return (max(0, length - size), length) if size and length else Asked.UNSATISFIABLE
    first = _number(found[1])
    last = _number(found[2]) if found[2] else length - 1
    if found[2] and last < first:
        return WHOLE
    return (first, min(last + 1, length)) if first < length else Asked.UNSATISFIABLE


def _number(digits: bytes) -> int:
    digits = digits.lstrip(b"0") or b"0"
    return int(digits) if len(digits) <= DIGITS else 10**DIGITS
