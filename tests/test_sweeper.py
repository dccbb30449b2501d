"""M8, M13: what a Sweeper sweeps, in slices; broken caches; how it ends."""

import asyncio
import logging
from contextlib import suppress
from itertools import pairwise
from typing import Any

import pytest

from stillfresh import ConfigError, StillfreshError, Sweeper, TtlCache
from stillfresh.testing import ManualClock


class Pause:
    """A `sleep=` that a test ends by hand."""

    def __init__(self) -> None:
        self.asked: list[float] = []
        self.begun = asyncio.Event()
        self.go = asyncio.Event()

    async def __call__(self, seconds: float) -> None:
        self.asked.append(seconds)
        self.go.clear()
        self.begun.set()
        await self.go.wait()

    async def end(self) -> None:
        """Let the sleeper go on, and wait until it sleeps again."""
        await self.begun.wait()
        self.begun.clear()
        self.go.set()
        await self.begun.wait()


class Broken:
    def cleanup_expired(self, limit: int | None = None) -> int:
        raise RuntimeError(f"broken cache, asked for {limit}")


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


def expired(clock: ManualClock, count: int, **options: Any) -> TtlCache[int, int]:
    cache = TtlCache[int, int](1, clock=clock, **options)
    for number in range(count):
        cache.insert(number, number)
    clock.advance(1)
    return cache


class TestM8Sweeper:
    async def test_the_sweeper_sweeps_every_cache_after_each_pause(
        self, clock: ManualClock
    ) -> None:
        """After each pause of `every`, and not before, all caches are swept."""
        pause = Pause()
        caches = [expired(clock, 3), expired(clock, 5)]
        async with Sweeper(*caches, every="5m", sleep=pause):
            await pause.begun.wait()
            assert [cache.stats().expired for cache in caches] == [0, 0]
            await pause.end()
            assert [cache.stats().expired for cache in caches] == [3, 5]
            caches[0].insert(1, 1)
            clock.advance(1)
            await pause.end()
            assert [cache.stats().expired for cache in caches] == [4, 5]
        assert pause.asked == [300, 300, 300]

    def test_cleanup_expired_returns_the_sum_of_all_caches(self, clock: ManualClock) -> None:
        """One number for all caches, as in the seed's `WsState`; no event loop needed."""
        sweeper = Sweeper(expired(clock, 3), expired(clock, 5), expired(clock, 0), every=1)
        assert [sweeper.cleanup_expired(), sweeper.cleanup_expired()] == [8, 0]

    async def test_the_sweeper_yields_to_the_loop_between_slices(self, clock: ManualClock) -> None:
        """While 10,000 entries are dropped, another task runs at least every 1,000."""
        seen = []
        cache = expired(clock, 10_000)

        async def watch() -> None:
            while True:
                seen.append(cache.stats().expired)
                await asyncio.sleep(0)

        watcher = asyncio.create_task(watch())
        assert await Sweeper(cache, every=1).tick() == 10_000
        watcher.cancel()
        await asyncio.wait([watcher])
        steps = [after - before for before, after in pairwise(seen)]
        assert max(steps) <= 1_000
        assert len(seen) >= 10

    async def test_a_broken_cache_is_logged_and_tried_again_next_time(
        self, clock: ManualClock, caplog: pytest.LogCaptureFixture
    ) -> None:
        """It is logged, the others are swept, and it is tried again next time."""
        cache, pause = expired(clock, 3), Pause()
        with caplog.at_level(logging.ERROR):
            async with Sweeper(Broken(), cache, every=1, sleep=pause):
                await pause.end()
                await pause.end()
        assert cache.stats().expired == 3
        assert caplog.text.count("RuntimeError: broken cache") == 2

    @pytest.mark.parametrize("how", ["cancelled", "none", "raises"])
    async def test_a_cache_that_raises_or_returns_no_number_is_logged_and_passed_over(
        self, clock: ManualClock, how: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        """One that raises CancelledError, or answers with no number, is logged and passed over."""

        class Odd:
            def cleanup_expired(self, limit: int | None = None) -> Any:
                if how == "none":
                    return None
                raise asyncio.CancelledError if how == "cancelled" else RuntimeError(limit)

        cache = expired(clock, 1_500)
        with caplog.at_level(logging.ERROR):
            assert await Sweeper(Odd(), cache, every=1).tick() == 1_500
            assert Sweeper(Odd(), expired(clock, 1_500), every=1).cleanup_expired() == 1_500
        assert caplog.text.count("Odd object") == 2

    async def test_a_cache_that_never_ends_does_not_starve_the_others(
        self, clock: ManualClock
    ) -> None:
        """They take turns, slice by slice."""

        class Endless:
            def cleanup_expired(self, limit: int | None = None) -> int:
                return limit or 0

        cache = expired(clock, 2_500)
        tick = asyncio.create_task(Sweeper(Endless(), cache, every=1).tick())
        while cache.stats().expired < 2_500:
            await asyncio.sleep(0)
        tick.cancel()
        await asyncio.wait([tick])

    async def test_the_sweeper_ends_with_its_block_and_can_be_entered_again(self) -> None:
        """No task is left, also when the block raises; and it can be entered again."""
        sweeper = Sweeper(every=1, sleep=Pause())
        with pytest.raises(KeyError):
            async with sweeper:
                raise KeyError
        assert asyncio.all_tasks() == {asyncio.current_task()}
        async with sweeper:
            assert len(asyncio.all_tasks()) == 2
        assert len(asyncio.all_tasks()) == 1

    async def test_cancelling_the_block_ends_the_sweeper(self, clock: ManualClock) -> None:
        """The application's task is cancelled inside the block: the sweeper's task goes with it."""
        pause = Pause()

        async def application() -> None:
            async with Sweeper(expired(clock, 1), every=1, sleep=pause):
                await asyncio.Event().wait()

        task = asyncio.create_task(application())
        await pause.begun.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert len(asyncio.all_tasks()) == 1

    async def test_leaving_the_block_does_not_wait_for_a_sweep_to_end(
        self, clock: ManualClock
    ) -> None:
        """Leaving the block does not wait for a million entries."""
        cache, pause = expired(clock, 5_000), Pause()
        async with Sweeper(cache, every=1, sleep=pause):
            await pause.begun.wait()
            pause.go.set()
            while cache.stats().expired == 0:
                await asyncio.sleep(0)
        assert cache.stats().expired < 5_000

    async def test_entering_a_sweeper_twice_raises(self) -> None:
        """Entering it twice is a mistake that is named."""
        async with Sweeper(every=1, sleep=Pause()) as sweeper:
            with pytest.raises(StillfreshError, match="already running"):
                await sweeper.__aenter__()

    async def test_a_sleep_that_fails_is_logged(self, caplog: pytest.LogCaptureFixture) -> None:
        """It cannot go on, but nobody should find out from a full memory."""

        async def broken(_seconds: float) -> None:
            raise RuntimeError("broken sleep")

        with caplog.at_level(logging.ERROR):
            async with Sweeper(every=1, sleep=broken):
                while "broken sleep" not in caplog.text:
                    await asyncio.sleep(0)

    async def test_a_cleanup_that_returns_no_number_is_named_in_the_log(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        """A cleanup that returns None is a common mistake: the log says what it has to return."""

        class Silent:
            def cleanup_expired(self) -> None: ...

        assert await Sweeper(Silent(), every=1).tick() == 0  # type: ignore[arg-type]
        assert "how many" in caplog.text
        assert "None" in caplog.text

    def test_a_list_of_caches_is_refused(self, clock: ManualClock) -> None:
        """A natural mistake, named at the door."""
        with pytest.raises(ConfigError, match="one by one"):
            Sweeper([expired(clock, 1)], every=1)  # type: ignore[arg-type]

    @pytest.mark.parametrize("every", [0, "never", -1])
    def test_a_bad_interval_of_the_sweeper_is_refused(self, every: Any) -> None:
        """A sweeper without a pause would never let go of the loop."""
        with pytest.raises(ConfigError, match="every: "):
            Sweeper(every=every)


class WsState:
    """The seed's own: three caches behind one async method without a limit."""

    def __init__(self, clock: ManualClock) -> None:
        self.pending_staging_requests = expired(clock, 1_200)
        self.pending_time_suggestions = expired(clock, 2)
        self.generation_read_state = expired(clock, 1)
        self.calls = 0

    async def cleanup_expired(self) -> int:
        self.calls += 1
        staging = self.pending_staging_requests.cleanup_expired()
        await asyncio.sleep(0)
        time = self.pending_time_suggestions.cleanup_expired()
        return staging + time + self.generation_read_state.cleanup_expired()


class Sync:
    """No limit, not async."""

    def __init__(self) -> None:
        self.calls = 0

    def cleanup_expired(self, force: bool = False) -> int:
        assert force is False
        self.calls += 1
        return 5_000


class AsyncLimited:
    def __init__(self) -> None:
        self.limits: list[int | None] = []

    async def cleanup_expired(self, *, limit: int | None = None) -> int:
        self.limits.append(limit)
        return 1_000 if len(self.limits) < 3 else 4


class Needy:
    """It needs more than a limit."""

    def cleanup_expired(self, limit: int | None, store: str) -> int:
        raise AssertionError(f"called with {limit} and {store}")


class TestM13Sweepable:
    async def test_an_async_cleanup_without_a_limit_is_called_once_a_sweep(
        self, clock: ManualClock
    ) -> None:
        """An async method without a limit is called once a sweep, and its number counts."""
        state, pause = WsState(clock), Pause()
        async with Sweeper(state, every="5m", sleep=pause) as sweeper:
            await pause.end()
            assert (state.calls, len(state.pending_staging_requests)) == (1, 0)
            assert await sweeper.tick() == 0

    async def test_a_cleanup_with_a_limit_is_called_in_slices_and_others_once(
        self, clock: ManualClock
    ) -> None:
        """With `limit` in slices, without it once; another argument of it is left alone."""
        sync, limited = Sync(), AsyncLimited()
        inner = Sweeper(expired(clock, 3), every=1)
        assert await Sweeper(sync, limited, inner, every=1).tick() == 5_000 + 2_004 + 3
        assert (sync.calls, limited.limits) == (1, [1_000, 1_000, 1_000])
        assert Sweeper(sync, every=1).cleanup_expired() == 5_000

    async def test_a_cleanup_that_needs_a_limit_always_gets_one(self) -> None:
        """It is always given: a slice at a tick, None in one go."""
        limits = []

        class Limited:
            def cleanup_expired(self, limit: int | None) -> int:
                limits.append(limit)
                return 7

        sweeper = Sweeper(Limited(), every=1)  # type: ignore[arg-type]
        assert (await sweeper.tick(), sweeper.cleanup_expired()) == (7, 7)
        assert limits == [1_000, None]

    async def test_cleanup_expired_refuses_an_async_cache_before_any_is_swept(
        self, clock: ManualClock
    ) -> None:
        """In one go, without an event loop, an async cache is refused before any is swept."""
        cache = expired(clock, 3)
        with pytest.raises(StillfreshError, match=r"await sweeper\.tick\(\)"):
            Sweeper(cache, WsState(clock), every=1).cleanup_expired()
        assert cache.stats().expired == 0

    @pytest.mark.parametrize("how", ["cancelled", "raises", "late"])
    async def test_an_async_cleanup_that_fails_or_takes_too_long_is_logged(
        self, clock: ManualClock, how: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        """One that fails, is cancelled from within, or takes longer than `every` is logged."""
        ended = []

        class Odd:
            async def cleanup_expired(self) -> int:
                try:
                    if how == "late":
                        await asyncio.Event().wait()
                    raise asyncio.CancelledError if how == "cancelled" else RuntimeError
                finally:
                    ended.append(how)

        cache = expired(clock, 3)
        with caplog.at_level(logging.ERROR):
            assert await Sweeper(Odd(), cache, every=0.001).tick() == 3
        assert caplog.text.count("tried again next time") == 1
        assert ("within 0.001 s" in caplog.text) is (how == "late")
        assert ended == [how]

    async def test_an_async_cleanup_that_cannot_be_cancelled_delays_no_other_cache(
        self, clock: ManualClock, caplog: pytest.LogCaptureFixture
    ) -> None:
        """The others are swept, now and later; it is left alone until it ends."""
        calls, free = [], asyncio.Event()

        class Stubborn:
            async def cleanup_expired(self) -> int:
                calls.append(1)
                while not free.is_set():
                    with suppress(asyncio.CancelledError):
                        await free.wait()
                return 5

        async with Sweeper(Stubborn(), expired(clock, 3), every=0.001, sleep=Pause()) as sweeper:
            async with asyncio.timeout(10):
                assert await sweeper.tick() == 3
                assert await sweeper.tick() == 0
        assert len(calls) == 1
        assert caplog.text.count("within 0.001 s") == 2
        free.set()
        async with asyncio.timeout(10):
            while len(asyncio.all_tasks()) > 1:
                await asyncio.sleep(0)
        assert await sweeper.tick() == 5

    async def test_leaving_the_block_cancels_an_async_cleanup(self) -> None:
        """Leaving the block cancels the cleanup that is under way, and no task is left."""
        began, pause = asyncio.Event(), Pause()

        class Slow:
            async def cleanup_expired(self) -> int:
                began.set()
                return await asyncio.Event().wait()

        async with Sweeper(Slow(), every="5m", sleep=pause):
            await pause.begun.wait()
            pause.go.set()
            await began.wait()
        assert asyncio.all_tasks() == {asyncio.current_task()}

    @pytest.mark.parametrize(
        "wrong",
        [
            object(),
            5,
            {},
            TtlCache,
            type("Attribute", (), {"cleanup_expired": 5})(),
            Needy(),
        ],
        ids=lambda given: getattr(given, "__name__", type(given).__name__),
    )
    def test_an_object_that_cannot_be_swept_is_refused_at_construction(
        self, wrong: Any, clock: ManualClock
    ) -> None:
        """At construction, with what is allowed; not at the first sweep, hours later."""
        with pytest.raises(ConfigError, match=r"cleanup_expired\(\).*limit="):
            Sweeper(expired(clock, 1), wrong, every=1)
