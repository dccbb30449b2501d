"""Django's values as bytes that cannot run code: plain data, responses, model instances.

msgpack holds text, numbers, lists, and dicts whose keys are text. Every other type has an extension
in the table below; types without one can be neither stored nor read. A model's class is looked up
in Django's registry of apps; nothing is imported by a stored name.
"""

from collections.abc import Callable
from datetime import UTC, date, datetime, time, timedelta, timezone, tzinfo
from decimal import Decimal
from functools import cached_property
from http.cookies import Morsel, SimpleCookie
from typing import Any, Final, NamedTuple, TypeAlias
from uuid import UUID
from zoneinfo import ZoneInfo

import django.http
from django.apps import apps
from django.db.models import Model, QuerySet
from django.db.models.fields.files import FieldFile
from django.http import HttpResponse
from django.http.response import HttpResponseBase
from django.utils.functional import Promise
from django.utils.functional import cached_property as django_cached_property
from django.utils.safestring import SafeString
from msgspec import msgpack

Plain: TypeAlias = Any
"""A value that msgpack itself can hold."""

LEAVES: Final = frozenset({type(None), bool, float, str, bytes})
INT64: Final = range(-(2**63), 2**64)
COMPUTED: Final = (property, cached_property, django_cached_property)
RESPONSES: Final = {
    name: member
    for name, member in vars(django.http).items()
    if isinstance(member, type) and issubclass(member, HttpResponse)
}
"""The classes of decoded responses; another class becomes its nearest base in this table."""
ADVICE: Final = (
    "Store plain data (text, numbers, lists, tuples, sets, dicts, dates, Decimal, UUID), "
    "a response or a model instance; or give this cache a codec of its own in OPTIONS['CODEC']"
)

_pack = msgpack.Encoder().encode


class DjangoCodec:
    """Turns values of a Django cache into bytes and back, without pickle."""

    def encode(self, value: object) -> bytes:
        """Return the value as bytes. Raises TypeError if its type cannot be stored."""
        try:
            return _pack(Encoding().plain(value))
        except RecursionError:
            problem = f"a {type(value).__name__} cannot be cached: it contains itself. {ADVICE}"
            raise TypeError(problem) from None

    def decode(self, data: bytes) -> Any:
        """Return the value, equal and of the same type. Raises an error for other bytes."""
        return _unpack(data)


class Encoding:
    """The encoding of one value. It knows which model instances it is inside of."""

    def __init__(self) -> None:
        self._path: list[Model] = []
        """The instances that lead to the current one by their relations."""

    def plain(self, value: Any) -> Plain:
        kind = type(value)
        if kind in LEAVES or (kind is int and value in INT64):
            return value
        if kind is list:
            return self.plain_list(value)
        if kind is dict and all(type(key) is str for key in value):
            return {key: self.plain(member) for key, member in value.items()}
        extension = _extension_of(kind)
        if extension is not None:
            return msgpack.Ext(extension.code, _pack(extension.parts(self, value)))
        if isinstance(value, Promise):
            return str(value)
        if isinstance(value, QuerySet):
            return self.plain_list(value)
        raise TypeError(f"a {kind.__module__}.{kind.__qualname__} cannot be cached. {ADVICE}")

    def plain_list(self, value: Any) -> Plain:
        return [self.plain(member) for member in value]

    def pairs(self, value: dict[Any, Any]) -> Plain:
        return [[self.plain(key), self.plain(member)] for key, member in value.items()]

    def response(self, value: Any) -> Plain:
        if not isinstance(value, HttpResponse):
            raise TypeError(f"a {type(value).__name__} cannot be cached: it is sent in a stream")
        known_class = next(
            base.__name__ for base in type(value).__mro__ if RESPONSES.get(base.__name__) is base
        )
        status = [value.status_code, value._reason_phrase, value._charset]
        headers = [list(header) for header in value.headers.items()]
        return [known_class, *status, headers, self.plain(value.cookies), value.content]

    def instance(self, value: Any) -> Plain:
        """Its fields, its annotations, and the related instances that it has loaded."""
        model = type(value)
        state = value._state
        attributes = value.__dict__
        fields = [
            field.attname for field in model._meta.concrete_fields if field.attname in attributes
        ]
        annotations = sorted(
            name
            for name in attributes.keys() - set(fields)
            if not name.startswith("_") and not isinstance(getattr(model, name, None), COMPUTED)
        )
        self._path.append(value)
        try:
            related = {
                name: self.plain(instance)
                for name, instance in state.fields_cache.items()
                if not any(instance is outer for outer in self._path)
            }
            own = {name: self.plain(_file_name(attributes[name])) for name in fields}
            more = {name: self.plain(attributes[name]) for name in annotations}
        finally:
            self._path.pop()
        return [model._meta.label_lower, state.db, state.adding, own, more, related]


class Extension(NamedTuple):
    """One type beyond msgpack's."""

    code: int
    """Never reused for another type, because it is in the stored bytes."""
    parts: Callable[[Encoding, Any], Plain]
    restore: Callable[[Any], Any]


def _file_name(value: object) -> object:
    return value.name if isinstance(value, FieldFile) else value


def _zone(at: Any) -> Plain:
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


def _moment(_: Encoding, value: Any) -> Plain:
    return [value.replace(tzinfo=None).isoformat(), value.fold, _zone(value)]


def _moment_of(of: Any, parts: Any) -> Any:
    text, fold, zone = parts
    return of.fromisoformat(text).replace(fold=fold, tzinfo=_zone_of(zone))


def _cookies(_: Encoding, value: SimpleCookie) -> Plain:
    return [[key, morsel.value, morsel.coded_value, dict(morsel)] for key, morsel in value.items()]


def _cookies_of(parts: Any) -> SimpleCookie:
    cookies: SimpleCookie = SimpleCookie()
    for key, value, coded, attributes in parts:
        morsel: Morsel[str] = Morsel()
        morsel.set(key, value, coded)
        morsel.update(attributes)
        dict.__setitem__(cookies, key, morsel)
    return cookies


def _response_of(parts: Any) -> HttpResponse:
    name, status, reason, charset, headers, cookies, content = parts
    response: Any = object.__new__(RESPONSES[name])
    HttpResponse.__init__(response, content, status=status, reason=reason, charset=charset)
    del response["Content-Type"]
    for field, value in headers:
        response[field] = value
    response.cookies = cookies
    return response


def _instance_of(parts: Any) -> Model:
    """The instance; deferred and new fields are loaded when they are used."""
    label, database, adding, own, more, related = parts
    model = apps.get_model(label)
    fields = [field.attname for field in model._meta.concrete_fields if field.attname in own]
    if len(fields) < len(own):
        raise LookupError(f"{label} has no such fields any more: {own.keys() - set(fields)}")
    instance = model.from_db(database, fields, [own[name] for name in fields])
    instance._state.adding = adding
    instance._state.fields_cache.update(related)
    instance.__dict__.update(more)
    return instance


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
    SafeString: Extension(12, lambda _, text: str.__str__(text), SafeString),
    SimpleCookie: Extension(13, _cookies, _cookies_of),
    HttpResponseBase: Extension(14, Encoding.response, _response_of),
    Model: Extension(15, Encoding.instance, _instance_of),
}
_BY_CODE: Final = {extension.code: extension.restore for extension in TABLE.values()}


def _extension_of(kind: type) -> Extension | None:
    """The extension of exactly this type; for responses and models, of subclasses too."""
    if kind in TABLE:
        return TABLE[kind]
    for base in (HttpResponseBase, Model):
        if issubclass(kind, base):
            return TABLE[base]
    return None


def _restore(code: int, data: memoryview) -> Any:
    return _BY_CODE[code](_unpack(data))


_unpack = msgpack.Decoder(ext_hook=_restore).decode
