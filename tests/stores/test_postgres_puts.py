"""S13, S8: puts on a real PostgreSQL server: late, lost, given up, at once, and after a crash."""

import asyncio
import random
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager

import psycopg
import pytest

from stillfresh import Policy, StoreError
from stillfresh.clock import Clock
from stillfresh.stores.contract import (
    Ask,
    Copy,
    Lease,
    Mark,
    Put,
    PutOutcome,
    PutResult,
    Record,
    Store,
    When,
)
from stillfresh.stores.postgres import create, link
from stillfresh.stores.postgres import store as postgres_store
from stillfresh.stores.postgres.schema import GOOD_FOR, TRACE
from stillfresh.stores.postgres.store import PostgresStore
from stillfresh.stores.urls import store_for
from stillfresh.testing import ManualClock
from tests.kit.engine import until
from tests.kit.processes import Process
from tests.kit.proxies.flaky import FlakyProxy
from tests.kit.servers.postgres import HOST, PostgresServer, postgres_serving

KIND = "price"
AGAIN, STORED, REPLACED = PutOutcome.AGAIN, PutOutcome.STORED, PutOutcome.REPLACED
MOST_PUTS = 100
LONG = Policy(3_600)


@asynccontextmanager
async def opened(url: str, clock: Clock = time.time) -> AsyncIterator[PostgresStore]:
    store = store_for(url, clock)
    assert isinstance(store, PostgresStore)
    await store.open()
    try:
        yield store
    finally:
        await store.close()


def through(proxy: FlakyProxy, url: str) -> str:
    return re.sub(r":\d+/", f":{proxy.port}/", url)


def schema_of(url: str) -> str:
    return url.partition("schema=")[2].partition("&")[0]


@pytest.fixture
def url(postgres: PostgresServer) -> str:
    return postgres.new_store()


@pytest.fixture
async def proxy(postgres: PostgresServer) -> AsyncIterator[FlakyProxy]:
    async with FlakyProxy(HOST, postgres.port) as proxy:
        yield proxy


@pytest.fixture
async def store(
    proxy: FlakyProxy, url: str, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[PostgresStore]:
    """Through the proxy. A statement's own text is in every request: it can arrive elsewhere."""
    monkeypatch.setattr(link, "PREPARED_AFTER", None)
    async with opened(through(proxy, url)) as store:
        yield store


@pytest.fixture
async def other(url: str) -> AsyncIterator[PostgresStore]:
    """Another machine's, straight to the server."""
    async with opened(url) as store:
        yield store


def new_put(store: Store, value: bytes | None = b"put", **options: object) -> Put:
    copy = Copy(store.new_generation(), time.time(), LONG, value)
    return Put(copy, **options)  # type: ignore[arg-type]


async def put(store: Store, put: Put, id_: str = "a") -> PutResult:
    for _ in range(MOST_PUTS):
        result = (await store.put(KIND, {id_: put}))[id_]
        if result.outcome is not AGAIN:
            return result
    raise AssertionError("the store answers AGAIN for ever")


async def put_value(store: Store, value: bytes = b"put", id_: str = "a") -> None:
    assert (await put(store, new_put(store, value), id_)).outcome is STORED


async def copy_in(store: Store, id_: str = "a") -> Copy | None:
    return (await store.read(KIND, [id_])).get(id_, Record()).copy


async def shown(store: Store, id_: str = "a") -> bytes | None:
    """The value, unless it is missing or was invalidated."""
    copy = await copy_in(store, id_)
    if copy is None or copy.mark is not Mark.NONE:
        return None
    assert isinstance(copy.value, bytes)
    return copy.value


async def leased(store: Store, id_: str = "a", *tags: str) -> Lease:
    copy = await copy_in(store, id_)
    seen = None if copy is None else copy.generation
    grant = (await store.acquire(KIND, [Ask(id_, seen, tags)], 30))[id_]
    assert isinstance(grant, Lease), grant
    return grant


async def load(store: Store, value: bytes = b"loaded", id_: str = "a") -> None:
    lease = await leased(store, id_)
    copy = Copy(lease.token, time.time(), LONG, value)
    assert await store.publish(KIND, {id_: (lease, copy)}) == set()


async def give_up(proxy: FlakyProxy, work: Awaitable[object], function: bytes) -> None:
    """Both of its statements are on their way when it fails."""
    proxy.held.clear()
    proxy.lose("late", to=b"." + function + b"(", times=2)
    with pytest.raises(StoreError, match="unavailable"):
        await work
    proxy.heal()
    assert len(proxy.held) == 2


async def arrive(postgres: PostgresServer, proxy: FlakyProxy) -> None:
    for request in proxy.held:
        await postgres.deliver(request)


CHANGES: dict[str, Callable[[Store], Awaitable[object]]] = {
    "invalidate": lambda store: store.invalidate(KIND, ["a"]),
    "invalidate_tag": lambda store: store.invalidate_tag("eu"),
    "delete": lambda store: store.delete(KIND, ["a"]),
}
VALUES: dict[str, Callable[[Store], Awaitable[object]]] = {
    "put": lambda store: put_value(store, b"later"),
    "load": lambda store: load(store, b"later"),
}


class TestS8LatePuts:
    """A put whose sender gave up arrives when a test says so."""

    @pytest.mark.parametrize("is_cold", [True, False], ids=["cold", "warm"])
    @pytest.mark.parametrize("change", CHANGES)
    async def test_a_put_that_was_given_up_is_not_shown_after_an_invalidation(
        self,
        store: Store,
        other: Store,
        proxy: FlakyProxy,
        postgres: PostgresServer,
        change: str,
        is_cold: bool,
    ) -> None:
        """S8: also if there was nothing to invalidate or to delete."""
        if not is_cold:
            await put(other, new_put(other, b"old", tags=("eu",)))
            await store.read(KIND, ["a"])
        late = new_put(store, b"late", tags=("eu",))
        await give_up(proxy, store.put(KIND, {"a": late}), b"put")
        await CHANGES[change](other)
        await arrive(postgres, proxy)
        assert await shown(other) is None
        await put_value(other, b"new")
        await arrive(postgres, proxy)
        assert await shown(other) == b"new"

    @pytest.mark.parametrize("is_cold", [True, False], ids=["cold", "warm"])
    @pytest.mark.parametrize("value", VALUES)
    async def test_a_put_that_was_given_up_does_not_replace_a_later_value(
        self,
        store: Store,
        other: Store,
        proxy: FlakyProxy,
        postgres: PostgresServer,
        value: str,
        is_cold: bool,
    ) -> None:
        """S8, rule 1: neither that of a put nor that of a load."""
        if not is_cold:
            await put_value(other, b"old")
            await store.read(KIND, ["a"])
        await give_up(proxy, store.put(KIND, {"a": new_put(store, b"late")}), b"put")
        await VALUES[value](other)
        await arrive(postgres, proxy)
        assert await shown(other) == b"later"

    @pytest.mark.parametrize("is_cold", [True, False], ids=["cold", "warm"])
    async def test_a_late_put_acts_if_nothing_else_happened(
        self,
        store: Store,
        other: Store,
        proxy: FlakyProxy,
        postgres: PostgresServer,
        is_cold: bool,
    ) -> None:
        """S13: the fence refuses only what is late; twice is once."""
        if not is_cold:
            await put_value(other, b"old")
            await store.read(KIND, ["a"])
        late = new_put(store, b"late")
        await give_up(proxy, store.put(KIND, {"a": late}), b"put")
        await arrive(postgres, proxy)
        assert await copy_in(other) == late.copy

    @pytest.mark.parametrize("change", CHANGES)
    async def test_a_change_that_was_given_up_voids_no_later_put(
        self,
        store: Store,
        other: Store,
        proxy: FlakyProxy,
        postgres: PostgresServer,
        change: str,
    ) -> None:
        """S8, rule 3a: the put began after the sender of the change had given up."""
        await put(other, new_put(other, b"old", tags=("eu",)))
        await store.read(KIND, ["a"])
        await give_up(proxy, CHANGES[change](store), change.encode())
        await put(other, new_put(other, b"new", tags=("eu",)))
        await arrive(postgres, proxy)
        assert await shown(other) == b"new"

    async def test_a_change_that_arrives_twice_voids_no_put_in_between(
        self, store: Store, other: Store, proxy: FlakyProxy, postgres: PostgresServer
    ) -> None:
        """S8: the store sent it again, and the first one arrives at last."""
        for change in CHANGES.values():
            await put(other, new_put(other, b"old", tags=("eu",)))
            proxy.held.clear()
            proxy.lose("late", to=b"SELECT * FROM", times=1)
            await change(store)
            proxy.heal()
            assert await shown(other) is None
            await put(other, new_put(other, b"new", tags=("eu",)))
            await arrive(postgres, proxy)
            assert await shown(other) == b"new"

    @pytest.mark.parametrize("knows_time", [True, False])
    async def test_an_add_that_was_refused_is_never_stored(
        self,
        store: PostgresStore,
        other: Store,
        url: str,
        proxy: FlakyProxy,
        postgres: PostgresServer,
        monkeypatch: pytest.MonkeyPatch,
        *,
        knows_time: bool,
    ) -> None:
        """S8: it arrives a second time when the copy that has refused it is old."""
        await put_value(other, b"theirs")
        await store.read(KIND, ["a"])
        with monkeypatch.context() as patch:
            if not knows_time:
                patch.setattr(store, "_good_until", lambda: 0.0)
            late = new_put(store, b"late", when=When.NO_LIVE_COPY)
            await give_up(proxy, store.put(KIND, {"a": late}), b"put")
        ends = f"fetched_at = extract(epoch FROM clock_timestamp()) - {LONG.fresh_for}"
        await arrive(postgres, proxy)
        postgres.execute(f"UPDATE {schema_of(url)}.entry SET {ends}")
        await arrive(postgres, proxy)
        assert await shown(other) == b"theirs"
        add = new_put(other, b"next", when=When.NO_LIVE_COPY)
        assert (await put(other, add)).outcome is STORED

    async def test_a_cancelled_put_that_waited_for_a_lock_undoes_nothing(
        self, url: str, postgres: PostgresServer, other: Store
    ) -> None:
        """S8: the server goes on with it when the row is free, and finds that it has changed."""
        await put_value(other, b"old")
        schema = schema_of(url)
        waits = "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock'"
        async with opened(f"{url}&application_name={schema}") as store:
            await store.read(KIND, ["a"])
            asked = f"{waits} AND application_name = '{schema}'"
            with psycopg.connect(postgres.address) as holder:
                holder.execute(f"SELECT 1 FROM {schema}.entry FOR UPDATE".encode())
                putting = asyncio.create_task(store.put(KIND, {"a": new_put(store, b"late")}))
                await until(lambda: postgres.execute(asked) == [(1,)])
                putting.cancel()
                await asyncio.gather(putting, return_exceptions=True)
                deleting = (
                    f"SELECT {schema}.delete(ARRAY['{KIND}'::bytea], ARRAY['a'::bytea],"
                    f" ARRAY[NULL::bytea], (SELECT number FROM {schema}.life),"
                    f" {schema}.last_stamp(), NULL)"
                )
                holder.execute(deleting.encode())
            await until(lambda: postgres.execute(asked) == [(0,)])
        assert await other.read(KIND, ["a"]) == {}

    async def test_a_deletion_is_remembered_for_longer_than_a_put_is_on_its_way(
        self, url: str, proxy: FlakyProxy, postgres: PostgresServer, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """S13: its trace stops what is younger, and the put's own time what is older."""
        monkeypatch.setattr(link, "PREPARED_AFTER", None)
        clock = ManualClock(start=1_700_000_000.0)
        rows = f"SELECT count(*) FROM {schema_of(url)}.entry"
        async with opened(through(proxy, url), clock) as store, opened(url, clock) as other:
            await put_value(other, b"old")
            await store.read(KIND, ["a"])
            await give_up(proxy, store.put(KIND, {"a": new_put(store, b"late")}), b"put")
            await other.delete(KIND, ["a"])
            clock.advance(TRACE - 1)
            assert await other.evict(clock()) == 0
            assert postgres.execute(rows) == [(1,)]
            await arrive(postgres, proxy)
            assert await other.read(KIND, ["a"]) == {}
            clock.advance(1)
            assert await other.evict(clock()) == 0
            assert postgres.execute(rows) == [(0,)]

    async def test_a_put_that_was_too_long_on_its_way_inserts_nothing(
        self, url: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """S13: the trace of what came after it may be gone; the next attempt is done."""
        clock = ManualClock(start=1_700_000_000.0)
        async with opened(url, clock) as store:
            await store.invalidate(KIND, ["connected"])
            with monkeypatch.context() as patch:
                patch.setattr(store, "_good_until", lambda: clock() - 0.001)
                assert (await store.put(KIND, {"a": new_put(store)}))["a"].outcome is AGAIN
                assert await store.read(KIND, ["a"]) == {}
                patch.setattr(store, "_good_until", clock)
                assert (await store.put(KIND, {"a": new_put(store)}))["a"].outcome is STORED

    async def test_the_time_of_a_put_is_counted_by_the_clock_of_the_server(
        self, store: PostgresStore, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """S13: as it was heard last; a clock that was moved costs one more attempt."""
        await store.invalidate(KIND, ["connected"])
        heard = store._opened().heard
        left = heard.good_until() - time.time()  # one machine, one clock
        assert 0 < left <= GOOD_FOR
        heard.hear(heard.life, heard.stamp, time.time() - 3_600)
        assert (await store.put(KIND, {"a": new_put(store)}))["a"].outcome is AGAIN
        assert (await store.put(KIND, {"a": new_put(store)}))["a"].outcome is STORED

    async def test_an_evicted_copy_leaves_its_stamp(
        self, url: str, proxy: FlakyProxy, postgres: PostgresServer, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """S13: a copy that lasted a second does not let an older put in when it is gone."""
        monkeypatch.setattr(link, "PREPARED_AFTER", None)
        clock = ManualClock(start=1_700_000_000.0)
        async with opened(through(proxy, url), clock) as store, opened(url, clock) as other:
            await store.read(KIND, ["a"])
            await give_up(proxy, store.put(KIND, {"a": new_put(store, b"late")}), b"put")
            short = Copy(other.new_generation(), clock(), Policy(1), b"short")
            assert (await put(other, Put(short))).outcome is STORED
            clock.advance(2)
            assert await other.evict(clock()) == 1
            assert await other.read(KIND, ["a"]) == {}
            await arrive(postgres, proxy)
            assert await other.read(KIND, ["a"]) == {}
            clock.advance(TRACE)
            assert await other.evict(clock()) == 0
            assert postgres.execute(f"SELECT count(*) FROM {schema_of(url)}.entry") == [(0,)]

    async def test_traces_are_dropped_in_time_when_the_clock_was_set_back(
        self, url: str, postgres: PostgresServer
    ) -> None:
        """S13: not at once, and not only when the clock is where it was."""
        clock = ManualClock(start=1_700_000_000.0)
        rows = f"SELECT count(*) FROM {schema_of(url)}.entry"
        async with opened(url, clock) as store:
            await store.delete(KIND, ["a"])
            clock.advance(-3_600)
            await store.evict(clock())
            assert postgres.execute(rows) == [(1,)]
            clock.advance(TRACE)
            await store.evict(clock())
            assert postgres.execute(rows) == [(0,)]


class TestS2LostPuts:
    """The server did it, and its answer got lost."""

    @pytest.mark.parametrize("changes", [0, 1, 5])
    async def test_a_put_without_an_answer_is_recognised_or_put_once_more(
        self, store: Store, other: Store, proxy: FlakyProxy, changes: int
    ) -> None:
        """S2: by its generation, or among the last four that were replaced. It is in progress."""
        late = new_put(store, b"unanswered")
        result = await put_unanswered(store, other, proxy, late, changes)
        if changes == 0:
            assert result.outcome is STORED
            assert await copy_in(other) == late.copy
        elif changes == 1:
            assert result.outcome is REPLACED
            assert await shown(other) == b"later 0"
        else:
            assert result.outcome is AGAIN
            assert await shown(other) == b"later 4"
            assert (await put(store, late)).outcome is STORED
            assert await shown(other) == b"unanswered"

    @pytest.mark.parametrize("condition", [When.UNCHANGED, When.NO_LIVE_COPY])
    async def test_a_condition_that_no_longer_shows_is_an_error(
        self, store: Store, other: Store, proxy: FlakyProxy, condition: When
    ) -> None:
        """E35: else an increment would be counted twice."""
        late = new_put(store, b"1", when=condition)
        with pytest.raises(
            StoreError, match=r"price 'a': .* whether the value was stored; read it"
        ):
            await put_unanswered(store, other, proxy, late, changes=5)
        assert await shown(other) == b"later 4"

    async def test_a_put_that_is_never_answered_is_an_error(
        self, store: Store, other: Store, proxy: FlakyProxy
    ) -> None:
        """S2: nothing is claimed, and the next put works."""
        proxy.lose("replies", to=b".put(", times=2)
        with pytest.raises(StoreError, match="unavailable"):
            await store.put(KIND, {"a": new_put(store, b"unanswered")})
        proxy.heal()
        assert await shown(other) == b"unanswered"
        await put_value(other, b"new")
        assert await shown(other) == b"new"

    async def test_a_cancelled_put_leaks_no_connection(
        self, url: str, other: Store, postgres: PostgresServer
    ) -> None:
        """S13: at whatever point it was; the only place is free for the next one."""
        name = schema_of(url)
        async with opened(f"{url}&max_connections=1&application_name={name}") as store:
            for turns in range(12):
                putting = asyncio.create_task(store.put(KIND, {"a": new_put(store, b"late")}))
                for _ in range(turns):
                    await asyncio.sleep(0)
                putting.cancel()
                await asyncio.gather(putting, return_exceptions=True)
                await put_value(store, b"%d" % turns)
                assert await shown(other) == b"%d" % turns
            asked = f"SELECT count(*) FROM pg_stat_activity WHERE application_name = '{name}'"
            await until(lambda: postgres.execute(asked) == [(1,)])


async def put_unanswered(
    store: Store, other: Store, proxy: FlakyProxy, late: Put, changes: int
) -> PutResult:
    async def meanwhile() -> None:
        for number in range(changes):
            await put_value(other, b"later %d" % number)

    await store.read(KIND, ["a"])
    proxy.lose("replies", to=b".put(", times=1, meanwhile=meanwhile)
    return (await store.put(KIND, {"a": late}))["a"]


class TestS13RoundTrips:
    async def test_an_undisturbed_put_is_one_statement(
        self, store: PostgresStore, other: Store
    ) -> None:
        """S13: also the first one of a process, of a key that it has never read."""
        await put_value(other, b"old", "before")
        async with opened_again(store) as (fresh, requests):
            for id_ in ("before", "new"):
                before = requests()
                result = (await fresh.put(KIND, {id_: new_put(fresh)}))[id_]
                assert (result.outcome, requests() - before) == (STORED, 1)
                assert result.stamp > 0

    async def test_a_change_by_another_process_costs_one_more(
        self, store: Store, other: Store, proxy: FlakyProxy
    ) -> None:
        """S13: unless this process has read the entry since."""
        await put_value(store)
        await put_value(other)
        assert (await store.put(KIND, {"a": new_put(store)}))["a"].outcome is AGAIN
        assert (await store.put(KIND, {"a": new_put(store)}))["a"].outcome is STORED
        await put_value(other)
        await store.read(KIND, ["a"])
        assert (await store.put(KIND, {"a": new_put(store)}))["a"].outcome is STORED

    async def test_every_change_has_its_own_stamp(self, store: Store, other: Store) -> None:
        """S13: in the order in which they were done, over all keys and processes."""
        stamps = []
        for number, each in enumerate([store, other] * 3):
            result = await put(each, new_put(each), f"{number % 2}")
            stamps.append(result.stamp)
        assert stamps == sorted(set(stamps))

    async def test_an_invalidation_of_a_key_that_others_change_for_ever_is_an_error(
        self, store: PostgresStore, other: Store, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """S8: an invalidation asks again for a while, and says that it was not done."""
        monkeypatch.setattr(postgres_store, "PERSISTENCE", 0.05)
        ask = store._call

        async def overtaken(function: str, *given: object, **options: object) -> list[object]:
            await put_value(other, b"again")
            return await ask(function, *given, **options)  # type: ignore[arg-type, return-value]

        monkeypatch.setattr(store, "_call", overtaken)
        for change, verb in ((store.invalidate, "invalidate"), (store.delete, "delete")):
            with pytest.raises(StoreError, match=f"again and again for 0.05 s.* not {verb} them"):
                await change(KIND, ["a"])
        assert await shown(other) == b"again"


@asynccontextmanager
async def opened_again(
    store: PostgresStore,
) -> AsyncIterator[tuple[PostgresStore, Callable[[], int]]]:
    """A new process's store, and the number of statements that it has sent."""
    count = 0
    fresh = PostgresStore(*store._opened()._hosts, schema=store._place, timeout=30)
    await fresh.open()
    run = fresh._opened().run

    async def counted(*given: object, **options: object) -> list[tuple[object, ...]]:
        nonlocal count
        count += 1
        return await run(*given, **options)  # type: ignore[arg-type]

    fresh._opened().run = counted  # type: ignore[method-assign]
    try:
        yield fresh, lambda: count
    finally:
        await fresh.close()


class TestS13AtOnce:
    async def test_steps_on_many_keys_never_wait_for_each_other_in_a_circle(
        self, url: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """S13: whatever is there and whatever is missing, in whatever order it was asked for."""
        monkeypatch.setattr(link, "UNDONE", set())  # a deadlock is an error
        dice, ids = random.Random(7), [*"abcdefgh"]
        eager = f"{url}&options=-cdeadlock_timeout%3D5ms"
        until = time.monotonic() + 4

        def some() -> list[str]:
            return dice.sample(ids, dice.randint(2, len(ids)))

        async def storm(store: PostgresStore) -> None:
            while time.monotonic() < until:
                match dice.randrange(6):
                    case 0 | 1:
                        tags = tuple(dice.sample(["eu", "us", "shop"], 2))
                        puts = {id_: new_put(store, tags=tags, late=tags) for id_ in some()}
                        await store.put(KIND, puts)
                    case 2:
                        await store.invalidate(KIND, some())
                    case 3:
                        await store.delete(KIND, some())
                    case 4:
                        await store.invalidate_tag(dice.choice(["eu", "us", "shop"]))
                    case _:
                        grants = await store.acquire(KIND, [Ask(id_) for id_ in some()], 30)
                        leases = [it for it in grants.values() if isinstance(it, Lease)]
                        await store.release(KIND, leases)
                await store.evict(time.time() + dice.choice([0, 1e9]))

        async with opened(eager) as one, opened(eager) as two:
            await asyncio.gather(*(storm(store) for store in (one, two, one, two, one, two)))

    @pytest.mark.proof
    async def test_eight_processes_put_one_key_at_once(self, url: str) -> None:
        """E35: every put is acknowledged, one of the values is there, and it has no mark."""
        rounds, writers = 12, 8
        async with opened(url) as store:
            await put_value(store, b"before")
            with ExitStack() as stack:
                workers = [
                    Process(stack, "store_puts", url, number, is_ready=False)
                    for number in range(writers)
                ]
                for worker in workers:
                    assert worker.line() == "ready"
                for turn in range(rounds):
                    for worker in workers:
                        worker.go()
                    assert {worker.line() for worker in workers} <= {"stored", "replaced"}
                    values = {b"%d of %d" % (number, turn) for number in range(writers)}
                    assert await shown(store) in values


@pytest.fixture(scope="module")
def mortal() -> Iterator[PostgresServer]:
    """A server that these tests may kill."""
    with postgres_serving("synchronous_commit=on") as server:
        yield server


class TestS13Crashes:
    @pytest.mark.parametrize("is_unlogged", [False, True], ids=["logged", "unlogged"])
    async def test_a_put_from_before_a_crash_does_nothing_after_it(
        self, mortal: PostgresServer, monkeypatch: pytest.MonkeyPatch, is_unlogged: bool
    ) -> None:
        """S13: the trace of the deletion may be lost; what the put's sender had heard is void."""
        monkeypatch.setattr(link, "PREPARED_AFTER", None)
        url = mortal.new_store()
        await create(url, unlogged=is_unlogged)
        async with (
            FlakyProxy(HOST, mortal.port) as proxy,
            opened(through(proxy, url)) as store,
        ):
            await put_value(store, b"old", "b")
            await give_up(proxy, store.put(KIND, {"a": new_put(store, b"late")}), b"put")
            await store.delete(KIND, ["a"])
            mortal.stop()
            mortal.start()
            proxy.cut()
            await arrive(mortal, proxy)
            assert await copy_in(store) is None
            late = (await store.put(KIND, {"a": new_put(store)}))["a"]
            assert late.outcome in {AGAIN, STORED}  # it may have heard when it connected
            await put_value(store, b"new")
            assert await shown(store) == b"new"
            assert await shown(store, "b") == (None if is_unlogged else b"old")
            await store.invalidate(KIND, ["a"])
            assert await shown(store) is None

    async def test_stamps_go_on_after_a_crash(self, mortal: PostgresServer) -> None:
        """S13: none is given out twice, so a put after the crash is later than any before it."""
        url = mortal.new_store()
        async with opened(url) as store:
            before = await put(store, new_put(store))
            mortal.stop()
            mortal.start()
            result = await put(store, new_put(store, b"new"))
            assert result.stamp > before.stamp
            assert await shown(store) == b"new"

    async def test_stamps_of_another_server_count_for_nothing(
        self, mortal: PostgresServer, url: str
    ) -> None:
        """S13: its stamps may be higher. The put is asked for again, and done."""
        async with opened(mortal.new_store()) as elsewhere, opened(url) as store:
            for _ in range(20):
                await put_value(elsewhere)
            await put_value(store)
            heard = store._opened().heard
            heard.life = elsewhere._opened().heard.life
            heard.stamp = elsewhere._opened().heard.stamp
            assert (await store.put(KIND, {"a": new_put(store)}))["a"].outcome is AGAIN
            assert (await store.put(KIND, {"a": new_put(store, b"x")}))["a"].outcome is STORED
            heard.life = 0
            await store.invalidate(KIND, ["a"])
            assert await shown(store) is None

    async def test_a_stamp_that_was_never_given_out_counts_for_nothing(self, url: str) -> None:
        """S13: else whatever is late would be done."""
        async with opened(url) as store:
            await put_value(store)
            store._opened().heard.hear_stamp(2**62)
            assert (await store.put(KIND, {"a": new_put(store)}))["a"].outcome is AGAIN
            assert (await store.put(KIND, {"a": new_put(store)}))["a"].outcome is STORED
