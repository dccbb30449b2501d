"""DiskCache: the methods of diskcache's Cache that people use, over one resource of a SyncCache.

Values are stored as bytes and decoded for each caller: what it gets is its own. They are plain
data by default; `value_type` and `codec` are for others. Nothing is pickled: a file in the
directory cannot run code. An entry is there while it is fresh; its end is `expire`.
"""

import io
import logging
import os
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import update_wrapper
from pathlib import Path
from threading import Lock
from typing import IO, Any, Final, NamedTuple, ParamSpec, Self, TypeVar
from urllib.parse import quote

import apsw

from stillfresh.checks import checked_bytes
from stillfresh.clock import Clock
from stillfresh.engine import (
    DELETE,
    LEAVE,
    Amended,
    Answer,
    Codec,
    CodecMaker,
    Listed,
    Loaded,
    Private,
    Spec,
    UnreadableLog,
    codec_for,
    codec_of,
    no_loader,
    terms_of,
)
from stillfresh.errors import ConfigError, LoadFailed, MissingMethod, shown
from stillfresh.freshness import Verdict
from stillfresh.integrations.diskcache.keys import id_of, key_of
from stillfresh.integrations.plain_values import (
    PLAIN_TYPES,
    TABLE,
    Encoding,
    decoder_of,
    encoded_plain,
)
from stillfresh.integrations.tagged_values import (
    NEVER_ENDS,
    BlockingCache,
    Bytes,
    BytesChange,
    TaggedKey,
    tags_of_key,
    update_with_its_tags,
    with_tags,
    without_tags,
)

P = ParamSpec("P")
T = TypeVar("T")

FILE_NAME: Final = "stillfresh.db"
OLD_FILE_NAME: Final = "cache.db"
"""The file of diskcache."""
KIND: Final = "diskcache"
MISSING: Final = object()
MEMORY_ENTRIES: Final = 1_000
MEMORY_BYTES: Final = "64MB"
CONCURRENCY: Final = 32
LOAD_TIMEOUT: Final = "10m"
PAGE: Final = 1_000
"""Entries that an iteration reads at once."""

REFUSED_SETTINGS: Final = {
    "cull_limit": "leave it out: each write removes what `size_limit` asks for",
    "disk": "leave it out; write codec= for another form of the values, such as stillfresh.zstd()",
    "eviction_policy": "leave it out: the least recently used entries are removed first; "
    "write size_limit=None to remove none",
    "tag_index": "leave it out: tags are always indexed",
    "timeout": "leave it out: writes of all processes wait for each other",
}
MISSING_METHODS: Final = {
    "transact": "a transaction over several keys: to change one key in one step, use incr, pop or "
    "add; for a function of the value use `update` of a SyncCache's resource, and for a change in "
    "your database `changing`",
    "push": "a queue: use a queue such as Celery's, or queue.Queue within a process",
    "pull": "a queue: use a queue such as Celery's, or queue.Queue within a process",
    "peek": "a queue: use a queue such as Celery's, or queue.Queue within a process",
    "peekitem": "an order of insertion: iterate over the keys, which come sorted",
    "reset": "settings in the file: give options to DiskCache(…) where it is made",
    "create_tag_index": "a tag index to switch on: tags are always indexed",
    "drop_tag_index": "a tag index to switch off: tags are always indexed",
}

logger = logging.getLogger(__name__)


class ValueEncoding(Encoding):
    """Values that are plain data."""

    advice = (
        f"Store plain data ({PLAIN_TYPES}); or name the type of the values, "
        "DiskCache(directory, value_type=…), for dataclasses, msgspec and Pydantic; or give codec="
    )


class PlainCodec:
    """The codec of a DiskCache: plain data comes back equal and of the same type."""

    decode = staticmethod(decoder_of(TABLE))

    def encode(self, value: object) -> bytes:
        """Return the value as bytes. Raises TypeError if its type cannot be stored."""
        return encoded_plain(ValueEncoding(), value)


class CachedItem(NamedTuple):
    """What a DiskCache holds for one key."""

    value: Any
    expire_time: float | None
    tag: Any


NO_ITEM: Final = CachedItem(MISSING, None, None)


class DiskCache:
    """A cache in a directory, used as `diskcache.Cache` is: `cache = DiskCache("cache")`.

    Threads and processes share it. Raises ConfigError for an option that cannot be used, with what
    to write instead.

    Args:
        directory: Where the file is; None: a new temporary directory.
        size_limit: The most bytes of entries; the least recently used go first. None: no limit.
        statistics: Count hits and misses from the start, for `stats`.
        value_type: The type of all values, for dataclasses, msgspec and Pydantic; None: plain data.
        codec: Turns values into bytes, or `zstd()` or `encrypted(keys)` around that.
        clock: Returns seconds since 1970.
        settings: Settings of diskcache are refused, with what to do instead.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str] | None = None,
        *,
        size_limit: int | str | None = 2**30,
        statistics: bool = False,
        value_type: Any = None,
        codec: Codec[Any] | CodecMaker | None = None,
        clock: Clock = time.time,
        **settings: Any,
    ) -> None:
        for name in settings:
            raise _refusal(name)
        path = tempfile.mkdtemp(prefix="stillfresh-") if directory is None else directory
        self.directory = os.path.expandvars(Path(path).expanduser())
        """The directory, as text."""
        self.clock = clock
        self.size_limit = None if size_limit is None else checked_bytes("size_limit", size_limit)
        """The most bytes of entries, or None."""
        self._options = {
            "size_limit": size_limit,
            "statistics": statistics,
            "value_type": value_type,
            "codec": codec,
            "clock": clock,
        }
        file = Path(self.directory).absolute() / FILE_NAME
        _warn_of_old_cache(file)
        file.parent.mkdir(parents=True, exist_ok=True)
        self._file = file
        limit = "" if self.size_limit is None else f"?max_bytes={self.size_limit}"
        address = f"sqlite:///{quote(str(file))}{limit}"
        self._cache = (
            BlockingCache(address) if clock is None else BlockingCache(address, clock=clock)
        )
        self._value_type = value_type
        self._codec = codec_of(codec, lambda: _chosen_codec(value_type), KIND)
        spec: Spec[str, bytes] = Spec(
            KIND,
            no_loader,
            Bytes,
            tags_of_key,
            terms_of(KIND, 0, 0, 0, 0),
            concurrency=CONCURRENCY,
            max_entries=MEMORY_ENTRIES,
            max_bytes=MEMORY_BYTES,
            load_timeout=LOAD_TIMEOUT,
            by_id=False,
            in_thread=True,
        )
        self._resource = self._cache.declare(spec, str.__str__, str)
        self._unreadable = UnreadableLog()
        self._lock = Lock()  # of the two counts
        self._hits = 0
        self._misses = 0
        self._is_counting = statistics

    # Reading.

    def get(
        self,
        key: Any,
        default: Any = None,
        read: bool = False,
        expire_time: bool = False,
        tag: bool = False,
        retry: bool = False,
    ) -> Any:
        """Return the value, or `default`; with `expire_time` or `tag`, a tuple of it and these.

        `read`: bytes come as a file that is open for reading.
        """
        item = self._item(id_of(key))
        self._count(is_hit=item is not NO_ITEM)
        value = default if item is NO_ITEM else item.value
        if read and isinstance(value, bytes):
            value = io.BytesIO(value)
        return _value_with_more(value, item, expire_time=expire_time, tag=tag)

    def read(self, key: Any, retry: bool = False) -> IO[bytes]:
        """Return bytes as an open file. Raises KeyError."""
        file = self.get(key, MISSING, read=True)
        if file is MISSING:
            raise KeyError(key)
        if not isinstance(file, io.BytesIO):
            raise TypeError(f"the value of {key!r} is not bytes; use get")
        return file

    def __getitem__(self, key: Any) -> Any:
        value = self.get(key, MISSING)
        if value is MISSING:
            raise KeyError(key)
        return value

    def __contains__(self, key: object) -> bool:
        return self._item(id_of(key)) is not NO_ITEM

    def __len__(self) -> int:
        """Count the entries. This looks at all of them."""
        return sum(1 for _ in self._ids())

    def __iter__(self) -> Iterator[Any]:
        """Iterate over the keys, sorted: numbers, then text, bytes and tuples."""
        return map(key_of, self._ids())

    def __reversed__(self) -> Iterator[Any]:
        """Iterate over the keys from the last one. All keys are read first."""
        return map(key_of, reversed(list(self._ids())))

    def iterkeys(self, reverse: bool = False) -> Iterator[Any]:
        """Iterate over the keys in order; `reverse`: from the last one."""
        return reversed(self) if reverse else iter(self)

    # Writing.

    def set(
        self,
        key: Any,
        value: Any,
        expire: float | None = None,
        read: bool = False,
        tag: Any = None,
        retry: bool = False,
    ) -> bool:
        """Store a value, for `expire` seconds. `read`: the value is a file, whose bytes are stored.

        Raises TypeError for a key, tag or value that cannot be stored, and StoreError, for example
        if the disk is full.
        """
        name = _tagged_key(key, tag)
        loaded = self._copy_of(value.read() if read else value, expire, name.tags)
        if loaded is None:
            self._resource.delete(name)
        else:
            self._resource.put(name, loaded)
        return True

    def __setitem__(self, key: Any, value: Any) -> None:
        self.set(key, value)

    def add(
        self,
        key: Any,
        value: Any,
        expire: float | None = None,
        read: bool = False,
        tag: Any = None,
        retry: bool = False,
    ) -> bool:
        """Store a value if there is none. Of many callers at once, one gets True."""
        name = _tagged_key(key, tag)
        loaded = self._copy_of(value.read() if read else value, expire, name.tags)
        if self._item(name) is not NO_ITEM:  # a read is much quicker than an add that is refused
            return False
        if loaded is None or self._resource.add(name, loaded).stored:
            return True
        # The store has an entry: another caller was first, or its value cannot be read.
        is_added = False

        def change(answer: Answer[bytes] | None) -> object:
            nonlocal is_added
            is_added = self._item_of(answer) is NO_ITEM
            return loaded if is_added else LEAVE

        self._resource.update(name, change)
        return is_added

    def add_items(self, items: Sequence[tuple[Any, CachedItem]]) -> int:
        """Store many entries in one step, each with its expiry time and tag; return how many.

        Entries whose keys are there already are left as they are.
        """
        now = self.clock()
        names = {id_of(key): (key, item) for key, item in items}
        present = self._resource.known(list(names)) if names else {}
        loaded_by_name: dict[str, Loaded[bytes]] = {}
        for id_, (key, item) in names.items():
            if _is_there(present.get(id_)):
                continue
            name = _tagged_key(key, item.tag)
            expire = None if item.expire_time is None else item.expire_time - now
            loaded = self._copy_of(item.value, expire, name.tags)
            if loaded is not None:
                loaded_by_name[name] = loaded
        if loaded_by_name:
            self._resource.put_many(loaded_by_name)
        return len(loaded_by_name)

    def touch(self, key: Any, expire: float | None = None, retry: bool = False) -> bool:
        """Give an entry a new expiry time; return False if there is no entry."""
        seconds = _seconds(expire)
        if not seconds:
            return self.delete(key)
        result = self._resource.touch(id_of(key), fresh_for=seconds, stale_for=0, error_for=0)
        return result.stored

    def incr(
        self,
        key: Any,
        delta: int = 1,
        default: int | None = 0,
        retry: bool = False,
    ) -> Any:
        """Add to a number, atomically in all processes; return the sum.

        The entry keeps its expiry time and its tag. Raises KeyError if there is no entry and
        `default` is None.
        """
        result: Any = None

        def change(answer: Answer[bytes] | None) -> object:
            nonlocal result
            item = self._item_of(answer)
            if item is not NO_ITEM and answer is not None:
                result = item.value + delta
                return Amended(self._encode_value(result, without_tags(answer.value)[0]))
            if default is None:
                raise KeyError(key)
            result = default + delta
            return self._copy_of(result, None, ())

        update_with_its_tags(self._resource, id_of(key), change)
        return result

    def decr(
        self,
        key: Any,
        delta: int = 1,
        default: int | None = 0,
        retry: bool = False,
    ) -> Any:
        """Subtract from a number, as `incr` adds."""
        return self.incr(key, -delta, default)

    def pop(
        self,
        key: Any,
        default: Any = None,
        expire_time: bool = False,
        tag: bool = False,
        retry: bool = False,
    ) -> Any:
        """Remove an entry and return its value. Of many callers at once, one gets it."""
        item = self._remove_item(key)
        value = default if item is NO_ITEM else item.value
        return _value_with_more(value, item, expire_time=expire_time, tag=tag)

    def delete(self, key: Any, retry: bool = False) -> bool:
        """Remove an entry; return False if there is none."""
        return self._remove_item(key) is not NO_ITEM

    def __delitem__(self, key: Any) -> None:
        if not self.delete(key):
            raise KeyError(key)

    def clear(self, retry: bool = False) -> int:
        """Remove all entries; return how many there were."""
        count = len(self)
        self._resource.clear()
        return count

    def evict(self, tag: Any, retry: bool = False) -> int:
        """Remove the entries with this tag; return how many."""
        ids = [id_ for _, id_ in self._cache.invalidate_tag(id_of(tag))]
        for id_ in ids:
            # One that was set again meanwhile stays.
            self._resource.update(id_, lambda answer: LEAVE if _is_there(answer) else DELETE)
        return len(ids)

    def expire(self, now: float | None = None, retry: bool = False) -> int:
        """Remove expired entries; return how many. They are not served anyway."""
        if now is not None:
            raise ConfigError("expire: leave out `now`; for another time, give clock= to DiskCache")
        return self.cull()

    def cull(self, retry: bool = False) -> int:
        """Remove expired entries; return how many.

        Entries above `size_limit` are removed by the writes themselves.
        """
        # Counted here: the store also removes what deleted entries have left.
        count = sum(1 for entry in self._entries() if entry.verdict is Verdict.GONE)
        self._cache.evict()
        return count

    # Functions.

    def memoize(
        self,
        name: str | None = None,
        typed: bool = False,
        expire: float | None = None,
        tag: Any = None,
        ignore: Iterable[int | str] = (),
    ) -> Callable[[Callable[P, T]], Callable[P, T]]:
        """Cache the results of a function: `@cache.memoize(expire=60)`.

        Of many callers with the same arguments, in all threads and processes, one runs the
        function. Arguments are plain data; `ignore` names those that do not count, by name or
        position. The function gets `__cache_key__`, which returns the key of its arguments.
        """
        if callable(name):
            raise TypeError("name cannot be callable; write @cache.memoize()")
        ignored = frozenset(ignore)

        def decorate(function: Callable[P, T]) -> Callable[P, T]:
            base = name or f"{function.__module__}.{function.__qualname__}"

            def cache_key(*args: P.args, **kwargs: P.kwargs) -> tuple[Any, ...]:
                return _key_of_call(base, args, kwargs, ignored, is_typed=typed)

            def memoized(*args: P.args, **kwargs: P.kwargs) -> T:
                key = cache_key(*args, **kwargs)
                return self._call_once(key, lambda: function(*args, **kwargs), expire, tag)

            update_wrapper(memoized, function)
            memoized.__cache_key__ = cache_key  # type: ignore[attr-defined]
            return memoized

        return decorate

    def _call_once(
        self,
        key: tuple[Any, ...],
        function: Callable[[], T],
        expire: float | None,
        tag: Any,
    ) -> T:
        name = _tagged_key(key, tag)
        stored_answer = self._answer(name)
        item = self._item_of(stored_answer)
        self._count(is_hit=item is not NO_ITEM)
        if item is not NO_ITEM:
            value: T = item.value
            return value
        if _is_there(stored_answer):
            self._remove_unreadable(name)  # else each caller would call the function
        result: Any = MISSING

        def load() -> object:
            nonlocal result
            result = function()
            loaded = self._copy_of(result, expire, name.tags)
            return Private(None, is_noted=False) if loaded is None else loaded

        answer = self._resource.read(name, load)
        if isinstance(answer, LoadFailed) and answer.__cause__ is not None:
            raise answer.__cause__
        if isinstance(answer, Answer) and answer.found:
            item = self._decode_item(answer)
        if item is not NO_ITEM:
            loaded_value: T = item.value
            return loaded_value
        if result is not MISSING:  # it could not be kept
            own_value: T = result
            return own_value
        value = function()  # it failed a moment ago, or the stored value cannot be read
        if isinstance(answer, Answer):
            self.set(key, value, expire, tag=tag)
        else:
            self._encode_value(value, ())  # one that cannot be stored is refused at every call
        return value

    # The cache itself.

    def stats(self, enable: bool = True, reset: bool = False) -> tuple[int, int]:
        """Return this object's hits and misses since counting began or was reset.

        `enable`: count from now on, or no more. `reset`: begin again from 0.
        """
        with self._lock:
            counted = (self._hits, self._misses)
            self._is_counting = enable
            if reset:
                self._hits = 0
                self._misses = 0
        return counted

    def volume(self) -> int:
        """Return the bytes of the files on disk."""
        names = (FILE_NAME, f"{FILE_NAME}-wal")
        total = 0
        for name in names:
            with suppress(FileNotFoundError):
                total += (self._file.parent / name).stat().st_size
        return total

    def check(self, fix: bool = False, retry: bool = False) -> list[str]:
        """Return what SQLite finds wrong in the file; it reads all of it. Usually nothing."""
        if fix:
            raise ConfigError(
                "check: leave out `fix`: a damaged file is set aside when it is opened"
            )
        if not self._file.exists():
            return []
        connection = apsw.Connection(str(self._file), flags=apsw.SQLITE_OPEN_READONLY)
        try:
            rows = [str(text) for (text,) in connection.execute("PRAGMA integrity_check")]
        finally:
            connection.close()
        return [text for text in rows if text != "ok"]

    def close(self) -> None:
        """Close the file. `with cache:` opens it again."""
        self._cache.close()

    def __enter__(self) -> Self:
        self._cache.open()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """For a worker process: a DiskCache of the same directory and options."""
        return _again, (type(self), self.directory, self._options)

    def __repr__(self) -> str:
        return f"DiskCache({self.directory!r})"

    # Inside.

    def _ids(self) -> Iterator[str]:
        """The ids of the entries that are there, in order."""
        return (entry.id for entry in self._entries() if entry.verdict is Verdict.FRESH)

    def _entries(self) -> Iterator[Listed]:
        """The entries in the file, in the order of their ids. Deleted ones leave an absent one."""
        after: tuple[str, str] | None = None
        while True:
            page = self._cache.entries(KIND, after=after, limit=PAGE)
            yield from (entry for entry in page if not entry.absent)
            if len(page) < PAGE:
                return
            after = (KIND, page[-1].id)

    def _item(self, id_: str) -> CachedItem:
        return self._item_of(self._answer(id_))

    def _answer(self, id_: str) -> Answer[bytes] | None:
        answer = self._resource.get_nowait(id_)
        if answer is None:
            answer = self._resource.known([id_]).get(id_)
        return answer

    def _item_of(self, answer: Answer[bytes] | None) -> CachedItem:
        if answer is None or not _is_there(answer):
            return NO_ITEM
        return self._decode_item(answer)

    def _decode_item(self, answer: Answer[bytes]) -> CachedItem:
        try:
            tags, data = without_tags(answer.value)
            value = self._codec.decode(data)
            tag = key_of(tags[0]) if tags else None
        except Exception as exc:  # noqa: BLE001 (a codec may raise anything)
            self._unreadable.report(KIND, exc)
            return NO_ITEM
        fresh_for = answer.policy.fresh_for
        end = None if fresh_for >= NEVER_ENDS else answer.fetched_at + fresh_for
        return CachedItem(value, end, tag)

    def _remove_item(self, key: Any) -> CachedItem:
        item = NO_ITEM

        def change(answer: Answer[bytes] | None) -> object:
            nonlocal item
            item = self._item_of(answer)
            return LEAVE if answer is None else DELETE

        removing: BytesChange = change
        self._resource.update(id_of(key), removing)
        return item

    def _remove_unreadable(self, name: str) -> None:
        """Remove an entry whose value cannot be read. One that was set meanwhile stays."""

        def change(answer: Answer[bytes] | None) -> object:
            is_unreadable = _is_there(answer) and self._item_of(answer) is NO_ITEM
            return DELETE if is_unreadable else LEAVE

        removing: BytesChange = change
        self._resource.update(name, removing)

    def _encode_value(self, value: object, tags: tuple[str, ...]) -> bytes:
        """The value with its tags. Raises TypeError if it is not of the type of all values."""
        data = self._codec.encode(value)
        if self._value_type is not None:
            try:
                self._codec.decode(data)
            except Exception as exc:
                problem = f"{shown(value)} is not of the type {self._value_type!r} of all values"
                raise TypeError(problem) from exc
        return with_tags(data, tags)

    def _copy_of(
        self, value: object, expire: float | None, tags: tuple[str, ...]
    ) -> Loaded[bytes] | None:
        """The value with its end, or None if its end is now."""
        data = self._encode_value(value, tags)
        seconds = _seconds(expire)
        return Loaded(data, fresh_for=seconds, stale_for=0, error_for=0) if seconds else None

    def _count(self, *, is_hit: bool) -> None:
        if self._is_counting:
            with self._lock:
                if is_hit:
                    self._hits += 1
                else:
                    self._misses += 1


for _name, _what in MISSING_METHODS.items():
    setattr(DiskCache, _name, MissingMethod(f"{{}} has no {_name}. stillfresh has not got {_what}"))


def _again(of: type[DiskCache], directory: str, options: dict[str, Any]) -> DiskCache:
    return of(directory, **options)


def _chosen_codec(value_type: Any) -> Codec[Any]:
    return PlainCodec() if value_type is None else codec_for(value_type, KIND)


def _refusal(name: str) -> ConfigError:
    if name.startswith(("sqlite_", "disk_")):
        return ConfigError(f"DiskCache: {name}: leave it out: the file's settings are fixed")
    advice = REFUSED_SETTINGS.get(name)
    if advice is None:
        return ConfigError(f"DiskCache: there is no option {shown(name)}")
    return ConfigError(f"DiskCache: {name}: {advice}")


def _warn_of_old_cache(file: Path) -> None:
    if (file.parent / OLD_FILE_NAME).exists() and not file.exists():
        logger.warning(
            "%s has a cache of diskcache, which is not read. To take its plain values over, run: "
            "stillfresh diskcache convert %s",
            file.parent,
            file.parent,
        )


def _seconds(expire: float | None) -> float:
    """How long an entry is there; 0 if its end is now."""
    return NEVER_ENDS if expire is None else min(max(0.0, float(expire)), NEVER_ENDS)


def _tagged_key(key: Any, tag: Any) -> TaggedKey:
    return TaggedKey(id_of(key), () if tag is None else (id_of(tag),))


def _is_there(answer: Answer[bytes] | None) -> bool:
    return answer is not None and answer.found and answer.verdict is Verdict.FRESH


def _value_with_more(value: Any, item: CachedItem, *, expire_time: bool, tag: bool) -> Any:
    """The value alone, or a tuple of what the caller asks for."""
    if not expire_time and not tag:
        return value
    parts = [value]
    if expire_time:
        parts.append(item.expire_time)
    if tag:
        parts.append(item.tag)
    return tuple(parts)


def _key_of_call(
    base: str,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    ignored: frozenset[int | str],
    *,
    is_typed: bool,
) -> tuple[Any, ...]:
    """The function's name, its positional arguments, and its named ones in order."""
    positional = tuple(arg for index, arg in enumerate(args) if index not in ignored)
    named = tuple(sorted((name, arg) for name, arg in kwargs.items() if name not in ignored))
    if not is_typed:
        return (base, positional, named)
    types = tuple(type(arg).__name__ for arg in (*positional, *(arg for _, arg in named)))
    return (base, positional, named, types)
