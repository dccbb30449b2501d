"""S8, T7: requests that arrive late or twice at real servers, behind proxies that hold them."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from stillfresh import Cache, StoreError
from stillfresh.stores.contract import Ask, Held
from stillfresh.stores.dynamodb import DynamoStore
from stillfresh.stores.dynamodb.leases import Leases
from stillfresh.stores.redis import RedisStore
from stillfresh.testing import ManualClock
from tests.kit.engine import until
from tests.kit.late_steps import KIND, NOW, leased, opened, publishes
from tests.kit.proxies.flaky import FlakyProxy
from tests.kit.proxies.lossy import LossyProxy, lossy
from tests.kit.servers.aws import Aws
from tests.kit.servers.valkey import HOST, Server


class TestS8Redis:
    """T7: one request is held back in front of a real Valkey, and arrives when a test says so."""

    @pytest.fixture
    async def proxy(self, valkey: Server) -> AsyncIterator[FlakyProxy]:
        async with FlakyProxy(HOST, valkey.port) as proxy:
            yield proxy

    @pytest.fixture
    async def store(self, proxy: FlakyProxy, valkey: Server) -> AsyncIterator[RedisStore]:
        """Through the proxy; the server knows every script already."""
        prefix = f"late-{time.monotonic_ns()}"
        store = RedisStore(f"redis://{HOST}:{proxy.port}/0", prefix=prefix, timeout=10)
        self.other = RedisStore(valkey.address, prefix=prefix, timeout=10)
        async with opened(store, self.other):
            await self.other.invalidate(KIND, ["a"])
            await self.other.release(KIND, [await leased(self.other)])
            yield store

    async def test_a_resent_acquire_never_revives_a_voided_lease(
        self, store: RedisStore, proxy: FlakyProxy
    ) -> None:
        """The history that was measured: the first ACQUIRE arrives after the invalidation."""
        proxy.lose("late", to=b"EVALSHA", times=1)
        lease = await leased(store)
        assert len(proxy.held) == 1
        await self.other.invalidate(KIND, ["a"])
        await proxy.deliver()
        assert not await publishes(store, lease)
        assert (await store.renew(KIND, [lease], 30)) == {"a"}

    async def test_a_request_that_arrives_twice_grants_two_tokens(
        self, store: RedisStore, proxy: FlakyProxy
    ) -> None:
        """Without any retry of ours: the very bytes that granted the lease grant another one."""
        proxy.lose("late", to=b"EVALSHA", times=1)
        lease = await leased(store)
        for _ in range(2):
            await self.other.delete(KIND, ["a"])
            await proxy.deliver()
            assert not await publishes(store, lease)
        assert (await store.read(KIND, ["a"]))["a"].copy is None

    async def test_a_retry_recognises_its_lease(self, store: RedisStore, proxy: FlakyProxy) -> None:
        """The first ACQUIRE took effect, or arrives while the lease is held: it is the same."""
        proxy.lose("replies", to=b"EVALSHA", times=1)
        lease = await leased(store)
        assert proxy.lost == 1
        assert await publishes(store, lease)
        proxy.lose("late", to=b"EVALSHA", times=1)
        lease = await leased(store, lease.token)
        await proxy.deliver()
        assert await publishes(store, lease, b"new")


class TestS15LeasesLeftBehind:
    """A late ACQUIRE takes the lease, and nobody loads: its own process takes it at once."""

    @pytest.fixture
    async def proxy(self, valkey: Server) -> AsyncIterator[FlakyProxy]:
        async with FlakyProxy(HOST, valkey.port) as proxy:
            yield proxy

    @pytest.fixture
    async def store(self, proxy: FlakyProxy, valkey: Server) -> AsyncIterator[RedisStore]:
        self.prefix = f"left-{time.monotonic_ns()}"
        self.url = f"redis://{HOST}:{proxy.port}/0"
        store = RedisStore(self.url, prefix=self.prefix, timeout=10)
        self.other = RedisStore(valkey.address, prefix=self.prefix, timeout=10)
        async with opened(store, self.other):
            await self.other.release(KIND, [await leased(self.other)])
            await self.other.invalidate(KIND, ["b"])
            yield store

    async def taken_by_nobody(self, store: RedisStore, proxy: FlakyProxy) -> None:
        """Both requests are under way when their sender gives up, and arrive later."""
        proxy.lose("late", to=b"EVALSHA")
        with pytest.raises(StoreError):
            await leased(store)
        proxy.heal()
        await store.invalidate(KIND, ["b"])  # the server answers again
        await proxy.deliver()
        assert isinstance((await self.other.acquire(KIND, [Ask("a")], 30))["a"], Held)

    async def test_a_request_that_was_given_up(self, store: RedisStore, proxy: FlakyProxy) -> None:
        """The next request of the same process gets the lease, and its load is published."""
        await self.taken_by_nobody(store, proxy)
        lease = await leased(store)
        assert await publishes(store, lease)

    async def test_a_request_whose_caller_was_cancelled(
        self, store: RedisStore, proxy: FlakyProxy
    ) -> None:
        """It arrived, and nobody heard the answer."""
        proxy.lose("silently", to=b"EVALSHA", times=1, waits=True)
        asking = asyncio.create_task(leased(store))
        await until(lambda: proxy.lost)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        assert await publishes(store, await leased(store))

    async def test_the_first_of_two_requests(self, store: RedisStore, proxy: FlakyProxy) -> None:
        """It arrives when the load of the second has ended: published, superseded, given up."""
        seen = None
        for end in ("published", "superseded", "released"):
            proxy.held.clear()
            proxy.lose("late", to=b"EVALSHA", times=1)
            lease = await leased(store, seen)
            if end == "superseded":
                await self.other.invalidate(KIND, ["a"])
            if end == "released":
                await store.release(KIND, [lease])
            else:
                assert await publishes(store, lease) is (end == "published")
            await proxy.deliver()
            copy = (await store.read(KIND, ["a"]))["a"].copy
            seen = None if copy is None else copy.generation
            again = await leased(store, seen)
            assert again.token != lease.token
            assert await publishes(store, again)
            seen = again.token

    async def test_a_lease_under_which_this_process_loads_is_held(
        self, store: RedisStore, proxy: FlakyProxy
    ) -> None:
        """Sent twice or not: two loads at once are what leases prevent."""
        for times in (0, 1):
            proxy.lose("late", to=b"EVALSHA", times=times)
            lease = await leased(store)
            await proxy.deliver()
            assert isinstance((await store.acquire(KIND, [Ask("a")], 30))["a"], Held)
            await store.release(KIND, [lease])
        await self.taken_by_nobody(store, proxy)
        lease = await leased(store)
        assert isinstance((await store.acquire(KIND, [Ask("a")], 30))["a"], Held)
        assert await publishes(store, lease)

    async def test_another_process_holds_what_it_holds(
        self, store: RedisStore, proxy: FlakyProxy
    ) -> None:
        """Requests that were given up change nothing about it."""
        lease = await leased(self.other)
        proxy.lose("late", to=b"EVALSHA")
        with pytest.raises(StoreError):
            await leased(store)
        proxy.heal()
        await store.invalidate(KIND, ["b"])
        await proxy.deliver()
        assert isinstance((await store.acquire(KIND, [Ask("a")], 30))["a"], Held)
        assert (await store.read(KIND, ["a"]))["a"].held_until is not None
        assert await publishes(self.other, lease)

    async def test_a_read_says_that_nobody_loads(
        self, store: RedisStore, proxy: FlakyProxy
    ) -> None:
        """So callers that wait for the lease ask for it; in other processes it counts as held."""
        await self.taken_by_nobody(store, proxy)
        assert (await self.other.read(KIND, ["a"]))["a"].held_until is not None
        assert (await store.read(KIND, ["a"]))["a"].held_until is None
        assert (await store.read(KIND, ["a"], {"a": "known"}))["a"].held_until is None
        await leased(store)
        assert (await store.read(KIND, ["a"]))["a"].held_until is not None

    async def test_no_reader_waits_for_it(self, store: RedisStore, proxy: FlakyProxy) -> None:
        """Measured before: readers waited 5 and 13 seconds, for the end of the lease."""
        cache = Cache(f"{self.url}?prefix={self.prefix}&timeout=10s")
        loads = 0

        @cache.batched("stock", fresh_for=60, lease_for=60)
        async def stock(ids: list[str]) -> dict[str, int]:
            nonlocal loads
            loads += 1
            return dict.fromkeys(ids, loads)

        async with cache:
            proxy.lose("late", to=b"EVALSHA")
            assert await stock("a") == 1  # without the lease, and not stored
            proxy.heal()
            await cache.invalidate_tag("the server answers again")
            await proxy.deliver()
            await stock.invalidate("b")
            other = RedisStore(self.url, prefix=self.prefix, timeout=10)
            async with opened(other):
                assert (await other.read("stock", ["a"]))["a"].held_until is not None
            async with asyncio.timeout(20):
                await stock.refresh("a")
            assert loads == 2


class TestS8DynamoDB:
    """T7: every write is held back once in front of a real DynamoDB server, and sent again."""

    @pytest.fixture
    async def proxy(self, aws: Aws, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[LossyProxy]:
        monkeypatch.setattr("stillfresh.stores.aws.FIRST_PAUSE", 0.0)
        async with lossy(aws.endpoint) as proxy:
            yield proxy

    @pytest.fixture
    async def store(self, aws: Aws, proxy: LossyProxy) -> AsyncIterator[DynamoStore]:
        table, clock = aws.new_table(), ManualClock(start=NOW)
        store = Aws(proxy.address, aws.s3_endpoint).store(table, clock)
        self.other = aws.store(table, clock)
        async with opened(store, self.other):
            yield store

    async def test_a_resent_acquire_never_revives_a_voided_lease(
        self, store: DynamoStore, proxy: LossyProxy
    ) -> None:
        """The first PutItem arrives after the invalidation: it leases nothing to its sender."""
        proxy.delays = True
        lease = await leased(store)
        proxy.delays = False
        assert len(proxy.held) == 1
        await self.other.invalidate(KIND, ["a"])
        await proxy.deliver()
        assert not await publishes(store, lease)
        assert (await store.renew(KIND, [lease], 30)) == {"a"}

    async def test_a_retry_recognises_its_lease(
        self, store: DynamoStore, proxy: LossyProxy
    ) -> None:
        """The first PutItem took effect and its answer was lost: that lease is ours."""
        proxy.lose["PutItem"] = 2
        lease = await leased(store)
        assert proxy.seen["PutItem"] == 3
        assert await publishes(store, lease)

    async def test_a_late_row_of_a_tag_replaces_no_later_one(
        self, aws: Aws, store: DynamoStore, proxy: LossyProxy
    ) -> None:
        """Else a step that drops the rows of the earlier lease would drop the row of a load."""
        proxy.delays = True
        first = await leased(store, None, "eu")
        proxy.delays = False
        assert len(proxy.held) == 2
        assert await publishes(store, first)
        second = await leased(self.other, first.token, "eu")
        await proxy.deliver()
        async with aws.raw(store._names.table) as raw:
            (tag,) = [row for row in await raw.rows() if row["pk"]["S"].startswith("TAG#")]
        assert tag["lease_token"]["S"] == second.token
        assert await store.invalidate_tag("eu") == [(KIND, "a")]

    async def test_a_holder_that_lost_its_lease_writes_no_row_of_a_tag(
        self, aws: Aws, store: DynamoStore, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Its lease is deleted between its two writes: the row of the next load stays."""
        slow, deleting = Gate(Leases.write_tags), Gate(Leases.remove_tags)
        third = aws.store(store._names.table, ManualClock(start=NOW))
        async with opened(third), asyncio.TaskGroup() as group:
            with monkeypatch.context() as patch:
                patch.setattr(Leases, "write_tags", slow)
                first = group.create_task(leased(store, None, "eu"))
                await slow.reached.wait()
            with monkeypatch.context() as patch:
                patch.setattr(Leases, "remove_tags", deleting)
                deleted = group.create_task(third.delete(KIND, ["a"]))
                await deleting.reached.wait()
            second = await leased(self.other, None, "eu")
            slow.opens.set()
            await first
            deleting.opens.set()
            await deleted
            assert await third.invalidate_tag("eu") == [(KIND, "a")]
            assert not await publishes(self.other, second)
            assert not await publishes(store, first.result())


class Gate:
    """A method that waits before it is done."""

    def __init__(self, method: Callable[..., Awaitable[object]]) -> None:
        self.reached = asyncio.Event()
        self.opens = asyncio.Event()
        self._method = method

    def __get__(self, owner: Leases, _: type[Leases]) -> Callable[..., Awaitable[object]]:
        async def waiting(*args: Any, **options: Any) -> object:
            self.reached.set()
            await self.opens.wait()
            return await self._method(owner, *args, **options)

        return waiting
