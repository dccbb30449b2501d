"""TtlCache: hold for a while in memory, then forget.

Reads take no lock: an entry's value and end never change, so one lookup and one clock reading
decide. Writers take the lock. With one TTL, expiry order is insertion order, kept as a ring of
entries. Whatever runs foreign code (a lookup calls the key's `__hash__` and `__eq__`) comes before
the ring is touched, and the ring is changed by plain stores alone: a finalizer, a signal handler
or an exception finds it whole at every moment (docs/decisions/0301).
"""

import logging
from collections import deque
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from inspect import iscoroutinefunction
from math import inf
from threading import RLock, get_ident
from typing import Any, Final, Generic, Literal, TypeAlias, TypeVar, overload

from stillfresh.checks import checked_whole
from stillfresh.clock import Clock, checked_clock, monotonic
from stillfresh.durations import Duration, seconds
from stillfresh.errors import ConfigError

__all__ = ["EvictReason", "TtlCache", "TtlStats"]

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")
D = TypeVar("D")

EvictReason: TypeAlias = Literal["expired", "full"]
"""Why an entry was dropped: its time was over, or the cache was full."""

SLICE: Final = 1_000
"""Entries dropped under one holding of the lock, and in one turn of the event loop."""
DROPPED_PER_INSERT: Final = 2
"""More than one, so that expired entries become fewer while new ones are inserted."""

logger = logging.getLogger(__name__)


class TtlEntry(float, Generic[K, V]):
    """The moment of its end, its value, and its place in the ring; `older` is None without one."""

    __slots__ = ("key", "newer", "older", "value")
    key: K
    value: V
    newer: "TtlEntry[K, V] | None"
    older: "TtlEntry[K, V] | None"


@dataclass(frozen=True, slots=True)
class TtlStats:
    """Counts of a `TtlCache`. `hits` and `misses` are None without `count_reads=True`."""

    size: int
    """Live entries now."""
    expired_held: int
    """Entries that have expired and are still held: a sweep would drop them."""
    inserted: int
    expired: int
    """Entries dropped because their time was over."""
    evicted: int
    """Entries dropped because the cache was full."""
    hits: int | None
    misses: int | None


class ReadCounter:
    """Replaces the clock in `get`: a read that finds an entry asks for the time, and is counted.

    So a cache that does not count pays nothing for it on a hit.
    """

    __slots__ = ("clock", "hits", "misses")

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.hits = 0
        self.misses = 0

    def __call__(self) -> float:
        self.hits += 1
        return self.clock()

    def missed(self, *, is_expired: bool) -> None:
        """A read that ended without a value; one that found it expired had counted as a hit."""
        self.misses += 1
        if is_expired:
            self.hits -= 1


class TtlCache(Generic[K, V]):
    """A dict whose entries expire after `ttl`. Any thread may use it.

    `max_entries` limits its size: one more drops the oldest. `on_evict(key, value, reason)` is
    called after an entry is dropped. `count_reads` counts hits and misses. Raises ConfigError.
    """

    __slots__ = (
        "__weakref__",
        "_clock",
        "_counter",
        "_data",
        "_evicted",
        "_expired",
        "_inserted",
        "_lock",
        "_max_entries",
        "_on_evict",
        "_read_clock",
        "_ring",
        "_telling",
        "_ttl",
    )

    def __init__(
        self,
        ttl: Duration,
        *,
        max_entries: int | None = None,
        clock: Clock = monotonic,
        on_evict: Callable[[K, V, EvictReason], object] | None = None,
        count_reads: bool = False,
    ) -> None:
        self._ttl = seconds(ttl, name="ttl", positive=True)
        if max_entries is not None:
            checked_whole("max_entries", max_entries, or_else=", or None for no limit")
        self._max_entries = max_entries
        self._clock = checked_clock(clock)
        self._counter = ReadCounter(clock) if count_reads else None
        self._read_clock: Callable[[], Any] = self._counter or clock
        if on_evict is not None and (not callable(on_evict) or iscoroutinefunction(on_evict)):
            raise ConfigError(f"on_evict: must be a plain function, not async, not {on_evict!r}")
        self._on_evict = on_evict
        self._lock = RLock()
        self._data: dict[K, TtlEntry[K, V]] = {}
        self._ring: TtlEntry[K, V] = _new_ring()
        self._telling: dict[int, deque[tuple[K, V, EvictReason]]] = {}
        self._inserted = self._expired = self._evicted = 0

    def insert(self, key: K, value: V) -> None:
        """Store a value, or replace it, and restart its TTL."""
        with self._lock:
            now = self._clock()
            entry = _new_entry(key, value, now + self._ttl)
            old = self._data.get(key)
            self._data[key] = entry
            if old is not None:
                _unlink(old)
            _link(self._ring, entry)
            self._inserted += 1
            dropped = self._take_expired(now, DROPPED_PER_INSERT)
            if old is not None and now >= old:
                self._expired += 1
                dropped.append((old.key, old.value, "expired"))
            dropped += self._take_over_limit()
        self._tell(dropped)

    @overload
    def get(self, key: K) -> V | None: ...
    @overload
    def get(self, key: K, default: D) -> V | D: ...
    def get(self, key: K, default: D | None = None) -> V | D | None:
        """Return the value, or `default` if it is missing or has expired. Takes no lock."""
        if (entry := self._data.get(key)) is not None:
            clock = self._read_clock
            if clock() < entry:
                return entry.value
        if self._counter is not None:
            self._counter.missed(is_expired=entry is not None)
        return default

    @overload
    def remove(self, key: K) -> V | None: ...
    @overload
    def remove(self, key: K, default: D) -> V | D: ...
    def remove(self, key: K, default: D | None = None) -> V | D | None:
        """Remove an entry and return its value. Of many callers, one gets it, others `default`."""
        with self._lock:
            now = self._clock()
            entry = self._data.pop(key, None)
            if entry is None:
                return default
            _unlink(entry)
            if now < entry:
                return entry.value
            self._expired += 1
        self._tell([(entry.key, entry.value, "expired")])
        return default

    def clear(self) -> None:
        """Remove every entry. `on_evict` is not called."""
        new_ring = _new_ring()
        with self._lock:
            forgotten = self._data
            self._data = {}
            old_ring = self._ring
            self._ring = new_ring
        old_ring.newer = None
        for entry in forgotten.values():
            entry.older = None  # no cycle is left: the values die here, outside the lock

    def cleanup_expired(self, limit: int | None = None) -> int:
        """Drop expired entries, the oldest first, at most `limit`; return how many."""
        now = self._clock()
        dropped = 0
        while limit is None or dropped < limit:
            step = SLICE if limit is None else min(SLICE, limit - dropped)
            with self._lock:
                expired = self._take_expired(now, step)
            self._tell(expired)
            dropped += len(expired)
            if len(expired) < step:
                break
            del expired  # the values die here, outside the lock
        return dropped

    def stats(self) -> TtlStats:
        """Return the counts since the cache was made, and how many entries live."""
        counter = self._counter
        with self._lock:
            size = len(self)
            return TtlStats(
                size=size,
                expired_held=len(self._data) - size,
                inserted=self._inserted,
                expired=self._expired,
                evicted=self._evicted,
                hits=counter.hits if counter else None,
                misses=counter.misses if counter else None,
            )

    def __contains__(self, key: K) -> bool:
        entry = self._data.get(key)
        return entry is not None and self._clock() < entry

    def __iter__(self) -> Iterator[K]:
        """The keys at the start of the iteration, without those that are gone by their turn."""
        for key in list(self._data):
            if key in self:
                yield key

    def items(self) -> Iterator[tuple[K, V]]:
        """Iterate over the live entries, as pairs of key and value."""
        for key in list(self._data):
            entry = self._data.get(key)
            if entry is not None and self._clock() < entry:
                yield key, entry.value

    def __len__(self) -> int:
        """The cost grows with expired entries that are still held, not with live ones."""
        with self._lock:
            now = self._clock()
            size = len(self._data)
            entry = self._ring.newer
            while entry is not None and now >= entry:
                size -= 1
                entry = entry.newer
            return size

    def __repr__(self) -> str:
        return f"<TtlCache ttl={self._ttl:g}s size={len(self)}>"

    def _take_expired(self, now: float, limit: int) -> list[tuple[K, V, EvictReason]]:
        """Take out the oldest while they have expired."""
        expired: list[tuple[K, V, EvictReason]] = []
        while len(expired) < limit:
            entry = self._ring.newer
            if entry is None or now < entry:
                break
            if self._take(entry):
                self._expired += 1
                expired.append((entry.key, entry.value, "expired"))
        return expired

    def _take_over_limit(self) -> list[tuple[K, V, EvictReason]]:
        evicted: list[tuple[K, V, EvictReason]] = []
        limit = self._max_entries
        while limit is not None and len(self._data) > limit:
            entry = self._ring.newer
            if entry is None or entry is self._ring:
                break
            if self._take(entry):
                self._evicted += 1
                evicted.append((entry.key, entry.value, "full"))
        return evicted

    def _take(self, entry: TtlEntry[K, V]) -> bool:
        """Take exactly this entry out; False if foreign code has replaced it meanwhile."""
        stored = self._data.pop(entry.key, None)
        if stored is not None and stored is not entry:
            self._data[entry.key] = stored
        _unlink(entry)
        return stored is entry

    def _tell(self, dropped: list[tuple[K, V, EvictReason]]) -> None:
        """Call `on_evict`, outside the lock; for drops by a callback's own inserts, after it."""
        if self._on_evict is None or not dropped:
            return
        me = get_ident()
        if me in self._telling:
            self._telling[me].extend(dropped)
            return
        untold = self._telling[me] = deque(dropped)
        try:
            while untold:
                key, value, reason = untold.popleft()
                try:
                    self._on_evict(key, value, reason)
                except Exception:
                    logger.exception("on_evict failed for key %r (%s)", key, reason)
        finally:
            del self._telling[me]


def _new_ring() -> TtlEntry[Any, Any]:
    """The entry before the oldest and after the newest, which never expires: an empty ring."""
    ring: TtlEntry[Any, Any] = _new_entry(None, None, inf)
    ring.newer = ring.older = ring
    return ring


def _new_entry(key: K, value: V, expires_at: float) -> TtlEntry[K, V]:
    entry: TtlEntry[K, V] = TtlEntry(expires_at)
    entry.key = key
    entry.value = value
    entry.newer = entry.older = None
    return entry


def _link(ring: TtlEntry[K, V], entry: TtlEntry[K, V]) -> None:
    newest = ring.older
    if newest is not None:
        entry.newer = ring
        entry.older = newest
        newest.newer = entry
        ring.older = entry


def _unlink(entry: TtlEntry[K, V]) -> None:
    """Only once. It keeps its newer neighbour, for a walk that has just reached it."""
    older = entry.older
    newer = entry.newer
    if older is not None and newer is not None:
        older.newer = newer
        newer.older = older
        entry.older = None
