"""E22: blocks of code for which a cache is not there, or has another store."""

import asyncio
import re
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from stillfresh import Answer, Cache, LoadFailed, Origin, Resource, StillfreshError, Verdict
from stillfresh.engine import Private
from stillfresh.testing import ManualClock
from tests.kit.engine import (
    Price,
    Prices,
    Upstream,
    declare,
    outcome,
    read_with,
    turns,
    version,
)
from tests.kit.held_store import SteppedStore

PAGE = Path(__file__).parents[2] / "docs" / "guides" / "testing-your-code.md"
NOWHERE = "redis://127.0.0.1:1"


class TestE22Bypassed:
    async def test_every_read_inside_bypassed_loads(
        self, cache: Cache, prices: Resource[str, Price], upstream: Upstream
    ) -> None:
        """Whatever memory and the store hold, and however it is read."""
        await prices("a")
        upstream.version = 2
        with cache.bypassed():
            assert (await prices("a")).version == 2
            answer = await prices.get("a")
            assert (version(answer), answer.verdict, answer.origin) == (
                2,
                Verdict.FRESH,
                Origin.LOADED,
            )
            assert list(map(version, (await prices.get_many(["a", "b"])).values())) == [2, 2]
            assert (await prices.of("a").get(max_age="1h")).value.version == 2
            await prices.refresh("a")
        assert upstream.calls == [["a"], ["a"], ["a"], ["a", "b"], ["a"], ["a"]]

    async def test_bypassed_stores_nothing(
        self, cache: Cache, prices: Resource[str, Price], upstream: Upstream
    ) -> None:
        """Neither in the store nor in memory; what was there is served after the block."""
        await prices("a")
        upstream.version = 2
        with cache.bypassed():
            await prices.get_many(["a", "b"])
        assert (await prices("a")).version == 1
        assert list(await prices.known(["a", "b"])) == ["a"]
        assert [it.id for it in await cache.entries("price")] == ["a"]

    async def test_reads_that_load_nothing_know_nothing_inside_bypassed(
        self, cache: Cache, prices: Resource[str, Price]
    ) -> None:
        """`peek`, `known` and `look` read a cache that is not there."""
        await prices("a")
        with cache.bypassed():
            assert prices.peek("a") is None
            assert await prices.known(["a"]) == {}
            assert await prices.get_stored("a") is None
        assert prices.peek("a") is not None

    async def test_a_cached_function_is_called_inside_bypassed(self, cache: Cache) -> None:
        """Also if its arguments led straight to an entry before, and after the block again."""
        calls: list[int] = []

        @cache.cached("report", fresh_for=60)
        async def report(year: int) -> int:
            calls.append(year)
            return len(calls)

        assert [await report(1) for _ in range(3)] == [1, 1, 1]
        with cache.bypassed():
            assert [await report(1), (await report.get(1)).value, await report(1)] == [2, 3, 4]
        assert await report(1) == 1

    async def test_bypassed_holds_for_its_task_and_the_tasks_it_starts(
        self, cache: Cache, prices: Resource[str, Price], upstream: Upstream
    ) -> None:
        """Others are served as always, while the block is open; a child is, once it has ended."""
        await prices("a")
        upstream.version = 2
        inside, ended = asyncio.Event(), asyncio.Event()

        async def bypassing() -> "asyncio.Task[list[int]]":
            with cache.bypassed():
                child = asyncio.create_task(reading())
                inside.set()
                await ended.wait()
            return child

        async def reading() -> list[int]:
            during = (await prices("a")).version
            await over.wait()
            return [during, (await prices("a")).version]

        over = asyncio.Event()
        task = asyncio.create_task(bypassing())
        await inside.wait()
        assert [(await prices("a")).version, version(await prices.get("a"))] == [1, 1]
        looked, peeked = await prices.get_stored("a"), prices.peek("a")
        assert looked is not None is not peeked
        assert [version(looked), version(peeked)] == [1, 1]
        await prices.put("b", Price("b", 5))
        assert (await prices("b")).version == 5
        await prices.refresh("c")
        assert list(await prices.known(["b", "c"])) == ["b", "c"]
        ended.set()
        child = await task

        async def another() -> list[int]:
            with cache.bypassed():
                over.set()
                return await child

        assert await asyncio.create_task(another()) == [2, 1]

    async def test_blocks_may_be_nested_and_of_several_caches(
        self, cache: Cache, prices: Resource[str, Price], upstream: Upstream
    ) -> None:
        """Each ends its own."""
        other = declare(Cache("memory://"), upstream)
        await prices("a")
        await other("a")
        upstream.version = 2
        with cache.bypassed():
            with cache.bypassed():
                assert (await prices("a")).version == 2
            assert (await prices("a")).version == 2
            assert (await other("a")).version == 1
        assert (await prices("a")).version == 1

    async def test_bypassed_needs_no_store(self, upstream: Upstream) -> None:
        """It is not opened."""
        cache = Cache(NOWHERE)
        prices = declare(cache, upstream)
        with cache.bypassed():
            assert (await prices("a")).version == 1
        assert cache.opened is None

    async def test_bypassed_tells_failures_and_absences_as_always(
        self, cache: Cache, prices: Resource[str, Price], upstream: Upstream
    ) -> None:
        """And no cooldown begins."""
        upstream.absent = {"none"}
        with cache.bypassed():
            assert isinstance(await outcome(prices("none")), KeyError)
            upstream.error = ValueError("down")
            for _ in range(2):
                failed = await outcome(prices("a"))
                assert isinstance(failed, LoadFailed)
                assert isinstance(failed.__cause__, ValueError)
        upstream.error = None
        assert (await prices("a")).version == 1

    async def test_bypassed_loads_many_keys_in_batches(
        self, cache: Cache, upstream: Upstream, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Of `max_batch`, as many at once as `concurrency` allows, whatever the number of keys."""
        monkeypatch.setattr("stillfresh.engine.read.SLICE", 2)
        prices = declare(cache, upstream, max_batch=2, concurrency=1)
        with cache.bypassed():
            loading = await upstream.holding(prices.get_many(["a", "b", "c"]))
            await turns()
            assert upstream.calls == [["a", "b"]]
            upstream.let_go()
            assert len(await loading) == 3
        assert upstream.calls == [["a", "b"], ["c"]]

    async def test_a_loader_that_reads_is_past_the_cache_too(
        self, cache: Cache, prices: Resource[str, Price], upstream: Upstream
    ) -> None:
        """Nothing old comes in through another resource."""

        @cache.cached("total", fresh_for=60)
        async def total(sku: str) -> int:
            return (await prices(sku)).version

        await total("a")
        upstream.version = 2
        with cache.bypassed():
            assert await total("a") == 2

    async def test_a_loader_of_one_read_is_called_inside_bypassed(
        self, cache: Cache, prices: Resource[str, Price]
    ) -> None:
        """It is called, and what it keeps to itself stays private."""

        async def load() -> object:
            return Price("a", 7)

        async def private() -> object:
            return Private("mine")

        await prices("a")
        with cache.bypassed():
            read = await read_with(prices, "a", load)
            assert isinstance(read, Answer)
            assert read.value == Price("a", 7)
            assert await read_with(prices, "a", private) == Private("mine")

    async def test_a_put_inside_bypassed_stores_nothing_and_leaves_nobody_an_old_value(
        self, cache: Cache, prices: Resource[str, Price], upstream: Upstream
    ) -> None:
        """The key is invalidated instead; `invalidate` is what it always is."""
        await prices.get_many(["a", "b"])
        upstream.version = 2
        with cache.bypassed():
            await prices.put("a", Price("a", 9))
            await prices.invalidate("b")
        assert [(await prices(sku)).version for sku in "ab"] == [2, 2]

    async def test_a_resource_declared_inside_bypassed_is_past_the_cache(
        self, cache: Cache, upstream: Upstream
    ) -> None:
        """And in it afterwards."""
        with cache.bypassed():
            prices = declare(cache, upstream)
            await prices("a")
            await prices("a")
        assert len(upstream.calls) == 2
        await prices("a")
        await prices("a")
        assert len(upstream.calls) == 3


class TestE22Override:
    async def test_nothing_leaks_into_or_out_of_an_override(
        self, cache: Cache, prices: Resource[str, Price], upstream: Upstream
    ) -> None:
        """Neither through memory nor through the store; after the block all is as before."""
        await prices("a")
        upstream.version = 2
        async with cache.override("memory://"):
            assert prices.peek("a") is None
            assert await prices.known(["a"]) == {}
            assert [(await prices("a")).version, (await prices("b")).version] == [2, 2]
            upstream.version = 3
            assert (await prices("a")).version == 2
            assert (await prices.get("a")).origin is Origin.MEMORY
        assert list(await prices.known(["a", "b"])) == ["a"]
        assert (await prices("a")).version == 1

    async def test_other_processes_are_heard_again_after_an_override(
        self, url: str, clock: ManualClock, upstream: Upstream
    ) -> None:
        """Memory stood before a store of its own; afterwards it asks the shared one."""
        if url == "memory://":
            return
        async with Cache(url, clock=clock) as cache, Cache(url, clock=clock) as other:
            prices, theirs = declare(cache, upstream), declare(other, upstream)
            async with cache.override("memory://"):
                await prices("a")
            await prices("a")
            await theirs.put("a", Price("a", 9))
            assert (await prices("a")).version == 9

    async def test_a_store_that_is_bound_to_a_loop_is_closed_meanwhile(
        self, here: Cache, ours: Prices, store: SteppedStore
    ) -> None:
        """Another may stay open."""
        await ours("a")
        async with here.override("memory://"):
            assert store.count("close") == 1
        await ours("a")
        assert store.count("open") == 2

    async def test_a_store_that_is_not_there_is_not_asked(self, upstream: Upstream) -> None:
        """The point of it: a test needs no server."""
        cache = Cache(NOWHERE)
        prices = declare(cache, upstream)
        async with cache.override("memory://"):
            assert [await prices("a"), await prices("a")] == [Price("a", 1)] * 2
        assert upstream.calls == [["a"]]
        assert cache.opened is None

    async def test_an_override_closes_its_store(self, cache: Cache, tmp_path: Path) -> None:
        """A file may be looked at, or removed."""
        file = tmp_path / "other.db"
        upstream = Upstream()
        prices = declare(cache, upstream)
        async with cache.override(f"sqlite:///{file}"):
            await prices("a")
            assert (tmp_path / "other.db-wal").exists()
        assert not (tmp_path / "other.db-wal").exists()
        async with cache.override(f"sqlite:///{file}"):
            await prices("a")
        assert upstream.calls == [["a"]]

    async def test_overrides_may_be_nested(
        self, cache: Cache, prices: Resource[str, Price], upstream: Upstream
    ) -> None:
        """The inner one ends first."""
        await prices("a")
        async with cache.override("memory://"):
            upstream.version = 2
            await prices("a")
            async with cache.override("memory://"):
                upstream.version = 3
                assert (await prices("a")).version == 3
            assert (await prices("a")).version == 2
        assert (await prices("a")).version == 1

    async def test_a_closed_cache_is_open_inside_and_closed_again(
        self, url: str, upstream: Upstream
    ) -> None:
        """As it was found."""
        cache = Cache(url)
        prices = declare(cache, upstream)
        await cache.close()
        async with cache.override("memory://"):
            assert (await prices("a")).version == 1
        assert isinstance(await outcome(prices("b")), StillfreshError)

    async def test_an_override_ends_with_an_error_in_the_block(
        self, cache: Cache, prices: Resource[str, Price], upstream: Upstream
    ) -> None:
        """A test that failed takes no other along."""
        await prices("a")
        upstream.version = 2

        async def failing() -> None:
            async with cache.override("memory://"):
                await prices("a")
                raise ValueError

        assert isinstance(await outcome(failing()), ValueError)
        assert (await prices("a")).version == 1

    def test_an_override_needs_no_event_loop(self, url: str, upstream: Upstream) -> None:
        """`with`, around as many loops as you like: they share the other store."""
        cache = Cache(url)
        prices = declare(cache, upstream)
        assert asyncio.run(prices("a")) == Price("a", 1)
        upstream.version = 2
        with cache.override("memory://"):
            assert [asyncio.run(prices("a")).version for _ in range(2)] == [2, 2]
        assert asyncio.run(prices("a")).version == 1
        assert len(upstream.calls) == 2

        async def end() -> None:
            async with cache:
                pass

        asyncio.run(end())

    async def test_with_is_refused_where_async_with_belongs(self, cache: Cache) -> None:
        """Says so."""
        with (
            pytest.raises(StillfreshError, match=r"write async with cache\.override"),
            cache.override("memory://"),
        ):
            pass

    async def test_from_a_thread_beside_the_loop_that_has_it_open(
        self, cache: Cache, prices: Resource[str, Price]
    ) -> None:
        """Refused: what is open there cannot be closed from here."""
        await prices("a")
        said: list[Exception] = []

        def overriding() -> None:
            try:
                with cache.override("memory://"):
                    pass
            except StillfreshError as exc:
                said.append(exc)

        thread = threading.Thread(target=overriding)
        thread.start()
        thread.join()
        assert "opened by another event loop" in str(said)
        assert await prices("a") == Price("a", 1)


class TestE22Fixture:
    def test_the_fixture_of_the_docs_works(self, tmp_path: Path) -> None:
        """Copied into a project, its tests pass: without Redis, in any order."""
        block = r"```python\n# test_report.py\n(.*?)```"
        [example] = re.findall(block, PAGE.read_text(), re.DOTALL)
        (tmp_path / "test_example.py").write_text(example)
        (tmp_path / "pytest.ini").write_text(
            "[pytest]\nfilterwarnings = error\nasyncio_mode = auto\n"
            "asyncio_default_fixture_loop_scope = function\n"
        )
        run = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tmp_path)]
        done = subprocess.run(
            run, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        assert "2 passed" in done.stdout
