"""The feed's store behind the store contract's ids, kinds and values, for the conformance suite.

A feed has one kind, its ids are cache keys and its values are rows. Here each (kind, id) of the
suite is the key of some topic's comments, and each value is one comment. All else is the
feed's own.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from msgspec.structs import replace

from stillfresh.clock import Clock
from stillfresh.freshness import Policy
from stillfresh.stores import CountsEntries, EvictsEntries, ListsEntries
from stillfresh.stores.contract import (
    UNREAD,
    Ask,
    Copy,
    Failure,
    Grant,
    LateTags,
    Lease,
    Mark,
    Newer,
    Put,
    PutResult,
    Record,
    Store,
    StoredEntry,
    StoreStats,
)
from stillfresh.systems.feed import Comment, FeedCache
from stillfresh.systems.feed.rules import Fetched, value_of
from stillfresh.systems.feed.store import KIND, FeedStore

PREFIX = "comments:"
FIRST = 0xE000
"""Kinds are letters of the private use area, which nobody searches for."""


@dataclass
class FeedAsStore(Store, ListsEntries, EvictsEntries, CountsEntries):
    """Opens the file and closes it; may be opened again."""

    path: Path
    clock: Clock
    policy: Policy
    """A feed has one for all: what the suite publishes has this one."""
    kinds: list[str] = field(default_factory=list)
    generations: dict[str, str] = field(default_factory=dict)
    """By token: the feed's generation is a time and a token."""
    last: dict[str, Copy] = field(default_factory=dict)
    """By key: its last publication, whose rows are served on when the meta row has gone."""

    hard: set[str] = field(default_factory=set)
    """A feed has no marks: what the suite asked for since the last publication."""

    is_open: bool = False

    async def open(self) -> None:
        if self.is_open:
            return
        self.is_open = True
        self.cache = FeedCache.open(
            self.path, clock=self.clock, fresh_for=1e6, keep_for=self.policy.lasts
        )
        self.store = FeedStore(self.cache, clock=self.clock)
        await self.store.open()

    async def close(self) -> None:
        self.is_open = False
        await self.store.close()
        self.cache.close()

    def key(self, kind: str, id_: str) -> str:
        if kind not in self.kinds:
            self.kinds.append(kind)
        return f"{PREFIX}{chr(FIRST + self.kinds.index(kind))}{id_}"

    def name(self, key: str) -> tuple[str, str]:
        name = key.removeprefix(PREFIX)
        return self.kinds[ord(name[0]) - FIRST], name[1:]

    def value(self, key: str) -> bytes | None:
        comments = self.cache.get_comments(key.removeprefix(PREFIX)) or []
        return comments[0].body.encode("latin-1") if comments else None

    def hand_over(self, key: str, copy: Copy) -> None:
        """As a load of the feed does before it is published: one comment, or none if absent."""
        comments: tuple[Comment, ...] = ()
        if isinstance(copy.value, bytes):
            text = copy.value.decode("latin-1")
            comments = (Comment("1", key.removeprefix(PREFIX), "ann", 1, text),)
        self.store.hand_over(key, copy.fetched_at, Fetched(comments=comments))

    def record(self, key: str, record: Record) -> Record:
        copy = record.copy
        if copy is None:
            rows = self.cache.get_comments(key.removeprefix(PREFIX))
            if rows is None or key not in self.last:
                return record
            mark = Mark.HARD if key in self.hard else Mark.SOFT
            old = replace(self.last[key], value=self.value(key), mark=mark)
            return replace(record, copy=old)
        token = copy.generation.partition(":")[2]
        self.generations[token] = copy.generation
        value = UNREAD if copy.value is UNREAD else self.value(key)
        copy = replace(copy, generation=token, policy=self.policy, value=value)
        return replace(record, copy=copy)

    async def read(
        self,
        kind: str,
        ids: Sequence[str],
        known: Mapping[str, str] | None = None,
        lag: float = 0.0,
    ) -> dict[str, Record]:
        del lag
        keys = {self.key(kind, id_): id_ for id_ in ids}
        stored = await self.store.read(KIND, list(keys), known)
        records = {keys[key]: self.record(key, stored.get(key, Record())) for key in keys}
        return {id_: record for id_, record in records.items() if record != Record()}

    async def acquire(self, kind: str, asks: Sequence[Ask], lease_for: float) -> dict[str, Grant]:
        named = [
            replace(
                ask,
                id=self.key(kind, ask.id),
                seen=None if ask.seen is None else self.generations.get(ask.seen, ask.seen),
            )
            for ask in asks
        ]
        grants = await self.store.acquire(KIND, named, lease_for)
        return {self.name(key)[1]: self.grant(key, grant) for key, grant in grants.items()}

    def grant(self, key: str, grant: Grant) -> Grant:
        if isinstance(grant, Newer):
            return Newer(self.record(key, grant.record))
        return replace(grant, id=self.name(key)[1]) if isinstance(grant, Lease) else grant

    async def publish(
        self, kind: str, copies: Mapping[str, tuple[Lease, Copy]], tags: LateTags = None
    ) -> set[str]:
        named = {}
        for id_, (lease, copy) in copies.items():
            key = self.key(kind, id_)
            self.hand_over(key, copy)
            value = value_of(copy.fetched_at)
            named[key] = (replace(lease, id=key), replace(copy, value=value))
        late = {self.key(kind, id_): id_tags for id_, id_tags in (tags or {}).items()}
        superseded = await self.store.publish(KIND, named, late)
        for key in named.keys() - superseded:
            lease, copy = named[key]
            self.hard.discard(key)
            self.last[key] = replace(copy, generation=lease.token)
            self.generations[lease.token] = f"{int(copy.fetched_at)}:{lease.token}"
        return {self.name(key)[1] for key in superseded}

    def named(self, kind: str, leases: Sequence[Lease]) -> list[Lease]:
        return [replace(lease, id=self.key(kind, lease.id)) for lease in leases]

    async def renew(self, kind: str, leases: Sequence[Lease], lease_for: float) -> set[str]:
        lost = await self.store.renew(KIND, self.named(kind, leases), lease_for)
        return {self.name(key)[1] for key in lost}

    async def release(
        self, kind: str, leases: Sequence[Lease], failures: Mapping[str, Failure] | None = None
    ) -> None:
        failed = {self.key(kind, id_): failure for id_, failure in (failures or {}).items()}
        await self.store.release(KIND, self.named(kind, leases), failed)

    async def invalidate(self, kind: str, ids: Sequence[str], *, soft: bool = False) -> None:
        keys = [self.key(kind, id_) for id_ in ids]
        self.hard.update([] if soft else keys)
        await self.store.invalidate(KIND, keys, soft=soft)

    async def invalidate_tag(self, tag: str, *, soft: bool = False) -> list[tuple[str, str]]:
        keys = [key for _, key in await self.store.invalidate_tag(tag, soft=soft)]
        self.hard.update([] if soft else keys)
        return [self.name(key) for key in keys]

    async def put(self, kind: str, puts: Mapping[str, Put]) -> dict[str, PutResult]:
        named = {self.key(kind, id_): put for id_, put in puts.items()}
        return await self.store.put(KIND, named)

    async def delete(self, kind: str, ids: Sequence[str]) -> None:
        await self.store.delete(KIND, [self.key(kind, id_) for id_ in ids])

    async def evict(self, before: float) -> int:
        """Each entry is two rows: its comments and its meta row."""
        return await self.store.evict(before) // 2

    async def stats(self) -> StoreStats:
        return await self.store.stats()

    async def entries(
        self,
        kind: str | None = None,
        search: str = "",
        after: tuple[str, str] | None = None,
        limit: int = 100,
    ) -> list[StoredEntry]:
        """The kinds of the suite are one to the feed."""
        entries: list[StoredEntry] = []
        last = None if after is None else (KIND, self.key(*after))
        while page := await self.store.entries(KIND, search, last, limit):
            last = KIND, page[-1].id
            for entry in page:
                entry_kind, id_ = self.name(entry.id)
                if kind in {None, entry_kind}:
                    record = self.record(entry.id, entry.record)
                    entries.append(StoredEntry(entry_kind, id_, record))
        return entries[:limit]
