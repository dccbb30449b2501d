"""TtlCache: hold for a while in memory, then forget (seed 002, rules M1-M12).

Reads take no lock: an entry never changes once it is in the dict, so one lookup and one clock
reading decide. Writers take the lock. With one TTL, expiry order is insertion order: each entry
names its neighbours in that order by key, 16 bytes where an OrderedDict costs 45, and no cycle.
"""

import logging
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from enum import Enum
from inspect import iscoroutinefunction
from threading import RLock
from typing import Final, Generic, Literal, TypeAlias, TypeVar, overload

from stillfresh.clock import Clock, checked_clock, monotonic
from stillfresh.durations import Duration, seconds
from stillfresh.errors import ConfigError

__all__ = ["EvictReason", "TtlCache", "TtlStats"]

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")
D = TypeVar("D")

EvictReason: TypeAlias = Literal["expired", "full"]

SLICE: Final = 1_000
"""Entries dropped in one go, before other threads and the event loop get their turn."""
DROPPED_PER_INSERT: Final = 2
"""More than one, so that what has expired dwindles while entries keep coming."""

logger = logging.getLogger(__name__)


class End(Enum):
    """Beyond the oldest and the newest key; not None, which is a key like any other."""

    END = 0


END: Final = End.END


class Entry(Generic[K, V]):
    """A value, its end, and the keys next to it in insertion order."""

    __slots__ = ("expires_at", "newer", "older", "value")

    def __init__(self, value: V, expires_at: float) -> None:
        self.value = value
        self.expires_at = expires_at
        self.older: K | End = END
        self.newer: K | End = END


@dataclass(frozen=True, slots=True)
class TtlStats:
    """`hits` and `misses` are None unless the cache was made with `count_reads=True` (M9)."""

    size: int
    """Live entries, now."""
    inserted: int
    expired: int
    """Dropped because their time was over."""
    evicted: int
    """Dropped because the cache was full."""
    hits: int | None
    misses: int | None


class ReadCounter:
    """Stands in for the clock in `get`: who finds an entry asks it the time, and is counted.

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

    def missed(self, *, found: bool) -> None:
        """A read that ended without a value; one that found it expired had counted as a hit."""
        self.misses += 1
        if found:
            self.hits -= 1


class TtlCache(Generic[K, V]):
    """A dict whose entries live for `ttl` and are absent from then on; safe from any thread."""

    __slots__ = (
        "_clock",
        "_counter",
        "_data",
        "_evicted",
        "_expired",
        "_inserted",
        "_lock",
        "_max_entries",
        "_newest",
        "_oldest",
        "_on_evict",
        "_read_clock",
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
        self._max_entries = _limit(max_entries)
        self._clock = checked_clock(clock)
        self._counter = ReadCounter(clock) if count_reads else None
        self._read_clock: Clock = self._counter or clock
        self._on_evict = _checked_callback(on_evict)
        self._lock = RLock()
        self._data: dict[K, Entry[K, V]] = {}
        self._oldest: K | End = END
        self._newest: K | End = END
        self._inserted = self._expired = self._evicted = 0

    def insert(self, key: K, value: V) -> None:
        """Store or replace, and restart the TTL (M1)."""
        with self._lock:
            now = self._clock()
            old = self._place(key, Entry(value, now + self._ttl))
            self._inserted += 1
            expired = self._take_expired(now, DROPPED_PER_INSERT)
            if old is not None and now >= old.expires_at:
                expired.append((key, old.value))
                self._expired += 1
            full = self._take_over_limit()
        self._tell(expired, "expired")
        self._tell(full, "full")

    @overload
    def get(self, key: K) -> V | None: ...
    @overload
    def get(self, key: K, default: D) -> V | D: ...
    def get(self, key: K, default: D | None = None) -> V | D | None:
        """The value while it lives, else `default`; deletes nothing and never waits (M4)."""
        if (entry := self._data.get(key)) is not None:
            clock = self._read_clock
            if clock() < entry.expires_at:
                return entry.value
        if self._counter is not None:
            self._counter.missed(found=entry is not None)
        return default

    @overload
    def remove(self, key: K) -> V | None: ...
    @overload
    def remove(self, key: K, default: D) -> V | D: ...
    def remove(self, key: K, default: D | None = None) -> V | D | None:
        """Take the value out: exactly one of all who ask gets it, the others `default` (M5)."""
        with self._lock:
            entry = self._place(key, None)
            if entry is None:
                return default
            if self._clock() < entry.expires_at:
                return entry.value
            self._expired += 1
        self._tell([(key, entry.value)], "expired")
        return default

    def clear(self) -> None:
        """Forget everything, now; `on_evict` is not told, as for `remove`."""
        with self._lock:
            forgotten = list(self._data.values())
            self._oldest = self._newest = END
            self._data.clear()
        forgotten.clear()  # the values die here, outside the lock

    def cleanup_expired(self, limit: int | None = None) -> int:
        """Drop what has expired, oldest first, at most `limit`; return how many (M6)."""
        now = self._clock()
        dropped = 0
        while limit is None or dropped < limit:
            step = SLICE if limit is None else min(SLICE, limit - dropped)
            with self._lock:
                expired = self._take_expired(now, step)
            self._tell(expired, "expired")
            dropped += len(expired)
            if len(expired) < step:
                break
        return dropped

    def stats(self) -> TtlStats:
        """The live entries, and what became of the others since the cache was made (M9)."""
        counter = self._counter
        with self._lock:
            return TtlStats(
                size=len(self),
                inserted=self._inserted,
                expired=self._expired,
                evicted=self._evicted,
                hits=counter.hits if counter else None,
                misses=counter.misses if counter else None,
            )

    def __contains__(self, key: K) -> bool:
        entry = self._data.get(key)
        return entry is not None and self._clock() < entry.expires_at

    def __iter__(self) -> Iterator[K]:
        """The keys here when iteration began, leaving out what has gone by its turn."""
        for key in list(self._data):
            if key in self:
                yield key

    def items(self) -> Iterator[tuple[K, V]]:
        """As iteration, with the values."""
        for key in list(self._data):
            entry = self._data.get(key)
            if entry is not None and self._clock() < entry.expires_at:
                yield key, entry.value

    def __len__(self) -> int:
        """Costs what has expired and was not dropped yet, not what is live."""
        with self._lock:
            now = self._clock()
            size = len(self._data)
            key = self._oldest
            while key is not END:
                entry = self._data[key]
                if now < entry.expires_at:
                    break
                size -= 1
                key = entry.newer
            return size

    def __repr__(self) -> str:
        return f"<TtlCache ttl={self._ttl:g}s size={len(self)}>"

    def _place(self, key: K, entry: Entry[K, V] | None) -> Entry[K, V] | None:
        """Put `entry` in as the newest, or with None take the key out; what was there before.

        The only code that changes the order. It calls nothing, so that a finalizer or a signal
        handler that uses the cache, in this very thread, finds the order whole.
        """
        data = self._data
        old = None
        if key in data:
            old = data[key]
            older, newer = old.older, old.newer
            if older is END:
                self._oldest = newer
            else:
                data[older].newer = newer
            if newer is END:
                self._newest = older
            else:
                data[newer].older = older
        if entry is not None:
            newest = self._newest
            entry.older = newest
            if newest is END:
                self._oldest = key
            else:
                data[newest].newer = key
            self._newest = key
            data[key] = entry
        elif old is not None:
            del data[key]
        return old

    def _take_expired(self, now: float, limit: int) -> list[tuple[K, V]]:
        """Take out the oldest while they have expired. Their values die outside the lock."""
        taken: list[tuple[K, V]] = []
        while len(taken) < limit:
            key = self._oldest
            if key is END:
                break
            entry = self._data[key]
            if now < entry.expires_at:
                break
            self._place(key, None)
            self._expired += 1
            taken.append((key, entry.value))
        return taken

    def _take_over_limit(self) -> list[tuple[K, V]]:
        taken: list[tuple[K, V]] = []
        limit = self._max_entries
        while limit is not None and len(self._data) > limit and (key := self._oldest) is not END:
            taken.append((key, self._data[key].value))
            self._place(key, None)
            self._evicted += 1
        return taken

    def _tell(self, taken: list[tuple[K, V]], reason: EvictReason) -> None:
        if self._on_evict is None:
            return
        for key, value in taken:
            try:
                self._on_evict(key, value, reason)
            except Exception:
                logger.exception("on_evict failed for key %r (%s)", key, reason)


def _checked_callback(
    on_evict: Callable[[K, V, EvictReason], object] | None,
) -> Callable[[K, V, EvictReason], object] | None:
    if on_evict is not None and (not callable(on_evict) or iscoroutinefunction(on_evict)):
        raise ConfigError(f"on_evict: must be a plain function, not async, not {on_evict!r}")
    return on_evict


def _limit(max_entries: int | None) -> int | None:
    if max_entries is None:
        return None
    if not isinstance(max_entries, int) or isinstance(max_entries, bool) or max_entries < 1:
        raise ConfigError(
            f"max_entries: must be a whole number of 1 or more, or None for no limit, "
            f"not {max_entries!r}"
        )
    return max_entries
