"""What all threads and aliases of one LOCATION share: the cache, its resource, values as bytes.

Django makes a backend object for each thread and alias. They share one cache.
"""

from collections.abc import Mapping
from threading import Lock
from typing import Any, Final

from django.utils.module_loading import import_string

from stillfresh.engine import Codec, CodecMaker, Spec, UnreadableLog, no_loader, terms_of
from stillfresh.engine.keys import checked_kind
from stillfresh.errors import ConfigError, shown
from stillfresh.integrations.django.codec import DjangoCodec
from stillfresh.integrations.django.errors import is_refusal
from stillfresh.integrations.tagged_values import (
    BlockingCache,
    Bytes,
    tags_of,
    tags_of_key,
    with_tags,
    without_tags,
)

SHARED: Final = {
    "NAME": "django",
    "MEMORY_FOR": 0,
    "MAX_ENTRIES": 1_000,
    "MAX_BYTES": "64MB",
    "CONCURRENCY": 32,
    "LOAD_TIMEOUT": "10m",
    "CODEC": None,
}
"""Options, with their defaults, on which all aliases of a LOCATION and NAME agree."""
OWN: Final = ("STALE_FOR", "ERROR_FOR")


class SharedCache:
    """One resource of one cache, and the codec of its values."""

    def __init__(self, location: str, options: Mapping[str, Any]) -> None:
        name = checked_kind(options["NAME"])
        self.options = options
        self.cache = BlockingCache(location)
        self.cache.pass_on(is_refusal)
        self.codec: Codec[Any] = _codec(options["CODEC"], name)
        self._name = name
        self._unreadable = UnreadableLog()
        spec: Spec[str, bytes] = Spec(
            name,
            no_loader,
            Bytes,
            tags_of_key,
            terms_of(name, 0, 0, 0, 0),
            concurrency=options["CONCURRENCY"],
            max_entries=options["MAX_ENTRIES"],
            max_bytes=options["MAX_BYTES"],
            memory_for=options["MEMORY_FOR"],
            load_timeout=options["LOAD_TIMEOUT"],
            by_id=False,
            in_thread=True,
        )
        self.resource = self.cache.declare(spec, str.__str__, str)

    def encoded(self, value: object, tags: tuple[str, ...] = ()) -> bytes:
        """The value with its tags, so that a later change of the entry knows them."""
        return with_tags(self.codec.encode(value), tags)

    def decoded(self, data: bytes, default: object) -> Any:
        """The value; `default` if another release or another codec wrote the bytes."""
        try:
            _, value = without_tags(data)
            return self.codec.decode(value)
        except Exception as exc:  # noqa: BLE001 (a codec may raise anything)
            self._unreadable.report(self._name, exc)
            return default

    def tags(self, data: bytes) -> tuple[str, ...]:
        """The tags that were stored with the value."""
        return tags_of(data)


_caches: dict[tuple[str, str], SharedCache] = {}
_lock = Lock()


def options_of(params: Mapping[str, Any]) -> Mapping[str, Any]:
    """The OPTIONS of an alias. Raises ConfigError for a TIMEOUT that Django reads as 300."""
    timeout = params.get("TIMEOUT")
    if timeout is not None:
        try:
            int(timeout)
        except (ValueError, TypeError):
            advice = "write a number of seconds, or None for no end"
            raise ConfigError(f"CACHES: TIMEOUT is {shown(timeout)}; {advice}") from None
    options: Mapping[str, Any] = params.get("OPTIONS", {})
    return options


def shared(location: str, given: Mapping[str, Any]) -> SharedCache:
    """The cache that the backends of this LOCATION and NAME share. Opens nothing."""
    if not location or not isinstance(location, str):
        advice = "write a store's address, such as 'sqlite:///cache.db'"
        raise ConfigError(f"CACHES: LOCATION is {shown(location)}; {advice}")
    unknown = sorted(given.keys() - SHARED.keys() - set(OWN))
    if unknown:
        names = ", ".join([*SHARED, *OWN])
        raise ConfigError(f"CACHES: there is no OPTIONS[{unknown[0]!r}]; there are {names}")
    options: dict[str, Any] = dict(SHARED)
    options.update((name, value) for name, value in given.items() if name in SHARED)
    identity = (location, options["NAME"])
    with _lock:
        cache = _caches.get(identity)
        if cache is None:
            cache = SharedCache(location, options)
            _caches[identity] = cache
    for option, value in options.items():
        other_value = cache.options[option]
        if value != other_value:
            raise ConfigError(
                f"CACHES: OPTIONS[{option!r}] is {shown(value)} in one alias and "
                f"{shown(other_value)} in another of the same LOCATION; "
                f"write the same in both, or give one of them a NAME of its own"
            )
    return cache


def _codec(given: object, name: str) -> Codec[Any]:
    """The codec in OPTIONS: an object, its class, or the import path of either."""
    if given is None:
        return DjangoCodec()
    imported: Any = import_string(given) if isinstance(given, str) else given
    codec: Any = imported() if isinstance(imported, type) else imported
    return codec.make(name, DjangoCodec) if isinstance(codec, CodecMaker) else codec
