"""E6, E8: once the consumer has caught up to a commit, no older copy is served as fresh."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path

import psycopg
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stillfresh import Cache, Verdict
from stillfresh.integrations.postgres import OutboxConsumer
from tests.kit.examples import examples
from tests.kit.outbox import PRODUCTS, TABLES, Link, Shop, database_at, rows
from tests.kit.processes import Process
from tests.kit.servers.postgres import PostgresServer

WRITERS = 3
IDS = range(2 * WRITERS)
UPSERT = b"INSERT INTO products VALUES (%s, %s, 'eu') ON CONFLICT (id) DO UPDATE SET name = %s"
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("write"), st.sampled_from(IDS)),
        st.tuples(st.just("delete"), st.sampled_from(IDS)),
        st.tuples(st.just("commit"), st.sampled_from(range(WRITERS))),
        st.tuples(st.just("roll back"), st.sampled_from(range(WRITERS))),
        st.tuples(st.just("load"), st.sampled_from(IDS)),
        st.tuples(st.just("turns"), st.sampled_from(range(1, 30))),
        st.tuples(st.just("begin anew"), st.just(0)),
        st.tuples(st.just("check"), st.just(0)),
    ),
    min_size=5,
    max_size=40,
)


@pytest.fixture(scope="module")
def address(postgres: PostgresServer) -> Iterator[str]:
    found = postgres.new_database()
    with database_at(found, PRODUCTS, tables=TABLES):
        yield found


class World:
    """Writers with transactions of their own, and a reader whose loads take a while."""

    def __init__(self, address: str, link: Link, writers: list[Link]) -> None:
        self.address = address
        self.link = link
        self.writers = writers
        self.cache = Cache("memory://")
        self.loads: list[asyncio.Task[object]] = []
        self.count = 0

        @self.cache.cached("name", fresh_for="1d", tags=lambda number: [f"product:{number}"])
        async def name(number: int) -> str | None:
            found = rows(link, "SELECT name FROM products WHERE id = %s", number)
            for _ in range(10 * number):
                await asyncio.sleep(0)
            return found[0][0] if found else None

        self.name = name

    async def take(self, step: str, number: int) -> None:
        self.count += 1
        match step:
            case "write":
                told = f"{self.count}"
                self.writers[number % WRITERS].execute(UPSERT, (number, told, told))
            case "delete":
                self.writers[number % WRITERS].execute(
                    "DELETE FROM products WHERE id = %s", (number,)
                )
            case "commit":
                self.writers[number].commit()
            case "roll back":
                self.writers[number].rollback()
            case "load":
                self.loads.append(asyncio.ensure_future(self.name(number)))
            case "turns":
                for _ in range(number):
                    await asyncio.sleep(0.0005)

    async def check(self, consumer: OutboxConsumer) -> None:
        await consumer.caught_up()
        there = dict(rows(self.link, "SELECT id, name FROM products"))
        answers = {number: self.name.of(number) for number in IDS}
        read = {number: await handle.get() for number, handle in answers.items()}
        assert {it.verdict for it in read.values()} == {Verdict.FRESH}
        assert {number: it.value for number, it in read.items()} == {
            number: there.get(number) for number in IDS
        }


@asynccontextmanager
async def consuming(world: World) -> AsyncIterator[OutboxConsumer]:
    async with OutboxConsumer(world.cache, world.address, "shop") as consumer:
        yield consumer


class TestE6ThePromise:
    @settings(max_examples=examples(15))
    @given(steps=STEPS)
    def test_after_catching_up_every_read_equals_the_database(
        self, address: str, steps: list[tuple[str, int]]
    ) -> None:
        """Whatever writers commit, roll back or leave open, and in whatever order."""
        asyncio.run(self.walk(address, steps))

    async def walk(self, address: str, steps: list[tuple[str, int]]) -> None:
        with ExitStack() as stack:
            link = stack.enter_context(psycopg.connect(address, autocommit=True))
            writers = [stack.enter_context(psycopg.connect(address)) for _ in range(WRITERS)]
            writers[0].isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
            world = World(address, link, writers)
            async with world.cache:
                left = iter([*steps, ("commit", 0), ("commit", 1), ("check", 0)])
                is_over = False
                while not is_over:
                    async with consuming(world) as consumer:
                        is_over = await self.go_on(world, consumer, left)
                await asyncio.gather(*world.loads)

    async def go_on(
        self, world: World, consumer: OutboxConsumer, left: Iterator[tuple[str, int]]
    ) -> bool:
        """Until the consumer is to begin anew, wherever it is in a cycle; True: all is done."""
        for step, number in left:
            if step == "begin anew":
                return False
            await (world.check(consumer) if step == "check" else world.take(step, number))
        return True


class TestE6Killed:
    @pytest.mark.parametrize("steps", [3, 5, 6, 9])
    def test_a_consumer_that_is_killed_loses_nothing(
        self, address: str, tmp_path: Path, steps: int
    ) -> None:
        """kill -9 after any step of the cycle that delivers: the next one does it again."""
        store = f"sqlite:///{tmp_path / 'shop.db'}"
        with ExitStack() as stack:
            link = stack.enter_context(psycopg.connect(address, autocommit=True))
            link.execute(UPSERT, (1, "old", "old"))
            worker = Process(stack, "outbox", address, store, steps)
            asyncio.run(self.read(link, store, "old"))
            link.execute(UPSERT, (1, f"new {steps}", f"new {steps}"))
            assert worker.line() == "here"
            worker.process.kill()
            worker.process.wait()
            asyncio.run(self.read(link, store, f"new {steps}", address))

    async def read(self, link: Link, store: str, expected: str, address: str | None = None) -> None:
        async with Cache(store) as cache:
            shop = Shop(link, cache)
            if address is not None:
                async with OutboxConsumer(cache, address, "shop") as consumer:
                    await consumer.caught_up()
            answer = await shop.name.of(1).get()
            assert (answer.value, answer.verdict) == (expected, Verdict.FRESH)
