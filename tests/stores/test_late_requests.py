"""S8, T7: requests that arrive late or twice at real servers, behind proxies that hold them."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from stillfresh import Policy
from stillfresh.stores.contract import Ask, Copy, Lease, Store
from stillfresh.stores.dynamodb import DynamoStore
from stillfresh.stores.dynamodb.leases import Leases
from stillfresh.stores.redis import RedisStore
from stillfresh.testing import ManualClock
from tests.kit.proxies.flaky import FlakyProxy
from tests.kit.proxies.lossy import LossyProxy, lossy
from tests.kit.servers.aws import Aws
from tests.kit.servers.valkey import HOST, Server

KIND = "price"
NOW = 1_700_000_000.0
POLICY = Policy(60, 60, 60)


@asynccontextmanager
async def opened(*stores: Store) -> AsyncIterator[None]:
    for store in stores:
        await store.open()
    try:
        yield
    finally:
        for store in stores:
            await store.close()


async def leased(store: Store, seen: str | None = None, *tags: str) -> Lease:
    grant = (await store.acquire(KIND, [Ask("a", seen, tags)], 30))["a"]
    assert isinstance(grant, Lease), grant
    return grant


async def publishes(store: Store, lease: Lease, value: bytes = b"old") -> bool:
    copy = Copy(lease.token, NOW, POLICY, value)
    return await store.publish(KIND, {"a": (lease, copy)}) == set()


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

    def __init__(self, method: Callable[..., Awaitable[None]]) -> None:
        self.reached = asyncio.Event()
        self.opens = asyncio.Event()
        self._method = method

    def __get__(self, owner: Leases, _: type[Leases]) -> Callable[..., Awaitable[None]]:
        async def waiting(*args: Any, **options: Any) -> None:
            self.reached.set()
            await self.opens.wait()
            await self._method(owner, *args, **options)

        return waiting
