"""Checks of arguments, each written once. An error says the name, what is allowed and the value.

Pure: a value in, the same value out, or a `ConfigError`.
"""

import re
from typing import Final, TypeGuard, TypeVar

from stillfresh.errors import ConfigError, shown

T = TypeVar("T")

BYTES_PER_UNIT: Final = {"b": 1} | {
    f"{letter}{unit}": base**power
    for power, letter in enumerate("kmgt", 1)
    for unit, base in (("b", 1000), ("ib", 1024))
}
SIZE: Final = re.compile(r"([0-9]{1,15}(?:\.[0-9]{1,15})?) ?([kmgt]?i?b)?", re.IGNORECASE)


def is_whole(value: object, least: int | None = None, most: int | None = None) -> TypeGuard[int]:
    """A whole number within these bounds; True and False are no numbers."""
    if not isinstance(value, int) or isinstance(value, bool):
        return False
    return (least is None or value >= least) and (most is None or value <= most)


def checked_whole(
    name: str, value: object, least: int = 1, most: int | None = None, *, or_else: str = ""
) -> int:
    """The number itself, if it is whole and within these bounds; `or_else`: what is allowed too."""
    if not is_whole(value, least, most):
        bounds = f"of {least:,} or more" if most is None else f"from {least:,} to {most:,}"
        raise ConfigError(f"{name}: must be a whole number {bounds}{or_else}, not {shown(value)}")
    return value


def checked_bytes(name: str, value: object, least: int = 1) -> int:
    """Bytes, from a whole number or text such as "2GB" (1000 x 1000 x 1000) or "64KiB" (1024)."""
    size = value
    if isinstance(value, str) and (match := SIZE.fullmatch(value)):
        unit = BYTES_PER_UNIT.get((match[2] or "B").lower())
        size = value if unit is None else int(float(match[1]) * unit)
    if not is_whole(size, least):
        allowed = "a whole number of bytes, or text such as '500MB', '2GB' or '64KiB'"
        raise ConfigError(f"{name}: must be {allowed}, at least {least:,}, not {shown(value)}")
    return size


def checked_share(name: str, value: object) -> float:
    """A part of the whole: more than nothing."""
    if not isinstance(value, float | int) or isinstance(value, bool) or not 0 < value <= 1:
        raise ConfigError(f"{name}: must be a number above 0, up to 1, not {shown(value)}")
    return float(value)


def checked_flag(name: str, value: object) -> bool:
    """True or False itself, and nothing that is only taken for it."""
    if not isinstance(value, bool):
        raise ConfigError(f"{name}: must be True or False, not {shown(value)}")
    return value


def checked_function(name: str, value: T, what: str = "a function") -> T:
    """`what` says which kind of function, as "an async function"."""
    if not callable(value):
        raise ConfigError(f"{name}: must be {what}, not {shown(value)}")
    return value


def checked_unicode(name: str, text: str) -> bytes:
    """The text as UTF-8, which has no half characters."""
    try:
        return text.encode()
    except UnicodeEncodeError as exc:
        raise ConfigError(f"{name}: must be Unicode, without lone surrogates: {text!a}") from exc
