"""What people get wrong on their first day, and what they are told: issue 43, E15, E30, E34.

Each mistake ends in an error or a warning that says what to write. Other files test the rules
behind them; this one keeps the list.
"""

import asyncio
import inspect
import logging
import os
import pickle
import re
import sqlite3
import subprocess
import sys
import warnings
from collections.abc import AsyncIterator, Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path, PurePath
from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import BaseModel

from stillfresh import (
    BadValue,
    Cache,
    ConfigError,
    Handle,
    LoadFailed,
    NotOpen,
    Resource,
    StillfreshError,
    StoreError,
    SyncCache,
)
from stillfresh.engine import cache as cache_module
from stillfresh.engine import core as core_module
from stillfresh.engine import mistakes, sources
from stillfresh.engine import resource as resource_module
from stillfresh.engine.function import Function
from stillfresh.stores.contract import Record

Report = Function[[int], int]
Prices = Resource[str, int]

SYNC = SyncCache("memory://")

POOL = """
import sys
from multiprocessing import get_context

from stillfresh import SyncCache

cache = SyncCache("sqlite:///squares.db")


@cache.cached("square", fresh_for="1d")
def square(number: int) -> int:
    with open("calls", "a") as calls:
        print(number, file=calls)
    return number * number


if __name__ == "__main__":
    square(3)
    with get_context(sys.argv[1]).Pool(2) as pool:
        print(pool.map(square, [3, 4, 3, 4], chunksize=1))
"""
TOP_LEVEL = """
from stillfresh import Cache

cache = Cache("memory://")


@cache.cached("report", fresh_for="1d")
async def yearly_report(year: int) -> int:
    return year


yearly_report(2026)
"""


@SYNC.cached("square", fresh_for=30)
def square(number: int) -> int:
    return number * number


@pytest.fixture
async def cache() -> AsyncIterator[Cache]:
    async with Cache("memory://") as cache:
        yield cache


@pytest.fixture
def report(cache: Cache) -> Report:
    @cache.cached("report", fresh_for=30)
    async def report(year: int) -> int:
        return year

    return report


@pytest.fixture
def prices(cache: Cache) -> Prices:
    @cache.batched("price", fresh_for=30)
    async def prices(skus: list[str]) -> Mapping[str, int]:
        return {sku: len(sku) for sku in skus if sku != "unknown"}

    return prices


class TestE34ForgottenAwait:
    """The warning names the function that the user wrote, not one of this package."""

    async def test_of_a_call(self, report: Report) -> None:
        forgotten = [report(2026)]
        with pytest.warns(RuntimeWarning, match=r"'report\.<locals>\.report' was never awaited"):
            forgotten.clear()

    async def test_of_a_call_of_a_batched_function(self, prices: Prices) -> None:
        forgotten = [prices("a")]
        with pytest.warns(RuntimeWarning, match=r"'prices\.<locals>\.prices' was never awaited"):
            forgotten.clear()

    async def test_of_a_call_of_a_function_with_values_of_its_own(self, cache: Cache) -> None:
        @cache.cached("rows", fresh_for=30, share=False)
        async def rows(year: int) -> list[int]:
            return [year]

        forgotten = [rows(2026)]
        with pytest.warns(RuntimeWarning, match=r"<locals>\.rows' was never awaited"):
            forgotten.clear()
        assert await rows(2026) == [2026]

    async def test_of_a_call_of_a_method(self, cache: Cache) -> None:
        class Reports:
            @cache.cached("yearly", fresh_for=30, ignore=["self"])
            async def yearly(self, year: int) -> int:
                return year

        reports = Reports()
        forgotten = [reports.yearly(2026)]
        with pytest.warns(RuntimeWarning, match=r"Reports\.yearly' was never awaited"):
            forgotten.clear()
        assert inspect.iscoroutinefunction(reports.yearly)
        assert await reports.yearly(2026) == 2026

    async def test_of_an_invalidation(self, report: Report, prices: Prices) -> None:
        forgotten = [prices.invalidate("a")]
        with pytest.warns(RuntimeWarning, match=r"prices\.invalidate' was never awaited"):
            forgotten.clear()
        forgotten = [prices.of("a").invalidate()]
        with pytest.warns(RuntimeWarning, match=r"prices\.of\(\.\.\.\)\.invalidate' was never"):
            forgotten.clear()
        forgotten = [report.of(2026).invalidate()]
        with pytest.warns(RuntimeWarning, match=r"report\.of\(\.\.\.\)\.invalidate' was never"):
            forgotten.clear()

    async def test_the_named_objects_are_what_they_were(self, report: Report) -> None:
        handle = report.of(2026)
        assert isinstance(report, Function)
        assert isinstance(handle, Handle)
        assert type(report).__name__ == "Function"
        assert repr(report).startswith("<cached function ")
        assert inspect.iscoroutinefunction(report)
        assert inspect.iscoroutinefunction(handle.invalidate)
        assert (await handle.get()).value == (await report.get(2026)).value == 2026

    async def test_with_instead_of_async_with(self) -> None:
        says = "write `async with`, or use SyncCache"
        with pytest.raises(AttributeError, match=says), Cache("memory://"):  # type: ignore[attr-defined]
            pass

    async def test_with_instead_of_async_with_for_a_change(self, prices: Prices) -> None:
        change: Any = prices.changing("a")
        with pytest.raises(AttributeError, match="write `async with`"), change:
            pass

    async def test_async_with_instead_of_with_for_a_change(self) -> None:
        change: Any = square.of(2).changing()
        with pytest.raises(AttributeError, match="a change of a SyncCache; write `with`"):
            async with change:
                pass


class TestE34Options:
    @pytest.mark.parametrize(
        ("options", "says"),
        [
            ({"ttl": 60}, "no option 'ttl'; write fresh_for"),
            ({"timeout": 60}, "no option 'timeout'; write fresh_for for how long"),
            ({"expire": 60}, "no option 'expire'; write fresh_for"),
            ({"maxsize": 100}, "no option 'maxsize'; write max_entries"),
            ({"fresh_fro": 60}, "no option 'fresh_fro'; write fresh_for"),
            ({"fresh_for": 60, "retries": 3}, "no option 'retries'; write one of fresh_for, "),
            ({"fresh_for": 60, "swr": 3}, "no option 'swr'; write stale_for"),
            ({}, r"it needs fresh_for; write @cache\.cached\('report', fresh_for='5m'\)"),
            ({"fresh_for": 60, "tags": "a"}, r"tags is a list; write tags=\['a'\]"),
            ({"fresh_for": "5 parsecs"}, "cannot read '5 parsecs' as a duration; write seconds"),
            ({"fresh_for": -1}, "must be zero or more, not -1"),
            ({"fresh_for": None}, "cannot read None as a duration; write seconds"),
        ],
    )
    async def test_a_wrong_option_names_the_right_one(
        self, cache: Cache, options: Any, says: str
    ) -> None:
        with pytest.raises((ConfigError, TypeError), match=says):

            @cache.cached("report", **options)
            async def report(year: int) -> int:
                return year

    @pytest.mark.parametrize("of", [Cache, SyncCache])
    async def test_a_decorator_without_a_name(self, of: type[Cache] | type[SyncCache]) -> None:
        cache: Any = of("memory://")

        async def report(year: int) -> int:
            return year

        for decorate in (cache.cached, cache.batched):
            with pytest.raises(TypeError, match=r"needs the name of the resource; write @cache"):
                decorate(report)
            with pytest.raises(TypeError, match=r"needs the name of the resource; write @cache"):
                decorate(fresh_for=30)
            with pytest.raises(
                TypeError, match=r"options are written by their names; write @cache"
            ):
                decorate("report", 30)

    @pytest.mark.parametrize(
        ("name", "says"),
        [("cache_clear", r"write \w+\.invalidate_all\(\)"), ("cache_info", r"cache\.stats\(\)")],
    )
    async def test_a_cached_function_is_none_of_functools(
        self, report: Report, name: str, says: str
    ) -> None:
        for function in (report, square):
            with pytest.raises(AttributeError, match=says):
                getattr(function, name)

    def test_a_batched_loader_with_two_parameters(self) -> None:
        with pytest.raises(ConfigError, match=r"one parameter, .*; write def prices\(keys: list"):

            @SYNC.batched("two", fresh_for=30)  # type: ignore[arg-type]
            def prices(skus: list[str], region: str) -> dict[str, int]:
                return {}

    @pytest.mark.parametrize("method", ["get", "set", "delete", "clear"])
    async def test_a_cache_is_no_dict(self, cache: Cache, method: str) -> None:
        with pytest.raises(AttributeError, match=r"@cache\.cached|report\.of|invalidate_all"):
            getattr(cache, method)

    async def test_two_functions_of_one_name(self, cache: Cache, report: Report) -> None:
        assert report.__name__ == "report"
        owner = r"by tests\.test_beginners_mistakes\.report"
        with pytest.raises(
            ConfigError, match=f"'report': taken already in this cache, {owner}; ch"
        ):

            @cache.cached("report", fresh_for=30)
            async def another(year: int) -> int:
                return year

    async def test_a_batched_method(self, cache: Cache) -> None:
        class Shop:
            async def load(self, skus):  # type: ignore[no-untyped-def] # noqa: ANN001, ANN202
                return dict.fromkeys(skus, 1)

        with pytest.raises(ConfigError, match=r"annotate the keys of .*load as list\[str\]"):
            cache.batched("price", fresh_for=30)(Shop().load)

    async def test_a_method(self, cache: Cache) -> None:
        with pytest.raises((ConfigError, RuntimeError)) as caught:

            class Shop:
                @cache.cached("price", fresh_for=30)
                async def load(self, sku: str) -> int:
                    return len(sku)

        error = caught.value if isinstance(caught.value, ConfigError) else caught.value.__cause__
        assert "ignore=" in str(error)

    async def test_a_lambda_is_a_function_like_any_other(self, cache: Cache) -> None:
        double = cache.cached("double", fresh_for=30)(lambda number: number * 2)
        assert await double(4) == 8


class TestE15Keys:
    @pytest.mark.parametrize("key", [["a"], {"a": 1}, None, 1.5, ("a",), object()])
    async def test_a_key_of_another_type(self, prices: Prices, key: Any) -> None:
        with pytest.raises(ConfigError, match=f"price: a key is str, not {type(key).__name__}"):
            await prices(key)

    async def test_a_text_where_many_keys_belong(self, prices: Prices) -> None:
        with pytest.raises(ConfigError, match=re.escape("['sku-1']")):
            await prices.get_many("sku-1")

    @pytest.mark.parametrize("keys", [None, 5, object])
    async def test_something_else_where_many_keys_belong(self, prices: Prices, keys: Any) -> None:
        says = rf"price\.get_many: takes many keys, such as a list, not {re.escape(repr(keys))}"
        with pytest.raises(ConfigError, match=says):
            await prices.get_many(keys)

    def test_something_else_where_many_keys_belong_in_sync_code(self) -> None:
        with SyncCache("memory://") as cache:

            @cache.batched("price", fresh_for=30)
            def prices(skus: list[str]) -> dict[str, int]:
                return dict.fromkeys(skus, 1)

            methods: list[Any] = [prices.get_many, prices.known, prices.refresh_many]
            for method in methods:
                with pytest.raises(ConfigError, match=r"takes many keys, such as a list, not None"):
                    method(None)
                with pytest.raises(ConfigError, match=r"takes many keys; write \w+\(\[''\]\)"):
                    method("")

    @pytest.mark.parametrize("of", [float, tuple[str, int], None, str | None])
    async def test_keys_that_are_declared_with_another_type(self, cache: Cache, of: Any) -> None:
        async def prices(keys):  # type: ignore[no-untyped-def] # noqa: ANN001, ANN202
            return dict.fromkeys(keys, 1)

        prices.__annotations__["keys"] = list[of]
        says = re.escape(f"of prices as list[str] or list[int], not {list[of]!r}; a function below")
        with pytest.raises(ConfigError, match=says):
            cache.batched("price", fresh_for=30)(prices)

    async def test_an_object_as_an_argument(self, cache: Cache) -> None:
        @cache.cached("rows", fresh_for=30)
        async def rows(db: object, table: str) -> int:
            return len(table)

        with pytest.raises(ConfigError, match=r"Write ignore=\('db',\) to leave it out, or key="):
            await rows(object(), "users")

    @pytest.mark.parametrize("argument", [None, 1.5, (1, 2), [1, 2], {"a": 1}])
    async def test_plain_arguments_of_functions_are_keys(self, cache: Cache, argument: Any) -> None:
        calls: list[Any] = []

        @cache.cached("any", fresh_for=30)
        async def anything(argument: Any) -> int:
            calls.append(argument)
            return 1

        await anything(argument)
        await anything(argument)
        assert calls == [argument]


class TestE34Addresses:
    @pytest.mark.parametrize(
        ("address", "says"),
        [
            ("", "write memory://, sqlite:///path"),
            ("memory", "write memory://"),
            (":memory:", "write memory://"),
            ("postgres", r"postgresql://user@host"),
            ("redis//localhost", "redis://host:6379/0"),
            ("redis://", "names no host; write redis://host:6379/0"),
            ("redis://localhost:port", "port that is not a number"),
            ("sqlite://x.db", r"write sqlite:///file\.db \(relative\)"),
            ("sqlite:///", "sqlite:///path/to/file.db"),
            ("mongodb://localhost", "write memory://"),
            ("http://localhost", "write memory://"),
            ("dynamodb://", r"write dynamodb://table\?bucket=name"),
            (None, "neither an address nor a store"),
            (PurePath("x.db"), r"an address is text; write 'x\.db'"),
        ],
    )
    async def test_a_wrong_address(self, address: Any, says: str) -> None:
        with pytest.raises(ConfigError, match=says):
            async with Cache(address):
                pass

    def test_a_missing_extra(self) -> None:
        """`tests/test_extras.py` hides each library; this is what all of them say."""
        program = (
            "import sys; sys.modules['redis'] = None\n"
            "import asyncio, stillfresh\n"
            "async def main():\n"
            "    async with stillfresh.Cache('redis://127.0.0.1:1'): pass\n"
            "asyncio.run(main())"
        )
        ended = subprocess.run(
            [sys.executable, "-c", program], check=False, capture_output=True, text=True
        )
        assert "install stillfresh[redis]" in ended.stderr

    async def test_a_folder_that_is_not_there(self, tmp_path: Path) -> None:
        with pytest.raises(StoreError, match=r"there is no directory .*; create it first"):
            async with Cache(f"sqlite:///{tmp_path}/no/x.db"):
                pass

    async def test_a_folder_that_cannot_be_written(self) -> None:
        with pytest.raises(StoreError, match="is its directory readable and writable"):
            async with Cache("sqlite:////proc/x.db"):
                pass

    async def test_a_file_that_is_no_database(self, tmp_path: Path) -> None:
        (tmp_path / "notes.db").write_text("my notes, " * 1000)
        with pytest.raises(ConfigError, match="not a SQLite file; it is left as it is"):
            async with Cache(f"sqlite:///{tmp_path}/notes.db"):
                pass

    async def test_a_database_of_another_program(self, tmp_path: Path) -> None:
        other = sqlite3.connect(tmp_path / "other.db")
        other.execute("CREATE TABLE customers (name)")
        other.commit()
        other.close()
        with pytest.raises(ConfigError, match="give stillfresh a file of its own"):
            async with Cache(f"sqlite:///{tmp_path}/other.db"):
                pass

    async def test_a_file_of_a_newer_release(self, tmp_path: Path) -> None:
        address = f"sqlite:///{tmp_path}/cache.db"
        async with Cache(address):
            pass
        file = sqlite3.connect(tmp_path / "cache.db")
        file.execute("PRAGMA user_version = 999")
        file.commit()
        file.close()
        with pytest.raises(StillfreshError, match="newer"):
            async with Cache(address):
                pass

    async def test_two_caches_on_one_file_share_it(self, tmp_path: Path) -> None:
        address = f"sqlite:///{tmp_path}/cache.db"
        calls: list[int] = []

        def declare(cache: Cache) -> Report:
            @cache.cached("report", fresh_for=30)
            async def report(year: int) -> int:
                calls.append(year)
                return year

            return report

        async with Cache(address) as first, Cache(address) as second:
            assert await declare(first)(2026) == await declare(second)(2026)
        assert calls == [2026]

    async def test_a_server_that_is_down_at_the_start(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        """The functions work without a cache, and the log says why."""
        async with Cache("redis://127.0.0.1:1") as cache:

            @cache.cached("report", fresh_for=30)
            async def report(year: int) -> int:
                return year

            assert await report(2026) == 2026
        assert "the Redis server is unavailable" in caplog.text


class TestE13Lives:
    async def test_a_cache_that_was_closed(self, cache: Cache, report: Report) -> None:
        await cache.close()
        with pytest.raises(NotOpen, match="open it again with async with"):
            await report(2026)

    async def test_closing_twice_is_no_mistake(self, cache: Cache) -> None:
        await cache.close()
        await cache.close()

    async def test_a_second_loop(self, report: Report) -> None:
        errors: list[BaseException] = []

        def run_another_loop() -> None:
            try:
                asyncio.run(report(2026))
            except StillfreshError as exc:
                errors.append(exc)

        await asyncio.to_thread(run_another_loop)
        assert re.search("from_thread", str(errors[0]))

    async def test_a_forked_child(self, report: Report) -> None:
        """A cache that was open at the fork is refused in the child, with what to do."""
        await report(2026)
        read_end, write_end = os.pipe()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            child = os.fork()
        if child == 0:
            text = "nothing"
            try:
                report.of(1).get().send(None)
            except BaseException as exc:  # noqa: BLE001 (the child only reports it)
                text = str(exc)
            os.write(write_end, text.encode())
            os._exit(0)
        os.close(write_end)
        await asyncio.to_thread(os.waitpid, child, 0)
        assert "fork" in os.read(read_end, 10_000).decode()
        os.close(read_end)

    def test_a_pool_of_processes(self) -> None:
        """A cached function can be sent to one, by its name."""
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
            assert list(pool.map(square, [2, 3])) == [4, 9]

    @pytest.mark.parametrize("start", ["fork", "spawn", "forkserver"])
    def test_pool_map(self, start: str, tmp_path: Path) -> None:
        """Of a script whose cache was in use before; the children find the copies in its file."""
        script = tmp_path / "squares.py"
        script.write_text(POOL)
        command: list[str | Path] = [sys.executable, script, start]
        ended = subprocess.run(
            command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=120
        )
        assert (ended.returncode, ended.stdout) == (0, "[9, 16, 9, 16]\n"), ended.stderr
        assert sorted((tmp_path / "calls").read_text().split()) == ["3", "4"]

    @pytest.mark.parametrize("of", [Cache, SyncCache])
    def test_a_cache_that_is_sent_to_another_process(
        self, of: type[Cache] | type[SyncCache]
    ) -> None:
        with pytest.raises(TypeError, match=r"cannot be pickled.* send a cached function instead"):
            pickle.dumps(of("memory://"))

    def test_pool_map_of_a_function_inside_a_function(self) -> None:
        """Pickle finds functions by their names, and says so."""

        @SYNC.cached("cube", fresh_for=30)
        def cube(number: int) -> int:
            return number**3

        with pytest.raises((AttributeError, pickle.PicklingError), match="<locals>"):
            pickle.dumps(cube)

    async def test_a_cell_that_is_run_twice(self, cache: Cache) -> None:
        """The second declaration replaces the first, which passes its calls on."""

        cell = (
            "@cache.cached('scaled', fresh_for=30)\n"
            "async def scaled(number: int) -> int: return number * factor\n"
        )
        notebook: dict[str, Any] = {"__name__": "notebook", "cache": cache, "factor": 1}
        exec(cell, notebook)  # noqa: S102 (a cell)
        first = notebook["scaled"]
        notebook["factor"] = 2
        exec(cell, notebook)  # noqa: S102 (a cell)
        second = notebook["scaled"]
        await second.invalidate_all()
        assert await first(5) == await second(5) == 10

    async def test_a_sync_cache_in_a_running_loop(self) -> None:
        with pytest.warns(RuntimeWarning, match="use Cache in async code"), SYNC:
            assert square(7) == 49

    def test_an_async_function_in_a_sync_cache(self) -> None:
        with SyncCache("memory://") as cache, pytest.raises(ConfigError, match="write def, or use"):

            @cache.cached("report", fresh_for=30)
            async def report(year: int) -> int:
                return year

    def test_top_level_await(self, tmp_path: Path) -> None:
        """Python itself refuses it in a script; the call without it names the function."""
        with pytest.raises(SyntaxError, match="'await' outside function"):
            compile("await yearly_report(2026)", "script.py", "exec")
        script = tmp_path / "script.py"
        script.write_text(TOP_LEVEL)
        ended = subprocess.run(
            [sys.executable, script], capture_output=True, text=True, check=False, timeout=120
        )
        assert ended.returncode == 0
        assert "coroutine 'yearly_report' was never awaited" in ended.stderr

    def test_an_async_cache_in_a_script(self) -> None:
        """Threads and scripts call an open cache through `from_thread`, or use SyncCache."""
        with pytest.raises(StillfreshError) as caught:
            Cache("memory://").from_thread(asyncio.sleep, 0)
        assert "open" in str(caught.value)


class TestE30Loaders:
    async def test_none_is_a_value(self, cache: Cache) -> None:
        calls: list[int] = []

        @cache.cached("nothing", fresh_for=30)
        async def nothing(year: int) -> None:
            calls.append(year)

        await nothing(2026)
        await nothing(2026)
        assert calls == [2026]

    async def test_a_loader_that_raises(self, cache: Cache) -> None:
        @cache.cached("report", fresh_for=30)
        async def report(year: int) -> int:
            raise ValueError("no such year")

        with pytest.raises(LoadFailed, match="ValueError: no such year") as caught:
            await report(2026)
        assert isinstance(caught.value.__cause__, ValueError)

    async def test_a_loader_that_hangs(self, cache: Cache) -> None:
        @cache.cached("report", fresh_for=30, load_timeout="20ms")
        async def report(year: int) -> int:
            await asyncio.Event().wait()
            return year

        with pytest.raises(LoadFailed, match=r"no answer within 0\.02 s \(load_timeout\)"):
            await report(2026)

    async def test_a_loader_that_returns_the_wrong_type(self, cache: Cache) -> None:
        @cache.cached("report", fresh_for=30)
        async def report(year: int) -> int:
            return "2026"  # type: ignore[return-value]

        with pytest.raises(BadValue, match=r"Expected `int`, got `str`; return what the annot"):
            await report(2026)

    @pytest.mark.parametrize(
        ("returned", "says"),
        [
            (lambda: asyncio.sleep(0), "the function returned a coroutine; write async def"),
            (lambda: (number for number in range(3)), "returned a generator; return a list"),
            (lambda: len, "returned a function; did you forget to call it"),
        ],
    )
    async def test_a_loader_that_returns_what_is_no_value(
        self, cache: Cache, returned: Callable[[], Any], says: str
    ) -> None:
        value = returned()
        report = cache.cached("report", fresh_for=30)(lambda _year: value)
        with pytest.raises(BadValue, match=says):
            await report(2026)
        if inspect.iscoroutine(value):
            value.close()

    async def test_a_batched_loader_that_returns_a_list(self, cache: Cache) -> None:
        @cache.batched("price", fresh_for=30)
        async def prices(skus: list[str]) -> Mapping[str, int]:
            return [1 for _ in skus]  # type: ignore[return-value]

        with pytest.raises(ConfigError, match=r"annotate it as dict\[str, \.\.\.\], not list"):

            @cache.batched("other", fresh_for=30)  # type: ignore[arg-type]
            async def others(skus: list[str]) -> list[int]:
                return [1 for _ in skus]

        with pytest.raises(LoadFailed, match="returned list, not a mapping from key to value"):
            await prices("a")

    async def test_a_loader_that_returns_too_few_keys(self, prices: Prices) -> None:
        with pytest.raises(KeyError, match="unknown") as caught:
            await prices("unknown")
        assert "returned no value for this key" in caught.value.__notes__[0]
        assert not (await prices.get("unknown")).found

    async def test_a_loader_that_calls_itself(self, cache: Cache) -> None:
        @cache.cached("loop", fresh_for=30)
        async def loop(number: int) -> int:
            return await loop(number)

        with pytest.raises(LoadFailed, match="waits, in a circle, for itself"):
            await loop(1)

    @pytest.mark.parametrize("frames", range(15))
    def test_a_loader_that_calls_itself_too_deeply(self, frames: int) -> None:
        """The stack ends before a load begins, wherever that is, so no load is left half done."""
        with SyncCache("memory://") as cache:
            is_deep = True

            @cache.cached("sum_to", fresh_for=30)
            def sum_to(number: int) -> int:
                return number + sum_to(number - 1) if is_deep and number else number

            def below(frames: int) -> int:
                return below(frames - 1) if frames else sum_to(1000)

            with pytest.raises(LoadFailed) as caught:
                below(frames)
            assert str(caught.value).startswith("sum_to [1000]: loading failed: sum_to [999]: ")
            assert "RecursionError: cached functions call one another too deeply" in str(
                caught.value
            )
            is_deep = False
            for number in range(1001):
                assert sum_to.of(number).refresh().value == number


@dataclass
class Item:
    """What a beginner returns without saying so."""

    name: str


class Model(BaseModel):
    """The same with Pydantic."""

    name: str


def price_in_cents() -> Any:
    async def price(sku: str) -> int:
        return 300

    return price


def price_in_cents_with_a_comment() -> Any:
    async def price(sku: str) -> int:
        return 300  # cents

    return price


def price_in_euros() -> Any:
    async def price(sku: str) -> int:
        return 3

    return price


class TestE32Values:
    @pytest.mark.parametrize("share", [True, False])
    @pytest.mark.parametrize("wrap", [lambda item: item, lambda item: [item], lambda i: {"x": i}])
    async def test_a_dataclass_without_annotation_is_reported_once(
        self,
        cache: Cache,
        caplog: pytest.LogCaptureFixture,
        wrap: Callable[[object], Any],
        share: bool,
    ) -> None:
        @cache.cached("item", fresh_for=30, share=share)
        async def item(name: str):  # type: ignore[no-untyped-def] # noqa: ANN202
            return wrap(Item(name))

        assert await item("a") == wrap({"name": "a"})
        await item("b")
        (record,) = caplog.records
        assert "of the type Item, and callers get dict" in record.getMessage()
        assert "Annotate it with Item" in record.getMessage()

    async def test_a_dataclass_that_is_put_is_reported(
        self, cache: Cache, caplog: pytest.LogCaptureFixture
    ) -> None:
        @cache.cached("item", fresh_for=30)
        async def item(name: str):  # type: ignore[no-untyped-def] # noqa: ANN202
            return {"name": name}

        await item.of("a").put(Item("a"))
        assert "Annotate it with Item" in caplog.text

    async def test_plain_values_and_annotated_ones_are_not_reported(
        self, cache: Cache, caplog: pytest.LogCaptureFixture
    ) -> None:
        @cache.cached("plain", fresh_for=30)
        async def plain(number: int):  # type: ignore[no-untyped-def] # noqa: ANN202
            return {"number": [number, None, "a", 1.5]}

        @cache.cached("item", fresh_for=30)
        async def item(name: str) -> Item:
            return Item(name)

        await plain(1)
        assert await item("a") == Item("a")
        assert not caplog.records

    @pytest.mark.parametrize(
        ("annotation", "wrap"),
        [
            (object, lambda item: item),
            (list, lambda item: [item]),
            (dict, lambda item: {"x": item}),
            (list[Any], lambda item: [item]),
            (dict[str, Any], lambda item: {"x": item}),
            (Mapping[str, object], lambda item: {"x": item}),
        ],
    )
    async def test_a_dataclass_inside_a_type_that_does_not_name_it_is_reported(
        self,
        cache: Cache,
        caplog: pytest.LogCaptureFixture,
        annotation: Any,
        wrap: Callable[[object], Any],
    ) -> None:
        async def item(name: str):  # type: ignore[no-untyped-def] # noqa: ANN202
            return wrap(Item(name))

        item.__annotations__["return"] = annotation
        assert await cache.cached("item", fresh_for=30)(item)("a") == wrap({"name": "a"})
        (record,) = caplog.records
        assert "of the type Item, and callers get dict" in record.getMessage()
        assert "because its return type does not name it" in record.getMessage()

    async def test_a_model_inside_a_type_that_does_not_name_it(self, cache: Cache) -> None:
        @cache.cached("models", fresh_for=30)
        async def models(name: str) -> list:  # type: ignore[type-arg]
            return [Model(name=name)]

        with pytest.raises(BadValue, match=r"what it holds, as in list\[Item\], or give codec="):
            await models("a")

    @pytest.mark.parametrize("share", [True, False])
    @pytest.mark.parametrize("is_dev_mode", [False, True])
    async def test_a_model_without_annotation(
        self, cache: Cache, monkeypatch: pytest.MonkeyPatch, share: bool, is_dev_mode: bool
    ) -> None:
        flags = SimpleNamespace(flags=SimpleNamespace(dev_mode=is_dev_mode))
        monkeypatch.setattr(cache_module, "sys", flags)

        @cache.cached("model", fresh_for=30, share=share)
        async def model(name: str):  # type: ignore[no-untyped-def] # noqa: ANN202
            return Model(name=name)

        with pytest.raises(BadValue, match="annotate the return type, or give codec="):
            await model("a")

    async def test_a_huge_value_is_reported_once(
        self,
        cache: Cache,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        @cache.cached("file", fresh_for=30)
        async def file(name: str) -> bytes:
            return bytes(mistakes.LARGE_VALUE)

        await file("a")
        await file("b")
        (record,) = caplog.records
        assert 'file ["a"]: its value takes 10 MB' in record.getMessage()
        assert record.levelno == logging.WARNING

    async def test_an_invalidated_key_that_was_never_there_is_reported_in_development_mode(
        self, prices: Prices, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        await prices("sku-1")
        await prices.invalidate("sku-2")
        assert not caplog.records
        flags = SimpleNamespace(flags=SimpleNamespace(dev_mode=True))
        monkeypatch.setattr(resource_module, "sys", flags)
        await prices.invalidate("sku-1")
        assert not caplog.records
        await prices.invalidate("sku-3")
        await prices.invalidate("sku-4")
        (record,) = caplog.records
        assert "invalidate('sku-3'): no copy is stored for this key" in record.getMessage()

    async def test_a_new_release_that_reads_old_values_is_told_of_version(
        self,
        tmp_path: Path,
        caplog: pytest.LogCaptureFixture,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        """In development mode. The values have the type that they had, and another meaning."""
        flags = SimpleNamespace(flags=SimpleNamespace(dev_mode=True))
        monkeypatch.setattr(core_module, "sys", flags)

        async def release(function: Any, *, is_known: bool, **options: Any) -> int:
            async with Cache(f"sqlite:///{tmp_path}/prices.db") as cache:
                price = cache.cached("price", fresh_for="1h", **options)(function)
                answer: int = await price("tea")
                kind = price.resource.core.spec.kind
                runtime = await cache.runtime()
                expected = sources.source_digest(function)
                while True:
                    records = await runtime.store.read(sources.SOURCES, [kind])
                    copy = records.get(kind, Record()).copy
                    if copy is not None and copy.value == expected:
                        return answer
                    assert not is_known
                    await asyncio.sleep(0)

        assert await release(price_in_cents(), is_known=False) == 300
        assert await release(price_in_cents_with_a_comment(), is_known=True) == 300
        assert not caplog.records
        assert await release(price_in_euros(), is_known=False) == 300
        (record,) = caplog.records
        assert "price: the function has changed since its values were" in record.getMessage()
        assert "write version='2'" in record.getMessage()
        assert await release(price_in_euros(), is_known=True) == 300
        assert await release(price_in_euros(), is_known=False, version="2") == 3
        assert len(caplog.records) == 1

    def test_a_changed_value_is_reported_in_development_mode(self) -> None:
        program = (
            "import asyncio, stillfresh\n"
            "async def main():\n"
            "    async with stillfresh.Cache('memory://') as cache:\n"
            "        @cache.cached('names', fresh_for=30)\n"
            "        async def names() -> list[str]: return []\n"
            "        (await names()).append('x')\n"
            "asyncio.run(main())"
        )
        ended = subprocess.run(
            [sys.executable, "-X", "dev", "-c", program],
            check=False,
            capture_output=True,
            text=True,
        )
        assert "declare the resource with share=False" in ended.stderr
