"""D4: what the guides of other libraries promise, on their own programs and the real libraries.

tests/test_guides.py runs each guide as it stands. Here its programs meet rollbacks, failures and
real workers.
"""

import os
import re
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from importlib.metadata import version
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from sqlalchemy.orm import load_only

from stillfresh import LoadFailed
from tests.kit.guides import imported, page_of, run, write_programs
from tests.kit.servers.valkey import Server, binary_of, serving

LIBRARIES = {
    "sqlalchemy": ["SQLAlchemy", "aiosqlite"],
    "litestar": ["Litestar"],
    "django-apis": ["django-ninja", "djangorestframework"],
    "strawberry": ["strawberry-graphql"],
    "task-queues": ["dramatiq", "taskiq"],
    "llm": ["openai"],
    "notebooks": ["ipykernel", "ipython"],
    "mcp": ["mcp"],
}
ARQ = Path(sys.prefix) / "servers" / "arq"
TIMEOUT = 100


@pytest.mark.parametrize("guide", LIBRARIES)
def test_a_guide_names_the_versions_that_it_was_tested_with(guide: str) -> None:
    """D4: those that are installed here."""
    text = re.sub(r"\s+", " ", page_of(guide))
    for library in LIBRARIES[guide]:
        assert re.search(rf"[a-zA-Z] {re.escape(version(library))}\b", text), library


class TestD4SQLAlchemy:
    @pytest.fixture
    def shop(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
        shop = imported("sqlalchemy", "shop", tmp_path, monkeypatch)
        engine = shop.Sessions.kw["bind"]
        shop.Base.metadata.create_all(engine)
        with shop.Sessions.begin() as session:
            session.add_all([shop.Maker(id=1, name="Acme"), shop.Maker(id=2, name="Bolt")])
            session.add(shop.Product(id=7, name="Lamp", maker_id=1))
        assert shop.products(7) == "Lamp"
        yield shop
        engine.dispose()
        shop.cache.close()

    def test_a_transaction_that_is_rolled_back_invalidates_nothing(self, shop: ModuleType) -> None:
        """Neither then, nor with the next commit of that session."""
        with shop.Sessions() as session:
            session.get_one(shop.Product, 7).name = "Desk lamp"
            session.flush()
            session.rollback()
            session.get_one(shop.Maker, 1).name = "Acme Ltd"
            session.commit()
        assert shop.products.get_stored(7).verdict == "fresh"

    def test_the_release_of_a_savepoint_invalidates_only_with_the_commit(
        self, shop: ModuleType
    ) -> None:
        """Before it, others see the old row, and would store it once more."""
        with shop.Sessions.begin() as session:
            with session.begin_nested():
                session.get_one(shop.Product, 7).name = "Desk lamp"
            assert shop.products.get_stored(7).verdict == "fresh"
        assert shop.products(7) == "Desk lamp"

    def test_a_savepoint_that_is_rolled_back_forgets_no_earlier_change(
        self, shop: ModuleType
    ) -> None:
        """The outer transaction commits."""
        with shop.Sessions.begin() as session:
            session.get_one(shop.Product, 7).name = "Desk lamp"
            session.flush()
            savepoint = session.begin_nested()
            session.get_one(shop.Maker, 2).name = "Nut"
            session.flush()
            savepoint.rollback()
        assert shop.products(7) == "Desk lamp"

    def test_a_moved_and_a_deleted_row_invalidate_the_tags_of_before(
        self, shop: ModuleType
    ) -> None:
        """Also if the session has not read the old value."""
        assert [shop.products_of(1), shop.products_of(2)] == [["Lamp"], []]
        with shop.Sessions() as session:
            lamp = session.get_one(shop.Product, 7)
            session.commit()  # its attributes expire
            lamp.maker_id = 2
            session.commit()
        assert [shop.products_of(1), shop.products_of(2)] == [[], ["Lamp"]]
        with shop.Sessions.begin() as session:
            session.delete(session.get_one(shop.Product, 7))
        assert shop.products_of(2) == []
        assert not shop.products.get(7).found

    @pytest.mark.parametrize("is_deleted", [False, True])
    def test_a_row_whose_query_deferred_a_column_invalidates_its_tags(
        self, shop: ModuleType, is_deleted: bool
    ) -> None:
        """The maker's list changes, though the session did not read the maker."""
        assert shop.products_of(1) == ["Lamp"]
        with shop.Sessions.begin() as session:
            names = shop.select(shop.Product).options(load_only(shop.Product.name))
            lamp = session.scalars(names).one()
            if is_deleted:
                session.delete(lamp)
            else:
                lamp.name = "Desk lamp"
        assert shop.products_of(1) == ([] if is_deleted else ["Desk lamp"])

    def test_a_session_that_is_closed_forgets_what_it_flushed(self, shop: ModuleType) -> None:
        """SQLAlchemy calls no `after_rollback` then; the session may be used again."""
        with shop.Sessions() as session:
            session.get_one(shop.Product, 7).name = "Desk lamp"
            session.flush()
            session.close()
            session.get_one(shop.Maker, 2).name = "Nut"
            session.commit()
        assert shop.products.get_stored(7).verdict == "fresh"

    def test_a_commit_succeeds_while_the_store_cannot_be_asked(
        self, shop: ModuleType, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        """It is logged."""

        def fail(_tag: str) -> None:
            raise LoadFailed("the store is away")

        monkeypatch.setattr(shop.cache, "invalidate_tag", fail)
        with shop.Sessions.begin() as session:
            session.get_one(shop.Product, 7).name = "Desk lamp"
        assert "product:7 was not invalidated" in caplog.text

    async def test_an_async_session_invalidates_after_its_commit(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """And not after a rollback, nor at the release of a savepoint."""
        shop = imported("sqlalchemy", "async_shop", tmp_path, monkeypatch)
        async with shop.cache:
            async with shop.engine.begin() as connection:
                await connection.run_sync(shop.Base.metadata.create_all)
            async with shop.Sessions.begin() as session:
                session.add_all(
                    [shop.Maker(id=1, name="A"), shop.Product(id=7, name="B", maker_id=1)]
                )
            assert await shop.products(7) == "B"
            async with shop.Sessions() as session:
                (await session.get_one(shop.Product, 7)).name = "C"
                await session.flush()
                await session.rollback()
            assert (await shop.products.get_stored(7)).verdict == "fresh"
            async with shop.Sessions.begin() as session:
                async with session.begin_nested():
                    (await session.get_one(shop.Product, 7)).name = "C"
                assert await shop.products(7) == "B"
            assert await shop.products(7) == "C"
        await shop.engine.dispose()


class TestD4Litestar:
    def test_a_failing_load_without_a_copy_is_503_with_retry_after(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """And a failing load with a copy is the old copy."""
        from litestar.testing import TestClient  # noqa: PLC0415 (slow to import)

        app = imported("litestar", "app", tmp_path, monkeypatch)
        with TestClient(app.app) as client:
            assert client.get("/products/1").json() == {"id": 1, "name": "tea"}
            monkeypatch.setattr(app, "database", None)
            assert client.get("/products/1").json() == {"id": 1, "name": "tea"}
            failed = client.get("/products/2")
            assert failed.status_code == 503
            assert int(failed.headers["retry-after"]) >= 1


class TestD4Strawberry:
    async def test_fields_that_fail_leave_the_others(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """One upstream call for all objects of a query; an error for the field that has no copy."""
        graph = imported("strawberry", "graph", tmp_path, monkeypatch)
        async with graph.cache:
            query = '{ products(skus: ["tea", "coffee"]) { sku price } }'
            whole = await graph.schema.execute(query)
            assert [product["price"] for product in whole.data["products"]] == [300, 600]
            monkeypatch.setattr(graph, "cents", None)
            query = '{ products(skus: ["tea", "mate"]) { sku price } }'
            part = await graph.schema.execute(query)
            assert [product["price"] for product in part.data["products"]] == [300, None]
            assert len(part.errors) == 1


@pytest.fixture(scope="module")
def valkey(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    binary = binary_of("valkey")
    assert binary is not None
    with serving(binary, tmp_path_factory.mktemp("valkey")) as server:
        yield server


class TestD4TaskQueues:
    def test_a_dramatiq_worker_on_a_real_broker_invalidates_for_this_process(
        self, valkey: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Its command line, Redis between, and two processes on one store."""
        monkeypatch.setenv("SHOP_BROKER", valkey.address)
        shop = imported("task-queues", "shop", tmp_path, monkeypatch)
        shop.database.mkdir()
        (shop.database / "tea").write_text("300")
        assert shop.prices("tea") == 300
        command = [sys.executable, "-m", "dramatiq", "shop", "--processes", "1", "--threads", "1"]
        with (tmp_path / "log").open("w") as log:
            worker = subprocess.Popen(command, cwd=tmp_path, stdout=log, stderr=log)
        try:
            shop.reprice.send("tea", 350)
            shop.broker.join("default", timeout=TIMEOUT * 1000)
            assert shop.prices("tea") == 350, (tmp_path / "log").read_text()
        finally:
            worker.terminate()
            worker.wait(TIMEOUT)
            shop.broker.close()
            shop.cache.close()

    @pytest.mark.skipif(not ARQ.exists(), reason="arq is not installed")
    def test_an_arq_worker_reads_and_invalidates(self, valkey: Server, tmp_path: Path) -> None:
        """Its command line, a new process for each job; jobs and copies are on one server."""
        write_programs("task-queues", tmp_path)
        (tmp_path / "prices").mkdir()
        (tmp_path / "prices" / "tea").write_text("300")
        script = """
import asyncio
from arq import create_pool
from jobs import WorkerSettings

async def main():
    pool = await create_pool(WorkerSettings.redis_settings)
    for name, *arguments in [("label", "tea"), ("reprice", "tea", 350), ("label", "tea")]:
        job = await pool.enqueue_job(name, *arguments)
        process = await asyncio.create_subprocess_exec(
            "%s", "-m", "arq", "jobs.WorkerSettings", "--burst"
        )
        assert await process.wait() == 0
        print(await job.result(timeout=20))
    await pool.aclose()

asyncio.run(main())
"""
        environment = os.environ | {
            "SHOP_REDIS": valkey.address.removesuffix("/0"),
            "PYTHONPATH": f"{ARQ}{os.pathsep}{tmp_path}",
        }
        done = subprocess.run(
            [sys.executable, "-c", script % sys.executable],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=TIMEOUT,
        )
        assert done.stdout.splitlines() == ["tea costs 300", "None", "tea costs 350"], done.stderr


class TestD4LanguageModels:
    @pytest.fixture
    async def streams(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> AsyncIterator[ModuleType]:
        streams = imported("llm", "streams", tmp_path, monkeypatch)
        async with streams.cache:
            yield streams
        await streams.client.close()
        server = sys.modules["model"].server
        server.shutdown()
        server.server_close()

    QUESTION = ({"role": "user", "content": "What is tea?"},)

    async def test_a_caller_that_leaves_does_not_end_the_recording(
        self, streams: ModuleType
    ) -> None:
        """And one that comes later gets all words."""
        first = streams.stream_answer("gpt", list(self.QUESTION))
        assert await anext(first) == "Tea "
        await first.aclose()
        words = [word async for word in streams.stream_answer("gpt", list(self.QUESTION))]
        assert words == ["Tea ", "is ", "a ", "drink."]
        assert sys.modules["model"].Model.calls == 1
        for _stream, task in list(streams.running.values()):
            await task
        assert streams.running == {}

    async def test_only_so_many_answers_are_recorded_at_a_time(
        self, streams: ModuleType, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """One more is refused at once; one that runs already has room for all who ask."""
        monkeypatch.setattr(streams, "MOST", 1)
        first = streams.stream_answer("gpt", list(self.QUESTION))
        second = streams.stream_answer("gpt", list(self.QUESTION))
        with pytest.raises(streams.TooBusy):
            streams.stream_answer("other", list(self.QUESTION))
        assert [word async for word in first] == [word async for word in second]
        for _stream, task in list(streams.running.values()):
            await task
        words = [word async for word in streams.stream_answer("other", list(self.QUESTION))]
        assert words == ["Tea ", "is ", "a ", "drink."]

    async def test_readers_of_a_recording_that_is_ended_do_not_wait_for_ever(
        self, streams: ModuleType
    ) -> None:
        """When the process stops, each gets an error, and no task is left."""
        reader = streams.stream_answer("gpt", list(self.QUESTION))
        [(_stream, task)] = streams.running.values()
        await streams.end_streams()
        assert task.done()
        assert streams.running == {}
        with pytest.raises(ConnectionAbortedError):
            await anext(reader)

    async def test_a_stream_that_breaks_off_is_an_error_and_is_not_kept(
        self, streams: ModuleType, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Its callers have the words that came."""

        class Broken:
            def __init__(self, chunks: Any) -> None:
                self.chunks = chunks

            async def __aenter__(self) -> "Broken":
                return self

            async def __aexit__(self, *_: object) -> None:
                await self.chunks.close()

            async def __aiter__(self) -> AsyncIterator[Any]:
                yield await anext(aiter(self.chunks))
                raise ConnectionError("the model is gone")

        create = streams.client.chat.completions.create

        async def breaking(**request: Any) -> Any:
            return Broken(await create(**request))

        monkeypatch.setattr(streams.client.chat.completions, "create", breaking)
        words = streams.stream_answer("gpt", list(self.QUESTION))
        assert await anext(words) == "Tea "
        with pytest.raises(LoadFailed, match="the model is gone"):
            await anext(words)
        assert streams.running == {}


def test_the_django_guide_serves_each_visitor_its_own_answer(tmp_path: Path) -> None:
    """D4: by the Authorization field in Django Ninja, by another one in REST framework."""
    write_programs("django-apis", tmp_path)
    ninja, rest = run(tmp_path, "try_it.py").splitlines()[-2:]
    assert ninja == "['ann', 'bob']"
    assert rest.startswith("['ann', 'bob', {'detail': ")


def test_without_vary_a_field_of_ones_own_shares_the_response_as_the_guide_warns(
    tmp_path: Path,
) -> None:
    """D4: Django's cache does not know which fields the view has read."""
    write_programs("django-apis", tmp_path)
    source = (tmp_path / "api.py").read_text()
    (tmp_path / "api.py").write_text(source.replace(', vary_on_headers("X-Api-Key")', ""))
    assert run(tmp_path, "try_it.py").splitlines()[-1] == "['ann', 'ann', 'ann']"
