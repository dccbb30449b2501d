"""E19: a decorated function is a function, a method a method; versions; and FastAPI."""

import asyncio
import gc
import inspect
import subprocess
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import fastapi
import pydantic
import pytest
from starlette.testclient import TestClient

from stillfresh import Cache, ConfigError, Function, Loaded, Origin, SyncCache
from stillfresh.testing import ManualClock
from tests.kit.engine import idle, turns

PYTHONS = sorted(Path.home().glob(".pyenv/versions/3.1[23]*/bin/python"))


class Report(pydantic.BaseModel):
    year: int
    region: str = "eu"


class Session:
    """A database session: no part of any key, and closed when its request ends."""

    is_open = True


@pytest.fixture
def memory() -> Cache:
    return Cache("memory://")


async def simple(year: int) -> int:
    return year


async def plain(year: int, region: str = "eu", *, deep: bool = False) -> Report:
    """A year's report."""
    return Report(year=year, region=region)


class TestE19Functions:
    def test_a_decorated_function_keeps_its_name_and_signature(self, memory: Cache) -> None:
        """Name, place, words, annotations, signature, and the function itself."""
        report = memory.cached("report", fresh_for=60)(plain)
        for name in ("__name__", "__qualname__", "__module__", "__doc__", "__annotations__"):
            assert getattr(report, name) == getattr(plain, name)
        assert report.__wrapped__ is plain
        assert inspect.signature(report) == inspect.signature(plain)
        assert get_type_hints(report) == get_type_hints(plain)

    def test_a_decorated_function_is_a_coroutine_function(self, memory: Cache) -> None:
        """To everybody who asks."""
        report = memory.cached("report", fresh_for=60)(plain)
        prices = memory.batched("price", fresh_for=60)(batch)
        for function in (report, prices, partial(report, 2026)):
            assert inspect.iscoroutinefunction(function)
            assert asyncio.iscoroutinefunction(function)

    @pytest.mark.skipif(not PYTHONS, reason="no other Python is here")
    @pytest.mark.parametrize("python", PYTHONS, ids=lambda path: path.parts[-3])
    def test_a_decorated_function_is_one_on_other_pythons(self, python: Path) -> None:
        """`inspect` has changed since 3.11: an object of this kind is still believed."""
        script = (
            "import asyncio, inspect, warnings\n"
            "class Face:\n"
            "    async def __call__(self): ...\n"
            "face = Face()\n"
            "face.__name__ = 'f'; face.__annotations__ = {}\n"
            "face.__code__ = Face.__call__.__code__\n"
            "face.__defaults__ = face.__kwdefaults__ = None\n"
            "assert inspect.iscoroutinefunction(face) and asyncio.iscoroutinefunction(face)"
        )
        subprocess.run([python, "-c", script], check=True, timeout=60)

    async def test_a_hit_by_the_same_arguments_binds_nothing(
        self, memory: Cache, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """E14: once memory has answered a call, the arguments alone lead to its entry."""
        report = memory.cached("report", fresh_for=60)(simple)
        assert [await report(2026), await report(2026)] == [2026, 2026]
        monkeypatch.setattr(report.signature, "call", None)
        assert await report(2026) == 2026
        with pytest.raises(TypeError):
            await report(year=2026)

    async def test_a_call_that_the_store_confirms_binds_nothing(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """E39: the entry that the arguments named before is checked, and not looked for again."""
        async with Cache(f"sqlite:///{tmp_path}/a.db") as cache:
            report = cache.cached("report", fresh_for=60)(simple)
            assert [await report(2026) for _ in range(2)] == [2026, 2026]
            monkeypatch.setattr(report.signature, "call", None)
            assert await report(2026) == 2026

    async def test_a_call_after_its_entry_was_dropped_loads_again(self, cache: Cache) -> None:
        """What the arguments named before is empty."""
        calls: list[int] = []

        @cache.cached("counted", fresh_for=60)
        async def counted(year: int) -> int:
            calls.append(year)
            return len(calls)

        assert [await counted(2026) for _ in range(3)] == [1, 1, 1]
        await counted.of(2026).delete()
        assert [await counted(2026) for _ in range(2)] == [2, 2]
        await counted.of(2026).invalidate()
        assert [await counted(2026) for _ in range(2)] == [3, 3]

    async def test_every_call_is_one_read(self, memory: Cache) -> None:
        """E12: by whichever way it is answered."""
        report = memory.cached("report", fresh_for=60)(simple)
        for _ in range(4):
            await report(2026)
            await report(year=2026)
            await report.get(2026)
            await report.of(2026).get()
        reads = (await memory.stats()).resources["report"].reads_by_origin
        counted = [sum(reads[origin].values()) for origin in (Origin.LOADED, Origin.MEMORY)]
        assert counted == [1, 15]

    def test_callers_are_not_told_of_loaded(self, memory: Cache) -> None:
        """They get the value."""

        @memory.cached("report", fresh_for=60)
        async def report(year: int) -> Report | Loaded[Report]:
            return Loaded(Report(year=year), fresh_for=1)

        assert inspect.signature(report).return_annotation is Report

    def test_a_resource_is_a_function_of_one_key(self, memory: Cache) -> None:
        """Under its loader's name."""
        prices = memory.batched("price", fresh_for=60)(batch)
        assert (prices.__name__, prices.__doc__) == ("batch", "Many.")
        assert str(inspect.signature(prices)) == "(key: int) -> tests.engine.test_functions.Report"
        assert prices.__wrapped__ is batch

    @pytest.mark.parametrize(
        "cache", [Cache("memory://"), SyncCache("memory://")], ids=["async", "sync"]
    )
    def test_a_method_of_an_entry_is_pointed_to(self, cache: Cache | SyncCache) -> None:
        """`report.invalidate(2026)` says to write `report.of(...).invalidate()`."""

        def report(year: int) -> int:
            return year

        cached = cache.cached("report", fresh_for=60)(report)
        handle = cached.of(2026)
        methods = {it for it in dir(handle) if not it.startswith("_")} - {"get"}
        for name in methods:
            with pytest.raises(AttributeError, match=rf"write report\.of\(\.\.\.\)\.{name}\(\)"):
                getattr(cached, name)
        assert "invalidate" in methods
        assert not hasattr(cached, "invalidate")


async def batch(years: list[int]) -> dict[int, Report]:
    """Many."""
    return {year: Report(year=year) for year in years}


class TestE19Ignore:
    async def test_an_ignored_argument_does_not_count(self, memory: Cache) -> None:
        """One entry; the loader gets what that caller passed."""
        seen: list[Session] = []

        @memory.cached("report", fresh_for=60, ignore=("db",))
        async def report(year: int, db: Session) -> int:
            seen.append(db)
            return year

        one, other = Session(), Session()
        assert [await report(1, one), await report(1, db=other), await report(2, other)] == [
            1,
            1,
            2,
        ]
        assert seen == [one, other]
        assert (await report.of(1, other).get()).origin is Origin.MEMORY

    async def test_a_refresh_gets_what_its_trigger_passed(
        self, cache: Cache, clock: ManualClock
    ) -> None:
        """Not what the first caller did, long ago."""
        seen: list[Session] = []

        @cache.cached("report", fresh_for=10, stale_for=60, ignore=("db",))
        async def report(year: int, db: Session) -> int:
            seen.append(db)
            return year

        one, other = Session(), Session()
        await report(1, one)
        clock.advance(20)
        await report(1, other)
        await idle(cache)
        assert seen == [one, other]

    async def test_memory_keeps_no_argument_alive(self, cache: Cache) -> None:
        """An entry may live for days; a session must not."""

        @cache.cached("report", fresh_for=60, ignore=("db",), tags=lambda year, _: [f"y{year}"])
        async def report(year: int, db: Session) -> int:
            return year

        session = Session()
        gone = weakref.ref(session)
        await report(1, session)
        await report(1, session)
        del session
        await turns()
        gc.collect()
        assert gone() is None
        assert await cache.invalidate_tag("y1") == [("report", "[1]")]

    async def test_key_says_which_arguments_count(self, memory: Cache) -> None:
        """A function of the arguments says what counts."""

        @memory.cached("report", fresh_for=60, key=lambda year, _: f"y{year}")
        async def report(year: int, db: Session) -> int:
            return year

        await report(1, Session())
        assert report.of(1, Session()).peek() is not None
        assert (await report.get(1, Session())).origin is Origin.MEMORY
        assert [it.id for it in await memory.entries()] == ['"y1"']


class TestE19Methods:
    async def test_a_method_whose_self_is_ignored_can_be_decorated(self, memory: Cache) -> None:
        """Bound as any other; all instances share its entries."""
        calls: list[str] = []

        class Shop:
            def __init__(self, name: str) -> None:
                self.name = name

            @memory.cached("price", fresh_for=60, ignore=("self",))
            async def price(self, sku: str, *, net: bool = False) -> str:
                """Of one thing."""
                calls.append(self.name)
                return sku

        one, other = Shop("one"), Shop("other")
        assert [await one.price("a"), await other.price("a"), await Shop.price(one, "a")] == [
            "a"
        ] * 3
        assert (await other.price.get("a")).origin is Origin.MEMORY
        await other.price.of("a").invalidate()
        assert await other.price("a", net=False) == "a"
        assert calls == ["one", "other"]
        assert isinstance(one.price, Function)
        assert isinstance(Shop.price, Function)
        assert one.price.__self__ is one  # type: ignore[attr-defined]
        assert (one.price.__name__, one.price.__doc__) == ("price", "Of one thing.")
        assert str(inspect.signature(one.price)) == "(sku: str, *, net: bool = False) -> str"
        assert list(inspect.signature(Shop.price).parameters) == ["self", "sku", "net"]
        assert inspect.iscoroutinefunction(one.price)

    async def test_a_method_with_a_key_of_its_own(self, memory: Cache) -> None:
        """What of `self` counts."""

        class Shop:
            def __init__(self, id_: int) -> None:
                self.id = id_

            @memory.cached("price", fresh_for=60, key=lambda self, sku: (self.id, sku))
            async def price(self, sku: str) -> int:
                return self.id

        assert [await Shop(1).price("a"), await Shop(2).price("a"), await Shop(1).price("a")] == [
            1,
            2,
            1,
        ]

    async def test_a_static_method_can_be_decorated(self, memory: Cache) -> None:
        """`@staticmethod` stands above."""

        class Shop:
            @staticmethod
            @memory.cached("price", fresh_for=60)
            async def price(sku: str) -> str:
                return sku

        assert await Shop.price("a") == "a"
        assert await Shop().price("b") == "b"  # type: ignore[call-arg]  # mypy binds it, Python not
        assert (await Shop.price.get("a")).origin is Origin.MEMORY

    @pytest.mark.parametrize(
        ("make", "says"),
        [
            (
                lambda it: it("price")(method),
                "price: method is a method; write ignore=('self',) if all instances share their",
            ),
            (
                lambda it: it("price")(of_class),
                "price: of_class is a class method; write @staticmethod above @cache.cached(...)",
            ),
            (
                lambda it: it("price", ignore=("cls",))(of_class),
                "price: of_class is a class method",
            ),
            (
                lambda it: it("price")(staticmethod(plain)),
                "price: @staticmethod stands below the cache's decorator; write it above",
            ),
            (
                lambda it: it("price")(classmethod(of_class)),
                "price: @classmethod stands below the cache's decorator; write @staticmethod, and",
            ),
        ],
    )
    def test_methods_that_cannot_work_are_refused(
        self, memory: Cache, make: Callable[[Any], object], says: str
    ) -> None:
        """Refused with what to write instead."""
        with pytest.raises(ConfigError) as caught:
            make(partial(memory.cached, fresh_for=1))
        assert str(caught.value).startswith(says)


async def method(self: object, sku: str) -> str:
    raise NotImplementedError


async def of_class(cls: type, sku: str) -> str:
    raise NotImplementedError


class TestE19Versions:
    async def test_releases_do_not_see_each_others_values(self, url: str) -> None:
        """Neither the old one's by the new one, nor the other way round; nor those without."""
        for release in (None, "1", "2", "1", "2", None):
            async with Cache(url if url != "memory://" else "memory://") as cache:
                made: list[str] = []

                @cache.cached("report", fresh_for=60, version=release)
                async def report(
                    year: int, release: str | None = release, made: Any = made
                ) -> str | None:
                    made.append("called")
                    return release

                @cache.batched("price", fresh_for=60, version=release)
                async def prices(
                    keys: list[str],
                ) -> dict[str, str | None]:
                    return dict.fromkeys(keys, release)  # noqa: B023 (called within the loop)

                assert await report(1) == release
                assert await prices("a") == release

    async def test_each_release_has_its_own_entries(self, url: str) -> None:
        """So that two of them side by side do not undo each other's loads; tags reach both."""
        async with Cache(url) as cache:
            calls: list[str] = []

            def declared(version: str) -> Any:
                @cache.batched("price", fresh_for=60, version=version, tags=lambda _: ["all"])
                async def prices(keys: list[str]) -> dict[str, str]:
                    calls.append(version)
                    return dict.fromkeys(keys, version)

                return prices

            old, new = declared("1"), declared("2")
            for _ in range(2):
                assert [await old("a"), await new("a")] == ["1", "2"]
            assert calls == ["1", "2"]
            assert {(it.kind, it.id) for it in await cache.entries()} == {
                ("price_v1", "a"),
                ("price_v2", "a"),
            }
            assert sorted(await cache.invalidate_tag("all")) == [
                ("price_v1", "a"),
                ("price_v2", "a"),
            ]
            assert "price_v2" in str(await new.explain("a"))

    @pytest.mark.parametrize("version", ["", "1.2", "V2", "a-b", 2, 1.5, "ä", "a b"])
    def test_a_bad_version_is_refused(self, memory: Cache, version: Any) -> None:
        """Says what was given, and what to write."""
        for declare in (memory.batched, memory.cached):
            with pytest.raises(
                ConfigError, match=r"price: version is .*; write small letters, digits"
            ):
                declare("price", fresh_for=1, version=version)


class TestE19FastAPI:
    def test_depends_and_routes_take_a_cached_function(self, memory: Cache) -> None:
        """A cached function is a dependency and a route, with its parameters and its model."""
        calls: list[int] = []

        @memory.cached("report", fresh_for=60, ignore=("agent",))
        async def report(
            year: int, region: str = "eu", agent: Annotated[str, fastapi.Header()] = ""
        ) -> Report:
            """A year's report."""
            calls.append(year)
            return Report(year=year, region=region)

        prices = memory.batched("price", fresh_for=60)(batch)
        app = fastapi.FastAPI()
        app.get("/report/{year}")(report)
        app.get("/price/{key}")(prices)

        @app.get("/both")
        async def both(
            one: Annotated[Report, fastapi.Depends(report)],
            other: Annotated[Report, fastapi.Depends(prices)],
        ) -> list[Report]:
            return [one, other]

        with TestClient(app) as client:
            for agent in ("a", "b"):
                answer = client.get("/report/2026", headers={"agent": agent})
                assert answer.json() == {"year": 2026, "region": "eu"}
            assert calls == [2026]
            assert client.get("/report/soon").status_code == 422
            assert client.get("/price/7").json() == {"year": 7, "region": "eu"}
            assert client.get("/both?year=1&region=us&key=2").json() == [
                {"year": 1, "region": "us"},
                {"year": 2, "region": "eu"},
            ]
            route = client.get("/openapi.json").json()["paths"]["/report/{year}"]["get"]
            assert (route["summary"], route["description"]) == ("Report", "A year's report.")
            assert [it["name"] for it in route["parameters"]] == ["year", "region", "agent"]
            schema = route["responses"]["200"]["content"]["application/json"]["schema"]
            assert schema == {"$ref": "#/components/schemas/Report"}
            with memory.bypassed():
                client.get("/report/2026")
            assert calls == [2026, 1, 2026]

    def test_depends_takes_a_bound_method(self, memory: Cache) -> None:
        """As a dependency, without `self`."""

        class Shop:
            @memory.cached("report", fresh_for=60, ignore=("self",))
            async def report(self, year: int) -> Report:
                return Report(year=year)

        app, shop = fastapi.FastAPI(), Shop()

        @app.get("/")
        async def page(one: Annotated[Report, fastapi.Depends(shop.report)]) -> Report:
            return one

        with TestClient(app) as client:
            assert client.get("/?year=5").json() == {"year": 5, "region": "eu"}
