"""The README's first screen is true: each of its claims is tried here.

Figures of speed and of other libraries are those of docs/benchmarks.md: tests/test_docs.py compares
them. Claims about a store that is down are tried in tests/engine and tests/stores (E29).
"""

import asyncio
import io
import logging
import re
from contextlib import redirect_stdout
from pathlib import Path

import pytest

from stillfresh import Cache, LoadFailed, SyncCache
from stillfresh.testing import ManualClock

README = (Path(__file__).parent.parent / "README.md").read_text()


def test_the_readme_is_short_and_names_the_technique_on_its_first_screen() -> None:
    """At most 120 lines; the word that people search for is in the first thirty."""
    lines = README.splitlines()
    assert len(lines) <= 120
    assert "stale-while-revalidate" in " ".join(lines[:30])


def test_the_readme_says_how_to_see_it_and_how_to_test_it() -> None:
    """In a clone, two words each."""
    assert "`make demo`" in README
    assert "`make test`" in README


def test_the_readme_promises_nothing_that_does_not_hold_in_an_outage() -> None:
    """An invalidated copy can be served, and says so; the page must not deny it."""
    text = " ".join(README.lower().split())
    assert "never serves what you invalidated" not in text
    assert "neither is ever called fresh" in text


def test_the_first_program_prints_what_its_comments_say(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    [program] = re.findall(r"^```python\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
    with redirect_stdout(io.StringIO()) as printed:
        exec(compile(program, "README.md", "exec"), {"__name__": "readme"})  # noqa: S102 (our own page)
    assert re.fullmatch(r"1999\nfresh [\d.e-]+\n", printed.getvalue())
    assert "# 1999\n" in program
    assert "# fresh 0.002…\n" in program


async def test_the_price_is_fresh_then_stale_then_kept_for_failures(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """30 seconds fresh, an hour stale; a failing upstream is bridged for a day, and no longer."""
    caplog.set_level(logging.CRITICAL, "stillfresh")
    times = re.findall(r'_for="(\w+)"', README)[:3]
    assert times == ["30s", "1h", "1d"]
    fresh_for, stale_for, error_for = times
    is_down = False
    clock = ManualClock()
    async with Cache("memory://", clock=clock) as cache:

        @cache.cached("price", fresh_for=fresh_for, stale_for=stale_for, error_for=error_for)
        async def price(_sku: str) -> int:
            if is_down:
                raise ConnectionError("the upstream is down")
            return 1999

        def verdict() -> str:
            copy = price.of("tea").peek()
            assert copy is not None
            return copy.verdict

        await price("tea")
        is_down = True
        clock.advance(29)
        assert verdict() == "fresh"
        clock.advance(2)
        assert verdict() == "stale"
        clock.advance("1h")
        assert verdict() == "expired"
        clock.advance("22h")
        assert await price("tea") == 1999
        clock.advance("1h")
        with pytest.raises(LoadFailed):
            await price("tea")


async def test_an_hour_of_outage_costs_fewer_than_a_hundred_calls(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A read every second: all are answered with the copy, few ask the upstream."""
    caplog.set_level(logging.CRITICAL, "stillfresh")
    assert "3,600 reads of a key cause **fewer than 100** calls" in README
    clock = ManualClock()
    calls = 0
    async with Cache("memory://", clock=clock) as cache:

        @cache.cached("price", fresh_for="30s", error_for="1d")
        async def price(_sku: str) -> int:
            nonlocal calls
            calls += 1
            if calls > 1:
                raise ConnectionError("the upstream is down")
            return 1999

        await price("tea")
        clock.advance("30s")
        for _ in range(3_600):
            clock.advance(1)
            answer = await price.get("tea")
            assert answer.value == 1999
            assert answer.error is not None
    assert calls - 1 < 100


async def test_an_invalidated_copy_is_never_called_fresh(caplog: pytest.LogCaptureFixture) -> None:
    """If the load after an invalidation fails, the old copy is EXPIRED and carries the error."""
    caplog.set_level(logging.CRITICAL, "stillfresh")
    is_down = False
    async with Cache("memory://") as cache:

        @cache.cached("price", fresh_for="30s", stale_for="1h", error_for="1d")
        async def price(_sku: str) -> int:
            if is_down:
                raise ConnectionError("the upstream is down")
            return 1999

        await price("tea")
        is_down = True
        await price.of("tea").invalidate()
        answer = await price.get("tea")
    assert (answer.value, answer.verdict) == (1999, "expired")
    assert "the upstream is down" in str(answer.error)


@pytest.mark.parametrize("store", ["memory://", "sqlite:///prices.db"])
async def test_a_load_that_began_before_an_invalidation_stores_nothing(
    store: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The story of the README's first paragraph; the next reader gets the new value."""
    monkeypatch.chdir(tmp_path)
    current = "old"
    is_loading = asyncio.Event()
    may_end = asyncio.Event()
    async with Cache(store) as cache:

        @cache.cached("price", fresh_for="1h")
        async def price(_sku: str) -> str:
            value = current
            is_loading.set()
            await may_end.wait()
            return value

        first = asyncio.create_task(price("tea"))
        await is_loading.wait()
        current = "new"
        await price.of("tea").invalidate()
        may_end.set()
        await first
        assert await price("tea") == "new"


async def test_sixteen_callers_cause_one_load_and_one_that_gives_up_disturbs_nobody() -> None:
    """One load for all; the fifteen others get the value."""
    loads = 0
    is_loading = asyncio.Event()
    may_end = asyncio.Event()
    async with Cache("memory://") as cache:

        @cache.cached("price", fresh_for="1h")
        async def price(_sku: str) -> int:
            nonlocal loads
            loads += 1
            is_loading.set()
            await may_end.wait()
            return 1999

        first, *others = [asyncio.create_task(price("tea")) for _ in range(16)]
        await is_loading.wait()
        first.cancel()
        await asyncio.wait([first])
        may_end.set()
        assert await asyncio.gather(*others) == [1999] * 15
    assert first.cancelled()
    assert loads == 1


def test_sync_code_needs_no_event_loop() -> None:
    """`SyncCache` is the same for sync code, as the README says."""
    with SyncCache("memory://") as cache:

        @cache.cached("price", fresh_for="1h")
        def price(_sku: str) -> int:
            return 1999

        assert price("tea") == 1999
