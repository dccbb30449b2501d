"""The feed's file as a store of the engine, so that its flights, leases and verdicts apply (F6-F8).

A copy here is a cache key and when it was fetched; what it stands for is in the rows, which
`publish` writes together with the meta row. Freshness is F3's, told as the copy's mark.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from secrets import token_hex
from typing import Any, Final, TypeAlias, TypeVar

import apsw
from msgspec.structs import replace

from stillfresh.clock import Clock
from stillfresh.engine.tasks import looked_at
from stillfresh.errors import NotOpen, StoreError
from stillfresh.feed import leases, steps, upkeep
from stillfresh.feed.cache import FeedCache
from stillfresh.feed.keys import canonical
from stillfresh.feed.model import FeedCacheUpdated
from stillfresh.feed.rules import is_stale
from stillfresh.feed.shelf import Found, Shelf
from stillfresh.freshness import MAX_SKEW
from stillfresh.stores.contract import (
    Ask,
    Copy,
    Entry,
    Failure,
    Grant,
    Lease,
    Mark,
    Record,
    StoreStats,
)
from stillfresh.stores.listing import checked_limit
from stillfresh.stores.sqlite.writer import MAX_QUEUED

T = TypeVar("T")
Broken: TypeAlias = frozenset[bytes]

KIND: Final = "feed"
"""The one kind there is: its ids are the feed's cache keys."""
NOTHING: Final = Record()
MAX_BROKEN: Final = 100
"""Keys whose unreadable rows are remembered; beyond that they are refetched more than once."""


def start_of(kind: str | None, after: tuple[str, str] | None) -> str | None:
    """The key after which a listing goes on; None: there is nothing to list."""
    if kind not in {None, KIND} or (after is not None and after[0] > KIND):
        return None
    return after[1] if after is not None and after[0] == KIND else ""


class FeedStore:
    """Belongs to one FeedEngine; the file is the FeedCache's, which opens and closes it."""

    def __init__(
        self, cache: FeedCache, clock: Clock, tell: Callable[[FeedCacheUpdated], None]
    ) -> None:
        self._cache = cache
        self._clock = clock
        self._tell = tell
        self._room = asyncio.Semaphore(MAX_QUEUED)
        self._silent: dict[str, str] = {}
        """Leases of misses, by key: who asked gets the answer, and needs no event."""
        self._owed: set[str] = set()
        """Keys whose answer was overtaken: the next one is news."""
        self._broken: dict[str, Broken] = {}
        """F12: the unreadable rows that a key's refetch is meant to replace, and did not."""

    async def open(self) -> None:
        self._cache.file.check_open()

    async def close(self) -> None:
        self._silent.clear()
        self._owed.clear()

    def find(self, key: str, now: float, *, raw: bool = False) -> Found[Any]:
        """The data of a key, on the spot."""
        return self._cache.file.read(
            lambda connection, shelf: shelf.find(connection, key, now, raw=raw)
        )

    def owe(self, key: str) -> None:
        """Somebody was given something old while the first copy is on its way: tell them."""
        self._silent.pop(key, None)

    def is_fresh(self, key: str, found: Found[Any], now: float) -> bool:
        """F3; F12: unreadable rows are refetched, once; F8: what was deleted here stays away."""
        fresh_for = self._cache.fresh_for
        if found.deleted_at is not None and -MAX_SKEW <= now - found.deleted_at < fresh_for:
            return True
        return not is_stale(found.last_fetched, fresh_for, now) and (
            not found.broken or self._broken.get(key) == found.broken
        )

    def read_now(
        self, kind: str, ids: Sequence[str], known: Mapping[str, str] | None = None
    ) -> dict[str, Record]:
        del known
        if kind != KIND:
            return {}
        now = self._clock()
        found = {key: self._record(key, now) for key in ids}
        return {key: record for key, record in found.items() if record != NOTHING}

    async def read(
        self, kind: str, ids: Sequence[str], known: Mapping[str, str] | None = None
    ) -> dict[str, Record]:
        return self.read_now(kind, ids, known)

    def _record(self, key: str, now: float) -> Record:
        def read(connection: apsw.Connection, shelf: Shelf) -> tuple[Found[Any], leases.State]:
            with connection:  # one snapshot: half of a publication would be fetched again
                found = shelf.find(connection, key, now)
                state = leases.state(connection, key, now)
            return found, state

        found, state = self._cache.file.read(read)
        return Record(self._copy(key, found, state, now), state.held_until, state.failure)

    def _copy(self, key: str, found: Found[Any], state: leases.State, now: float) -> Copy | None:
        """Rows without a meta row are STALE; a meta row whose rows cannot be read is EXPIRED."""
        copy = leases.copy_of(state, fresh_for=self._cache.fresh_for, now=now)
        if not found.is_hit:
            return copy and replace(copy, mark=Mark.HARD)
        if copy is None:
            return Copy("rows", found.fetched_at, leases.FOREVER, leases.EMPTY, Mark.SOFT)
        return copy if self.is_fresh(key, found, now) else replace(copy, mark=Mark.SOFT)

    async def acquire(self, kind: str, asks: Sequence[Ask], lease_for: float) -> dict[str, Grant]:
        del kind
        grants = await self.run(
            lambda connection: leases.acquire(
                connection,
                asks,
                lease_for=lease_for,
                fresh_for=self._cache.fresh_for,
                now=self._clock(),
                new_token=lambda: token_hex(16),
            ),
            urgent=False,
        )
        for ask in asks:
            grant = grants[ask.id]
            if isinstance(grant, Lease) and ask.seen is None and ask.id not in self._owed:
                self._silent[ask.id] = grant.token
        return grants

    async def publish(self, kind: str, copies: Mapping[str, tuple[Lease, Copy]]) -> set[str]:
        """F7: stored, then told. F8: a full disk says nothing; who lost the lease is overtaken."""
        del kind
        try:
            done = await self.run(
                lambda connection: leases.publish(
                    connection, copies, fresh_for=self._cache.fresh_for, now=self._clock()
                ),
                urgent=False,
            )
        except StoreError:
            if not all(self._is_lost(lease) for lease, _ in copies.values()):
                raise
            done = leases.Published(frozenset(copies), frozenset())
        self._owed |= done.superseded
        for key in done.superseded:
            self._silent.pop(key, None)
        for key in copies.keys() - done.superseded:
            self._note_broken(key)
            self._owed.discard(key)
            if self._silent.pop(key, None) != copies[key][0].token:
                self._tell(FeedCacheUpdated(key, key in done.changed))
        return set(done.superseded)

    def _is_lost(self, lease: Lease) -> bool:
        now = self._clock()
        try:
            found = self._cache.file.read(lambda file, _: leases.state(file, lease.id, now))
        except (StoreError, NotOpen):
            return False
        return found.token != lease.token

    def _note_broken(self, key: str) -> None:
        """What is unreadable still, right after a refetch, is not worth another one."""
        self._broken.pop(key, None)
        try:
            broken = self.find(key, self._clock()).broken
        except StoreError:
            return
        if broken and len(self._broken) < MAX_BROKEN:
            self._broken[key] = broken

    async def renew(self, kind: str, held: Sequence[Lease], lease_for: float) -> set[str]:
        del kind
        return await self.run(
            lambda connection: leases.renew(
                connection, held, lease_for=lease_for, now=self._clock()
            ),
            urgent=False,
        )

    async def release(
        self, kind: str, held: Sequence[Lease], failures: Mapping[str, Failure] | None = None
    ) -> None:
        del kind
        for lease in held:
            self._silent.pop(lease.id, None)
            self._owed.discard(lease.id)
        await self.run(
            lambda connection: leases.release(connection, held, failures or {}, now=self._clock()),
            urgent=False,
        )

    async def invalidate(self, kind: str, ids: Sequence[str], *, soft: bool = False) -> None:
        """Always soft: the rows are served on."""
        del soft
        if kind == KIND:
            keys = [canonical(key) for key in ids]
            await self.run(lambda connection: steps.forget(connection, keys))

    async def invalidate_tag(self, tag: str, *, soft: bool = False) -> list[tuple[str, str]]:
        """A feed has none."""
        del tag, soft
        return []

    async def delete(self, kind: str, ids: Sequence[str]) -> None:
        if kind == KIND:
            await self.run(lambda connection: steps.erase(connection, ids))

    async def evict(self, before: float) -> int:
        """F11: in slices."""
        since, written_since = before - self._cache.keep_for, before - self._cache.fresh_for
        total, dropped = 0, upkeep.SLICE
        while dropped == upkeep.SLICE:
            dropped = await self.run(
                lambda file: upkeep.evict_slice(file, before=since, written_before=written_since)
            )
            total += dropped
        return total

    async def stats(self) -> StoreStats:
        now = self._clock()
        return await self.run(lambda connection: leases.count(connection, now=now), writes=False)

    async def entries(
        self,
        kind: str | None = None,
        search: str = "",
        after: tuple[str, str] | None = None,
        limit: int = 100,
    ) -> list[Entry]:
        """Keys that were fetched, or are being fetched; what they stand for is not looked at."""
        checked_limit(limit)
        if (start := start_of(kind, after)) is None:
            return []
        keys = await self.run(
            lambda connection: leases.keys(connection, search, start, limit), writes=False
        )
        now, fresh_for = self._clock(), self._cache.fresh_for
        states = await self.run(
            lambda connection: {key: leases.state(connection, key, now) for key in keys},
            writes=False,
        )
        return [
            Entry(KIND, key, leases.record_of(state, fresh_for=fresh_for, now=now))
            for key, state in states.items()
        ]

    async def run(
        self, job: Callable[[apsw.Connection], T], *, writes: bool = True, urgent: bool = True
    ) -> T:
        """On the writer's thread; what is queued is done, also if no caller waits.

        What is not urgent fails at once while another process keeps the file locked (S12).
        """
        await self._room.acquire()
        try:
            done = asyncio.wrap_future(self._cache.file.submit(job, writes=writes, urgent=urgent))
        except NotOpen as exc:
            self._room.release()
            raise StoreError("the feed cache is closed") from exc
        done.add_done_callback(lambda _: self._room.release())
        done.add_done_callback(looked_at)
        return await asyncio.shield(done)
