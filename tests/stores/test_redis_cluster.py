"""S9: a real Valkey cluster and a real Sentinel set: keys that move, primaries that die."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager
from typing import Any, TypeVar
from uuid import uuid4

import pytest
from redis.crc import key_slot
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import RedisError

from stillfresh import Answer, Cache, ConfigError, Policy, StoreError
from stillfresh.clock import Clock
from stillfresh.stores import A_TAG
from stillfresh.stores.contract import (
    Ask,
    Copy,
    Failure,
    Held,
    Lease,
    Mark,
    Put,
    PutOutcome,
    Record,
    Store,
    When,
)
from stillfresh.stores.redis import RedisStore, scripts
from stillfresh.stores.redis.cluster import Cluster
from stillfresh.stores.redis.heard import AGAIN, Blank
from stillfresh.stores.redis.layout import Command, Keyspace
from stillfresh.stores.redis.link import Link
from stillfresh.stores.redis.lua import Script
from stillfresh.stores.urls import store_for
from stillfresh.stores.versions import packed_version
from stillfresh.testing import StoreConformance
from stillfresh.testing.conformance_kit import Deliver
from tests.kit.engine import until
from tests.kit.servers.cluster import ClusterServers, Move, SentinelServers, clustered, watched_over
from tests.kit.servers.valkey import HOST, Server, binary_of, free_port, serving

T = TypeVar("T")

KIND = "price"
DEADLINE = 30.0


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ClusterServers]:
    with clustered(tmp_path_factory.mktemp("cluster")) as cluster:
        yield cluster


@pytest.fixture
def prefix() -> str:
    return f"test-{uuid4().hex}"


@asynccontextmanager
async def opened(url: str, **options: str) -> AsyncIterator[RedisStore]:
    query = "&".join(f"{name}={value}" for name, value in options.items())
    store = store_for(f"{url}?{query}", time.time)
    assert isinstance(store, RedisStore)
    await store.open()
    try:
        yield store
    finally:
        await store.close()


@pytest.fixture
async def store(cluster: ClusterServers, prefix: str) -> AsyncIterator[RedisStore]:
    async with opened(cluster.url, prefix=prefix, timeout="5s") as store:
        yield store


class TestS9ClusterConformance(StoreConformance):
    """Every sentence of the contract, on a cluster of three primaries."""

    @pytest.fixture(autouse=True)
    def _on(self, cluster: ClusterServers) -> None:
        self.url = f"{cluster.url}?prefix=test-{uuid4().hex}&timeout=30s"

    async def new_store(self, clock: Clock) -> Store:
        return store_for(self.url, clock)

    async def unanswered(self, step: Awaitable[T], meanwhile: Deliver) -> T:
        """S2: the node publishes or puts, and the connection breaks."""
        with pytest.MonkeyPatch.context() as patch:
            lose_a_reply(patch, meanwhile, scripts.PUBLISH, scripts.PUT)
            return await step


async def lease_of(store: Store, id_: str, *tags: str, lasts: float = 30) -> Lease:
    record = (await store.read(KIND, [id_])).get(id_, Record())
    seen = record.copy.generation if record.copy is not None else None
    grant = (await store.acquire(KIND, [Ask(id_, seen, tags)], lasts))[id_]
    assert isinstance(grant, Lease), grant
    return grant


def copy_by(lease: Lease, value: bytes = b"value") -> Copy:
    return Copy(lease.token, time.time(), Policy(60), value)


def new_copy(store: Store, version: bytes = b"", value: bytes = b"put") -> Copy:
    generation = store.new_generation()
    return Copy(generation, time.time(), Policy(60), value, version=version)


async def stored(store: Store, put: Put, id_: str = "a") -> PutOutcome:
    """Put it until the store says something else than AGAIN."""
    while True:
        outcome = (await store.put(KIND, {id_: put}))[id_].outcome
        if outcome is not PutOutcome.AGAIN:
            return outcome


async def published(store: Store, id_: str, *tags: str) -> Copy:
    lease = await lease_of(store, id_, *tags)
    copy = copy_by(lease)
    assert await store.publish(KIND, {id_: (lease, copy)}) == set()
    return copy


async def copy_in(store: Store, id_: str) -> Copy | None:
    return (await store.read(KIND, [id_])).get(id_, Record()).copy


def move_of(cluster: ClusterServers, prefix: str, id_: str) -> Move:
    return Move(cluster, Keyspace(prefix).of(KIND, [id_])[0].key)


def tag_of(move: Move) -> bytes:
    return move.key[: move.key.index(b"}:") + 2] + b"#eu"


MOVED = {"nothing": (), "the key": ("key",), "the tag": ("tag",), "both": ("key", "tag")}


@pytest.fixture(params=MOVED)
async def move(
    request: pytest.FixtureRequest, cluster: ClusterServers, store: RedisStore, prefix: str
) -> AsyncIterator[Callable[[], Move]]:
    """Begins to move the slot of `a`: some of what it has is on the new node already."""
    begun: list[Move] = []

    def begin() -> Move:
        move = move_of(cluster, prefix, "a")
        begun.append(move)
        names = {"key": move.key, "tag": tag_of(move)}
        move.begin(*(names[it] for it in MOVED[request.param]))
        return move

    yield begin
    for it in begun:
        it.end()


async def while_it_moves(move: Move, step: asyncio.Task[object]) -> None:
    """The step may wait for the rest to move, and ends by itself then."""
    done, _ = await asyncio.wait([step], timeout=0.3)
    if not done:
        move.keys(move.key, tag_of(move))
        await asyncio.wait([step], timeout=0.3)
    if not step.done():
        await asyncio.to_thread(move.end)
    await step


class TestS9MovingSlots:
    """A slot moves key by key while it is used: whatever has moved, nothing is lost or revived."""

    async def test_a_read_finds_the_copy_where_it_is(
        self, store: RedisStore, move: Callable[[], Move]
    ) -> None:
        """ASK is followed, once, and the next read asks the old node again."""
        copy = await published(store, "a", "eu")
        move()
        assert await copy_in(store, "a") == copy
        assert await copy_in(store, "a") == copy

    async def test_a_load_is_leased_and_published(
        self, store: RedisStore, move: Callable[[], Move]
    ) -> None:
        """At once if the id and its tags are together, else when they are."""
        await published(store, "a", "eu")
        it = move()
        leasing = asyncio.create_task(lease_of(store, "a", "eu"))
        await while_it_moves(it, leasing)
        copy = copy_by(leasing.result(), b"new")
        publishing = asyncio.create_task(store.publish(KIND, {"a": (leasing.result(), copy)}))
        await while_it_moves(it, publishing)
        assert publishing.result() == set()
        assert await copy_in(store, "a") == copy
        assert await store.invalidate_tag("eu") == [(KIND, "a")]

    async def test_a_lease_of_before_is_renewed_and_released(
        self, store: RedisStore, move: Callable[[], Move]
    ) -> None:
        """Wherever it is by now."""
        await published(store, "a", "eu")
        lease = await lease_of(store, "a", "eu")
        it = move()
        await while_it_moves(it, asyncio.create_task(store.renew(KIND, [lease], 30)))
        failure = Failure(1, time.time() + 5, "TimeoutError")
        releasing = asyncio.create_task(store.release(KIND, [lease], {"a": failure}))
        await while_it_moves(it, releasing)
        record = (await store.read(KIND, ["a"]))["a"]
        assert record.failure == failure
        assert record.held_until is None

    async def test_an_invalidation_reaches_copy_and_lease(
        self, store: RedisStore, move: Callable[[], Move]
    ) -> None:
        """At once: it needs none of the tags."""
        await published(store, "a", "eu")
        lease = await lease_of(store, "a", "eu")
        it = move()
        await store.invalidate(KIND, ["a"])
        copy = await copy_in(store, "a")
        assert copy is not None
        assert copy.mark is Mark.HARD
        publishing = asyncio.create_task(store.publish(KIND, {"a": (lease, copy_by(lease))}))
        await while_it_moves(it, publishing)
        assert publishing.result() == {"a"}

    async def test_an_invalidation_by_tag_reaches_copy_and_lease(
        self, store: RedisStore, move: Callable[[], Move]
    ) -> None:
        """At once, also if the tag's set is on one node and the id on the other."""
        await published(store, "a", "eu")
        lease = await lease_of(store, "a", "eu")
        it = move()
        assert await store.invalidate_tag("eu") == [(KIND, "a")]
        copy = await copy_in(store, "a")
        assert copy is not None
        assert copy.mark is Mark.HARD
        publishing = asyncio.create_task(store.publish(KIND, {"a": (lease, copy_by(lease))}))
        await while_it_moves(it, publishing)
        assert publishing.result() == {"a"}
        it.end()
        assert await store.invalidate_tag("eu") == [(KIND, "a")]

    async def test_a_tag_reaches_entries_on_both_sides(
        self, store: RedisStore, move: Callable[[], Move]
    ) -> None:
        """Copies and leases, with listeners told, while `a` and its neighbours are on two nodes."""
        places = store._place.of(KIND, [f"n{number}" for number in range(400)])
        (first,) = store._place.of(KIND, ["a"])
        names = [it.member.decode().partition(":")[2] for it in places if it.base == first.base]
        some = ["a", *names[:5]]
        for id_ in some:
            await published(store, id_, "eu")
        leases = {id_: await lease_of(store, id_, "eu") for id_ in some}
        it = move()
        it.keys(*(place.key for place in store._place.of(KIND, names[:2])))
        told: set[tuple[str, str]] = set()
        async with store.listen(lambda kind, id_, _: told.add((kind, id_))) as channel:
            assert sorted(await store.invalidate_tag("eu")) == sorted((KIND, id_) for id_ in some)
            await channel.beat()
        assert told >= {(A_TAG, "eu"), *((KIND, id_) for id_ in some)}
        for id_ in some:
            copy = await copy_in(store, id_)
            assert copy is not None
            assert copy.mark is Mark.HARD
        await asyncio.to_thread(it.end)
        copies = {id_: (lease, copy_by(lease)) for id_, lease in leases.items()}
        assert await store.publish(KIND, copies) == set(some)

    async def test_a_tag_that_a_load_tells_is_not_missed(
        self, store: RedisStore, move: Callable[[], Move]
    ) -> None:
        """I26: it was invalidated meanwhile; else the copy is reached by it, or superseded."""
        await published(store, "a", "eu")
        lease = await lease_of(store, "a", "eu")
        it, tags = move(), {"a": ("late",)}
        assert await store.invalidate_tag("late") == []
        publishing = store.publish(KIND, {"a": (lease, copy_by(lease))}, tags)
        past = asyncio.create_task(publishing)
        await while_it_moves(it, past)
        assert past.result() == {"a"}
        leasing = asyncio.create_task(lease_of(store, "a", "eu"))
        await while_it_moves(it, leasing)
        lease = leasing.result()
        new = asyncio.create_task(store.publish(KIND, {"a": (lease, copy_by(lease))}, tags))
        await while_it_moves(it, new)
        it.end()
        reached = await store.invalidate_tag("late")
        assert reached == ([(KIND, "a")] if new.result() == set() else [])
        lease = await lease_of(store, "a", "eu")
        assert await store.publish(KIND, {"a": (lease, copy_by(lease))}, tags) == set()
        assert await store.invalidate_tag("late") == [(KIND, "a")]

    async def test_a_deletion_while_a_slot_moves_leaves_no_copy(
        self, store: RedisStore, move: Callable[[], Move]
    ) -> None:
        """Wherever it is."""
        await published(store, "a", "eu")
        move()
        await store.delete(KIND, ["a"])
        assert await store.read(KIND, ["a"]) == {}

    async def test_s13_a_put_is_stored(self, store: RedisStore, move: Callable[[], Move]) -> None:
        """As soon as the entry, its tags and the counter of its bucket are together."""
        await published(store, "a", "eu")
        it = move()
        put = Put(new_copy(store), ("eu",))
        await while_it_moves(it, asyncio.create_task(stored(store, put)))
        assert await copy_in(store, "a") == put.copy
        it.end()
        assert await store.invalidate_tag("eu") == [(KIND, "a")]
        assert await stored(store, Put(new_copy(store), ("eu",))) is PutOutcome.STORED

    async def test_s13_a_new_entry_is_put(
        self, store: RedisStore, cluster: ClusterServers, prefix: str
    ) -> None:
        """The counter has moved: the new node takes it, before the slot is its own."""
        await published(store, "a", "eu")
        (names,) = store._place.of(KIND, ["a"])
        others = [f"n{number}" for number in range(400)]
        places = zip(others, store._place.of(KIND, others), strict=True)
        beside = next(id_ for id_, place in places if place.base == names.base)
        it = move_of(cluster, prefix, "a")
        it.begin(names.base + b"+")
        try:
            put = Put(new_copy(store))
            assert await stored(store, put, beside) is PutOutcome.STORED
            assert await copy_in(store, beside) == put.copy
        finally:
            it.end()
        assert await copy_in(store, beside) == put.copy

    async def test_s13_an_invalidation_without_its_counter_stops_late_puts(
        self, store: RedisStore, move: Callable[[], Move], cluster: ClusterServers, prefix: str
    ) -> None:
        """It has no stamp: a put that was sent before it does nothing when it arrives."""
        await stored(store, Put(new_copy(store), ("eu",)))
        it = move()
        link = store._link
        assert isinstance(link, Cluster)
        for change in ("invalidate", "delete"):
            (place,) = store._place.of(KIND, ["a"])
            late = store._put_step(place, Put(new_copy(store)), time.time())
            heard = link._primary(key_slot(it.key))._life
            assert heard is not None
            filled = heard[1].filled(late, drops_keys=False)
            await getattr(store, change)(KIND, ["a"])
            it.end()
            _, sha, keys, *arguments = filled
            node = cluster.client(it.new)
            node.script_load(scripts.PUT.text)  # it may be new to this node
            code, stamp = node.evalsha(sha, keys, *arguments)[:2]
            assert (code, stamp > 0) == (AGAIN, True)
            copy = await copy_in(store, "a")
            assert copy is None or copy.mark is Mark.HARD
            assert await stored(store, Put(new_copy(store), ("eu",))) is PutOutcome.STORED
            it = move_of(cluster, prefix, "a")
            it.begin()
        it.end()

    async def test_a_slot_that_has_moved_is_found(
        self, store: RedisStore, cluster: ClusterServers, prefix: str
    ) -> None:
        """MOVED is followed, by every kind of step, and remembered."""
        copy = await published(store, "a", "eu")
        for _ in range(2):
            move = move_of(cluster, prefix, "a")
            move.begin()
            move.end()
            assert await copy_in(store, "a") == copy
            refused = move.old.command("INFO errorstats")
            assert await copy_in(store, "a") == copy
            assert move.old.command("INFO errorstats") == refused
        await store.invalidate(KIND, ["a"])
        move = move_of(cluster, prefix, "a")
        move.begin()
        move.end()
        assert await store.invalidate_tag("eu") == [(KIND, "a")]
        assert (await store.stats()).copies == 1
        assert [entry.id for entry in await store.entries()] == ["a"]

    async def test_a_node_that_is_not_named_is_where_the_asked_one_is(
        self, mended: ClusterServers, prefix: str
    ) -> None:
        """By the name that we know the other by; a port alone says nothing of the machine."""
        for node in mended.nodes:
            node.command("CONFIG SET cluster-preferred-endpoint-type unknown-endpoint")
        try:
            url = mended.url.replace(HOST, "localhost")
            async with opened(url, prefix=prefix, timeout="5s") as store:
                copy = await published(store, "a")
                for keys in ((), ("key",)):
                    move = move_of(mended, prefix, "a")
                    move.begin(*(move.key for _ in keys))
                    assert await copy_in(store, "a") == copy
                    move.end()
                    assert await copy_in(store, "a") == copy
                assert isinstance(store._link, Cluster)
                assert {host for host, _ in store._link._links} == {"localhost"}
        finally:
            for node in mended.nodes:
                node.command("CONFIG SET cluster-preferred-endpoint-type ip")

    async def test_a_slot_that_nobody_had_is_found(
        self, mended: ClusterServers, prefix: str
    ) -> None:
        """As soon as a node has it, also if it was in no table when the store was opened."""
        (place,) = Keyspace(prefix).of(KIND, ["a"])
        mended.take_slot(key_slot(place.key))
        async with opened(mended.url, prefix=prefix, timeout="5s") as store:
            # Late gossip may bring the slot back to a node's table. Its holder then refuses.
            with pytest.raises(StoreError, match=r"no node|slot not served"):
                await store.read(KIND, ["a"])
            mended.mend()
            await patiently(lambda: store.read(KIND, ["a"]))

    async def test_slots_move_to_and_fro_under_load(
        self, cluster: ClusterServers, prefix: str
    ) -> None:
        """Readers see no error, and nobody is served as fresh what was invalidated before."""
        cache, loads = Cache(f"{cluster.url}?prefix={prefix}&timeout=5s"), dict[str, int]()

        @cache.batched(KIND, fresh_for=60, tags=lambda _: ["eu"])
        async def prices(skus: list[str]) -> Mapping[str, int]:
            for sku in skus:
                loads[sku] = loads.get(sku, 0) + 1
            return {sku: loads[sku] for sku in skus}

        skus, running, invalidated = [f"sku-{number}" for number in range(8)], True, 0

        async def read(sku: str) -> None:
            while running:
                before = invalidated
                answer = await prices.get(sku)
                assert answer.error is None
                assert answer.value > before

        async with cache:
            readers = [asyncio.create_task(read(sku)) for sku in skus]
            for number in range(6):
                move = move_of(cluster, prefix, skus[number])
                await asyncio.to_thread(move.begin)
                await asyncio.to_thread(move.keys, move.key)
                floor = min(loads.get(sku, 0) for sku in skus)
                await cache.invalidate_tag("eu")
                invalidated = floor
                await asyncio.to_thread(move.end)
            running = False
            await asyncio.gather(*readers)


async def nothing() -> None:
    """What happens meanwhile."""


def lose_a_reply(
    patch: pytest.MonkeyPatch,
    meanwhile: Callable[[], Awaitable[object]] = nothing,
    *steps: Script,
) -> None:
    """A node does the next such step, and its reply gets lost with the connection."""
    send = Link.send
    names = {name for step in steps or [scripts.PUBLISH] for name in (step.sha, step.text)}

    async def sent(link: Link, commands: Sequence[Command]) -> list[Any]:
        replies = await send(link, commands)
        given = zip(commands, replies, strict=True)
        done = [reply for command, reply in given if names.intersection(command[:2])]
        if any(reply and reply != [0] and not isinstance(reply, RedisError) for reply in done):
            patch.setattr(Link, "send", send)
            await link.drop_idle()
            await meanwhile()
            raise RedisConnectionError("the connection broke")
        return replies

    patch.setattr(Link, "send", sent)


def move_all(move: Move) -> None:
    """All keys have moved, and the slot still belongs to the old node."""
    move.begin()
    move.cluster.move_keys(move.slot, move.old, move.new)


class TestS2LostRepliesWhileASlotMoves:
    """A step that may have been done is settled at the node that holds the key, never guessed."""

    @pytest.fixture
    def moving(self, cluster: ClusterServers, prefix: str) -> Iterator[Move]:
        move = move_of(cluster, prefix, "a")
        yield move
        move.end()

    async def test_a_publication_at_the_new_node(
        self, store: RedisStore, moving: Move, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """It is sent there again, as one that was sent before."""
        await published(store, "a")
        lease = await lease_of(store, "a")
        moving.begin(moving.key)
        lose_a_reply(monkeypatch)
        assert await store.publish(KIND, {"a": (lease, copy_by(lease))}) == set()

    async def test_a_publication_at_the_old_node(
        self, store: RedisStore, moving: Move, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The key moves before it is sent again, so the new node must say whether it was done."""
        await published(store, "a")
        lease = await lease_of(store, "a")
        lose_a_reply(monkeypatch, lambda: asyncio.to_thread(moving.begin, moving.key))
        assert await store.publish(KIND, {"a": (lease, copy_by(lease))}) == set()

    async def test_s13_a_put_at_the_new_node(
        self, store: RedisStore, moving: Move, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """It is sent there again with the same generation, and recognised."""
        await stored(store, Put(new_copy(store)))
        moving.begin(moving.key, counter_of(moving))
        lose_a_reply(monkeypatch, nothing, scripts.PUT)
        put = Put(new_copy(store))
        assert await stored(store, put) is PutOutcome.STORED
        assert await copy_in(store, "a") == put.copy

    async def test_s13_a_put_at_the_old_node(
        self, store: RedisStore, moving: Move, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """All keys move before it is sent again: the new node knows it."""
        await stored(store, Put(new_copy(store)))
        lose_a_reply(monkeypatch, lambda: asyncio.to_thread(move_all, moving), scripts.PUT)
        put = Put(new_copy(store))
        assert await stored(store, put) is PutOutcome.STORED
        assert await copy_in(store, "a") == put.copy

    @pytest.mark.parametrize("goes_over", ["before the update", "during the update"])
    async def test_an_update_while_a_slot_moves_is_applied_once(
        self,
        cluster: ClusterServers,
        prefix: str,
        monkeypatch: pytest.MonkeyPatch,
        goes_over: str,
    ) -> None:
        """It is applied once, as soon as the bucket's counter has gone over, too."""
        moving = Move(cluster, Keyspace(prefix).of("stock", ["a"])[0].key)
        async with Cache(f"{cluster.url}?prefix={prefix}&timeout=5s") as cache:
            stock = cache.batched("stock", fresh_for="1h")(no_stock)
            await stock.put("a", 10)
            is_over = goes_over == "before the update"
            moving.begin(moving.key, *([counter_of(moving)] if is_over else []))
            try:
                lose_a_reply(monkeypatch)
                async with asyncio.TaskGroup() as tasks:
                    updating = tasks.create_task(stock.update("a", one_more))
                    if not is_over:
                        await waits_for_the_counter(cluster, moving)
                        await asyncio.to_thread(moving.keys, counter_of(moving))
                answer = updating.result()
            finally:
                moving.end()
            assert answer is not None
            assert answer.value == 11

    async def test_s13_a_put_whose_counter_stays_behind(
        self, cluster: ClusterServers, prefix: str
    ) -> None:
        """It says that the keys are moving, stores nothing, and does not stop the move."""
        moving = Move(cluster, Keyspace(prefix).of(KIND, ["a"])[0].key)
        async with opened(cluster.url, prefix=prefix, timeout="500ms") as store:
            before = Put(new_copy(store))
            await stored(store, before)
            moving.begin(moving.key)
            try:
                with pytest.raises(StoreError, match="moving these keys"):
                    await store.put(KIND, {"a": Put(new_copy(store))})
            finally:
                moving.end()
        async with opened(cluster.url, prefix=prefix) as store:
            assert await copy_in(store, "a") == before.copy
            assert await stored(store, Put(new_copy(store))) is PutOutcome.STORED


def counter_of(move: Move) -> bytes:
    return move.key[: move.key.index(b"}:") + 2] + b"+"


def one_more(answer: Answer[int] | None) -> int:
    return 0 if answer is None else answer.value + 1


async def waits_for_the_counter(cluster: ClusterServers, move: Move) -> None:
    """Until a put has asked the old node for its counter twice: it is waiting."""
    asked = cluster.client(move.old)

    def times() -> int:
        calls = asked.info("commandstats").get("cmdstat_hget", {})
        return int(calls.get("calls", 0))

    first = times()
    await until(lambda: times() > first + 1)


class TestE13CloseWhileAStepIsUnderWay:
    """The step ends with an error that says why, and leaves nothing behind."""

    async def test_no_caller_is_cancelled(
        self, store: RedisStore, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """S5: an invalidation that waits for the route table raises: it was not delivered."""
        asked = asyncio.Event()

        async def run(*_: object, **__: object) -> list[Any]:
            asked.set()
            await asyncio.get_running_loop().create_future()
            return []

        link = store._link
        assert isinstance(link, Cluster)
        link._primaries.clear()
        monkeypatch.setattr(Link, "run", run)
        writing = asyncio.create_task(store.invalidate(KIND, ["a"]))
        await asked.wait()
        await store.close()
        with pytest.raises(StoreError, match="this store is closed"):
            await writing

    async def test_no_link_is_opened_again(
        self, store: RedisStore, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A step whose node does not answer looks for no other node."""
        sent, closed = asyncio.Event(), asyncio.Event()

        async def send(*_: object) -> list[Any]:
            sent.set()
            await closed.wait()
            raise RedisConnectionError("the connection broke")

        link = store._link
        assert isinstance(link, Cluster)
        monkeypatch.setattr(Link, "send", send)
        writing = asyncio.create_task(store.invalidate(KIND, ["a"]))
        await sent.wait()
        await store.close()
        closed.set()
        with pytest.raises(StoreError, match="this store is closed"):
            await writing
        assert link._links == {}


async def no_stock(ids: list[str]) -> dict[str, int]:
    return dict.fromkeys(ids, 0)


async def patiently(step: Callable[[], Awaitable[T]]) -> T:
    """Until somebody has taken over."""
    deadline = time.monotonic() + DEADLINE
    while True:
        try:
            return await step()
        except StoreError:
            assert time.monotonic() < deadline
            await asyncio.sleep(0.02)


def replica_of(cluster: ClusterServers, primary: Server) -> Server:
    ports = [
        line.split(",")[1]
        for line in primary.command("INFO replication").splitlines()
        if line.startswith("slave0:")
    ]
    return next(node for node in cluster.nodes if f"port={node.port}" in ports)


async def promoted(replica: Server) -> None:
    await until(lambda: "role:master" in replica.command("INFO replication"))
    await until(lambda: "cluster_state:ok" in replica.command("CLUSTER INFO"))


@pytest.fixture
def mended(cluster: ClusterServers) -> Iterator[ClusterServers]:
    """A cluster that the test may hurt."""
    yield cluster
    cluster.mend()


class Shop:
    """A process that loads prices."""

    def __init__(self, cache: Cache) -> None:
        self.loads: list[str] = []
        self.version = 1

        @cache.batched(KIND, fresh_for=60)
        async def prices(skus: list[str]) -> dict[str, int]:
            self.loads += skus
            return dict.fromkeys(skus, self.version)

        self.prices = prices


class TestS9Failover:
    async def test_a_dead_primary_is_replaced_under_load(
        self, mended: ClusterServers, prefix: str
    ) -> None:
        """Readers see no error; when its replica has taken over, everything works by itself."""
        cache = Cache(f"{mended.url}?prefix={prefix}&timeout=10s")
        running, served = True, 0

        @cache.batched(KIND, fresh_for=0.05, stale_for=60)
        async def prices(skus: list[str]) -> Mapping[str, int]:
            return dict.fromkeys(skus, 1)

        async def read(number: int) -> None:
            nonlocal served
            while running:
                assert await prices(f"sku-{number}") == 1
                served += 1
                await asyncio.sleep(0.005)

        async def invalidate() -> float:
            began = time.time()
            await prices.invalidate("sku-0")
            return began

        async with cache:
            readers = [asyncio.create_task(read(number)) for number in range(16)]
            await until(lambda: served > 100)
            move = move_of(mended, prefix, "sku-0")
            move.old.stop()
            with pytest.raises(StoreError):
                await prices.invalidate("sku-0")
            invalidated = await patiently(invalidate)
            running = False
            await asyncio.gather(*readers)
            assert (await prices.get("sku-0")).fetched_at >= invalidated

    async def test_a_dead_primary_costs_the_others_nothing(
        self, mended: ClusterServers, prefix: str
    ) -> None:
        """Nobody replaces it: its ids are loaded, the others' are read, leased and invalidated."""
        settings = ("cluster-replica-no-failover", "cluster-require-full-coverage")
        url, ids = f"{mended.url}?prefix={prefix}&timeout=10s", [f"sku-{it}" for it in range(60)]
        caches = [Cache(url) for _ in range(3)]
        before, ours, theirs = (Shop(it) for it in caches)
        dead = mended.primary_of(Keyspace(prefix).of(KIND, ["sku-0"])[0].key)
        keys = {id_: Keyspace(prefix).of(KIND, [id_])[0].key for id_ in ids}
        lost = {id_ for id_, key in keys.items() if mended.primary_of(key) is dead}
        left = sorted({*ids} - lost)
        async with caches[0], caches[1], caches[2]:
            for node in mended.nodes:
                node.command("CONFIG SET", settings[0], "yes")
                node.command("CONFIG SET", settings[1], "no")
            await before.prices.get_many(left[:20])
            dead.stop()
            for shop in (
                ours,
                theirs,
            ):  # theirs: what ours has stored is there, and nobody holds it
                answers = await shop.prices.get_many(ids)
                assert {answer.value for answer in answers.values()} == {1}
            assert sorted(ours.loads) == sorted({*ids} - {*left[:20]})
            assert sorted(theirs.loads) == sorted(lost)
            ours.version = theirs.version = 2
            await ours.prices.invalidate(left[0])
            assert (await theirs.prices.get_many(ids))[left[0]].value == 2
            with pytest.raises(StoreError):
                await ours.prices.put_many(dict.fromkeys(ids, 3))
            for node in mended.nodes:
                if node is not dead:
                    node.command("CONFIG SET", settings[0], "no")
                    node.command("CONFIG SET", settings[1], "yes")

    async def test_a_lease_is_not_granted_twice_by_a_replica_in_step(
        self, mended: ClusterServers, prefix: str
    ) -> None:
        """The new primary knows the holder, who publishes there."""
        async with opened(mended.url, prefix=prefix, timeout="10s", wait_replicas="1") as store:
            lease = await lease_of(store, "a", "eu")
        primary = mended.primary_of(Keyspace(prefix).of(KIND, ["a"])[0].key)
        replica = replica_of(mended, primary)
        async with opened(mended.url, prefix=prefix, timeout="10s") as store:
            primary.stop()
            await promoted(replica)
            grants = await patiently(lambda: store.acquire(KIND, [Ask("a")], 30))
            assert isinstance(grants["a"], Held)
            copy = copy_by(lease)
            assert await store.publish(KIND, {"a": (lease, copy)}) == set()
            assert await copy_in(store, "a") == copy
            assert await store.invalidate_tag("eu") == [(KIND, "a")]

    @pytest.mark.parametrize("wait_replicas", ["0", "1"])
    async def test_a_failover_undoes_what_the_replica_never_received(
        self, mended: ClusterServers, prefix: str, wait_replicas: str
    ) -> None:
        """An acknowledged invalidation is lost; with `wait_replicas` it is not acknowledged."""
        options = {"prefix": prefix, "timeout": "4s", "wait_replicas": wait_replicas}
        async with opened(mended.url, **options) as store:
            await published(store, "a")
            primary = mended.primary_of(Keyspace(prefix).of(KIND, ["a"])[0].key)
            replica = replica_of(mended, primary)
            replica.pause()
            primary.command("CLIENT KILL TYPE replica")
            if wait_replicas == "1":
                with pytest.raises(StoreError, match="0 of 1 replicas"):
                    await store.invalidate(KIND, ["a"])
            else:
                await store.invalidate(KIND, ["a"])
            copy = await copy_in(store, "a")
            assert copy is not None
            assert copy.mark is Mark.HARD
            primary.stop()
            replica.go_on()
            await promoted(replica)
            copy = await patiently(lambda: copy_in(store, "a"))
            assert copy is not None
            assert copy.mark is Mark.NONE

    @pytest.mark.parametrize(
        "step", ["invalidate", "delete", "a page", "publish", "acquire", "put"]
    )
    async def test_an_earlier_change_that_no_replica_has_is_not_confirmed(
        self, mended: ClusterServers, prefix: str, step: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """By another process, or by a request whose answer was lost: no replica has it yet."""
        options = {"prefix": prefix, "timeout": "1s", "wait_replicas": "1"}
        async with opened(mended.url, **options) as ours, opened(mended.url, **options) as theirs:
            lease = await lease_of(ours, "a")
            (place,) = Keyspace(prefix).of(KIND, ["a"])
            tag = place.base + b"#t"
            page = scripts.INVALIDATE_TAG.call([tag], place.base, Blank.AS_OF, 2, b"1")
            replica_of(mended, mended.primary_of(place.key)).pause()
            if step in {"invalidate", "delete", "a page"}:
                with pytest.raises(StoreError, match="0 of 1 replicas"):
                    await theirs.delete(KIND, ["a"])
            else:
                lose_a_reply(monkeypatch, nothing, getattr(scripts, step.upper()))
            asked: dict[str, Callable[[], Awaitable[object]]] = {
                "publish": lambda: ours.publish(KIND, {"a": (lease, copy_by(lease))}),
                "acquire": lambda: ours.acquire(KIND, [Ask("a", take_over=True)], 30),
                "put": lambda: stored(ours, Put(new_copy(ours))),
                "invalidate": lambda: ours.invalidate(KIND, ["a"]),
                "delete": lambda: ours.delete(KIND, ["a"]),
                "a page": lambda: ours._opened().run([page], lasting=True),  # of a tag, the second
            }
            with pytest.raises(StoreError, match="0 of 1 replicas"):
                await asked[step]()

    @pytest.mark.parametrize("outcome", ["stored", "replaced", "kept", "mixed", "refused"])
    async def test_s13_no_answer_to_a_put_counts_before_the_replicas_have_it(
        self, mended: ClusterServers, prefix: str, outcome: str
    ) -> None:
        """Decision 0304: it may rely on another's change, which a failover undoes."""
        options = {"prefix": prefix, "timeout": "1s", "wait_replicas": "1"}
        async with opened(mended.url, **options) as ours, opened(mended.url, **options) as theirs:
            (place,) = Keyspace(prefix).of(KIND, ["a"])
            first = Put(new_copy(ours, packed_version(7)))
            assert await stored(ours, first) is PutOutcome.STORED
            theirs_put = Put(new_copy(theirs, packed_version(8)))
            replica_of(mended, mended.primary_of(place.key)).pause()
            with pytest.raises(StoreError, match="0 of 1 replicas"):
                await stored(theirs, theirs_put)
            put = {
                "stored": theirs_put,
                "replaced": first,
                "kept": Put(new_copy(ours, packed_version(7))),
                "mixed": Put(new_copy(ours, packed_version("7"))),
                "refused": Put(new_copy(ours), when=When.NO_LIVE_COPY),
            }[outcome]
            with pytest.raises(StoreError, match="0 of 1 replicas"):
                await stored(ours, put)

    async def test_s13_again_is_answered_without_replicas(
        self, mended: ClusterServers, prefix: str
    ) -> None:
        """Nothing was done: there is nothing that a failover could undo."""
        async with opened(mended.url, prefix=prefix, timeout="5s") as theirs:
            await stored(theirs, Put(new_copy(theirs)))
            options = {"prefix": prefix, "timeout": "1s", "wait_replicas": "1"}
            async with opened(mended.url, **options) as ours:
                assert await copy_in(ours, "a") is not None
                await stored(theirs, Put(new_copy(theirs)))
                (place,) = Keyspace(prefix).of(KIND, ["a"])
                replica_of(mended, mended.primary_of(place.key)).pause()
                again = await ours.put(KIND, {"a": Put(new_copy(ours))})
                assert again["a"].outcome is PutOutcome.AGAIN

    async def test_a_cluster_opens_with_any_of_its_nodes(
        self, mended: ClusterServers, prefix: str
    ) -> None:
        """A seed that is unavailable is passed over, and one node's name leads to all."""
        nodes = f"redis+cluster://{HOST}:1,{HOST}:{mended.nodes[1].port}"
        async with opened(nodes, prefix=prefix) as store:
            for number in range(64):
                await published(store, f"sku-{number}")
            assert (await store.stats()).copies == 64

    async def test_a_store_opens_before_its_cluster_is_formed(
        self, tmp_path_factory: pytest.TempPathFactory
    ) -> None:
        """A node without slots is no reason not to begin; it is asked again."""
        binary, bus = binary_of("valkey"), str(free_port())
        assert binary is not None
        options = ("--cluster-enabled", "yes", "--cluster-port", bus)
        with serving(binary, tmp_path_factory.mktemp("lone"), *options) as node:
            async with opened(f"redis+cluster://{HOST}:{node.port}") as store:
                with pytest.raises(StoreError, match="names its slots"):
                    await store.read(KIND, ["a"])
                node.command("CLUSTER ADDSLOTSRANGE 0 16383")
                await patiently(lambda: store.invalidate(KIND, ["a"]))

    async def test_a_slot_that_one_node_does_not_know_is_found(
        self, tmp_path_factory: pytest.TempPathFactory
    ) -> None:
        """Nodes that have not met name their own slots only; together they name all."""
        binary = binary_of("valkey")
        assert binary is not None
        with ExitStack() as stack:
            nodes = []
            for slots in ("0 8191", "8192 16383"):
                options = ["--cluster-enabled", "yes", "--cluster-port", str(free_port())]
                options += ["--cluster-require-full-coverage", "no"]
                folder = tmp_path_factory.mktemp("unmet")
                node = stack.enter_context(serving(binary, folder, *options))
                node.command(f"CLUSTER ADDSLOTSRANGE {slots}")
                nodes.append(f"{HOST}:{node.port}")
            async with opened(f"redis+cluster://{','.join(nodes)}") as store:
                ids = [f"sku-{number}" for number in range(64)]
                await patiently(lambda: store.invalidate(KIND, ids))
                for id_ in ids:
                    await published(store, id_)
                assert (await store.stats()).copies == 64


class TestS9Addresses:
    async def test_a_server_without_cluster_mode_is_refused(self, valkey: Server) -> None:
        """With the address to write instead."""
        with pytest.raises(ConfigError, match="write redis:// instead of redis\\+cluster://"):
            async with opened(f"redis+cluster://{HOST}:{valkey.port}"):
                pass

    async def test_a_node_of_a_cluster_is_refused_by_a_plain_address(
        self, cluster: ClusterServers
    ) -> None:
        """With the address to write instead."""
        with pytest.raises(ConfigError, match="write redis\\+cluster://"):
            async with opened(f"redis://{HOST}:{cluster.nodes[0].port}"):
                pass

    @pytest.mark.parametrize(
        ("url", "wrong"),
        [
            ("redis+cluster://a:1,:2", "names no host"),
            ("redis+cluster://a:1,b:x", "port"),
            ("redis+cluster://a:1/3", "a cluster has only database 0"),
            ("redis+sentinel://a:1,b:2", "names no service"),
            ("redis+sentinel://a:1/shop/x", "number of a database"),
            ("redis://a?wait_replicas=many", "wait_replicas is a whole number of 0 or more"),
        ],
    )
    def test_a_bad_address_is_refused(self, url: str, wrong: str) -> None:
        """What is wrong with it, and what to write."""
        with pytest.raises(ConfigError, match=wrong) as caught:
            store_for(url, time.time)
        assert "redis+cluster://host:6379,host:6379" in str(caught.value)


@pytest.fixture
def sentinels(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SentinelServers]:
    with watched_over(tmp_path_factory.mktemp("sentinels")) as sentinels:
        yield sentinels


class TestS9Sentinel:
    async def test_the_next_primary_is_found_by_itself(
        self, sentinels: SentinelServers, prefix: str
    ) -> None:
        """The primary dies; the Sentinels promote its replica, and every step goes there."""
        async with opened(sentinels.url, prefix=prefix, timeout="30s") as store:
            copy = await published(store, "a", "eu")
            await until(lambda: "keys=4" in sentinels.replica.command("INFO keyspace"))
            sentinels.primary.stop()
            await patiently(lambda: store.invalidate_tag("eu"))
            found = await copy_in(store, "a")
            assert found is not None
            assert (found.generation, found.mark) == (copy.generation, Mark.HARD)

    async def test_an_unknown_service_is_said(
        self, sentinels: SentinelServers, caplog: pytest.LogCaptureFixture
    ) -> None:
        """Its name is in the warning; the store begins without a server, as always."""
        async with opened(sentinels.url.replace("/shop", "/shoes")) as store:
            assert "knows no service 'shoes'" in caplog.text
            with pytest.raises(StoreError):
                await store.read(KIND, ["a"])
