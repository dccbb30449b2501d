"""The Redis store: it maps the contract to commands and scripts, and decides nothing itself.

A request whose reply was lost is sent again, so a request may arrive late or twice. The lease's
token is the fence of loads. The fence of puts, invalidations and deletions are stamps (`heard.py`):
the server answers AGAIN if the entry may have changed after the stamp that this process heard last.
A request for a lease may also arrive after its caller has given up; `GivenUpRequests` recognises
such a lease.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from functools import partial
from math import ceil
from secrets import token_hex, token_urlsafe
from typing import Any, Final
from urllib.parse import urlsplit, urlunsplit

from msgspec.structs import replace

from stillfresh.checks import checked_whole
from stillfresh.clock import Clock
from stillfresh.durations import Duration
from stillfresh.errors import ConfigError, StoreError, shown
from stillfresh.stores.capabilities import (
    Capabilities,
    ReadsInThreads,
    TellsEmptiness,
    WaitsInThreads,
    capabilities_by_protocol,
)
from stillfresh.stores.contract import (
    ACTS_ONCE,
    AWAY,
    UNREAD,
    Ask,
    Copy,
    Failures,
    Generations,
    Grant,
    LateTags,
    Lease,
    Mark,
    Put,
    PutOutcome,
    PutResult,
    Record,
    StoredEntry,
    Superseded,
    When,
)
from stillfresh.stores.given_up import GivenUpRequests
from stillfresh.stores.redis import lua, scripts
from stillfresh.stores.redis.channel import RedisChannel
from stillfresh.stores.redis.cluster import KEEPS_CHANGING, Cluster
from stillfresh.stores.redis.heard import AGAIN, Blank, PutFence, StampedCommand
from stillfresh.stores.redis.layout import (
    ASKER,
    HOW,
    LATE_TAGS,
    SHORT_ID,
    Command,
    Keyspace,
    RedisKey,
    asker_of,
    copy_fields,
    failure_fields,
    grant_of,
    is_enough,
    packed_tags,
    padded,
    put_front,
    record_of,
    replaced_by,
)
from stillfresh.stores.redis.link import Address, Link, Sentinels
from stillfresh.stores.redis.listing import count, evict, list_entries, walk
from stillfresh.stores.server import ServerStore

SCHEMES: Final = ("redis://", "rediss://", "unix://")
TIMEOUT: Final = 1.0
MAX_CONNECTIONS: Final = 50
PREFIX: Final = "stillfresh"
MANY: Final = 20
"""Ids in one MGET, so that each reply of large values has its own time-out."""
GLANCED: Final = 100
"""Ids whose first bytes come in one reply."""
ASKER_AT: Final = 2
"""Where the asker stands among the arguments of ACQUIRE, behind base and member."""
IS_FIRST: Final = "0"
IS_RESENT: Final = "1"
"""The last argument of PUBLISH: whether it is sent again because its reply was lost."""
WHATEVER: Final = -1
"""For callers that do not say how many failures they saw."""
WRONG_TYPE: Final = "WRONGTYPE"
"""The server's error for a key that another program has made a list, a set, …"""
MAY_BE_STORED: Final = (
    "the answer to a put was lost, and the entry has changed too often since then: it is not known "
    "whether the value was stored"
)
LONGEST_LIFE: Final = 315_360_000.0
"""Seconds that a copy is kept at most."""
KEPT_LONGER: Final = 60.0
"""Seconds that a copy is kept beyond the time in which it can be served."""
OUTCOMES: Final = {
    AGAIN: PutOutcome.AGAIN,
    scripts.STORED: PutOutcome.STORED,
    scripts.REPLACED: PutOutcome.REPLACED,
    scripts.KEPT: PutOutcome.KEPT,
    scripts.MIXED: PutOutcome.MIXED,
    scripts.REFUSED: PutOutcome.REFUSED,
}


class RedisStore(
    ServerStore[Link | Cluster, Keyspace], ReadsInThreads, WaitsInThreads, TellsEmptiness
):
    """Entries in Redis or Valkey, opened by its address, `redis://host:6379/0`, or made here.

    Leases are judged by the server's clock, unless `clock` is given. `prefix` begins every key.
    Caches on one prefix are one cache. `timeout` ends a step that takes longer, with a StoreError.
    `nodes` are the servers of a cluster or of Sentinel, `service` is Sentinel's name of the
    primary. `wait_replicas` is how many replicas must have a change before it counts as done.
    """

    _list = staticmethod(list_entries)
    _count = staticmethod(count)
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
        super().__init__(Keyspace(prefix), timeout, clock)
        self.options = dict(options or {})
        """Of the connections, as `redis-py` names them."""
        self._new_link = partial(
            _new_link,
            url,
            nodes,
            service,
            self._place.bases,
            most=checked_whole("max_connections", max_connections),
            timeout=self._timeout,
            options=self.options,
            wait_replicas=checked_whole("wait_replicas", wait_replicas, 0),
        )
        self._is_one_server = not nodes and service is None
        self._given_up = GivenUpRequests(ASKER)

    async def read(
        self, kind: str, ids: Sequence[str], known: Generations = None, lag: float = 0.0
    ) -> dict[str, Record]:
        """One MGET; a value is sent only if the caller does not know its generation."""
        del lag
        known = known or {}
        if len(ids) == 1:
            return await self._read_one(kind, ids[0], known.get(ids[0]))
        redis_keys = dict(zip(ids, self._place.of(kind, ids), strict=True))
        texts = await self._texts(redis_keys, known)
        enough = {
            id_: text
            for id_, text in texts.items()
            if id_ not in known or is_enough(text, known[id_])
        }
        changed = {id_: redis_keys[id_] for id_ in texts.keys() - enough.keys()}
        if changed:
            enough.update(await self._texts(changed, {}))
        parsed = {id_: record_of(text, known.get(id_)) for id_, text in enough.items()}
        records = {id_: record for id_, record in parsed.items() if record is not None}
        if self._given_up:
            for id_, record in records.items():
                if self._given_up.is_left_behind(asker_of(enough[id_] or b"")):
                    records[id_] = replace(record, held_until=None)
        return records | dict.fromkeys(redis_keys.keys() - enough.keys(), AWAY)

    async def _read_one(self, kind: str, id_: str, known: str | None) -> dict[str, Record]:
        """What `read` does, for the commonest read, that of one id."""
        (redis_key,) = self._place.of(kind, (id_,))
        text = await self._text(redis_key.key, is_known=known is not None)
        if known is not None and not isinstance(text, StoreError) and not is_enough(text, known):
            text = await self._text(redis_key.key, is_known=False)
        if isinstance(text, StoreError):
            return {id_: AWAY}
        record = record_of(text, known)
        if record is None:
            return {}
        if self._given_up and self._given_up.is_left_behind(asker_of(text or b"")):
            record = replace(record, held_until=None)
        return {id_: record}

    async def _text(self, key: bytes, *, is_known: bool) -> bytes | StoreError | None:
        """The string of one key, of a known copy the first bytes; StoreError from a node away."""
        link = self._opened()
        doubts = link.drops_keys
        read = scripts.glance if is_known else scripts.values
        try:
            (reply,) = await link.run([read([key], doubts=doubts)], partly=True)
        except StoreError as exc:
            if not is_known or not str(exc.__cause__).startswith(WRONG_TYPE):
                raise
            return await self._text(key, is_known=False)  # MGET says that there is no text
        if link.drops_keys and not doubts:  # the server has said so with this reply
            return await self._text(key, is_known=is_known)
        text: bytes | StoreError | None = reply[0] if isinstance(reply, list) else reply
        return text

    def capabilities(self) -> Capabilities:
        """Threads use one server; they do not follow the nodes of a cluster or of Sentinel."""
        can = capabilities_by_protocol(self)
        return can if self._is_one_server else replace(can, threads=None, waits_in_threads=False)

    def read_in_thread(
        self, kind: str, ids: Sequence[str], known: Generations = None
    ) -> dict[str, Record]:
        """One MGET; of a single copy that the caller knows, the first bytes.

        A read that fails here goes the general way, which tries it again.
        """
        link = self._opened()
        if not isinstance(link, Link):
            raise StoreError("threads do not follow the nodes of a cluster")
        known = known or {}
        redis_keys = self._place.of(kind, ids)
        if len(ids) == 1:
            record = _record_in_thread(link, redis_keys[0].key, known.get(ids[0]))
            return {} if record is None else {ids[0]: record}
        texts = link.texts_in_thread([redis_key.key for redis_key in redis_keys])
        records = (
            (id_, record_of(text, known.get(id_))) for id_, text in zip(ids, texts, strict=True)
        )
        return {id_: record for id_, record in records if record is not None}

    async def _texts(
        self, redis_keys: Mapping[str, RedisKey], known: Mapping[str, str]
    ) -> dict[str, bytes | None]:
        """All in one round trip; for known copies the first bytes; none from unavailable nodes."""
        link = self._opened()
        # In a cluster, ids may be on different nodes, so each has its own command.
        glanced = 1 if link.is_cluster else GLANCED
        many = 1 if link.is_cluster else MANY
        glances = _cut([id_ for id_ in redis_keys if id_ in known], glanced)
        others = _cut([id_ for id_ in redis_keys if id_ not in known], many)

        def keys(group: Sequence[str]) -> list[bytes]:
            return [redis_keys[id_].key for id_ in group]

        doubts = link.drops_keys
        reads = [(scripts.glance(keys(group), doubts=doubts), group) for group in glances]
        reads += [(scripts.values(keys(group), doubts=doubts), group) for group in others]
        try:
            replies = await link.run([command for command, _ in reads], partly=True)
        except StoreError as exc:
            if not known or not str(exc.__cause__).startswith(WRONG_TYPE):
                raise
            return await self._texts(redis_keys, {})  # MGET says that there is no text
        if link.drops_keys and not doubts:  # the server has said so with these replies
            return await self._texts(redis_keys, known)
        texts: dict[str, bytes | None] = {}
        for (_, ids), reply in zip(reads, replies, strict=True):
            if not isinstance(reply, StoreError):
                texts.update(zip(ids, reply if isinstance(reply, list) else [reply], strict=True))
        return texts

    async def _each(
        self,
        script: lua.Script,
        kind: str,
        arguments: Mapping[str, tuple[object, ...]],
        *,
        urgent: bool = False,
        lasting: bool = True,
        partly: bool = False,
        before_resend: Callable[[], None] | None = None,
    ) -> dict[str, Any]:
        """One step for each id; the replies by id. `partly`: without unavailable nodes."""
        redis_keys = self._place.of(kind, list(arguments))
        steps = [
            script.on(redis_key, *step_arguments)
            for redis_key, step_arguments in zip(redis_keys, arguments.values(), strict=True)
        ]
        link = self._opened()
        replies = await link.run(
            steps, urgent=urgent, lasting=lasting, partly=partly, before_resend=before_resend
        )
        return {
            id_: reply
            for id_, reply in zip(arguments, replies, strict=True)
            if not isinstance(reply, StoreError)
        }

    async def acquire(self, kind: str, asks: Sequence[Ask], lease_for: float) -> dict[str, Grant]:
        """If sent again, the server recognises this request's lease, or grants a new token."""
        now = self._now()
        lasts = repr(float(lease_for))

        def step(ask: Ask, asker: str) -> tuple[object, ...]:
            failures = WHATEVER if ask.failures is None else ask.failures
            tags = packed_tags(ask.tags)
            return now, padded(ask.seen), asker, lasts, tags, failures, int(ask.take_over)

        arguments = {ask.id: step(ask, token_hex(ASKER // 2)) for ask in asks}
        replies = await self._send_acquire(kind, arguments, lease_for, partly=True)
        broken = {id_: arguments[id_] for id_, reply in replies.items() if _is_broken(reply)}
        if broken:
            # It cannot be read, so no caller can have seen it.
            await self.delete(kind, list(broken))
            replies |= await self._send_acquire(kind, broken, lease_for)
        by_id = {ask.id: ask for ask in asks}
        left_behind: dict[str, tuple[object, ...]] = {}
        for id_, reply in replies.items():
            asker = self._left_behind(reply)
            if asker:
                left_behind[id_] = step(by_id[id_], asker)
        if left_behind:
            # Nobody loads under these leases. The server gives each to its own asker.
            taken = await self._send_acquire(kind, left_behind, lease_for, partly=True)
            for id_, reply in taken.items():
                if reply[0] == b"lease":
                    self._given_up.take(str(left_behind[id_][ASKER_AT]), lease_for)
            replies |= taken
        return {id_: grant_of(id_, reply) for id_, reply in replies.items()}

    async def _send_acquire(
        self,
        kind: str,
        arguments: Mapping[str, tuple[object, ...]],
        lease_for: float,
        *,
        partly: bool = False,
    ) -> dict[str, Any]:
        """The replies of ACQUIRE. Askers that may still take a lease are remembered."""
        askers = {id_: str(parts[ASKER_AT]) for id_, parts in arguments.items()}
        note_resend = partial(self._given_up.note_sent_again, askers.values(), lease_for)
        try:
            replies = await self._each(
                scripts.ACQUIRE, kind, arguments, partly=partly, before_resend=note_resend
            )
        except BaseException:
            self._given_up.give_up(askers.values(), lease_for)
            raise
        self._given_up.give_up([askers[id_] for id_ in askers.keys() - replies.keys()], lease_for)
        for id_, reply in replies.items():
            if reply[0] != b"lease":
                self._given_up.note_end(askers[id_])
        return replies

    def _left_behind(self, reply: Sequence[bytes]) -> str:
        """The asker of a lease that this process has given up; empty if it is another's."""
        if reply[0] != b"held" or len(reply) < 3 or not self._given_up:
            return ""
        asker = reply[2].decode(errors="replace")
        return asker if self._given_up.is_left_behind(asker) else ""

    async def publish(
        self, kind: str, copies: Mapping[str, tuple[Lease, Copy]], tags: LateTags = None
    ) -> set[str]:
        """After a lost reply, the generation may show whether the copy was stored.

        If it does not, the id is `unsure`.
        """
        now = self._now()
        late = tags or {}
        steps = [
            scripts.PUBLISH.on(
                redis_key,
                now,
                padded(lease.token),
                copy_fields(copy),
                copy.value if isinstance(copy.value, bytes) else b"",
                copy.version,
                int(id_ in late),
                packed_tags(late.get(id_, ())),
                lease.epoch,
                IS_FIRST,
            )
            for redis_key, (id_, (lease, copy)) in zip(
                self._place.of(kind, list(copies)), copies.items(), strict=True
            )
        ]
        resend_as = [StampedCommand((*step[:-1], IS_RESENT)) for step in steps]
        replies = await self._opened().run(steps, resend_as=resend_as, lasting=True)
        self._note_ends(lease for lease, _ in copies.values())
        codes = {id_: reply[0] for id_, reply in zip(copies, replies, strict=True)}
        undone = [id_ for id_, code in codes.items() if code != scripts.DONE]
        return Superseded(undone, (id_ for id_ in undone if codes[id_] == scripts.UNSURE))

    def new_generation(self) -> str:
        """Draw a generation; its first eight characters are enough to know the copy by."""
        return token_urlsafe(24)

    async def put(self, kind: str, puts: Mapping[str, Put]) -> dict[str, PutResult]:
        """One attempt for each id: AGAIN if the entry has changed since this process heard of it.

        If the answer is lost, the store sends the same step again: it knows it by its generation.
        """
        now = time.time() if self._clock is None else self._clock()
        redis_keys = self._place.of(kind, list(puts))
        steps = [
            self._put_step(redis_key, put, now)
            for redis_key, put in zip(redis_keys, puts.values(), strict=True)
        ]
        was_sent_again = False

        def note_resend() -> None:
            nonlocal was_sent_again
            was_sent_again = True

        replies = await self._opened().run(
            steps, lasting=True, partly=True, before_resend=note_resend
        )
        results: dict[str, PutResult] = {}
        unsettled: list[str] = []
        for (id_, put), reply in zip(puts.items(), replies, strict=True):
            if isinstance(reply, StoreError):  # its node is unavailable
                continue
            if isinstance(reply, int):
                results[id_] = PutResult(PutOutcome.STORED, put.copy.version, reply)
                continue
            code, stamp = reply[:2]
            match OUTCOMES[code]:
                case PutOutcome.AGAIN:
                    results[id_] = PutResult(PutOutcome.AGAIN)
                    if was_sent_again and put.when in ACTS_ONCE:
                        unsettled.append(id_)
                case PutOutcome.STORED | PutOutcome.REPLACED as outcome:
                    results[id_] = PutResult(outcome, reply[2], stamp)
                case outcome:  # nothing was changed
                    if was_sent_again and not _is_certain(put, reply[3]):
                        raise StoreError(MAY_BE_STORED)
                    is_empty = outcome is PutOutcome.REFUSED and reply[4] == 1
                    results[id_] = PutResult(outcome, reply[2], is_empty=is_empty)
        if unsettled:
            await self._check_not_stored(kind, {id_: puts[id_] for id_ in unsettled})
        return results

    async def _check_not_stored(self, kind: str, puts: Mapping[str, Put]) -> None:
        """Raise StoreError if the first request of one of these puts may have been stored.

        Its answer was lost, and the answer to the second one was AGAIN: so from now on, neither of
        them is stored.
        """
        redis_keys = dict(zip(puts, self._place.of(kind, list(puts)), strict=True))
        texts = await self._texts(redis_keys, dict.fromkeys(puts, ""))
        drops_keys = self._opened().drops_keys
        for id_, put in puts.items():
            text = texts.get(id_)
            is_forgotten = text is None and (drops_keys or id_ not in texts)
            if is_forgotten or not _is_certain(put, replaced_by(text)):
                raise StoreError(MAY_BE_STORED)

    def _put_step(self, redis_key: RedisKey, put: Put, now: float) -> Command:
        copy = put.copy
        left = copy.fetched_at + copy.policy.lasts - now
        life = min(max(left, 0.0), LONGEST_LIFE) + KEPT_LONGER
        tags = packed_tags(put.tags or ())
        if put.late:
            tags += LATE_TAGS + packed_tags(put.late)
        how = HOW.pack(
            len(redis_key.base),
            put.when.value,
            copy.value is UNREAD,
            put.tags is None,
            put.late is None,
            len(copy.version),
            len(tags),
        )
        value = copy.value if isinstance(copy.value, bytes) else b""
        condition: tuple[object, ...] = ()
        if put.when is not When.ALWAYS:
            condition = (self._now(), padded(put.seen), int(put.seen_mark))
        return scripts.PUT.call(
            [redis_key.key],
            PutFence(how + b"%d" % ceil(life * 1000), acts_once=put.when in ACTS_ONCE),
            put_front(copy, len(tags)) + copy.version + tags + value,
            *condition,
        )

    def _note_ends(self, leases: Iterable[Lease]) -> None:
        for lease in leases:
            self._given_up.note_end(lease.token)

    async def renew(self, kind: str, leases: Sequence[Lease], lease_for: float) -> set[str]:
        now = self._now()
        lasts = repr(float(lease_for))
        arguments = {lease.id: (now, padded(lease.token), lasts) for lease in leases}
        replies = await self._each(scripts.RENEW, kind, arguments, lasting=False)
        return {id_ for id_, is_renewed in replies.items() if not is_renewed}

    async def release(self, kind: str, leases: Sequence[Lease], failures: Failures = None) -> None:
        now = self._now()
        failures = failures or {}
        arguments = {
            lease.id: (now, padded(lease.token), *failure_fields(failures.get(lease.id)))
            for lease in leases
        }
        await self._each(scripts.RELEASE, kind, arguments, lasting=False)
        self._note_ends(leases)

    async def invalidate(self, kind: str, ids: Sequence[str], *, soft: bool = False) -> None:
        """One script voids the lease and marks the copy; a hard mark stays hard."""
        mark = int(Mark.SOFT if soft else Mark.HARD)
        await self._until_done(scripts.INVALIDATE, kind, ids, mark)

    async def delete(self, kind: str, ids: Sequence[str]) -> None:
        """It leaves an empty entry for a minute: a put that is late must not create one."""
        await self._until_done(scripts.DELETE, kind, ids)

    async def _until_done(
        self, script: lua.Script, kind: str, ids: Sequence[str], *arguments: object
    ) -> None:
        """Ask again for ids that have changed since this process heard of them."""
        left = list(ids)
        until = time.monotonic() + self._timeout
        while left:
            steps = dict.fromkeys(left, (Blank.AS_OF, *arguments))
            replies = await self._each(script, kind, steps, urgent=True)
            left = [id_ for id_, reply in replies.items() if reply[0] == AGAIN]
            if left and time.monotonic() > until:
                raise StoreError(KEEPS_CHANGING)

    async def invalidate_tag(self, tag: str, *, soft: bool = False) -> list[tuple[str, str]]:
        """Invalidate the tag in every bucket, in slices.

        Every id that was leased with the tag before is in the answer, except that after a lost
        reply ids that had nothing but a lease are voided and missing in it.

        Buckets are invalidated one after another. While that goes on, a value may be made of an
        entry whose bucket is still to come, and be stored in a bucket that is done. So if there was
        such an entry, all buckets are invalidated once more.
        """
        mark = int(Mark.SOFT if soft else Mark.HARD)
        reached = await self._invalidate_tag_once(tag, mark)
        if reached:
            reached |= await self._invalidate_tag_once(tag, mark)
        return list(reached)

    async def _invalidate_tag_once(self, tag: str, mark: int) -> dict[tuple[str, str], None]:
        """Invalidate the tag in one bucket after another; return what was reached."""
        link = self._opened()
        reached: dict[tuple[str, str], None] = {}
        walks = [(base, key, b"0") for base, key in self._place.tagged(tag)]
        waiting = list[tuple[bytes, bytes, bytes]]()
        until = time.monotonic() + self._timeout
        while walks:
            replies = await link.run(
                [
                    scripts.INVALIDATE_TAG.call([key], base, Blank.AS_OF, mark, at)
                    for base, key, at in walks
                ],
                urgent=True,
                lasting=True,
            )
            changed = list[tuple[bytes, bytes, bytes]]()
            for page, (_, _, next_at, members, later) in zip(walks, replies, strict=True):
                names = map(self._place.name, members)
                reached.update((name, None) for name in names if name is not None)
                if later:  # changed since this process heard of them: ask for the page again
                    changed.append(page)
                elif next_at != b"0":
                    waiting.append((page[0], page[1], next_at))
                await asyncio.sleep(0)
            if changed:
                if time.monotonic() > until:
                    raise StoreError(KEEPS_CHANGING)
                walks = changed
            else:
                until = time.monotonic() + self._timeout
                walks = waiting[: scripts.TAGS_AT_ONCE]
                waiting = waiting[scripts.TAGS_AT_ONCE :]
        return reached

    async def evict(self, before: float) -> int:
        """Drop ids if the store has a clock of its own; by the server's clock, the server does."""
        self._opened()
        if self._clock is None and before <= time.time():
            return 0
        return await evict(self._opened(), self._place, before)

    def walk(self, kind: str | None) -> AsyncIterator[list[StoredEntry]]:
        """All entries, in no order, in one walk: each page of `entries` would be another."""
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
        return Link(url, sentinels=sentinels, timeout=timeout, bases=bases, **options)
    if not nodes:
        return Link(url, timeout=timeout, bases=bases, has_threads=True, **options)

    def link(address: Address) -> Link:
        host, port = address
        node = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        parts = urlsplit(url)
        user, at, _ = parts.netloc.rpartition("@")
        node_url = urlunsplit(parts._replace(netloc=f"{user}{at}{node}"))
        return Link(node_url, node=node, timeout=timeout, bases=bases, **options)

    return Cluster(nodes, link, timeout, bases)


def _record_in_thread(link: Link, key: bytes, known: str | None) -> Record | None:
    """The record of one key; of a copy that the caller knows, the first bytes are read."""
    if known is not None:
        text = link.glance_in_thread(key)
        if is_enough(text, known):
            return record_of(text, known)
    (text,) = link.texts_in_thread([key])
    return record_of(text, known)


def _cut(ids: list[str], size: int) -> list[list[str]]:
    return [ids[first : first + size] for first in range(0, len(ids), size)]


def _is_certain(put: Put, replaced: bytes) -> bool:
    """True if a put that is sent again and refused was not stored by the first request.

    The server remembers the last four copies that were replaced. If the copy that the put would
    have replaced is among them, or there were fewer than four, then the put itself would be, too.
    """
    if put.when not in ACTS_ONCE:
        return True
    if replaced.endswith(bytes(SHORT_ID)):
        return True
    return put.seen is not None and padded(put.seen)[:SHORT_ID] in replaced


def _is_broken(reply: Sequence[bytes]) -> bool:
    """True for a newer copy or failure that another program has made unreadable."""
    return reply[0] == b"newer" and record_of(reply[1]) is None
