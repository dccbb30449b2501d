"""The cache backend: Django's cache API over one resource of a SyncCache.

Values are stored as bytes and decoded for each caller, because Django code changes values that it
gets. `get` returns only fresh values; `get_or_set` and pages may be served stale ones.
"""

from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import suppress
from math import ceil
from threading import get_ident
from typing import Any, Final, TypeVar

from asgiref.sync import async_to_sync, iscoroutinefunction, sync_to_async
from django.core.cache import caches
from django.core.cache.backends.base import DEFAULT_TIMEOUT, BaseCache
from django.db import connections
from django.utils.timezone import get_current_timezone
from django.utils.timezone import override as override_zone
from django.utils.translation import get_language
from django.utils.translation import override as override_language

from stillfresh.durations import Duration, seconds
from stillfresh.engine import Amended, Answer, Loaded, checked_tags
from stillfresh.errors import ConfigError, LoadFailed, StoreError
from stillfresh.freshness import Verdict
from stillfresh.integrations.django.shared import SharedCache, options_of, shared
from stillfresh.integrations.tagged_values import (
    NEVER_ENDS,
    BytesChange,
    TaggedKey,
    update_with_its_tags,
)

T = TypeVar("T")

MISSING: Final = object()
LISTING: Final = "list the entries with `manage.py stillfresh inspect`, or in the dashboard"
REPLACEMENTS: Final = {
    "delete_pattern": "give the entries a tag, cache.set(key, value, tags=['menu']), and call "
    "cache.invalidate_tag('menu')",
    "keys": LISTING,
    "iter_keys": LISTING,
    "lock": "let cache.get_or_set(key, load) call `load` once for all processes; for work that is "
    "no cached value, use the lock of your own Redis client",
    "pttl": "use cache.ttl(key), in seconds",
    "expire": "use cache.touch(key, timeout)",
    "pexpire": "use cache.touch(key, timeout), in seconds",
    "expire_at": "use cache.touch(key, timeout), in seconds from now",
    "pexpire_at": "use cache.touch(key, timeout), in seconds from now",
    "persist": "use cache.touch(key, None)",
    "client": "entries are not plain Redis values; use a Redis client of your own beside it",
}
"""What users of django-redis call besides Django's own methods."""


def _as_coroutine(method: Callable[..., T]) -> Callable[..., Coroutine[Any, Any, T]]:
    """The method as a coroutine function.

    It does not run in Django's single thread for the ORM: cache calls need not queue there.
    """

    async def run_in_thread(*args: Any, **kwargs: Any) -> T:
        result: T = await sync_to_async(method, thread_sensitive=False)(*args, **kwargs)
        return result

    return run_in_thread


class StillfreshCache(BaseCache):
    """A backend for Django's CACHES. LOCATION is a store's address."""

    def __init__(self, location: str, params: dict[str, Any]) -> None:
        super().__init__(params)
        given = options_of(params)
        self._shared: SharedCache = shared(location, given)
        self._resource = self._shared.resource
        self.cache = self._shared.cache
        self.location = location
        self.name: str = self._shared.options["NAME"]
        self._stale_for = seconds(given.get("STALE_FOR", 0), name="OPTIONS['STALE_FOR']")
        self._error_for = seconds(given.get("ERROR_FOR", 0), name="OPTIONS['ERROR_FOR']")

    def get(self, key: str, default: Any = None, version: int | None = None) -> Any:
        """Return the value, or `default` if it is missing or has expired."""
        key = self.make_and_validate_key(key, version=version)
        return self._value(self._known_answer(key), default)

    def _known_answer(self, key: str) -> object:
        answer = self._resource.get_nowait(key)
        if answer is not None:
            return answer
        stored = self._resource.stored([key])  # `known` would look into memory once more
        if stored is None:
            stored = self._resource.known([key])
        return stored.get(key)

    def get_many(self, keys: Iterable[str], version: int | None = None) -> dict[str, Any]:
        """Return the values of the keys that have one."""
        names = {self.make_and_validate_key(key, version=version): key for key in keys}
        known = self._resource.known(list(names)) if names else {}
        values = {name: self._value(known.get(key), MISSING) for key, name in names.items()}
        return {name: value for name, value in values.items() if value is not MISSING}

    def _value(self, answer: object, default: Any) -> Any:
        """The value, or the default. Bytes that cannot be decoded (another release) are missing."""
        if not isinstance(answer, Answer) or not _has_fresh_value(answer):
            return default
        return self._shared.decoded(answer.value, default)

    def set(
        self,
        key: str,
        value: Any,
        timeout: Any = DEFAULT_TIMEOUT,
        version: int | None = None,
        *,
        tags: Sequence[str] = (),
    ) -> None:
        """Store a value. `tags` are for `invalidate_tag`."""
        self.set_many({key: value}, timeout, version, tags=tags)

    def set_many(
        self,
        data: Mapping[str, Any],
        timeout: Any = DEFAULT_TIMEOUT,
        version: int | None = None,
        *,
        tags: Sequence[str] = (),
    ) -> list[str]:
        """Store many values; return the keys that could not be stored."""
        names = {self._key(key, version, tags): value for key, value in data.items()}
        if not self._seconds(timeout):
            self._resource.delete(*names)
        elif names:
            loaded = {key: self.loaded(value, timeout, tags) for key, value in names.items()}
            self._resource.put_many(loaded)
        return []

    def add(
        self, key: str, value: Any, timeout: Any = DEFAULT_TIMEOUT, version: int | None = None
    ) -> bool:
        """Store a value if there is none. Of many callers at once, one gets True."""
        name = self._key(key, version, ())
        loaded = self.loaded(value, timeout)
        return self._resource.add(name, loaded).stored

    def touch(self, key: str, timeout: Any = DEFAULT_TIMEOUT, version: int | None = None) -> bool:
        """Give the value a new timeout; return False if there is none."""
        fresh_for = self._seconds(timeout)
        if not fresh_for:
            return self.delete(key, version)
        name = self._key(key, version, ())
        result = self._resource.touch(
            name, fresh_for=fresh_for, stale_for=self._stale_for, error_for=self._error_for
        )
        return result.stored

    def ttl(self, key: str, version: int | None = None) -> int | None:
        """Seconds until the timeout ends; 0 if there is no value, None if it has no timeout."""
        answer = self._known_answer(self.make_and_validate_key(key, version=version))
        if not isinstance(answer, Answer) or not _has_fresh_value(answer):
            return 0
        if answer.policy.fresh_for >= NEVER_ENDS:
            return None
        return max(1, ceil(answer.policy.fresh_for - answer.age))

    def __getattr__(self, name: str) -> Any:
        """Name the replacement of a method of django-redis. `hasattr` stays False."""
        advice = REPLACEMENTS.get(name)
        if advice is None:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        raise AttributeError(f"{name} is a method of django-redis; with stillfresh, {advice}")

    def incr(self, key: str, delta: int = 1, version: int | None = None) -> Any:
        """Add to a number, atomically across machines, and keep its timeout. Raises ValueError."""
        result: Any = None

        def change(answer: Answer[bytes] | None) -> object:
            nonlocal result
            value = self._value(answer, MISSING)
            if answer is None or value is MISSING:
                raise ValueError(f"Key '{key}' not found")
            result = value + delta
            return Amended(self._shared.encoded(result, self._shared.tags(answer.value)))

        update_with_its_tags(self._resource, self._key(key, version, ()), change)
        return result

    def incr_version(self, key: str, delta: int = 1, version: int | None = None) -> int:
        """Store the value under another version, with its tags; return the new version."""
        old_version = self.version if version is None else version
        new_version: int = old_version + delta
        answer = self._known_answer(self.make_and_validate_key(key, version=old_version))
        value = self._value(answer, MISSING)
        if value is MISSING or not isinstance(answer, Answer):
            raise ValueError(f"Key '{key}' not found")
        self.set(key, value, version=new_version, tags=self._shared.tags(answer.value))
        self.delete(key, version=old_version)
        return new_version

    def delete(self, key: str, version: int | None = None) -> bool:
        """Delete a value. Of many callers at once, one gets True."""
        return self._resource.remove(self._key(key, version, ()))

    def delete_many(self, keys: Iterable[str], version: int | None = None) -> None:
        """Delete many values."""
        if names := [self.make_and_validate_key(key, version=version) for key in keys]:
            self._resource.delete(*names)

    def clear(self) -> None:
        """Delete every entry of this LOCATION and NAME, whatever its prefix and version."""
        self._resource.clear()

    def invalidate_tag(self, tag: str, *, soft: bool = False) -> int:
        """Invalidate entries with this tag (soft: the old value is served meanwhile)."""
        return len(self._shared.cache.invalidate_tag(tag, soft=soft))

    def close(self, **_: object) -> None:
        """Do nothing: Django calls it after each request, and the store stays open until exit."""

    def _update(
        self, key: str, version: int | None, change: BytesChange, tags: Sequence[str] = ()
    ) -> bool:
        """Change an entry; return True if it had a fresh value before the change."""
        had_value = False

        def note_and_change(answer: Answer[bytes] | None) -> object:
            nonlocal had_value
            had_value = _has_fresh_value(answer)
            return change(answer)

        self._resource.update(self._key(key, version, tags), note_and_change)
        return had_value

    def get_or_set(
        self,
        key: str,
        default: Any,
        timeout: Any = DEFAULT_TIMEOUT,
        version: int | None = None,
        *,
        tags: Sequence[str] = (),
        stale_for: Duration | None = None,
        error_for: Duration | None = None,
    ) -> Any:
        """Return the value, or that of `default`, called once for all threads and processes.

        `default` is called in this thread. For `stale_for` after the timeout, the old value is
        returned while `default` is called in the background. For `error_for`, it is returned if
        `default` raises.
        """
        new_value: Any = MISSING

        def load() -> Loaded[bytes]:
            nonlocal new_value
            new_value = default() if callable(default) else default
            return self.loaded(new_value, timeout, tags, stale_for, error_for)

        value = self.read(key, load, version=version, tags=tags)
        if value is not MISSING:
            return value
        if new_value is MISSING:  # the loader was not called: it failed a moment ago
            loaded = load()
            with suppress(StoreError):  # no reason to withhold the value
                self.put(key, loaded, version=version, tags=tags)
        return new_value

    def read(
        self,
        key: str,
        load: Callable[[], object],
        *,
        version: int | None = None,
        tags: Sequence[str] = (),
    ) -> Any:
        """Read with this loader; MISSING if its value is private, or it failed a moment ago."""
        value, _ = self.read_with_answer(key, load, version=version, tags=tags)
        return value

    def read_with_answer(
        self,
        key: str,
        load: Callable[[], object],
        *,
        version: int | None = None,
        tags: Sequence[str] = (),
    ) -> tuple[Any, Answer[bytes] | None]:
        """The value as `read` returns it, and the answer that it came with, if any."""
        key = self._key(key, version, tags)
        known = self._known_answer(key)
        value = self._value(known, MISSING)
        if value is not MISSING and isinstance(known, Answer):
            return value, known
        answer = self._resource.read(key, in_background(load))
        if isinstance(answer, LoadFailed) and answer.__cause__ is not None:
            raise answer.__cause__
        if isinstance(answer, Answer) and answer.found:
            return self._shared.decoded(answer.value, MISSING), answer
        return MISSING, None

    def is_known_without_store(self, key: str, value: object) -> bool:
        """True if memory has this value, and the store cannot be asked about it."""
        known = self._known_answer(self.make_and_validate_key(key))
        if not isinstance(known, Answer) or not known.unverified or not known.found:
            return False
        return bool(self._shared.decoded(known.value, MISSING) == value)

    def put(
        self,
        key: str,
        loaded: Loaded[bytes],
        *,
        version: int | None = None,
        tags: Sequence[str] = (),
    ) -> None:
        self._resource.put(self._key(key, version, tags), loaded)

    def loaded(
        self,
        value: object,
        timeout: Any,
        tags: Sequence[str] = (),
        stale_for: Duration | None = None,
        error_for: Duration | None = None,
    ) -> Loaded[bytes]:
        """Encode a value with its terms. Raises TypeError if it cannot be stored."""
        data = self._shared.encoded(value, checked_tags("tags", tags))
        return self._on_terms(data, self._seconds(timeout), stale_for, error_for)

    def _key(self, key: str, version: int | None, tags: Sequence[str]) -> str:
        name: str = self.make_and_validate_key(key, version=version)
        return TaggedKey(name, checked_tags("tags", tags)) if tags else name

    def _seconds(self, timeout: Any) -> float:
        """How long a value with this timeout is fresh; 0 if it has expired at once."""
        if timeout is DEFAULT_TIMEOUT:
            timeout = self.default_timeout
        if timeout is None:
            return NEVER_ENDS
        return min(max(0.0, float(timeout)), NEVER_ENDS)

    def _on_terms(
        self,
        data: bytes,
        fresh_for: float,
        stale_for: Duration | None = None,
        error_for: Duration | None = None,
    ) -> Loaded[bytes]:
        return Loaded(
            data,
            fresh_for=fresh_for,
            stale_for=self._stale_for if stale_for is None else stale_for,
            error_for=self._error_for if error_for is None else error_for,
        )

    async def aget(self, key: str, default: Any = None, version: int | None = None) -> Any:
        """Return the value, as `get` does. A value in memory needs no thread."""
        answer = self._resource.get_nowait(self.make_and_validate_key(key, version=version))
        if answer is not None:
            return self._value(answer, default)
        return await _as_coroutine(self.get)(key, default, version)

    aget_many = _as_coroutine(get_many)
    aset = _as_coroutine(set)  # noqa: A003 (the method)
    aset_many = _as_coroutine(set_many)
    aadd = _as_coroutine(add)
    atouch = _as_coroutine(touch)
    aincr = _as_coroutine(incr)
    aincr_version = _as_coroutine(incr_version)
    adelete = _as_coroutine(delete)
    adelete_many = _as_coroutine(delete_many)
    aclear = _as_coroutine(clear)

    async def aget_or_set(self, key: str, default: Any, *args: Any, **kwargs: Any) -> Any:
        """Return the value, as `get_or_set` does; `default` may be a coroutine function."""
        if iscoroutinefunction(default):
            default = async_to_sync(default)
        return await sync_to_async(self.get_or_set)(key, default, *args, **kwargs)


def backend_of(alias: str, what: str) -> StillfreshCache:
    """Return the backend of an alias. `what` names its user in the error if it is another one."""
    cache = caches[alias]
    if not isinstance(cache, StillfreshCache):
        raise ConfigError(
            f"CACHES[{alias!r}]: {what} need the backend "
            f"stillfresh.integrations.django.StillfreshCache, not {type(cache).__name__}"
        )
    return cache


def _has_fresh_value(answer: object) -> bool:
    """False if there is no value, it is past its timeout, or it was invalidated."""
    return isinstance(answer, Answer) and answer.found and answer.verdict is Verdict.FRESH


def in_background(load: Callable[[], T]) -> Callable[[], T]:
    """`load` for another thread, with this one's language and time zone.

    That thread serves no request, so it closes the database connections that it opened.
    """
    calling_thread = get_ident()
    language = get_language()
    zone = get_current_timezone()

    def load_in_any_thread() -> T:
        if get_ident() == calling_thread:
            return load()
        try:
            with override_language(language), override_zone(zone):
                return load()
        finally:
            connections.close_all()

    return load_in_any_thread
