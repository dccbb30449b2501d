"""Plain Python values as bytes that cannot run code: each comes back equal and of the same type.

msgpack holds text, numbers, lists, and dicts whose keys are text. Every other type has an extension
in a table; types without one can be neither stored nor read.
"""

from collections.abc import Callable, Mapping
from datetime import UTC, date, datetime, time, timedelta, timezone, tzinfo
from decimal import Decimal
from typing import Any, Final, NamedTuple, TypeAlias
from uuid import UUID
from zoneinfo import ZoneInfo

from msgspec import msgpack

Plain: TypeAlias = Any
"""A value that msgpack itself can hold."""

LEAVES: Final = frozenset({type(None), bool, float, str, bytes})
INT64: Final = range(-(2**63), 2**64)
PLAIN_TYPES: Final = "text, bytes, numbers, lists, tuples, sets, dicts, dates, Decimal, UUID"

_pack = msgpack.Encoder().encode


class Encoding:
    """The encoding of one value."""

    advice = ""
    """What to do about a value whose type has no extension."""

    def extension_of(self, kind: type) -> "Extension | None":
        """The extension of exactly this type."""
        return TABLE.get(kind)

    def plain(self, value: Any) -> Plain:  # noqa: ANN401 (a value of any type)
        """The value as msgpack can hold it. Raises TypeError if its type cannot be stored."""
        kind = type(value)
        if kind in LEAVES or (kind is int and value in INT64):
            return value
        if kind is list:
            return self.plain_list(value)
        if kind is dict and all(type(key) is str for key in value):
            return {key: self.plain(member) for key, member in value.items()}
        extension = self.extension_of(kind)
        if extension is not None:
            return msgpack.Ext(extension.code, _pack(extension.parts(self, value)))
        return self.plain_of_unknown(value)

    def plain_of_unknown(self, value: object) -> Plain:
        """Raise TypeError, naming the type; a subclass may know more."""
        kind = type(value)
        raise TypeError(f"a {kind.__module__}.{kind.__qualname__} cannot be cached. {self.advice}")

    def plain_list(self, value: Any) -> Plain:  # noqa: ANN401
        return [self.plain(member) for member in value]

    def pairs(self, value: dict[Any, Any]) -> Plain:
        return [[self.plain(key), self.plain(member)] for key, member in value.items()]


def encoded_plain(encoding: Encoding, value: object) -> bytes:
    """The value as bytes. Raises TypeError if its type cannot be stored, or if it is endless."""
    try:
        return _pack(encoding.plain(value))
    except RecursionError:
        name = type(value).__name__
        raise TypeError(
            f"a {name} cannot be cached: it contains itself. {encoding.advice}"
        ) from None


class Extension(NamedTuple):
    """One type beyond msgpack's."""

    code: int
    """Never reused for another type, because it is in the stored bytes."""
    parts: Callable[[Any, Any], Plain]
    restore: Callable[[Any], Any]


def decoder_of(table: Mapping[type, Extension]) -> Callable[[bytes], Any]:
    """A function that reads bytes with the extensions of this table."""
    restore_by_code = {extension.code: extension.restore for extension in table.values()}

    def restore(code: int, data: memoryview) -> Any:  # noqa: ANN401
        return restore_by_code[code](decode(data))

    decode = msgpack.Decoder(ext_hook=restore).decode
    return decode


def _zone(at: Any) -> Plain:  # noqa: ANN401 (a datetime or a time)
    """The zone's name, its seconds from UTC, or None."""
    zone = at.tzinfo
    if zone is None:
        return None
    if isinstance(zone, ZoneInfo):
        return zone.key
    offset = at.utcoffset()
    if offset is None:
        raise TypeError(f"a time in the zone {zone!r} cannot be cached: it is not a fixed one")
    return offset.total_seconds()


def _zone_of(plain: Plain) -> tzinfo | None:
    if plain is None:
        return None
    if isinstance(plain, str):
        return ZoneInfo(plain)
    return timezone(timedelta(seconds=plain)) if plain else UTC


def _moment(_: Encoding, value: Any) -> Plain:  # noqa: ANN401
    return [value.replace(tzinfo=None).isoformat(), value.fold, _zone(value)]


def _moment_of(of: Any, parts: Any) -> Any:  # noqa: ANN401
    text, fold, zone = parts
    return of.fromisoformat(text).replace(fold=fold, tzinfo=_zone_of(zone))


TABLE: Final[dict[type, Extension]] = {
    tuple: Extension(1, Encoding.plain_list, tuple),
    set: Extension(2, Encoding.plain_list, set),
    frozenset: Extension(3, Encoding.plain_list, frozenset),
    dict: Extension(4, Encoding.pairs, dict),
    int: Extension(5, lambda _, number: hex(number), lambda text: int(text, 16)),
    datetime: Extension(6, _moment, lambda parts: _moment_of(datetime, parts)),
    date: Extension(7, lambda _, day: day.isoformat(), date.fromisoformat),
    time: Extension(8, _moment, lambda parts: _moment_of(time, parts)),
    timedelta: Extension(
        9,
        lambda _, span: [span.days, span.seconds, span.microseconds],
        lambda parts: timedelta(*parts),
    ),
    Decimal: Extension(10, lambda _, number: str(number), Decimal),
    UUID: Extension(11, lambda _, uuid: uuid.bytes, lambda data: UUID(bytes=data)),
}
"""Codes up to 99; those of frameworks are in their own tables."""
