"""A part of a stored body (I15): RFC 9110 §14.

Pure. One range is answered; several, other units and what cannot be read are ignored, as §14.2
allows: the whole page is a right answer to them.
"""

import re
from enum import Enum
from typing import Final, TypeAlias

__all__ = ["WHOLE", "Asked", "Part", "part_asked"]

SPEC: Final = re.compile(rb"bytes=\s*([0-9]{0,19})-([0-9]{0,19})\s*", re.IGNORECASE)


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
        first, end = max(0, length - int(found[2])), length
        return (first, end) if int(found[2]) and length else Asked.UNSATISFIABLE
    first = int(found[1])
    last = int(found[2]) if found[2] else length - 1
    if found[2] and last < first:
        return WHOLE
    return (first, min(last + 1, length)) if first < length else Asked.UNSATISFIABLE
