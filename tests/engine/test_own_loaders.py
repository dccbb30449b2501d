"""A read with a loader of its own: stored, private, or failed (E3, I13)."""

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial

import pytest

from stillfresh import Answer, Cache, LoadFailed, Verdict
from stillfresh.engine import MsgpackCodec, Private, Resource, Spec, terms_of
from stillfresh.testing import ManualClock
from tests.kit.engine import Price, turns, until

Load = Callable[[], Awaitable[object]]
HERS = Private("hers")


async def nobody(_: list[str]) -> dict[str, Price]:
    raise LoadFailed("no loader was given")


@pytest.fixture
def resource(cache: Cache) -> Resource[str, Price]:
    """A resource whose reads bring their loaders."""
    spec: Spec[str, Price] = Spec(
        "price",
        nobody,
        MsgpackCodec[Price](Price, "price"),
        None,
        terms_of("price", 30, 60, 0, 30),
        max_batch=1,
        concurrency=4,
        max_entries=10,
        memory_for=0,
        lease_for=5,
        load_timeout=30,
        by_id=False,
    )
    return cache.declare(spec, str, str)


class Asked:
    """A loader that says what it is told to, once it may."""

    def __init__(self, result: object, *, held: bool = False) -> None:
        self.calls = 0
        self.result = result
        self.may_end = asyncio.Event()
        if not held:
            self.may_end.set()

    async def __call__(self) -> object:
        self.calls += 1
        await self.may_end.wait()
        if isinstance(self.result, Exception):
            raise self.result
        return self.result


async def two(
    resource: Resource[str, Price], hers: Asked
) -> tuple["asyncio.Task[object]", "asyncio.Task[object]"]:
    """Her read, whose loader runs, and his, which waits for it."""
    first = asyncio.create_task(resource.read("a", hers))
    await until(lambda: hers.calls > 0)
    return first, await joined(resource, Asked(Price("a", 2)))


async def joined(resource: Resource[str, Price], load: Load) -> "asyncio.Task[object]":
    """A read that waits for the load under way."""
    reading = asyncio.create_task(resource.read("a", load))
    while not (await resource.stats()).coalesced:
        await asyncio.sleep(0)
    return reading


def has_begun(load: Asked) -> bool:
    return load.calls > 0


def of(outcome: object) -> Price:
    assert isinstance(outcome, Answer)
    value: Price = outcome.value
    return value


class TestE3OwnLoader:
    async def test_the_first_callers_loader_runs_and_the_others_wait(
        self, resource: Resource[str, Price]
    ) -> None:
        """One load, and every caller gets its copy."""
        hers = Asked(Price("a", 1), held=True)
        first, second = await two(resource, hers)
        hers.may_end.set()
        assert of(await first) == of(await second) == Price("a", 1)
        assert of(await resource.read("a", Asked(Price("a", 3)))) == Price("a", 1)

    async def test_a_stale_copy_is_refreshed_by_the_callers_loader(
        self, resource: Resource[str, Price], clock: ManualClock
    ) -> None:
        """The caller is served at once; its loader runs behind."""
        await resource.read("a", Asked(Price("a", 1)))
        clock.advance(31)
        again = Asked(Price("a", 2))
        assert of(await resource.read("a", again)) == Price("a", 1)
        assert await resource.settled(10)
        assert again.calls == 1
        assert of(await resource.read("a", Asked(Price("a", 3)))) == Price("a", 2)

    async def test_a_new_copy_can_be_asked_for(self, resource: Resource[str, Price]) -> None:
        """`anew` runs the loader though the copy is fresh."""
        await resource.read("a", Asked(Price("a", 1)))
        assert of(await resource.read("a", Asked(Price("a", 2)), anew=True)) == Price("a", 2)

    async def test_a_failure_is_told_to_every_caller(self, resource: Resource[str, Price]) -> None:
        """As with a loader of the resource's."""
        hers = Asked(ConnectionError("down"), held=True)
        first, second = await two(resource, hers)
        hers.may_end.set()
        for failed in (await first, await second):
            assert isinstance(failed, LoadFailed)
            assert isinstance(failed.__cause__, ConnectionError)


class TestE4Full:
    async def test_a_running_load_can_be_joined_when_no_other_may_begin(
        self, resource: Resource[str, Price]
    ) -> None:
        """At `concurrency` loads the resource is full for other keys, not before."""
        loads = [Asked(Price(key, 1), held=True) for key in "abcd"]
        reading = []
        for key, load in zip("abcd", loads, strict=True):
            assert not resource.is_full(key)
            reading.append(asyncio.create_task(resource.read(key, load)))
            await until(partial(has_begun, load))
        assert [resource.is_full(key) for key in "ade"] == [False, False, True]
        for load in loads:
            load.may_end.set()
        await asyncio.gather(*reading)
        assert not resource.is_full("e")


class TestI13Private:
    async def test_a_private_value_goes_to_the_caller_that_loaded_it(
        self, resource: Resource[str, Price]
    ) -> None:
        """The other callers that waited are told that there is nothing to share."""
        hers = Asked(HERS, held=True)
        first, second = await two(resource, hers)
        hers.may_end.set()
        assert await first is HERS
        answer = await second
        assert isinstance(answer, Answer)
        assert (answer.found, answer.value) == (False, None)

    async def test_a_noted_one_is_known_to_later_callers(
        self, resource: Resource[str, Price]
    ) -> None:
        """The store keeps the absence; `is_noted=False` leaves no row."""
        await resource.read("a", Asked(Private("hers")))
        await resource.read("b", Asked(Private("hers", is_noted=False)))
        kept, unkept = await resource.get_stored("a"), await resource.get_stored("b")
        assert kept is not None
        assert (kept.found, kept.verdict) == (False, Verdict.FRESH)
        assert unkept is None

    async def test_nobody_gets_it_if_its_caller_has_left(
        self, resource: Resource[str, Price]
    ) -> None:
        """The caller that waited first gets no private value of another's loader."""
        hers = Asked(HERS, held=True)
        first, second = await two(resource, hers)
        first.cancel()
        await turns()
        hers.may_end.set()
        answer = await second
        assert isinstance(answer, Answer)
        assert not answer.found

    async def test_a_load_that_follows_an_invalidation_is_of_a_caller_that_waits_for_it(
        self, resource: Resource[str, Price]
    ) -> None:
        """The first caller has been answered: its loader does not run again, and is counted."""
        hers, his = Asked(HERS, held=True), Asked(Private("his"))
        first = asyncio.create_task(resource.read("a", hers))
        await until(lambda: hers.calls > 0)
        await resource.invalidate("a")
        second = await joined(resource, his)
        hers.may_end.set()
        assert await first is HERS
        assert await second is his.result
        assert (hers.calls, his.calls) == (1, 1)
        stats = await resource.stats()
        assert (stats.loads, stats.superseded) == (2, 1)
