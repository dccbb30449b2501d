"""The Redis store: the contract as commands and scripts; it decides nothing (S1, S2, S5)."""

import asyncio
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from functools import partial
from secrets import token_hex
from typing import Any, Final
from urllib.parse import urlsplit, urlunsplit

from stillfresh.checks import checked_whole
from stillfresh.clock import Clock
from stillfresh.durations import Duration
from stillfresh.errors import ConfigError, StoreError, shown
from stillfresh.stores.contract import (
    AWAY,
    Ask,
    Copy,
    Entry,
    Failures,
    Generations,
    Grant,
    LateTags,
    Lease,
    Mark,
    Record,
    Superseded,
)
from stillfresh.stores.redis import lua, scripts
from stillfresh.stores.redis.channel import RedisChannel
from stillfresh.stores.redis.cluster import Cluster
from stillfresh.stores.redis.layout import (
    ASKER,
    Places,
    RedisKey,
    copy_fields,
    failure_fields,
    grant_of,
    is_enough,
    packed_tags,
    padded,
    record_of,
)
from stillfresh.stores.redis.link import Address, Link, Sentinels
from stillfresh.stores.redis.listing import count, evict, list_entries, walk
from stillfresh.stores.redis.threads import ThreadReads
from stillfresh.stores.server import ServerStore

SCHEMES: Final = ("redis://", "rediss://", "unix://")
TIMEOUT: Final = 1.0
MAX_CONNECTIONS: Final = 50
PREFIX: Final = "stillfresh"
MANY: Final = 20
"""Ids in one MGET, so that each reply of large values has its own time-out."""
GLANCED: Final = 100
"""Ids whose first bytes come in one reply."""
WHATEVER: Final = -1
"""For callers that do not say how many failures they saw."""
WRONG_TYPE: Final = "WRONGTYPE"
"""The server's error for a key that another program has made a list, a set, …"""


class RedisStore(ServerStore[Link | Cluster, Places]):
    """Entries in Redis or Valkey, opened by its address, `redis://host:6379/0`, or made here.

    Leases are judged by the server's clock, unless `clock` is given. `prefix` begins every key.
    Caches on one prefix are one cache. `timeout` ends a step that takes longer, with a StoreError.
    `nodes` are the servers of a cluster or of Sentinel, `service` is Sentinel's name of the
    primary. `wait_replicas` is how many replicas must have a change before it counts as done.
    """

    _list, _count = staticmethod(list_entries), staticmethod(count)
    _listening = RedisChannel

    def __init__(
        self,
        url: str,
        *,
        prefix: str = PREFIX,
        timeout: Duration = TIMEOUT,
        max_connections: int = MAX_CONNECTIONS,
        clock: Clock | None = None,
        options: Mapping[str, Any] | None = None,
        nodes: Sequence[Address] = (),
        service: str | None = None,
        wait_replicas: int = 0,
    ) -> None:
        """`nodes` of a cluster, or the Sentinels that know the primary of `service`."""
        if not url.startswith(SCHEMES):
            raise ConfigError(f"url: must begin with {', '.join(SCHEMES)}, not {shown(url[:9])}")
        super().__init__(Places(prefix), timeout, clock)
        self._new_link = partial(
            _new_link,
            url,
            nodes,
            service,
            self._place.bases,
            most=checked_whole("max_connections", max_connections),
            timeout=self._timeout,
            options=dict(options or {}),
            wait_replicas=checked_whole("wait_replicas", wait_replicas, 0),
        )
        self.reads_in_threads = not nodes and service is None
        self._threads = ThreadReads(url, timeout=self._timeout, options=options or {})

    async def close(self) -> None:
        self._threads.close()
        await super().close()

    async def read(
        self, kind: str, ids: Sequence[str], known: Generations = None, lag: float = 0.0
    ) -> dict[str, Record]:
        """One MGET; a value is sent only if the caller does not know its generation."""
        del lag
        known = known or {}
        places = dict(zip(ids, self._place.of(kind, ids), strict=True))
        texts = await self._texts(places, known)
        enough = {
            id_: text
            for id_, text in texts.items()
            if id_ not in known or is_enough(text, known[id_])
        }
        if changed := {id_: places[id_] for id_ in texts.keys() - enough.keys()}:
            enough.update(await self._texts(changed, {}))
        records = {id_: record_of(text, known.get(id_)) for id_, text in enough.items()}
        found = {id_: record for id_, record in records.items() if record is not None}
        return found | dict.fromkeys(places.keys() - enough.keys(), AWAY)

    def read_now(
        self, kind: str, ids: Sequence[str], known: Mapping[str, str] | None = None
    ) -> dict[str, Record]:
        """For a thread that waits for the reply."""
        if not self.reads_in_threads:
            return super().read_now(kind, ids, known)
        if self._link is not None and self._link.drops_keys:
            raise StoreError("this Redis server drops keys: a thread's MGET cannot tell of tags")
        known, keys = known or {}, [it.key for it in self._place.of(kind, ids)]
        texts = zip(ids, self._threads.texts(keys), strict=True)
        records = ((id_, record_of(text, known.get(id_))) for id_, text in texts)
        return {id_: record for id_, record in records if record is not None}

    async def _texts(
        self, places: Mapping[str, RedisKey], known: Mapping[str, str]
    ) -> dict[str, bytes | None]:
        """All in one round trip; for known copies the first bytes; none from unavailable nodes."""
        link = self._opened()
        glanced, many = (1, 1) if link.is_cluster else (GLANCED, MANY)
        glances = _cut([id_ for id_ in places if id_ in known], glanced)
        others = _cut([id_ for id_ in places if id_ not in known], many)

        def keys(some: Sequence[str]) -> list[bytes]:
            return [places[id_].key for id_ in some]

        doubts = link.drops_keys
        reads = [(scripts.glance(keys(some), doubts=doubts), some) for some in glances]
        reads += [(scripts.values(keys(some), doubts=doubts), some) for some in others]
        try:
            replies = await link.run([command for command, _ in reads], partly=True)
        except StoreError as exc:
            if not known or not str(exc.__cause__).startswith(WRONG_TYPE):
                raise
            return await self._texts(places, {})  # MGET says that there is no text
        texts: dict[str, bytes | None] = {}
        for (_, ids), reply in zip(reads, replies, strict=True):
            if not isinstance(reply, StoreError):
                texts.update(zip(ids, reply if isinstance(reply, list) else [reply], strict=True))
        return texts

    async def _each(
        self,
        script: lua.Script,
        kind: str,
        given: Mapping[str, tuple[bytes | str | int, ...]],
        *,
        urgent: bool = False,
        lasting: bool = True,
        partly: bool = False,
    ) -> dict[str, Any]:
        """One step for each id; the replies by id. `partly`: without unavailable nodes."""
        places = self._place.of(kind, list(given))
        steps = [script.on(at, *it) for at, it in zip(places, given.values(), strict=True)]
        link = self._opened()
        replies = await link.run(steps, urgent=urgent, lasting=lasting, partly=partly)
        found = zip(given, replies, strict=True)
        return {id_: reply for id_, reply in found if not isinstance(reply, StoreError)}

    async def acquire(self, kind: str, asks: Sequence[Ask], lease_for: float) -> dict[str, Grant]:
        """S8: if sent again, the server recognises this request's lease, or grants a new token."""
        now, lasts = self._now(), repr(float(lease_for))
        given = {
            ask.id: (
                now,
                padded(ask.seen),
                token_hex(ASKER // 2),
                lasts,
                packed_tags(ask.tags),
                WHATEVER if ask.failures is None else ask.failures,
                int(ask.take_over),
            )
            for ask in asks
        }
        replies = await self._each(scripts.ACQUIRE, kind, given, partly=True)
        if broken := {id_: given[id_] for id_, reply in replies.items() if _is_broken(reply)}:
            # It cannot be read, so no caller can have seen it.
            await self.delete(kind, list(broken))
            replies |= await self._each(scripts.ACQUIRE, kind, broken)
        return {id_: grant_of(id_, reply) for id_, reply in replies.items()}

    async def publish(
        self, kind: str, copies: Mapping[str, tuple[Lease, Copy]], tags: LateTags = None
    ) -> set[str]:
        """After a lost reply, the generation shows whether it was done, or nothing does (S2)."""
        now, late = self._now(), tags or {}
        steps = [
            scripts.PUBLISH.on(
                place,
                now,
                padded(lease.token),
                copy_fields(copy),
                copy.value if isinstance(copy.value, bytes) else b"",
                int(id_ in late),
                packed_tags(late.get(id_, ())),
                lease.epoch,
                "0",
            )
            for place, (id_, (lease, copy)) in zip(
                self._place.of(kind, list(copies)), copies.items(), strict=True
            )
        ]
        settle = [(*step[:-1], "1") for step in steps]
        replies = await self._opened().run(steps, settle=settle, lasting=True)
        undone = {id_: reply for id_, reply in zip(copies, replies, strict=True) if reply != 1}
        return Superseded(undone, (id_ for id_, reply in undone.items() if reply == scripts.UNSURE))

    async def renew(self, kind: str, leases: Sequence[Lease], lease_for: float) -> set[str]:
        now, lasts = self._now(), repr(float(lease_for))
        given = {lease.id: (now, padded(lease.token), lasts) for lease in leases}
        replies = await self._each(scripts.RENEW, kind, given, lasting=False)
        return {id_ for id_, held in replies.items() if not held}

    async def release(self, kind: str, leases: Sequence[Lease], failures: Failures = None) -> None:
        now, failures = self._now(), failures or {}
        given = {
            it.id: (now, padded(it.token), *failure_fields(failures.get(it.id))) for it in leases
        }
        await self._each(scripts.RELEASE, kind, given, lasting=False)

    async def invalidate(self, kind: str, ids: Sequence[str], *, soft: bool = False) -> None:
        """One script voids the lease and marks the copy; a hard mark stays hard."""
        mark = int(Mark.SOFT if soft else Mark.HARD)
        await self._each(scripts.INVALIDATE, kind, dict.fromkeys(ids, (mark,)), urgent=True)

    async def invalidate_tag(self, tag: str, *, soft: bool = False) -> list[tuple[str, str]]:
        """In every bucket, in slices: no id can be leased with the tag and not be named.

        If a reply got lost, ids that had nothing but a lease are voided, and missing in the answer.
        """
        link, mark = self._opened(), int(Mark.SOFT if soft else Mark.HARD)
        reached: dict[tuple[str, str], None] = {}
        walks, later = [(*it, b"0") for it in self._place.tagged(tag)], list[Any]()
        while walks:
            replies = await link.run(
                [scripts.INVALIDATE_TAG.call([key], base, mark, at) for base, key, at in walks],
                urgent=True,
                lasting=True,
            )
            for _, members in replies:
                names = map(self._place.name, members)
                reached.update((name, None) for name in names if name is not None)
                await asyncio.sleep(0)
            going = zip(walks, replies, strict=True)
            later += [(*walk[:2], at) for walk, (at, _) in going if at != b"0"]
            walks, later = later[: scripts.TAGS_AT_ONCE], later[scripts.TAGS_AT_ONCE :]
        return list(reached)

    async def delete(self, kind: str, ids: Sequence[str]) -> None:
        await self._each(scripts.DELETE, kind, dict.fromkeys(ids, ()), urgent=True)

    async def evict(self, before: float) -> int:
        """By its own clock the server drops ids itself; by a given clock, drop them here."""
        self._opened()
        if self._clock is None and before <= time.time():
            return 0
        return await evict(self._opened(), self._place, before)

    def walk(self, kind: str | None) -> AsyncIterator[list[Entry]]:
        """In no order: one walk, where pages would be many."""
        return walk(self._opened(), self._place, kind)

    def _now(self) -> str:
        """The time that the scripts use; empty: the server's own."""
        return "" if self._clock is None else repr(float(self._clock()))


def _new_link(
    url: str,
    nodes: Sequence[Address],
    service: str | None,
    bases: Sequence[bytes],
    *,
    timeout: float,
    **options: Any,  # noqa: ANN401 (the link's own)
) -> Link | Cluster:
    """To one server, to the primary that Sentinels name, or to the nodes of a cluster."""
    if service is not None:
        sentinels = Sentinels(nodes, service, timeout)
        return Link(url, sentinels=sentinels, timeout=timeout, **options)
    if not nodes:
        return Link(url, timeout=timeout, **options)

    def link(address: Address) -> Link:
        host, port = address
        node = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        user, at, _ = (parts := urlsplit(url)).netloc.rpartition("@")
        there = urlunsplit(parts._replace(netloc=f"{user}{at}{node}"))
        return Link(there, node=node, timeout=timeout, **options)

    return Cluster(nodes, link, timeout, bases)


def _cut(ids: list[str], size: int) -> list[list[str]]:
    return [ids[first : first + size] for first in range(0, len(ids), size)]


def _is_broken(reply: Sequence[bytes]) -> bool:
    """True for a newer copy or failure that another program has made unreadable."""
    return reply[0] == b"newer" and record_of(reply[1]) is None
