"""The feed's store: what the engine asks of a store, done in the seed's tables.

A copy is a meta row: its id is the cache key, its value is `last_fetched`. What was fetched is in
the rows, which are written in the transaction that publishes the copy. So a load hands over what it
has fetched (`hand_over`) before it is published.

Leases, cooldowns and tags are the SQLite store's own, in a table beside the seed's; the connection
and the writer's thread are those of the opened file. Other implementations know no leases: a lease
notes the meta row's time, and is void if that time has changed or is gone.
"""

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, suppress
from enum import Enum
from functools import partial
from secrets import token_hex
from typing import Final, NamedTuple, Protocol, TypeVar

import apsw
from msgspec.structs import replace

from stillfresh.bounded import BoundedDict
from stillfresh.clock import Clock
from stillfresh.errors import ConfigError, NotOpen, StoreError, shown
from stillfresh.stores import (
    CountsEntries,
    EvictsEntries,
    ListsEntries,
    ReadsInline,
    checked_limit,
    sqlite,
)
from stillfresh.stores.contract import (
    UNREAD,
    After,
    Ask,
    Copy,
    Failures,
    Generations,
    Grant,
    LateTags,
    Lease,
    Put,
    PutResult,
    Record,
    Store,
    StoredEntry,
    StoreStats,
    policy_of,
)
from stillfresh.systems.feed import schema as sql
from stillfresh.systems.feed.model import canonical
from stillfresh.systems.feed.reading import FeedReader, read_state
from stillfresh.systems.feed.rows import Writes, evict_slice
from stillfresh.systems.feed.rules import DAY, Fetched
from stillfresh.systems.feed.schema import LEASES
from stillfresh.tasks import looked_at

T = TypeVar("T")

KIND: Final = "feed"
"""The one kind there is: its ids are the feed's cache keys."""
MAX_FETCHES: Final = 32
"""Keys whose last fetch stays in memory: more than are fetched at the same time."""
STRETCH: Final = 2_000
"""Keys in one job of a listing."""


class FeedFile(Protocol):
    """An opened file of a feed, as the store uses it."""

    fresh_for: float
    keep_for: float

    def check_open(self) -> None:
        """Raise NotOpen if it is closed."""

    def submit(
        self, job: Callable[[apsw.Connection], T], *, writes: bool = True, urgent: bool = True
    ) -> "Future[T]":
        """Run a job in a transaction."""

    def reading(self) -> AbstractContextManager[FeedReader]:
        """A reader for this thread."""


class Published(Enum):
    """How the publication of a fetch ended."""

    NEWS = "it differs from what was stored"
    SAME = "upstream sent the same as before"
    OVERTAKEN = "a write has voided its lease: nothing was stored"


class Fetch(NamedTuple):
    """What was fetched for a key, and when it was asked for."""

    at: float
    fetched: Fetched


class FeedStore(Store, ReadsInline, ListsEntries, EvictsEntries, CountsEntries):
    """The store of one FeedEngine. It reports how each publication of a key ended, by `tell`."""

    def __init__(
        self,
        file: FeedFile,
        *,
        clock: Clock,
        tell: Callable[[str, Published], None] = lambda *_: None,
    ) -> None:
        self._file = file
        self._clock = clock
        self._tell = tell
        # Rows are served until they are evicted, which happens once a day.
        self._policy = policy_of(file.fresh_for, file.keep_for + DAY, 0.0)
        self._room = asyncio.Semaphore(sqlite.MAX_QUEUED)
        self._granted: BoundedDict[str, Lease] = BoundedDict(sqlite.MAX_QUEUED)
        """The leases of this store's own loads."""
        self._fetches: BoundedDict[str, Fetch] = BoundedDict(MAX_FETCHES)

    async def open(self) -> None:
        self._file.check_open()

    async def close(self) -> None:
        """Does nothing: the program that opened the file closes it."""

    async def run(
        self, job: Callable[[apsw.Connection], T], *, writes: bool = True, urgent: bool = True
    ) -> T:
        """Run a job on the file's writer; it is done even if its caller gives up."""
        await self._room.acquire()
        try:
            done = asyncio.wrap_future(self._file.submit(job, writes=writes, urgent=urgent))
        except NotOpen as exc:
            self._room.release()
            raise StoreError(str(exc)) from exc
        done.add_done_callback(lambda _: self._room.release())
        done.add_done_callback(looked_at)
        return await asyncio.shield(done)

    async def read(
        self, kind: str, ids: Sequence[str], known: Generations = None, lag: float = 0.0
    ) -> dict[str, Record]:
        del lag
        return self.read_now(kind, ids, known)

    def read_now(
        self, kind: str, ids: Sequence[str], known: Generations = None
    ) -> dict[str, Record]:
        """The records by id. Any spelling of a category is accepted."""
        del known  # a value is a few bytes
        if kind != KIND:
            return {}
        with self._file.reading() as reader:
            states = {id_: reader.state(canonical(id_)) for id_ in ids}
        now = self._clock()
        records = {id_: state.record(self._policy, now) for id_, state in states.items()}
        return {id_: record for id_, record in records.items() if record != Record()}

    async def acquire(self, kind: str, asks: Sequence[Ask], lease_for: float) -> dict[str, Grant]:
        self._check_kind(kind)
        for ask in asks:
            self._granted.pop(ask.id, None)

        def job(file: apsw.Connection) -> dict[str, Grant]:
            now = self._clock()
            held_at = sqlite.at_most(now) / 1000
            until = sqlite.at_least(now + lease_for) / 1000
            epoch = sqlite.epoch_of(file)
            grants: dict[str, Grant] = {}
            for ask in asks:
                record = read_state(file, ask.id).record(self._policy, now)
                refusal = ask.denied(record, held_at, lease_for)
                if refusal is not None:
                    grants[ask.id] = refusal
                    continue
                lease = Lease(ask.id, token_hex(16), until, epoch)
                LEASES.grant(file, lease)
                file.execute(sql.REMEMBER_META, (ask.id,))
                sqlite.replace_tags(file, KIND, {ask.id: ask.tags})
                grants[ask.id] = lease
            return grants

        grants = await self.run(job, urgent=False)
        for key, grant in grants.items():
            if isinstance(grant, Lease):
                self._granted.note(key, grant)
        return grants

    def hand_over(self, key: str, at: float, fetched: Fetched) -> None:
        """Hand over what a load has fetched: its publication writes it to the rows."""
        self._fetches.note(key, Fetch(at, fetched))

    def last_fetch(self, key: str, since: int) -> Fetched | None:
        """Return what this process fetched for the key, if that was not before `since`."""
        fetch = self._fetches.get(key)
        return fetch.fetched if fetch is not None and fetch.at >= since else None

    async def publish(
        self, kind: str, copies: Mapping[str, tuple[Lease, Copy]], tags: LateTags = None
    ) -> set[str]:
        """Store, then report. A lost lease is noticed even if the disk is full."""
        self._check_kind(kind)
        late = tags or {}
        # Now, before another load can hand over its own.
        fetches = {key: self._fetches.get(key) for key in copies}

        def job(file: apsw.Connection) -> dict[str, Published]:
            """How each publication ended; keys whose lease is lost are left out."""
            now = self._clock()
            published: dict[str, Published] = {}
            for key, (lease, copy) in copies.items():
                fetch = fetches[key]
                if sqlite.is_past(file, lease, late.get(key, ())):
                    self._release(file, [lease])
                elif fetch is not None and _holds(file, lease, now):
                    writes = Writes(file, copy.fetched_at, self._file.fresh_for, now)
                    is_news = writes.store(key, fetch.fetched)
                    published[key] = Published.NEWS if is_news else Published.SAME
                    LEASES.succeed(file, key)
                    file.execute(sql.SET_GENERATION, (copy.generation, key))
                    if key in late:
                        sqlite.replace_late_tags(file, KIND, {key: late[key]})
            return published

        try:
            published = await self.run(job, urgent=False)
        except StoreError:
            if not all(self._is_lost(lease) for lease, _ in copies.values()):
                raise
            published = {}
        for key in copies:
            self._tell(key, published.get(key, Published.OVERTAKEN))
        return set(copies.keys() - published.keys())

    async def store_part(self, key: str, fetched: Fetched, at: float) -> bool:
        """Store the days that succeeded, without a meta row. False if a write voided the lease.

        A load that has no lease stores nothing. It is not overtaken, so this is True.
        """
        lease = self._granted.get(key)
        if lease is None:
            return True

        def job(file: apsw.Connection) -> Published:
            now = self._clock()
            if not _holds(file, lease, now):
                return Published.OVERTAKEN
            is_news = Writes(file, at, self._file.fresh_for, now).store(key, fetched)
            return Published.NEWS if is_news else Published.SAME

        published = await self.run(job, urgent=False)
        if published is Published.OVERTAKEN:
            return False
        self._tell(key, published)
        return True

    def _is_lost(self, lease: Lease) -> bool:
        """True if it is certain that the lease is void or has been taken over."""
        with suppress(StoreError, NotOpen), self._file.reading() as reader:
            return not _holds(reader.connection, lease, now=0.0)  # it may have ended by now
        return False

    async def put(self, kind: str, puts: Mapping[str, Put]) -> dict[str, PutResult]:
        """Refused: a copy stands for rows, and a caller of `put` has none."""
        del kind, puts
        raise ConfigError(
            "a feed's values are rows: store them with put_topic(), put_topics() or "
            "put_comments() of its FeedCache"
        )

    async def renew(self, kind: str, leases: Sequence[Lease], lease_for: float) -> set[str]:
        self._check_kind(kind)

        def job(file: apsw.Connection) -> set[str]:
            valid = [lease for lease in leases if _has_remembered_meta(file, lease.id)]
            lost = {lease.id for lease in leases}.difference(lease.id for lease in valid)
            return lost | LEASES.renew(file, valid, lease_for, self._clock())

        return await self.run(job, urgent=False)

    async def release(self, kind: str, leases: Sequence[Lease], failures: Failures = None) -> None:
        self._check_kind(kind)
        await self.run(lambda file: self._release(file, leases, failures), urgent=False)

    @staticmethod
    def _release(file: apsw.Connection, leases: Sequence[Lease], failures: Failures = None) -> None:
        _forget_empty(file, LEASES.release(file, leases, failures or {}))

    async def invalidate(self, kind: str, ids: Sequence[str], *, soft: bool = False) -> None:
        """The rows are served on, as stale."""
        del soft
        if kind == KIND:
            keys = [canonical(id_) for id_ in ids]
            await self.run(lambda file: _invalidate(file, keys))

    async def invalidate_tag(self, tag: str, *, soft: bool = False) -> list[tuple[str, str]]:
        """Invalidate in slices, each a job of its own: other writers pass between them."""
        del soft
        keys: dict[str, None] = {}
        after: After = sqlite.FIRST

        def job(file: apsw.Connection, after: tuple[str, str]) -> tuple[list[str], After]:
            if after == sqlite.FIRST:
                sqlite.begin_epoch(file, tag)
            tagged_keys, next_after = sqlite.tagged(file, tag, after, sqlite.SLICE)
            slice_ = [id_ for kind, id_ in tagged_keys if kind == KIND]
            _invalidate(file, slice_)
            return slice_, next_after

        while after is not None:
            slice_, after = await self.run(partial(job, after=after))
            keys.update(dict.fromkeys(slice_))
        return [(KIND, key) for key in keys]

    async def delete(self, kind: str, ids: Sequence[str]) -> None:
        """A topic goes with its comments; the topics of a list stay."""
        if kind != KIND:
            return
        keys = [canonical(id_) for id_ in ids]

        def job(file: apsw.Connection) -> None:
            Writes(file).erase(keys)
            file.executemany(sql.DROP_TIMES, [(key,) for key in keys])
            sqlite.delete_tags(file, KIND, keys)

        await self.run(job)

    async def evict(self, before: float) -> int:
        """Drop rows in slices, each a job of its own; return how many rows were dropped."""
        job = partial(
            evict_slice,
            now=before,
            fresh_for=self._file.fresh_for,
            keep_for=self._file.keep_for,
            size=sqlite.SLICE,
        )
        total = 0
        goes_on = True
        while goes_on:
            dropped, goes_on = await self.run(job, urgent=False)
            total += dropped
        return total

    async def stats(self) -> StoreStats:
        now = self._clock()

        def job(file: apsw.Connection) -> StoreStats:
            copies, leases = file.execute(sql.COUNT_KEYS, (sqlite.at_most(now),)).get
            return StoreStats(copies, leases, sqlite.bytes_of(file))

        return await self.run(job, writes=False)

    async def entries(
        self, kind: str | None = None, search: str = "", after: After = None, limit: int = 100
    ) -> list[StoredEntry]:
        """Keys with a meta row, a lease or a failure, in their order. Sizes are not known."""
        checked_limit(limit)
        if kind not in {None, KIND} or (after is not None and after[0] > KIND):
            return []
        entries: list[StoredEntry] = []
        start = "" if after is None or after[0] < KIND else sqlite.following(after[1])
        while len(entries) < limit:
            left = limit - len(entries)
            job = partial(self._list_slice, start=start, search=search, limit=left)
            page, last = await self.run(job, writes=False)
            entries += page
            if last is None:
                break
            start = sqlite.following(last)
        return entries

    def _list_slice(
        self, file: apsw.Connection, start: str, search: str, limit: int
    ) -> tuple[list[StoredEntry], str | None]:
        """Up to `limit` entries that match among the next keys, and the last of these keys.

        None instead of a key: no more follow.
        """
        keys: list[str] = [key for (key,) in file.execute(sql.SELECT_KEYS, (start, STRETCH))]
        matching = [key for key in keys if search in key]
        now = self._clock()
        entries: list[StoredEntry] = []
        for key in matching[:limit]:
            record = read_state(file, key).record(self._policy, now)
            if record.copy is not None:
                record = replace(record, copy=replace(record.copy, value=UNREAD))
            entries.append(StoredEntry(KIND, key, record))
        return entries, keys[-1] if len(keys) == STRETCH else None

    @staticmethod
    def _check_kind(kind: str) -> None:
        if kind != KIND:
            raise ConfigError(f"kind: a feed's file has one, {KIND!r}, not {shown(kind)}")


def _holds(file: apsw.Connection, lease: Lease, now: float) -> bool:
    """True if the lease is live, and no other program has written the meta row since its grant."""
    return LEASES.is_held(file, lease, now) and _has_remembered_meta(file, lease.id)


def _has_remembered_meta(file: apsw.Connection, key: str) -> bool:
    return bool(file.execute(sql.HAS_REMEMBERED_META, (key,)).get)


def _invalidate(file: apsw.Connection, keys: Sequence[str]) -> None:
    Writes(file).forget(keys)
    _forget_empty(file, keys)


def _forget_empty(file: apsw.Connection, keys: Iterable[str]) -> None:
    """Forget keys that have no lease, no failure and no earlier copy."""
    sqlite.delete_tags(file, KIND, LEASES.forget_empty(file, keys))
