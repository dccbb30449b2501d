"""Keys of a DiskCache as ids in its store, and back.

A store's ids are text, listed in the order of text. So an id begins with a letter for the type, and
numbers are written so that their texts have their order: iteration goes through the keys as
`sorted` would, one type after the other. Only fractions between the same two whole numbers may come
in any order. `1`, `1.0` and `True` are equal in Python; here `1` and `1.0` are one key and `True`
is another, as in diskcache.
"""

import math
from base64 import urlsafe_b64decode, urlsafe_b64encode
from typing import Any, Final

from msgspec import json

from stillfresh.integrations.plain_values import (
    TABLE,
    Encoding,
    decoder_of,
    encoded_plain,
)

NONE: Final = "a"
FLAG: Final = "b"
NUMBER: Final = "c"
TEXT: Final = "d"
BYTES: Final = "e"
TUPLE: Final = "f"
LIST: Final = "g"
OTHER: Final = "h"
OFFSET: Final = 10**19
"""Makes whole numbers of 64 bits positive, with twenty digits at most."""
SMALL: Final = range(-(2**63), 2**63)
UNORDERED: Final = (set, frozenset, dict)
"""Two equal ones may be written differently."""


class KeyEncoding(Encoding):
    """Keys that are plain data."""

    advice = "Use a key of text, bytes, numbers, dates, UUID, or tuples of these"


_decode = decoder_of(TABLE)
_members = json.Decoder(list[Any]).decode


def id_of(key: Any) -> str:
    """The id of a key. Raises TypeError for a key that is not plain data."""
    kind = type(key)
    if kind is str:
        return TEXT + str(key)
    if kind is int and key in SMALL:
        return f"{NUMBER}{key + OFFSET:020d}"
    if kind is float and math.isfinite(key) and -(2.0**63) <= key < 2.0**63:
        whole = math.floor(key)
        if whole == key:
            return id_of(int(key))
        return f"{NUMBER}{whole + OFFSET:020d} {key!r}"
    if kind is bytes:
        return f"{BYTES}{key.hex()}"
    if kind is tuple or kind is list:
        letter = TUPLE if kind is tuple else LIST
        return letter + json.encode([_member_of(part) for part in key]).decode()
    if key is None:
        return NONE
    if kind is bool:
        return f"{FLAG}{int(key)}"
    if isinstance(key, UNORDERED):
        raise TypeError(f"a {kind.__name__} cannot be a key. {KeyEncoding.advice}")
    return OTHER + urlsafe_b64encode(encoded_plain(KeyEncoding(), key)).decode()


def key_of(id_: str) -> Any:
    """The key of an id."""
    letter = id_[0]
    content = id_[1:]
    match letter:
        case "d":
            return content
        case "c":
            whole, _, number = content.partition(" ")
            return float(number) if number else int(whole) - OFFSET
        case "e":
            return bytes.fromhex(content)
        case "f":
            return tuple(_key_of_member(member) for member in _members(content))
        case "g":
            return [_key_of_member(member) for member in _members(content)]
        case "b":
            return content == "1"
        case "a":
            return None
    return _decode(urlsafe_b64decode(content))


def _member_of(part: Any) -> str | list[Any]:
    """A part of a tuple: its id, or a list of its letter and its own parts."""
    kind = type(part)
    if kind is tuple or kind is list:
        letter = TUPLE if kind is tuple else LIST
        return [letter, *map(_member_of, part)]
    return id_of(part)


def _key_of_member(member: str | list[Any]) -> Any:
    if isinstance(member, str):
        return key_of(member)
    letter, *members = member
    parts = map(_key_of_member, members)
    return tuple(parts) if letter == TUPLE else list(parts)
