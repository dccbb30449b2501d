"""The shared store as one process sees it: over a network, or as a file.

A request is on its way, meets trouble, takes effect, and is answered or not. What the store does is
done by the real `MemoryStore`, in the name of nobody: a process that is killed or paused does not
take its requests back.

Over a network, puts, invalidations and deletions are fenced by stamps (`fence.py`). A `ServerLife`
is a connection: it knows the highest stamps that it has heard, and each message takes them along. A
file needs no fence: a step that waits for its turn is dropped when its caller gives up.

The way of a request, in the order in which it is called:

1. A method of the store (`acquire`, `publish`, `put`, …) makes a `StoreRequest`. Its `effect` is a
   function of ids, because a request may arrive for half of its ids, or twice.
2. `_exchange` sends it, and once more if its answer was lost and real clients would do so. In the
   end it notes in the ledger what the process does not know.
3. `_attempt` asks the weather for this request's trouble, and waits for an answer. A fenced request
   first gets a connection (`_address`), whose stamps say what the sender had heard when it sent.
4. `_send` schedules the arrival, in the name of the world, and the sender's giving up, in the name
   of the process. From here on nothing stops the message.
5. `_take_effect` runs when it arrives. `_do` refuses it if the server is away, full or another one
   by now, and otherwise runs the effect and tells the ledger in the same callback. So the ledger
   knows the order of the store's steps.
6. `_settle` schedules the answer, in the name of the process: a paused one gets it later, a killed
   one never. The stamps are heard when the answer arrives, not when the step is done.

`ClusterWire` (`nodes.py`) overrides steps 2, 3 and 5, because there a request has parts.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Generic, TypeAlias, TypeVar, cast
from weakref import WeakSet

from msgspec import MsgspecError, msgpack, structs

from stillfresh.errors import StoreError
from stillfresh.stores import A_TAG, Capabilities, Channel, Tell, WrappedStore
from stillfresh.stores.contract import (
    ACTS_ONCE,
    UNREAD,
    Ask,
    Copy,
    Failure,
    Generations,
    Grant,
    Held,
    LateTags,
    Lease,
    Put,
    PutOutcome,
    PutResult,
    Record,
    Superseded,
)
from stillfresh.testing.simulator import fence
from stillfresh.testing.simulator.changes import CALL, ChangeCall
from stillfresh.testing.simulator.channel import listening
from stillfresh.testing.simulator.faults import Blow, Trouble
from stillfresh.testing.simulator.fence import Sent
from stillfresh.testing.simulator.ledger import Version
from stillfresh.testing.simulator.record import STORE
from stillfresh.testing.simulator.server import finished
from stillfresh.virtual_loop import WORLD

if TYPE_CHECKING:
    from stillfresh.testing.simulator.process import Process

T = TypeVar("T")

READS: Final = frozenset({"read", "stats", "entries"})
LATENCY: Final = (0.0005, 0.02)
SLOW: Final = (1.0, 8.0)
VERY_LATE: Final = 100.0
"""Seconds: one late message in five may be later than any trace of a deletion lasts."""
PATIENCE: Final = (0.05, 2.0)
"""Seconds until a sender without an answer gives up."""
MOST_ATTEMPTS: Final = 1_000
"""How often an invalidation is sent again because the entry has changed."""
ON_A_FILE: Final = {
    Trouble.UNANSWERED: Trouble.SLOW,
    Trouble.LATE: Trouble.SLOW,
    Trouble.TWICE: Trouble.SLOW,
    Trouble.HALF: Trouble.LOST,
}
"""A change of a file is done once or not at all, and never after its caller has left."""
MARKS: Final = {Trouble.LATE: "late", Trouble.LOST: "lost"}


def _nothing(ids: Sequence[str]) -> Any:  # noqa: ANN401 (of any step)
    """The effect of a fenced step is known when it is sent."""
    raise AssertionError(ids)


class NoAnswer(StoreError):
    """No answer: it is not known whether the store did the step."""


@dataclass(slots=True)
class StoreRequest(Generic[T]):
    """A request on its way: its step, its ids, and its effect."""

    step: str
    kind: str
    ids: Sequence[str]
    effect: Callable[[Sequence[str]], T]
    leases: Sequence[Lease] = ()
    node: int | None = None
    """The node that it goes to, in a cluster."""
    fenced: "Callable[[Sent | None, Sequence[str]], T] | None" = None
    """Its effect, if that depends on what the message says about its time."""
    link: "ServerLife | None" = None
    """The connection on which it was sent."""
    is_given_up: bool = False
    puts: Mapping[str, Put] = field(default_factory=dict)
    first_as_of: dict[str, int] = field(default_factory=dict)
    """Of a put: by bucket, the stamp that was heard when it was first sent."""
    call: ChangeCall | None = None

    def __str__(self) -> str:
        return f"{self.step} {self.kind} {','.join(self.ids)}".rstrip()


def _result_text(result: object) -> str:
    """The result of a step, as the trace shows it."""
    if isinstance(result, dict):
        return " → " + ", ".join(f"{id_} {_grant_text(grant)}" for id_, grant in result.items())
    if isinstance(result, set) and result:
        return f" → not {','.join(sorted(result))}"
    return ""


def _grant_text(grant: Grant | PutResult) -> str:
    if isinstance(grant, PutResult):
        return f"{grant.outcome.value}"
    if isinstance(grant, Lease):
        return f"granted ({grant.token})"
    if isinstance(grant, Held):
        return "is held"
    return "has a newer copy"


Server: TypeAlias = tuple[int | None, int]
"""A node, and how often another server has taken its place."""


@dataclass(slots=True, eq=False)
class ServerLife:
    """A connection to one server, and what was heard on it: stamps, and the server's time."""

    server: Server
    as_of: dict[str, int]
    """By bucket, the highest stamp."""
    server_time: float
    heard_at: float

    def hear(self, stamps: Mapping[str, int], server_time: float, now: float) -> None:
        """An answer has arrived."""
        for bucket, stamp in stamps.items():
            self.as_of[bucket] = max(stamp, self.as_of.get(bucket, 0))
        self.server_time = server_time
        self.heard_at = now

    def sent(self, now: float) -> Sent:
        """Return what a message says that is sent now."""
        server_now = self.server_time + now - self.heard_at
        return Sent(dict(self.as_of), server_now + fence.GOOD_FOR)


@dataclass(slots=True)
class LeaseRequest:
    """A request for leases, which may arrive more than once: it knows its granted leases."""

    process: "Process"
    kind: str
    asks: dict[str, Ask]
    lease_for: float
    leases: dict[str, Lease] = field(default_factory=dict)

    def take_effect(self, ids: Sequence[str]) -> dict[str, Grant]:
        """A lease that it holds is its own; any other is a new one, with a new token."""
        ledger = self.process.world.ledger
        now = self.process.world.store_now()
        own: dict[str, Grant] = {}
        for id_ in ids:
            lease = self.leases.get(id_)
            if lease is not None and ledger.holds(self.kind, lease, now):
                own[id_] = lease
        others = [id_ for id_ in ids if id_ not in own]
        grants = self._acquire(others)
        leases = {id_: grant for id_, grant in grants.items() if isinstance(grant, Lease)}
        # A lease that is taken over ends first: two holders at once would break a promise.
        ledger.voided(self.kind, [id_ for id_ in leases if self.asks[id_].take_over])
        ledger.acquired(self.process.number, self.kind, grants, now)
        self.leases.update(leases)
        return {id_: own.get(id_) or grants[id_] for id_ in ids}

    def _acquire(self, ids: Sequence[str]) -> dict[str, Grant]:
        asks = [self.asks[id_] for id_ in ids]
        return finished(self.process.world.store.acquire(self.kind, asks, self.lease_for))


class StoreWire(WrappedStore):
    """A store as one process sees it: over a network, or as a file, which is read inline."""

    def __init__(self, process: "Process", *, inline: bool = False, pushes: bool = False) -> None:
        super().__init__(process.world.store)
        self._is_file = inline
        self._pushes = pushes
        self._process = process
        self._world = process.world
        self._store = process.world.store
        self._ledger = process.world.ledger
        self._server = process.world.server
        self._links: dict[int | None, ServerLife] = {}
        """The open connections, by node."""
        self._unsent: WeakSet[asyncio.Future[Any]] = WeakSet()
        """Answers that a node no longer gives: it failed before its replica had the step."""

    def capabilities(self) -> Capabilities:
        """It is in no process, whatever the store inside says."""
        can = super().capabilities()
        inline = self if self._is_file else None
        push = self if self._pushes else None
        return structs.replace(can, inline=inline, push=push, process=None)

    async def open(self) -> None:
        """Do nothing."""

    async def close(self) -> None:
        """Do nothing: the store is shared."""

    async def step(self, name: str, work: Callable[[], Awaitable[T]]) -> T:
        """A step without ids."""
        return await self._ask(name, "", (), lambda _: finished(work()))

    async def _ask(
        self, step: str, kind: str, ids: Iterable[str], effect: Callable[[Sequence[str]], T]
    ) -> T:
        return await self._exchange(StoreRequest(step, kind, list(ids), effect))

    def read_now(
        self, kind: str, ids: Sequence[str], known: Generations = None
    ) -> dict[str, Record]:
        is_away = self._world.is_over or self._world.weather.is_now(Blow.AWAY)
        if is_away or self._process.is_cut_off:
            self._note_no_answer(StoreRequest("read", kind, ids, len))
            raise StoreError("the store does not answer")
        return self._store.read_now(kind, ids, known)

    async def read(
        self, kind: str, ids: Sequence[str], known: Generations = None, lag: float = 0.0
    ) -> dict[str, Record]:
        del lag
        return await self._ask(
            "read", kind, ids, lambda part: self._store.read_now(kind, part, known)
        )

    async def acquire(self, kind: str, asks: Sequence[Ask], lease_for: float) -> dict[str, Grant]:
        request = LeaseRequest(self._process, kind, {ask.id: ask for ask in asks}, lease_for)
        step = "take over" if any(ask.take_over for ask in asks) else "acquire"
        grants = await self._ask(step, kind, request.asks, request.take_effect)
        if step == "acquire":
            self._ledger.granted(self._process.number, kind, grants)
        return grants

    async def publish(
        self, kind: str, copies: Mapping[str, tuple[Lease, Copy]], tags: LateTags = None
    ) -> set[str]:
        def effect(ids: Sequence[str]) -> set[str]:
            now = self._world.store_now()
            part = {id_: copies[id_] for id_ in ids}
            before = {id_: self._server.copy((kind, id_)) for id_ in ids}
            late = {id_: tags[id_] for id_ in ids if id_ in tags} if tags else None
            superseded = finished(self._store.publish(kind, part, late))
            self._ledger.published(kind, part, superseded, now)
            if late:  # a tag that was invalidated since the grant has ended the lease
                refused = [part[id_][0] for id_ in sorted(superseded & late.keys())]
                ended = [lease for lease in refused if not self._has_token(kind, lease)]
                self._ledger.released(kind, ended)
            for id_ in sorted(part.keys() - superseded):
                _, copy = part[id_]
                self._world.tell(kind, id_, copy.generation)
                self._note_value((kind, id_), copy)
                self._note_publication((kind, id_), before[id_], copy)
            # A publication that is sent twice is superseded by itself: it counts as stored if
            # the store has its copy.
            records = self._store.read_now(kind, list(part))
            stored: set[str] = set()
            for id_, record in records.items():
                _, copy = part[id_]
                if record.copy is not None and record.copy.generation == copy.generation:
                    stored.add(id_)
            return superseded - stored

        leases = [lease for lease, _ in copies.values()]
        return await self._exchange(StoreRequest("publish", kind, list(copies), effect, leases))

    def _has_token(self, kind: str, lease: Lease) -> bool:
        """True if the store still has this lease, which may be over for now."""
        rows = self._store._rows  # noqa: SLF001 (all of it)
        return rows.has_lease((kind, lease.id), lease)

    async def renew(self, kind: str, leases: Sequence[Lease], lease_for: float) -> set[str]:
        def effect(ids: Sequence[str]) -> set[str]:
            now = self._world.store_now()
            part = [lease for lease in leases if lease.id in ids]
            lost = finished(self._store.renew(kind, part, lease_for))
            self._ledger.renewed(kind, part, lost, now + lease_for)
            return lost

        return await self._ask("renew", kind, (lease.id for lease in leases), effect)

    async def release(
        self, kind: str, leases: Sequence[Lease], failures: Mapping[str, Failure] | None = None
    ) -> None:
        def effect(ids: Sequence[str]) -> None:
            part = [lease for lease in leases if lease.id in ids]
            finished(self._store.release(kind, part, failures))
            self._ledger.released(kind, part)

        await self._ask("release", kind, (lease.id for lease in leases), effect)

    def bucket_of(self, id_: str) -> str:
        """The counter of an id: one for the whole server, as on PostgreSQL."""
        del id_
        return ""

    async def put(self, kind: str, puts: Mapping[str, Put]) -> dict[str, PutResult]:
        """One attempt, as Redis and PostgreSQL make it; a lost answer is settled in it."""
        is_own_call = CALL.get() is None
        changes = self._ledger.changes
        with self._calling("put") as call:
            # A copy of `puts`: a message on its way does not change with its sender's next steps.
            results = await self._exchange(self._put_request(call, kind, dict(puts)))
            if is_own_call:
                for id_, result in results.items():
                    changes.settled(call, (kind, id_), puts[id_].copy.version, result)
                if len(results) < len(puts):
                    changes.end(call, acknowledged=False)
            return results

    def _put_request(
        self, call: ChangeCall, kind: str, puts: Mapping[str, Put]
    ) -> StoreRequest[dict[str, PutResult]]:
        def effect(sent: Sent | None, ids: Sequence[str]) -> dict[str, PutResult]:
            return {id_: self._put_entry(call, (kind, id_), puts[id_], sent) for id_ in ids}

        return StoreRequest("put", kind, list(puts), _nothing, fenced=effect, puts=puts, call=call)

    def _put_entry(
        self, call: ChangeCall, key: tuple[str, str], put: Put, sent: Sent | None
    ) -> PutResult:
        kind, id_ = key
        now = self._world.store_now()
        before = self._server.copy(key)
        result = self._server.put(self.bucket_of(id_), key, put, sent)
        after = self._server.copy(key)
        is_new = after is not None and (before is None or before.generation != after.generation)
        if after is not None and is_new:
            self._ledger.voided(kind, [id_])
            self._world.tell(kind, id_, after.generation)
            changes = self._ledger.changes
            changes.put(call, key, put, before=before, after=after, now=now)
            if put.copy.value is not UNREAD:
                self._note_value(key, after)
        return result

    async def invalidate(self, kind: str, ids: Sequence[str], *, soft: bool = False) -> None:
        with self._calling("invalidation") as call:
            await self._invalidate_ids(call, kind, ids, soft=soft)

    async def _invalidate_ids(
        self, call: ChangeCall, kind: str, ids: Sequence[str], *, soft: bool
    ) -> None:
        def effect(sent: Sent | None, part: Sequence[str]) -> set[str]:
            return {id_ for id_ in part if not self._void_entry(call, (kind, id_), sent, soft=soft)}

        request = StoreRequest("invalidate", kind, list(ids), _nothing, fenced=effect)
        await self._repeat_until_done(request)

    def _void_entry(
        self, call: ChangeCall, key: tuple[str, str], sent: Sent | None, *, soft: bool
    ) -> bool:
        _, id_ = key
        before = self._server.copy(key)
        is_done = self._server.invalidate(self.bucket_of(id_), key, sent, soft=soft)
        if is_done:
            self._note_voided(key)
            self._ledger.changes.voided(call, "invalidation", key, before, self._server.copy(key))
        return is_done

    async def invalidate_tag(self, tag: str, *, soft: bool = False) -> list[tuple[str, str]]:
        """Go round twice, as `RedisStore` does, whose entries are not reached at once."""
        with self._calling("invalidation by tag") as call:
            reached = await self._invalidate_tag_once(call, tag, soft=soft)
            if reached:
                reached |= await self._invalidate_tag_once(call, tag, soft=soft)
            return list(reached)

    async def _invalidate_tag_once(
        self, call: ChangeCall, tag: str, *, soft: bool
    ) -> dict[tuple[str, str], bool]:
        def effect(sent: Sent | None, buckets: Sequence[str]) -> dict[tuple[str, str], bool]:
            return self._void_tag(call, tag, sent, buckets, soft=soft)

        all_buckets = self._all_buckets()
        request = StoreRequest("invalidate_tag", tag, all_buckets, _nothing, fenced=effect)
        done: dict[tuple[str, str], bool] = await self._exchange(request)
        changed: dict[str, list[str]] = {}
        for (kind, id_), is_done in done.items():
            if not is_done:
                changed.setdefault(kind, []).append(id_)
        for kind, ids in changed.items():
            await self._invalidate_ids(call, kind, ids, soft=soft)
        return done

    def _all_buckets(self) -> list[str]:
        return [""]

    def _void_tag(
        self, call: ChangeCall, tag: str, sent: Sent | None, buckets: Sequence[str], *, soft: bool
    ) -> dict[tuple[str, str], bool]:
        changes = self._ledger.changes
        rows = self._store._rows  # noqa: SLF001 (all of it)
        keys = rows.tagged.keys(tag) + rows.late.keys(tag)
        before = {key: self._server.copy(key) for key in keys}
        done = self._server.invalidate_tag(buckets, self.bucket_of, tag, sent, soft=soft)
        self._world.tell(A_TAG, tag, None)
        for bucket in buckets:
            changes.tag_invalidated(call, tag, bucket)
        for key in [key for key, is_done in done.items() if is_done]:
            self._note_voided(key)
            after = self._server.copy(key)
            changes.voided(call, "invalidation by tag", key, before[key], after)
        return done

    async def delete(self, kind: str, ids: Sequence[str]) -> None:
        with self._calling("deletion") as call:

            def effect(sent: Sent | None, part: Sequence[str]) -> set[str]:
                return {id_ for id_ in part if not self._delete_entry(call, (kind, id_), sent)}

            request = StoreRequest("delete", kind, list(ids), _nothing, fenced=effect)
            await self._repeat_until_done(request)

    def _delete_entry(self, call: ChangeCall, key: tuple[str, str], sent: Sent | None) -> bool:
        _, id_ = key
        before = self._server.copy(key)
        is_done = self._server.delete(self.bucket_of(id_), key, sent)
        if is_done:
            self._note_voided(key)
            self._ledger.changes.voided(call, "deletion", key, before, None)
        return is_done

    @contextmanager
    def _calling(self, what: str) -> Iterator[ChangeCall]:
        """The call of the caller, if it is known; otherwise this step is a call of its own."""
        known = CALL.get()
        if known is not None:
            yield known
            return
        with self._process.calling(what) as call:
            yield call

    async def _repeat_until_done(self, request: StoreRequest[set[str]]) -> None:
        """Ask again for the ids that have changed since the message was sent."""
        left: Sequence[str] = request.ids
        for _ in range(MOST_ATTEMPTS):
            changed = await self._exchange(replace(request, ids=left))
            left = [id_ for id_ in left if id_ in changed]
            if not left:
                return
        raise StoreError(f"other processes keep changing {','.join(left)}")

    def _note_value(self, key: tuple[str, str], copy: Copy) -> None:
        with suppress(MsgspecError):  # an absence, or not a value of `process.load`
            value = msgpack.decode(cast("bytes", copy.value or b""), type=Version)
            self._ledger.stored(key, value, self._world.time())

    def _note_publication(self, key: tuple[str, str], before: Copy | None, copy: Copy) -> None:
        """A publication takes a stamp, too."""
        old = None if before is None else before.generation
        self._server.published(self.bucket_of(key[1]), key, old)
        after = self._server.copy(key)
        if after is not None:
            self._ledger.changes.published(key, before, after, copy.version)

    def listen(self, tell: Tell) -> AbstractAsyncContextManager[Channel]:
        return listening(self._process, tell)

    def _note_voided(self, key: tuple[str, str]) -> None:
        """An entry's lease has ended, and its copy has changed: tell ledger and listeners."""
        kind, id_ = key
        self._ledger.voided(kind, [id_])
        self._world.tell(kind, id_, None)

    async def _exchange(self, request: StoreRequest[T]) -> T:
        """Send it and wait; StoreError if there is no answer."""
        try:
            try:
                return await self._attempt(request)
            except NoAnswer:
                if not self._sends_again(request):
                    raise
            result = await self._attempt(self._repetition_of(request))
            return self._settle_repetition(request, result)
        except (StoreError, asyncio.CancelledError):
            self._note_no_answer(request)
            raise

    def _repetition_of(self, request: StoreRequest[T]) -> StoreRequest[T]:
        """The request as it is sent again: a put is the same step with the same generation."""
        return request

    def _settle_repetition(self, request: StoreRequest[T], result: Any) -> T:  # noqa: ANN401
        """The answer to a request that was sent twice, because the first answer was lost."""
        if request.step == "publish":
            # As Redis and PostgreSQL, which cannot tell whether the first one was stored.
            return Superseded(result, result)  # type: ignore[return-value]
        if request.step == "put":
            for id_, answer in result.items():
                is_sure = answer.outcome in {PutOutcome.STORED, PutOutcome.REPLACED}
                if not is_sure and request.puts[id_].when in ACTS_ONCE:
                    raise StoreError(f"it is not known whether {id_} was stored")
        return result  # type: ignore[no-any-return]

    def _note_no_answer(self, request: StoreRequest[Any]) -> None:
        """Note what the process may do now, because it does not know what the store did."""
        ledger = self._ledger
        number = self._process.number
        match request.step:
            case "acquire":
                ledger.unleased(number, request.kind, request.ids)
            case "read":
                ledger.unread(number, request.kind, request.ids, self._world.time())
            case "publish":
                ledger.unstored(request.kind, request.leases)

    def _sends_again(self, request: StoreRequest[Any]) -> bool:
        """A put without an answer is always settled; a file always answers."""
        if self._is_file and request.fenced is not None:
            return False
        return request.step == "put" or self._world.plan.resends

    async def _attempt(self, request: StoreRequest[T]) -> T:
        """Send it once, with the trouble that it meets, and wait for its answer."""
        world = self._world
        if world.is_over:
            raise StoreError("the simulation is over")
        if self._process.is_cut_off:
            await asyncio.sleep(world.weather.dice.uniform(*LATENCY))
            raise StoreError("this process cannot reach the store")
        request = await self._address(request)
        answer: asyncio.Future[T] = world.loop.create_future()
        number, trouble = world.weather.next_request()
        if self._is_file and request.fenced is not None and trouble is not None:
            trouble = ON_A_FILE.get(trouble, trouble)
        if trouble is not None:
            world.note(self._process, f"request {number} ({request}) {trouble}")
        self._send(request, trouble, answer)
        try:
            return await answer
        except NoAnswer:
            self._disconnect(request)
            raise
        except asyncio.CancelledError:
            request.is_given_up = True
            self._disconnect(request)
            raise

    async def _address(self, request: StoreRequest[T]) -> StoreRequest[T]:
        """The request as it is sent now: on a connection, with what was heard on it."""
        fenced = request.fenced
        if fenced is None:
            return replace(request, link=self._links.get(request.node))
        if self._is_file:
            return replace(request, effect=partial(fenced, None))
        link = await self._connect(request.node)
        sent = link.sent(self._world.time())
        if request.puts:
            for bucket in map(self.bucket_of, request.ids):
                request.first_as_of.setdefault(bucket, sent.as_of.get(bucket, 0))
            sent = structs.replace(sent, first_as_of=request.first_as_of)
        return replace(request, link=link, effect=partial(fenced, sent))

    async def _connect(self, node: int | None) -> ServerLife:
        """The open connection to a server, or a new one, which asks for the present stamps."""
        link = self._links.get(node)
        if link is not None:
            return link
        world = self._world
        await asyncio.sleep(world.weather.dice.uniform(*LATENCY))
        if world.weather.is_now(Blow.AWAY, node):
            raise StoreError("the store does not answer")
        server = node, world.incarnation(node)
        link = ServerLife(server, self._present_stamps(node), world.server_now(), world.time())
        self._links[node] = link
        return link

    def _present_stamps(self, node: int | None) -> dict[str, int]:
        del node
        return {"": self._server.counter("")}

    def _disconnect(self, request: StoreRequest[Any]) -> None:
        """Without an answer a connection is not used again: what comes on it is another's."""
        if request.link is not None and self._links.get(request.node) is request.link:
            del self._links[request.node]

    def _send(
        self, request: StoreRequest[Any], trouble: Trouble | None, answer: "asyncio.Future[Any]"
    ) -> None:
        weather = self._world.weather
        dice = weather.dice
        arrives_after = dice.uniform(*(self._world.latency or LATENCY)) + weather.slowness()
        gives_up_after = dice.uniform(*PATIENCE)
        answer_delay = 0.0
        ids = request.ids
        match trouble:
            case Trouble.SLOW:
                answer_delay = dice.choice((0.0, dice.uniform(*SLOW)))
                if not answer_delay:  # then the request is slow, and not its answer
                    arrives_after += dice.uniform(*SLOW)
            case Trouble.TWICE:
                second = arrives_after + self._lateness()
                self._record(request, second, "twice")
                self._arrive(second, request, ids, None)
            case Trouble.LATE:
                arrives_after = gives_up_after + self._lateness()
            case Trouble.HALF:
                ids = ids[: len(ids) // 2]
        is_answered = trouble in {None, Trouble.SLOW, Trouble.TWICE}
        if not is_answered:
            if trouble not in {Trouble.LOST, Trouble.LATE}:
                # It takes effect before its sender gives up.
                gives_up_after = max(gives_up_after, arrives_after)
            self._settle(gives_up_after, answer, NoAnswer("no answer from the store"))
        mark = "" if trouble is None else MARKS.get(trouble, "")
        self._record(request, None if trouble is Trouble.LOST else arrives_after, mark)
        if trouble is not Trouble.LOST:
            self._arrive(arrives_after, request, ids, answer if is_answered else None, answer_delay)

    def _record(self, request: StoreRequest[Any], takes: float | None, mark: str) -> None:
        recorder = self._world.recorder
        if recorder is not None:
            recorder.sent(self._process.number, STORE, str(request), takes, mark)

    def _lateness(self) -> float:
        dice = self._world.weather.dice
        shortest, longest = SLOW
        if dice.random() < 0.2:
            longest = self._world.longest_delay
        return dice.uniform(shortest, longest)

    def _arrive(self, after: float, *arrived: Any) -> None:  # noqa: ANN401 (for _take_effect)
        with self._world.loop.acting(WORLD):
            self._world.loop.call_later(after, self._take_effect, *arrived)

    def _take_effect(
        self,
        request: StoreRequest[Any],
        ids: Sequence[str],
        answer: "asyncio.Future[Any] | None",
        answer_delay: float = 0.0,
    ) -> None:
        """The message has arrived: do the step, and send the answer if there is to be one."""
        weather = self._world.weather
        undo = self._undo_of(request, ids, answer)
        try:
            result = self._do(request, ids)
        except StoreError as exc:
            result = exc
        answer_delay += self._confirmation_delay(request, result, undo)
        if answer is not None:
            answer_delay += weather.dice.uniform(*(self._world.latency or LATENCY))
            if not isinstance(result, StoreError):
                answer_delay += weather.slowness()
            recorder = self._world.recorder
            if recorder is not None:
                text = f"answer to {request}{_result_text(result)}"
                recorder.sent(STORE, self._process.number, text, answer_delay)
            self._settle(answer_delay, answer, result, self._on_answer(request, ids))

    def _undo_of(
        self,
        request: StoreRequest[Any],
        ids: Sequence[str],
        answer: "asyncio.Future[Any] | None",
    ) -> Callable[[], None] | None:
        """In a cluster: what undoes the step if the node fails before its replica has it."""
        del request, ids, answer
        return None

    def _confirmation_delay(
        self, request: StoreRequest[Any], result: object, undo: Callable[[], None] | None
    ) -> float:
        """In a cluster: seconds until a replica has the step."""
        del request, result, undo
        return 0.0

    def _on_answer(self, request: StoreRequest[Any], ids: Sequence[str]) -> Callable[[], None]:
        """The function that notes the answer's stamps when it arrives."""
        link = request.link
        world = self._world
        if link is None:
            return lambda: None
        server_time = world.server_now()
        stamps: dict[str, int] = {}
        for id_ in self._ids_of_node(request, ids):
            bucket = self.bucket_of(id_)
            if request.step == "read":
                stamp = self._server.changed((request.kind, id_))
            elif request.fenced is not None or request.step == "publish":
                stamp = self._server.counter(bucket)
            else:
                continue
            stamps[bucket] = max(stamp, stamps.get(bucket, 0))

        def hear() -> None:
            if stamps:
                link.hear(stamps, server_time, world.time())

        return hear

    def _ids_of_node(self, request: StoreRequest[Any], ids: Sequence[str]) -> Sequence[str]:
        """The ids that the server of a request has."""
        del request
        return ids

    def _do(self, request: StoreRequest[T], ids: Sequence[str]) -> T:
        """Do the step in the store. Raises StoreError if the server does not do it."""
        world = self._world
        server = request.node, world.incarnation(request.node)
        link = request.link if request.fenced is not None else None
        if link is not None and link.server != server:
            raise NoAnswer("the connection is broken")
        is_left = request.is_given_up or not self._process.is_alive
        if is_left and request.fenced is not None and self._is_file:
            raise StoreError("its caller has left")
        if world.weather.is_now(Blow.AWAY, request.node):
            raise StoreError("the store does not answer")
        if world.weather.is_now(Blow.FULL, request.node) and request.step not in READS:
            raise StoreError("the store is full")
        world.asked_by = self._process
        try:
            result = request.effect(ids)
        finally:
            world.asked_by = None
        if request.step != "read":
            world.note(self._process, f"{request}{_result_text(result)}")
        return result

    def _settle(
        self,
        after: float,
        answer: "asyncio.Future[T]",
        result: T | StoreError,
        on_answer: Callable[[], None] = lambda: None,
    ) -> None:
        """Schedule the answer, in the name of the process that waits for it."""

        def settle() -> None:
            is_unsent = answer in self._unsent and not isinstance(result, NoAnswer)
            if answer.done() or is_unsent:
                return
            on_answer()
            if isinstance(result, StoreError):
                answer.set_exception(result)
            else:
                answer.set_result(result)

        with self._world.loop.acting(self._process.number):
            self._world.loop.call_later(after, settle)
