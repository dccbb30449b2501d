"""S8, S13, S15: requests to a real DynamoDB server that arrive after their sender has given up."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from functools import partial
from typing import Any

import pytest

from stillfresh.stores.contract import (
    Ask,
    Copy,
    Failure,
    Held,
    Put,
    PutOutcome,
    Record,
)
from stillfresh.stores.dynamodb import DynamoStore
from stillfresh.testing import ManualClock
from tests.kit.late_steps import KIND, NOW, POLICY, leased, opened, publishes
from tests.kit.proxies.lossy import LossyProxy, lossy
from tests.kit.servers.aws import Aws


class Late:
    """A store behind a proxy, and another one beside it on the same table."""

    def __init__(self, aws: Aws, proxy: LossyProxy) -> None:
        self.proxy = proxy
        self.clock = ManualClock(start=NOW)
        self.pausing = asyncio.Event()
        self.goes_on = asyncio.Event()
        self.goes_on.set()
        table = aws.new_table()
        behind = Aws(proxy.address, aws.s3_endpoint)
        self.store = behind.store(table, self.clock, sleep=self.sleep)
        self.other = aws.store(table, self.clock)

    async def sleep(self, seconds: float) -> None:
        """Between two attempts: until the test goes on."""
        if seconds > 10:  # bodies are deleted later than this test ends
            await asyncio.Event().wait()
        self.pausing.set()
        await self.goes_on.wait()

    def new_put(self, value: bytes = b"put", **options: Any) -> Put:
        copy = Copy(self.other.new_generation(), self.clock(), POLICY, value)
        return Put(copy, ("eu",), **options)

    async def record(self, store: DynamoStore | None = None) -> Record:
        return (await (store or self.other).read(KIND, ["a"])).get("a", Record())

    async def give_up(
        self, step: Coroutine[Any, Any, object], operation: str, row: str = ""
    ) -> bool:
        """Cancel the step when its first request of that operation is under way.

        Or the first that names such a row. False if it sends no such request.
        """
        self.proxy.seen.clear()
        self.proxy.held.clear()
        self.proxy.delayed = frozenset({operation})
        self.proxy.delayed_row = row
        self.proxy.delays = True
        self.pausing.clear()
        self.goes_on.clear()
        task = asyncio.create_task(step)
        waiting = asyncio.create_task(self.pausing.wait())
        await asyncio.wait({task, waiting}, return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()
        self.proxy.delays = False
        self.goes_on.set()
        if not self.proxy.held:
            await task
            return False
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return True


@pytest.fixture
async def late(aws: Aws) -> AsyncIterator[Late]:
    """On a server that knows no names of transactions: the rows alone are the fence."""
    async with lossy(aws.endpoint) as proxy:
        proxy.forgets = True
        late = Late(aws, proxy)
        async with opened(late.store, late.other):
            yield late


Step = Callable[[Late], Awaitable[object]]


async def load(it: Late, *tags: str) -> None:
    """Another process loads and publishes."""
    record = await it.record()
    seen = None if record.copy is None else record.copy.generation
    lease = await leased(it.other, seen, *tags)
    assert await publishes(it.other, lease, b"loaded")


async def end_a_load(it: Late, failure: Failure | None = None) -> None:
    """Another process takes the lease, and ends it without a value."""
    record = await it.record()
    seen = None if record.copy is None else record.copy.generation
    failures = {} if failure is None else {"a": failure}
    await it.other.release(KIND, [await leased(it.other, seen)], failures)


async def die_loading(it: Late) -> None:
    """Another process takes the lease, and dies."""
    await leased(it.other)
    it.clock.advance(40)


async def invalidate(it: Late) -> None:
    await it.other.invalidate(KIND, ["a"])


async def invalidate_tag(it: Late) -> None:
    await it.other.invalidate_tag("eu")


async def delete(it: Late) -> None:
    await it.other.delete(KIND, ["a"])


async def evict(it: Late) -> None:
    it.clock.advance(500)
    await it.other.evict(it.clock())


async def put_another(it: Late) -> None:
    answer = await it.other.put(KIND, {"a": it.new_put(b"another")})
    assert answer["a"].outcome is PutOutcome.STORED


async def fail_a_load(it: Late) -> None:
    await end_a_load(it, Failure(1, NOW + 5, "down"))


HISTORIES: dict[str, tuple[tuple[Step, ...], tuple[Step, ...]]] = {
    "invalidated without a copy": ((), (invalidate,)),
    "invalidated": ((load,), (invalidate,)),
    "invalidated once more": ((load, invalidate), (invalidate,)),
    "invalidated twice without a copy": ((invalidate,), (invalidate,)),
    "invalidated by a tag": ((), (invalidate_tag,)),
    "deleted without a copy": ((), (delete,)),
    "deleted": ((load,), (delete,)),
    "deleted twice": ((delete,), (delete,)),
    "put": ((), (put_another,)),
    "put and deleted": ((), (put_another, delete)),
    "put in the place of a copy": ((load,), (put_another,)),
    "loaded": ((), (load,)),
    "loaded again": ((load,), (load,)),
    "loaded and evicted": ((), (load, evict)),
    "put and evicted": ((), (put_another, evict)),
    "invalidated, then a load that ends": ((), (invalidate, end_a_load)),
    "deleted, then a load that ends": ((load,), (delete, end_a_load)),
    "invalidated, then a load that fails": ((), (invalidate, fail_a_load)),
    "failed, then invalidated": ((fail_a_load,), (invalidate,)),
    "failed, invalidated, then a load that ends": ((fail_a_load,), (invalidate, end_a_load)),
    "invalidated, then two loads that end": ((), (invalidate, die_loading, end_a_load)),
    "invalidated, then a load that dies": ((), (invalidate, die_loading, evict)),
    "invalidated twice, between them a load": ((), (invalidate, end_a_load, invalidate)),
    "evicted long after": ((), (delete, evict)),
}
"""What happened before the put was sent, and what happened after it was given up."""


class TestS13LatePuts:
    @pytest.mark.parametrize("history", HISTORIES)
    async def test_a_put_that_was_given_up_does_nothing_to_what_came_after(
        self, late: Late, history: str
    ) -> None:
        """S8: neither at once nor in the end: nobody ever sees its value."""
        before, after = HISTORIES[history]
        for step in before:
            await step(late)
        put = late.store.put(KIND, {"a": late.new_put()})
        assert await late.give_up(put, "TransactWriteItems")
        for step in after:
            await step(late)
        found = await late.record()
        await late.proxy.deliver()
        assert await late.record() == found

    async def test_a_put_that_was_given_up_acts_if_nothing_has_happened(self, late: Late) -> None:
        """S8: it is as if it had come just before its caller went."""
        put = late.new_put()
        assert await late.give_up(late.store.put(KIND, {"a": put}), "TransactWriteItems")
        for _ in range(2):
            await late.proxy.deliver()
            assert (await late.record()).copy == put.copy

    @pytest.mark.parametrize("before", [(), (load,), (invalidate,)], ids=["cold", "warm", "void"])
    @pytest.mark.parametrize("name", ["invalidate", "invalidate_tag", "delete"])
    @pytest.mark.parametrize("operation", ["PutItem", "UpdateItem", "DeleteItem"])
    async def test_a_change_that_was_given_up_voids_no_later_put(
        self, late: Late, before: tuple[Step, ...], name: str, operation: str
    ) -> None:
        """E35: whichever request of it arrives late: what it would change is not as it was read."""
        for step in before:
            await step(late)
        if name == "invalidate_tag":
            await put_another(late)
        work: dict[str, Callable[[], Coroutine[Any, Any, object]]] = {
            "invalidate": partial(late.store.invalidate, KIND, ["a"]),
            "invalidate_tag": partial(late.store.invalidate_tag, "eu"),
            "delete": partial(late.store.delete, KIND, ["a"]),
        }
        await late.give_up(work[name](), operation)
        put = late.new_put(b"later")
        assert (await late.other.put(KIND, {"a": put}))["a"].outcome is PutOutcome.STORED
        await late.proxy.deliver()
        assert (await late.record()).copy == put.copy
        assert await late.other.invalidate_tag("eu") == [(KIND, "a")]

    @pytest.mark.parametrize("changes", [0, 1, 4, 5])
    @pytest.mark.parametrize("forgets", [True, False])
    async def test_a_put_whose_answer_was_lost(
        self, late: Late, changes: int, *, forgets: bool
    ) -> None:
        """S2: it knows itself; on a server that forgets, it is stored again after five changes."""
        late.proxy.forgets = forgets

        async def meanwhile() -> None:
            for _ in range(changes):
                await put_another(late)

        late.proxy.lose["TransactWriteItems"] = 1
        late.proxy.meanwhile = meanwhile
        outcome = (await late.store.put(KIND, {"a": late.new_put()}))["a"].outcome
        is_again = forgets and changes > 4
        expected = PutOutcome.REPLACED if forgets and 0 < changes < 5 else PutOutcome.STORED
        assert outcome is expected
        copy = (await late.record()).copy
        assert copy is not None
        assert copy.value == (b"another" if changes and not is_again else b"put")

    async def test_a_put_that_is_held_back_and_sent_again_is_done_once(self, late: Late) -> None:
        """S8: its first request arrives when its second was answered, and another put came."""
        late.proxy.delays = True
        put = late.store.put(KIND, {"a": late.new_put()})
        assert (await put)["a"].outcome is PutOutcome.STORED
        late.proxy.delays = False
        held = {operation for operation, _ in late.proxy.held}
        assert held == {"PutItem", "TransactWriteItems"}
        await put_another(late)
        for _ in range(2):
            await late.proxy.deliver()
            copy = (await late.record()).copy
            assert copy is not None
            assert copy.value == b"another"
        assert await late.other.invalidate_tag("eu") == [(KIND, "a")]


class TestS15LateRequestsForLeases:
    async def test_a_lease_that_was_left_behind_is_taken_at_once_by_its_process(
        self, late: Late
    ) -> None:
        """Its first request arrives when the load of its second has ended."""
        late.proxy.delays = True
        first = await leased(late.store)
        late.proxy.delays = False
        assert await publishes(late.store, first)
        await late.proxy.deliver()
        asks = [Ask("a", first.token)]
        assert isinstance((await late.other.acquire(KIND, asks, 30))["a"], Held)
        assert (await late.record(late.store)).held_until is None
        second = await leased(late.store, first.token)
        assert await publishes(late.store, second, b"new")

    async def test_a_caller_that_gave_up_leaves_no_lease_behind(self, late: Late) -> None:
        """Cancelled, or without an answer: its request took the lease, and nobody loads."""
        asks = [Ask("a")]
        assert await late.give_up(late.store.acquire(KIND, asks, 30), "PutItem")
        await late.proxy.deliver()
        assert (await late.record(late.store)).held_until is None
        assert isinstance((await late.other.acquire(KIND, asks, 30))["a"], Held)
        lease = await leased(late.store)
        assert await publishes(late.store, lease)

    async def test_a_caller_that_gave_up_after_its_grant_leaves_no_lease_behind(
        self, late: Late
    ) -> None:
        """It was cancelled while it wrote the rows of its tags."""
        asks = [Ask("a", None, ("eu",))]
        assert await late.give_up(late.store.acquire(KIND, asks, 30), "PutItem", "TAG#")
        assert (await late.record()).held_until is not None
        assert (await late.record(late.store)).held_until is None
        assert await publishes(late.store, await leased(late.store))

    async def test_a_lease_of_this_process_is_not_taken_for_one_left_behind(
        self, late: Late
    ) -> None:
        """While it loads, others are denied, also where its request was sent twice."""
        late.proxy.lose["PutItem"] = 1
        lease = await leased(late.store)
        assert (await late.record(late.store)).held_until is not None
        for store in (late.store, late.other):
            assert isinstance((await store.acquire(KIND, [Ask("a")], 30))["a"], Held)
        assert await publishes(late.store, lease)
