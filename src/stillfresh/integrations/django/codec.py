"""Django's values as bytes that cannot run code: plain data, responses, model instances.

Plain data is stored as everywhere (`plain_values`); the table below adds Django's types. A model's
class is looked up in Django's registry of apps; nothing is imported by a stored name.
"""

from functools import cached_property
from http.cookies import Morsel, SimpleCookie
from typing import Any, Final

import django.http
from django.apps import apps
from django.db.models import Model, QuerySet
from django.db.models.fields.files import FieldFile
from django.http import HttpResponse
from django.http.response import HttpResponseBase
from django.utils.functional import Promise
from django.utils.functional import cached_property as django_cached_property
from django.utils.safestring import SafeString

from stillfresh.integrations.plain_values import (
    PLAIN_TYPES,
    Encoding,
    Extension,
    Plain,
    decoder_of,
    encoded_plain,
)
from stillfresh.integrations.plain_values import TABLE as PLAIN_TABLE

COMPUTED: Final = (property, cached_property, django_cached_property)
RESPONSES: Final = {
    name: member
    for name, member in vars(django.http).items()
    if isinstance(member, type) and issubclass(member, HttpResponse)
}
"""The classes of decoded responses; another class becomes its nearest base in this table."""
ADVICE: Final = (
    f"Store plain data ({PLAIN_TYPES}), "
    "a response or a model instance; or give this cache a codec of its own in OPTIONS['CODEC']"
)


class DjangoCodec:
    """Turns values of a Django cache into bytes and back, without pickle."""

    def encode(self, value: object) -> bytes:
        """Return the value as bytes. Raises TypeError if its type cannot be stored."""
        return encoded_plain(DjangoEncoding(), value)

    def decode(self, data: bytes) -> Any:
        """Return the value, equal and of the same type. Raises an error for other bytes."""
        return _decode(data)


class DjangoEncoding(Encoding):
    """The encoding of one value. It knows which model instances it is inside of."""

    advice = ADVICE

    def __init__(self) -> None:
        self._path: list[Model] = []
        """The instances that lead to the current one by their relations."""

    def extension_of(self, kind: type) -> Extension | None:
        """The extension of exactly this type; for responses and models, of subclasses too."""
        if kind in TABLE:
            return TABLE[kind]
        for base in (HttpResponseBase, Model):
            if issubclass(kind, base):
                return TABLE[base]
        return None

    def plain_of_unknown(self, value: Any) -> Plain:
        """A lazy text becomes the text, and a query the list of its rows."""
        if isinstance(value, Promise):
            return str(value)
        if isinstance(value, QuerySet):
            return self.plain_list(value)
        return super().plain_of_unknown(value)

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


def _file_name(value: object) -> object:
    return value.name if isinstance(value, FieldFile) else value


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
    **PLAIN_TABLE,
    SafeString: Extension(12, lambda _, text: str.__str__(text), SafeString),
    SimpleCookie: Extension(13, _cookies, _cookies_of),
    HttpResponseBase: Extension(14, DjangoEncoding.response, _response_of),
    Model: Extension(15, DjangoEncoding.instance, _instance_of),
}
_decode = decoder_of(TABLE)
