"""S2, S5, S9: replies that get lost, real servers that go away, refuse and come back."""

import asyncio
import logging
import re
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import uvloop

from stillfresh import Cache, ConfigError, NotOpen, Origin, Policy, StoreError
from stillfresh.stores.breaker import FIRST_PAUSE, LONGEST_PAUSE, Breaker
from stillfresh.stores.contract import Ask, Copy, Failure, Held, Lease, Mark, Record, Superseded
from stillfresh.stores.redis import RedisStore
from stillfresh.stores.redis.link import Link
from stillfresh.testing import ManualClock
from tests.kit.engine import until
from tests.kit.proxies.flaky import FlakyProxy, Loss
from tests.kit.servers.valkey import HOST, Server, binary_of, free_port, serving

KIND = "price"
LOSSES: list[Loss] = ["replies", "requests", "silently"]
DEADLINE = 30.0


@asynccontextmanager
async def opened(store: RedisStore) -> AsyncIterator[RedisStore]:
    await store.open()
    try:
        yield store
    finally:
        await store.close()


@pytest.fixture
async def proxy(valkey: Server, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[FlakyProxy]:
    async with FlakyProxy(HOST, valkey.port) as proxy:
        proxy.hurry(monkeypatch, "redis.link")
        yield proxy


@pytest.fixture
async def store(proxy: FlakyProxy, prefix: str) -> AsyncIterator[RedisStore]:
    """Through the proxy."""
    url = f"redis://{HOST}:{proxy.port}/0"
    async with opened(RedisStore(url, prefix=prefix, timeout=30)) as store:
        yield store


async def teach(store: RedisStore) -> None:
    """The server knows every script, so that what is lost is what a step did."""
    lease = await lease_of(store, "taught")
    await store.renew(KIND, [lease], 30)
    await store.publish(KIND, {"taught": (lease, copy_by(lease))})
    await store.release(KIND, [lease])
    await store.invalidate(KIND, ["taught"])
    await store.invalidate_tag("taught")
    await store.delete(KIND, ["taught"])


@pytest.fixture
async def other(valkey: Server, prefix: str) -> AsyncIterator[RedisStore]:
    """Another machine's, straight to the server."""
    async with opened(RedisStore(valkey.address, prefix=prefix, timeout=10)) as store:
        await teach(store)
        yield store


@pytest.fixture
def prefix(request: pytest.FixtureRequest) -> str:
    return f"{request.node.name.partition('[')[0][:30]}-{time.monotonic_ns()}"


async def lease_of(store: RedisStore, id_: str = "a", *tags: str) -> Lease:
    record = (await store.read(KIND, [id_])).get(id_, Record())
    seen = record.copy.generation if record.copy is not None else None
    grant = (await store.acquire(KIND, [Ask(id_, seen, tags)], 30))[id_]
    assert isinstance(grant, Lease), grant
    return grant


def copy_by(lease: Lease, value: bytes = b"value") -> Copy:
    return Copy(lease.token, time.time(), Policy(60), value)


async def copy_in(store: RedisStore, id_: str = "a") -> Copy | None:
    return (await store.read(KIND, [id_])).get(id_, Record()).copy


@pytest.mark.parametrize("loss", LOSSES)
class TestS2LostReply:
    """An answer that got lost is settled by looking again, never guessed."""

    async def test_a_lease_whose_reply_was_lost_is_known_to_be_ours(
        self, store: RedisStore, other: RedisStore, proxy: FlakyProxy, loss: Loss
    ) -> None:
        """Who was granted it learns so, and it is nobody else's."""
        proxy.lose(loss, to=b"EVALSHA", times=1)
        lease = (await store.acquire(KIND, [Ask("a")], 30))["a"]
        assert proxy.lost == 1
        assert isinstance(lease, Lease)
        assert isinstance((await other.acquire(KIND, [Ask("a")], 30))["a"], Held)
        assert await store.publish(KIND, {"a": (lease, copy_by(lease))}) == set()

    async def test_a_publication_whose_reply_was_lost_is_done_once(
        self, store: RedisStore, other: RedisStore, proxy: FlakyProxy, loss: Loss
    ) -> None:
        """Done once, and known to be done."""
        leases = {id_: await lease_of(store, id_) for id_ in "abc"}
        await other.invalidate(KIND, ["b"])
        proxy.lose(loss, to=b"EVALSHA", times=1)
        copies = {id_: (lease, copy_by(lease)) for id_, lease in leases.items()}
        assert await store.publish(KIND, copies) == {"b"}
        assert proxy.lost == 1
        assert await copy_in(other) == copies["a"][1]
        assert await copy_in(other, "b") is None

    @pytest.mark.usefixtures("other")
    async def test_a_renewal_and_a_release(
        self, store: RedisStore, proxy: FlakyProxy, loss: Loss
    ) -> None:
        """The holder goes on holding; the failure is noted once."""
        lease = await lease_of(store)
        proxy.lose(loss, to=b"EVALSHA", times=1)
        assert await store.renew(KIND, [lease], 30) == set()
        failure = Failure(1, time.time() + 5, "TimeoutError")
        proxy.lose(loss, to=b"EVALSHA", times=1)
        await store.release(KIND, [lease], {"a": failure})
        assert proxy.lost == 2
        assert await store.read(KIND, ["a"]) == {"a": Record(None, None, failure)}

    async def test_an_invalidation_whose_reply_was_lost_is_delivered(
        self, store: RedisStore, other: RedisStore, proxy: FlakyProxy, loss: Loss
    ) -> None:
        """Delivered, by key and by tag."""
        lease = await lease_of(other, "a", "eu")
        await other.publish(KIND, {"a": (lease, copy_by(lease))})
        proxy.lose(loss, to=b"EVALSHA", times=1)
        await store.invalidate(KIND, ["a"], soft=True)
        copy = await copy_in(other)
        assert copy is not None
        assert copy.mark is Mark.SOFT
        proxy.lose(loss, to=b"EVALSHA", times=1)
        assert await store.invalidate_tag("eu") == [(KIND, "a")]
        copy = await copy_in(other)
        assert copy is not None
        assert copy.mark is Mark.HARD
        assert proxy.lost == 2

    async def test_a_publication_that_nobody_can_tell_of(
        self, store: RedisStore, other: RedisStore, proxy: FlakyProxy, loss: Loss
    ) -> None:
        """Replaced or deleted since, it may have been done."""
        leases = {id_: await lease_of(store, id_) for id_ in "abc"}
        await other.delete(KIND, ["b"])
        put = (await other.acquire(KIND, [Ask("a", take_over=True)], 30))["a"]
        assert isinstance(put, Lease)
        await other.publish(KIND, {"a": (put, copy_by(put))})
        proxy.lose(loss, to=b"EVALSHA", times=1)
        copies = {id_: (lease, copy_by(lease)) for id_, lease in leases.items()}
        superseded = await store.publish(KIND, copies)
        assert isinstance(superseded, Superseded)
        assert superseded == {"a", "b"}
        assert superseded.unsure == {"a", "b"}

    @pytest.mark.usefixtures("other")
    async def test_a_publication_after_its_lease_ran_out(
        self, proxy: FlakyProxy, prefix: str, loss: Loss
    ) -> None:
        """The token is still there, which shows that it was not done."""
        clock = ManualClock(start=time.time())
        url = f"redis://{HOST}:{proxy.port}/0"
        async with opened(RedisStore(url, prefix=prefix, timeout=30, clock=clock)) as store:
            lease = await lease_of(store)
            clock.advance(31)
            proxy.lose(loss, to=b"EVALSHA", times=1)
            superseded = await store.publish(KIND, {"a": (lease, copy_by(lease))})
        assert isinstance(superseded, Superseded)
        assert superseded == {"a"}
        assert not superseded.unsure

    async def test_an_outcome_that_cannot_be_known_is_an_error(
        self, store: RedisStore, proxy: FlakyProxy, loss: Loss
    ) -> None:
        """Nothing is claimed: neither that it was done, nor that it was not."""
        lease = await lease_of(store)
        proxy.lose(loss, to=b"EVALSHA")
        with pytest.raises(StoreError):
            await store.publish(KIND, {"a": (lease, copy_by(lease))})
        with pytest.raises(StoreError):
            await store.invalidate(KIND, ["a"])


class TestS2Settled:
    async def test_a_publication_that_was_overwritten_is_not_taken_for_ours(
        self, other: RedisStore, proxy: FlakyProxy, prefix: str
    ) -> None:
        """Its reply got lost and another published meanwhile: superseded, and theirs stands."""
        url = f"redis://{HOST}:{proxy.port}/0"
        async with opened(RedisStore(url, prefix=prefix, timeout=DEADLINE)) as store:
            lease = await lease_of(store)
            proxy.lose("silently", to=b"EVALSHA", times=1, waits=True)
            ours = store.publish(KIND, {"a": (lease, copy_by(lease))})
            publication = asyncio.create_task(ours)
            async with asyncio.timeout(DEADLINE / 2):
                while await copy_in(other) is None:
                    await asyncio.sleep(0)
            theirs = await lease_of(other)
            await other.publish(KIND, {"a": (theirs, copy_by(theirs, b"theirs"))})
            proxy.cut()
            assert await publication == {"a"}
        copy = await copy_in(other)
        assert copy is not None
        assert copy.value == b"theirs"

    async def test_a_cancelled_step_leaves_nothing_for_the_next_one(
        self, store: RedisStore, other: RedisStore
    ) -> None:
        """A reply that nobody waited for is never taken for another's."""
        for id_ in "ab":
            lease = await lease_of(other, id_)
            await other.publish(KIND, {id_: (lease, copy_by(lease, id_.encode()))})
        for turns in range(12):
            read = asyncio.create_task(store.read(KIND, ["a"]))
            for _ in range(turns):
                await asyncio.sleep(0)
            read.cancel()
            await asyncio.gather(read, return_exceptions=True)
            copy = await copy_in(store, "b")
            assert copy is not None
            assert copy.value == b"b"


class TestS5Breaker:
    def test_a_closed_breaker_lets_every_request_pass(self) -> None:
        """Closed."""
        breaker = Breaker()
        assert all(breaker.allows(now) for now in (0.0, 1.0, 1.0))

    def test_after_a_failure_one_request_passes_for_each_pause(self) -> None:
        """The others are told at once."""
        breaker = Breaker()
        breaker.failed(began=0.0, now=1.0)
        assert not breaker.allows(1.0)
        assert breaker.allows(1.0 + FIRST_PAUSE)
        assert not breaker.allows(1.0 + FIRST_PAUSE)

    def test_pauses_grow_to_a_limit(self) -> None:
        """However long it is unavailable, it is asked every two seconds."""
        breaker, now, pauses = Breaker(), 0.0, []
        for _ in range(8):
            breaker.failed(began=now, now=now)
            step = 0
            while not breaker.allows(now + step * 0.05):
                step += 1
            pauses.append(step * 0.05)
            now += step * 0.05
        assert pauses[:3] == pytest.approx([0.1, 0.2, 0.4])
        assert pauses[-1] == LONGEST_PAUSE

    def test_failures_of_one_moment_count_once(self) -> None:
        """Fifty readers were under way: that is one failure."""
        breaker = Breaker()
        for _ in range(50):
            breaker.failed(began=0.0, now=1.0)
        assert breaker.allows(1.0 + FIRST_PAUSE)

    def test_the_first_success_ends_it(self) -> None:
        """And the next pause is short again."""
        breaker = Breaker()
        for moment in (1.0, 2.0, 3.0):
            breaker.failed(began=moment, now=moment)
        breaker.succeeded()
        assert breaker.allows(3.0)
        breaker.failed(began=4.0, now=4.0)
        assert breaker.allows(4.0 + FIRST_PAUSE)


@pytest.fixture
def mortal(tmp_path: Path) -> Iterator[Server]:
    """A server of this test's own."""
    binary = binary_of("valkey")
    assert binary is not None
    with serving(binary, tmp_path) as server:
        yield server


class TestS5Away:
    async def test_an_away_server_is_asked_now_and_then_only(
        self, store: RedisStore, proxy: FlakyProxy, caplog: pytest.LogCaptureFixture
    ) -> None:
        """It swallows everything: one reader in a while waits for it, the others not at all."""
        await store.read(KIND, ["a"])
        proxy.lose("silently")
        before = proxy.requests
        for _ in range(200):
            with pytest.raises(StoreError, match="is unavailable: Timeout"):
                await store.read(KIND, ["a"])
        assert proxy.requests - before <= 5
        assert caplog.text.count("the Redis server is unavailable") == 1

    async def test_the_reason_ends_without_a_full_stop(self) -> None:
        """More follows it: redis-py writes one."""
        async with opened(RedisStore(f"redis://{HOST}:{free_port()}/0")) as store:
            with pytest.raises(StoreError, match=r"failed \(.*\); stillfresh tries it again"):
                await store.read(KIND, ["a"])

    async def test_an_invalidation_is_tried_however_long_it_was_away(
        self, store: RedisStore, proxy: FlakyProxy
    ) -> None:
        """Nobody can do without it: it does not wait for the end of a pause."""
        proxy.lose("replies")
        for _ in range(20):
            with pytest.raises(StoreError):
                await store.invalidate(KIND, ["a"])
        proxy.heal()
        await store.invalidate(KIND, ["a"])
        assert await store.read(KIND, ["a"]) == {}

    async def test_broken_connections_are_all_left_at_once(
        self, store: RedisStore, proxy: FlakyProxy
    ) -> None:
        """Ten that idled through a restart do not cost ten failures: not even one."""
        await asyncio.gather(*(store.read(KIND, ["a"]) for _ in range(10)))
        proxy.cut()
        assert await store.read(KIND, ["a"]) == {}

    @pytest.mark.parametrize("runs", [asyncio.run, uvloop.run])
    def test_a_connection_that_ended_while_it_was_idle_is_no_failure(
        self, mortal: Server, runs: Callable[[Coroutine[Any, Any, None]], None]
    ) -> None:
        """On every event loop: uvloop has an error of its own for what is sent then."""

        async def read_again() -> None:
            async with opened(RedisStore(mortal.address, timeout=30)) as store:
                await store.read(KIND, ["a"])
                link = store._opened()
                assert isinstance(link, Link)
                (idle,) = link._idle
                mortal.command("CLIENT KILL TYPE normal")
                await until(idle._transport.is_closing)
                await asyncio.sleep(0)  # uvloop closes its handle a turn later
                assert await store.read(KIND, ["a"]) == {}

        runs(read_again())

    async def test_a_long_answer_may_take_its_time_as_long_as_it_goes_on(
        self, valkey: Server
    ) -> None:
        """The time-out is for the next reply, not for all that one round trip brings."""
        connections = Link(valkey.address, most=1, timeout=1, options={})
        waits = [("BLPOP", b"nothing", "0.1")] * 12
        assert await connections.send(waits) == [None] * 12
        with pytest.raises(TimeoutError):
            await connections.send([("BLPOP", b"nothing", "5")])
        assert await connections.send([("PING",)]) == [b"PONG"]
        await connections.close()

    async def test_waiting_for_a_connection_is_no_failure(self, valkey: Server) -> None:
        """The server is well: only what it takes itself counts against it."""
        connections = Link(valkey.address, most=1, timeout=1, options={})
        busy = asyncio.create_task(connections.send([("BLPOP", b"nothing", "0.1")] * 12))
        await asyncio.sleep(0)
        assert await connections.send([("PING",)]) == [b"PONG"]
        assert busy.done()
        await connections.close()

    async def test_callers_that_wait_for_a_lost_server_are_told_together(self) -> None:
        """One finds out; those who waited behind it do not find out one by one."""
        came: list[asyncio.StreamWriter] = []

        async def silent(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            came.append(writer)

        async with await asyncio.start_server(silent, HOST, 0) as server:
            url = f"redis://{HOST}:{server.sockets[0].getsockname()[1]}/0"
            connections = Link(url, most=1, timeout=0.2, options={})
            sends = [connections.send([("PING",)]) for _ in range(20)]
            ends = await asyncio.gather(*sends, return_exceptions=True)
            assert {type(end) for end in ends} == {TimeoutError}
            assert len(came) == 1
            for writer in came:
                writer.close()
            await connections.close()

    async def test_large_values_come_in_several_replies(self, mortal: Server) -> None:
        """So that each has its own time: a long answer goes on, and is no failure."""
        async with opened(RedisStore(mortal.address, timeout=30)) as store:
            await store.read(KIND, [str(number) for number in range(100)])
        assert "cmdstat_mget:calls=5," in mortal.command("INFO commandstats")

    async def test_a_store_opens_without_a_server(
        self, mortal: Server, caplog: pytest.LogCaptureFixture
    ) -> None:
        """It begins without one, says so, and works when there is one."""
        mortal.stop()
        with caplog.at_level(logging.WARNING):
            async with opened(RedisStore(mortal.address, timeout=30)) as store:
                assert "the Redis server is unavailable" in caplog.text
                with pytest.raises(StoreError, match="unavailable"):
                    await store.read(KIND, ["a"])
                mortal.start()
                await store.invalidate(KIND, ["a"])
                assert await store.read(KIND, ["a"]) == {}
        assert "the Redis server answers again" in caplog.text

    async def test_the_cache_goes_on_without_it_and_comes_back_by_itself(
        self, mortal: Server
    ) -> None:
        """Memory and loaders answer, nothing is raised but by invalidations, `stats` says so."""
        loads: list[str] = []
        cache = Cache(mortal.url())

        @cache.batched("price", fresh_for=60, stale_for=60)
        async def prices(skus: list[str]) -> Mapping[str, int]:
            loads.extend(skus)
            return dict.fromkeys(skus, len(loads))

        async with cache:
            assert await prices("a") == 1
            mortal.stop()
            assert await prices("a") == 1
            assert (await prices.get("b")).origin is Origin.LOADED
            with pytest.raises(StoreError):
                await prices.invalidate("a")
            with pytest.raises(StoreError):
                await cache.invalidate_tag("eu")
            stats = await cache.stats()
            assert stats.store is None
            assert stats.resources["price"].store_errors > 0
            mortal.start()
            await eventually_stored(cache)
            assert await prices("c") == len(loads)
            answer = await prices.get("c")
            assert answer.origin is Origin.STORE
            await prices.invalidate("a")

    async def test_stopped_and_started_under_load(self, mortal: Server) -> None:
        """Sixteen readers go on, through two deaths and a long silence: none sees an error."""
        cache = Cache(mortal.url(timeout="200ms"))
        running, read = True, 0

        @cache.batched("price", fresh_for=0.02, stale_for=0.02)
        async def prices(skus: list[str]) -> Mapping[str, int]:
            return dict.fromkeys(skus, 1)

        async def reader(number: int) -> None:
            nonlocal read
            while running:
                assert await prices(f"sku-{number % 4}") == 1
                read += 1
                await asyncio.sleep(0)

        async with cache:
            readers = [asyncio.create_task(reader(number)) for number in range(16)]
            for goes, comes in (
                (mortal.stop, mortal.start),
                (mortal.pause, mortal.go_on),
                (mortal.stop, mortal.start),
            ):
                await eventually_stored(cache)
                goes()
                seen = read
                await until(lambda seen=seen: read > seen + 200)  # type: ignore[misc]
                comes()
            await eventually_stored(cache)
            running = False
            await asyncio.gather(*readers)


async def eventually_stored(cache: Cache) -> None:
    deadline = time.monotonic() + DEADLINE
    while (await cache.stats()).store is None:
        assert time.monotonic() < deadline
        await asyncio.sleep(0.02)


@pytest.fixture
def cluster_node(tmp_path: Path) -> Iterator[Server]:
    """One node of a cluster, which has no others yet."""
    binary = binary_of("valkey")
    assert binary is not None
    options = ["--cluster-enabled", "yes", "--cluster-port", str(free_port())]
    with serving(binary, tmp_path, *options) as server:
        yield server


class TestS9ClusterNode:
    async def test_a_plain_address_of_a_cluster_node_is_refused(self, cluster_node: Server) -> None:
        """When it is opened, with what to do: most keys would belong to other nodes."""
        store = RedisStore(cluster_node.address)
        with pytest.raises(ConfigError, match=r"cluster mode is on; write redis\+cluster://"):
            await store.open()
        with pytest.raises(NotOpen):
            await store.read(KIND, ["a"])

    async def test_a_server_that_becomes_a_cluster_node_says_the_same(
        self, store: RedisStore, proxy: FlakyProxy, cluster_node: Server
    ) -> None:
        """Opened before, or unavailable then: the first step that is redirected says so."""
        proxy.lead_to(HOST, cluster_node.port)
        proxy.cut()
        with pytest.raises(StoreError, match=r"write redis\+cluster://"):
            await store.invalidate(KIND, ["a"])


class TestS5Refused:
    async def test_a_server_that_forgot_the_scripts_is_taught_again(
        self, valkey: Server, other: RedisStore
    ) -> None:
        """`SCRIPT FLUSH`, or a restart."""
        lease = await lease_of(other)
        valkey.command("SCRIPT FLUSH")
        assert await other.publish(KIND, {"a": (lease, copy_by(lease))}) == set()

    async def test_a_replica_refuses_to_write_and_is_left(self, mortal: Server) -> None:
        """Reads go on; a primary again, it works again."""
        async with opened(RedisStore(mortal.address, timeout=30)) as store:
            lease = await lease_of(store)
            await store.publish(KIND, {"a": (lease, copy_by(lease))})
            mortal.command("CONFIG SET replica-serve-stale-data yes")
            mortal.command(f"REPLICAOF {HOST} 1")
            with pytest.raises(StoreError, match="read only replica"):
                await store.invalidate(KIND, ["a"])
            assert await copy_in(store) is not None
            mortal.command("REPLICAOF NO ONE")
            await store.invalidate(KIND, ["a"])

    async def test_after_a_failover_the_store_finds_the_new_primary(
        self, valkey: Server, mortal: Server, store: RedisStore, proxy: FlakyProxy
    ) -> None:
        """The address leads to another server now; the old one refuses to write, and is left."""
        await lease_of(store)
        proxy.lead_to(HOST, mortal.port)
        proxy.cut()
        lease = await lease_of(store)
        mortal.command(f"REPLICAOF {HOST} 1")
        proxy.lead_to(HOST, valkey.port)
        with pytest.raises(StoreError, match="read only replica"):
            await store.publish(KIND, {"a": (lease, copy_by(lease))})
        assert await store.publish(KIND, {"a": (lease, copy_by(lease))}) == {"a"}

    async def test_a_full_server_still_invalidates(self, mortal: Server) -> None:
        """Nothing new is kept, and said so; what is there is read, marked and deleted."""
        async with opened(RedisStore(mortal.address, timeout=30)) as store:
            lease = await lease_of(store)
            await store.publish(KIND, {"a": (lease, copy_by(lease))})
            held = await lease_of(store, "b")
            mortal.command("CONFIG SET maxmemory 1")
            with pytest.raises(StoreError, match="raise maxmemory, or shorten"):
                await store.acquire(KIND, [Ask("c")], 30)
            with pytest.raises(StoreError, match="maxmemory"):
                await store.publish(KIND, {"b": (held, copy_by(held))})
            await store.invalidate(KIND, ["a", "b"])
            copy = await copy_in(store)
            assert copy is not None
            assert copy.mark is Mark.HARD
            await store.delete(KIND, ["a"])
            mortal.command("CONFIG SET maxmemory 0")
            assert await store.publish(KIND, {"b": (held, copy_by(held))}) == {"b"}
            assert await store.read(KIND, ["a", "b"]) == {}

    @pytest.mark.parametrize("at", [":wrong@", "nobody:wrong@"])
    async def test_a_wrong_password_is_told_at_once(self, mortal: Server, at: str) -> None:
        """And never shown."""
        mortal.command("CONFIG SET requirepass secret")
        store = RedisStore(mortal.address.replace("//", f"//{at}"))
        with pytest.raises(StoreError, match="user:password@host") as caught:
            await store.open()
        assert "wrong" not in str(caught.value)

    async def test_a_missing_password_is_told_at_once(self, mortal: Server) -> None:
        """With the place where it belongs."""
        mortal.command("CONFIG SET requirepass secret")
        with pytest.raises(StoreError, match="user:password@host"):
            await RedisStore(mortal.address).open()

    async def test_a_right_password_opens(self, mortal: Server) -> None:
        mortal.command("CONFIG SET requirepass secret")
        url = mortal.address.replace("//", "//:secret@")
        async with opened(RedisStore(url)) as store:
            assert await store.read(KIND, ["a"]) == {}

    async def test_a_database_that_is_not_there_is_told_at_once(self, valkey: Server) -> None:
        """Not when the first value is stored; the error names the number in the address."""
        store = RedisStore(valkey.address.replace("/0", "/99"))
        with pytest.raises(StoreError, match="out of range; the address names database 99"):
            await store.open()

    async def test_a_server_that_drops_keys_is_known(self, mortal: Server) -> None:
        """By its policy and its limit, asked anew on every connection."""
        mortal.command("CONFIG SET maxmemory-policy allkeys-lru")
        async with opened(RedisStore(mortal.address, timeout=30)) as store:
            assert not store._opened().drops_keys
            mortal.command("CONFIG SET maxmemory 100mb")
            mortal.command("CLIENT KILL TYPE normal")
            await store.read(KIND, ["a"])
            assert store._opened().drops_keys

    async def test_the_permissions_that_the_docs_list_are_enough(self, mortal: Server) -> None:
        """A user with the commands that docs/stores.md lists, and no others."""
        page = (Path(__file__).parents[2] / "docs" / "stores.md").read_text()
        allowed = re.findall(r"\+[a-z|]+", page.partition("With an ACL")[2])
        called = page.partition("what the scripts call (`")[2].partition("`")[0].split()
        rules = [*allowed, *(f"+{command}" for command in called)]
        assert len(rules) > 20
        said = mortal.command("ACL SETUSER shop on >word ~shop:*", *rules)
        assert said == "+OK\r\n"
        url = mortal.address.replace("//", "//shop:word@").replace("/0", "/1")
        async with opened(RedisStore(url, prefix="shop")) as store:
            await teach(store)
            lease = await lease_of(store, "a", "eu")
            failure = Failure(1, time.time() + 5, "TimeoutError")
            await store.release(KIND, [lease], {"a": failure})
            asks = [Ask(f"b-{number}", tags=("eu",)) for number in range(3_000)]
            await store.acquire(KIND, asks, 30)
            assert (await store.stats()).leases == 3_000
            assert await store.evict(time.time() + 1e6) == 3_001
