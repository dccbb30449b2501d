"""What all threads and aliases of one LOCATION share: the cache, its resource, values as bytes.

Django makes a backend object for each thread and alias. They share one cache.
"""

from collections.abc import Mapping
from threading import Lock
from typing import Any, Final

from django.utils.module_loading import import_string
from msgspec import msgpack

from stillfresh.engine import Codec, Spec, no_loader, terms_of
from stillfresh.engine.keys import checked_kind
from stillfresh.errors import ConfigError, shown
from stillfresh.integrations.django.codec import DjangoCodec
from stillfresh.sync import SyncCache

TAGGED: Final = b"\xc1"
"""No msgpack value begins with it."""
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


class TaggedKey(str):
    """A key, and the tags that its entry gets."""

    __slots__ = ("tags",)

    def __new__(cls, name: str, tags: tuple[str, ...]) -> "TaggedKey":
        key = super().__new__(cls, name)
        key.tags = tags
        return key

    tags: tuple[str, ...]


class BlockingCache(SyncCache):
    """A SyncCache that may be called on an event loop. It blocks the loop, as Django backends do.

    A template rendered by an async view reads its fragments that way.
    """

    def check_caller(self) -> None:
        """Any thread may wait."""


class Bytes:
    """The codec of the resource: its values are bytes already."""

    @staticmethod
    def encode(value: bytes) -> bytes:
        return value

    decode = encode


class SharedCache:
    """One resource of one cache, and the codec of its values."""

    def __init__(self, location: str, options: Mapping[str, Any]) -> None:
        name = checked_kind(options["NAME"])
        self.options = options
        self.cache = BlockingCache(location)
        self.codec: Codec[Any] = _codec(options["CODEC"])
        spec: Spec[str, bytes] = Spec(
            name,
            no_loader,
            Bytes,
            lambda key: key.tags if isinstance(key, TaggedKey) else (),
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
        data = self.codec.encode(value)
        if tags or data.startswith(TAGGED):
            return TAGGED + _pack((tags, data))
        return data

    def decoded(self, data: bytes, default: object) -> Any:
        """The value; `default` if another release or another codec wrote the bytes."""
        try:
            if data.startswith(TAGGED):
                _, data = _unpack(data[1:])
            return self.codec.decode(data)
        except Exception:  # noqa: BLE001 (a codec may raise anything)
            return default

    def tags(self, data: bytes) -> tuple[str, ...]:
        """The tags that were stored with the value."""
        if not data.startswith(TAGGED):
            return ()
        tags, _ = _unpack(data[1:])
        return tags


_pack = msgpack.Encoder().encode
_unpack = msgpack.Decoder(tuple[tuple[str, ...], bytes]).decode
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


def _codec(given: object) -> Codec[Any]:
    """The codec in OPTIONS: an object, its class, or the import path of either."""
    if given is None:
        return DjangoCodec()
    imported: Any = import_string(given) if isinstance(given, str) else given
    codec: Codec[Any] = imported() if isinstance(imported, type) else imported
    return codec
