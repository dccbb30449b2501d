"""E6, E8: the consumer of an outbox: what it delivers, survives, and says of itself."""

import asyncio
import gc
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from itertools import count
from typing import Any

import httpx
import psycopg
import pytest

from stillfresh import Cache, ConfigError, SyncCache, Verdict
from stillfresh.engine import prometheus_text
from stillfresh.errors import NotOpen, StoreError
from stillfresh.gateway import gateway
from stillfresh.integrations.postgres import OutboxConsumer, consumer, consumer_lags, outbox_sql
from stillfresh.stores.memory import MemoryStore
from tests.kit.engine import until
from tests.kit.held_store import SteppedStore
from tests.kit.outbox import PRODUCTS, TABLES, Link, Shop, database_at, rows, waiting_rows
from tests.kit.servers.postgres import PostgresServer, postgres_serving

PAIR = "INSERT INTO products VALUES (1, 'tea', 'eu'), (2, 'cup', 'eu')"
RENAME = "UPDATE products SET name = %s WHERE id = %s"


@pytest.fixture
def address(postgres: PostgresServer) -> Iterator[str]:
    found = postgres.new_database()
    with database_at(found, PRODUCTS, PAIR, tables=TABLES):
        yield found


@pytest.fixture
def link(address: str) -> Iterator[Link]:
    with database_at(address) as link:
        yield link


@asynccontextmanager
async def opened(
    link: Link, store: Any = "memory://", name: str = "shop", **options: Any
) -> AsyncIterator[tuple[Shop, OutboxConsumer]]:
    """A shop whose copies were made before the change that a test makes."""
    async with Cache(store) as cache:
        shop = Shop(link, cache)
        async with OutboxConsumer(cache, address_of(link), name, **options) as consumer:
            await consumer.caught_up()
            assert [await shop.name(1), await shop.name(2)]
            shop.loads = 0
            yield shop, consumer


def address_of(link: Link) -> str:
    return f"postgresql://postgres@{link.info.host}:{link.info.port}/{link.info.dbname}"


class TestE6Delivery:
    async def test_a_change_invalidates_its_tags_and_no_others(self, link: Link) -> None:
        """The changed row is loaded again, the other one is served from the cache."""
        async with opened(link) as (shop, consumer):
            link.execute(RENAME, ("new", 1))
            await consumer.caught_up()
            assert [await shop.name(1), await shop.name(2), shop.loads] == ["new", "cup", 1]
            assert waiting_rows(link) == 0

    async def test_commits_out_of_order_are_all_delivered(self, link: Link) -> None:
        """A transaction that stays open holds nobody else's rows up, and its own come later."""
        async with opened(link) as (shop, consumer):
            with psycopg.connect(address_of(link)) as slow:
                slow.execute(RENAME, ("slow", 1))
                link.execute(RENAME, ("quick", 2))
                await consumer.caught_up()
                assert [await shop.name(1), await shop.name(2)] == ["tea", "quick"]
                await consumer.caught_up()
            await consumer.caught_up()
            assert [await shop.name(1), await shop.name(2)] == ["slow", "quick"]
            assert (shop.loads, waiting_rows(link)) == (2, 0)

    async def test_a_commit_during_a_delivery_comes_with_the_next_one(self, link: Link) -> None:
        """Only transactions that the cycle has looked at count as delivered."""
        store = SteppedStore(MemoryStore())
        async with opened(link, store) as (shop, consumer):
            store.hold("invalidate_tag")
            link.execute(RENAME, ("new", 1))
            await store.reached("invalidate_tag")
            link.execute(RENAME, ("new", 2))
            store.let_go("invalidate_tag")
            await consumer.caught_up()
            assert [await shop.name(1), await shop.name(2)] == ["new", "new"]

    async def test_many_changed_tags_are_read_in_pages(
        self, link: Link, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """However many there are; and swept in slices."""
        monkeypatch.setattr(consumer, "ROWS", 7)
        monkeypatch.setattr(consumer, "SWEPT", 10)
        async with opened(link) as (shop, following):
            told = [await shop.name(number) for number in range(3, 60)]
            assert set(told) == {None}
            link.execute(
                "INSERT INTO products SELECT n, 'x' || n, 'us' FROM generate_series(3, 59) n"
            )
            await following.caught_up()
            assert [await shop.name(number) for number in range(3, 60)] == [
                f"x{number}" for number in range(3, 60)
            ]
            while waiting_rows(link):
                await following.caught_up()

    async def test_a_soft_consumer_makes_copies_stale(self, link: Link) -> None:
        """Never as fresh."""
        async with Cache("memory://") as cache:

            @cache.cached("name", fresh_for="1d", stale_for="1d", tags=lambda: ["product:1"])
            async def name() -> int:
                return 1

            async with OutboxConsumer(cache, address_of(link), soft=True) as following:
                await following.caught_up()
                await name()
                link.execute(RENAME, ("new", 1))
                await following.caught_up()
                assert (await name.of().get()).verdict is Verdict.STALE

    async def test_a_truncated_table_makes_everything_stale(self, link: Link) -> None:
        """Also what has no tag of that table."""
        async with opened(link) as (shop, consumer):
            link.execute("TRUNCATE products")
            await consumer.caught_up()
            assert [await shop.name(1), await shop.name(2), shop.loads] == [None, None, 2]


class TestE6Resuming:
    async def test_a_consumer_continues_where_it_stopped(self, link: Link) -> None:
        """What changed meanwhile is delivered, and nothing else is made stale."""
        async with Cache("memory://") as cache:
            shop = Shop(link, cache)
            for name in ("tea", "new"):
                async with OutboxConsumer(cache, address_of(link), "shop") as following:
                    await following.caught_up()
                    assert [await shop.name(1), await shop.name(2)] == [name, "cup"]
                link.execute(RENAME, ("new", 1))
            assert shop.loads == 3

    async def test_a_new_consumer_begins_with_everything_stale(self, link: Link) -> None:
        """Its store may hold copies from before."""
        async with Cache("memory://") as cache:
            shop = Shop(link, cache)
            assert await shop.name(1) == "tea"
            link.execute("ALTER TABLE products DISABLE TRIGGER USER")
            link.execute(RENAME, ("new", 1))
            async with OutboxConsumer(cache, address_of(link), "shop") as following:
                await following.caught_up()
                assert await shop.name(1) == "new"

    @pytest.mark.parametrize(
        "what",
        [
            "DELETE FROM stillfresh_outbox.consumer",
            "UPDATE stillfresh_outbox.consumer SET system = 1",
        ],
    )
    async def test_a_dropped_consumer_begins_again_with_everything_stale(
        self, link: Link, what: str
    ) -> None:
        """It was away for too long, or the database was restored from a dump."""
        async with opened(link) as (shop, consumer):
            link.execute(what.encode())
            await consumer.caught_up()
            assert [await shop.name(1), await shop.name(2), shop.loads] == ["tea", "cup", 2]

    async def test_a_consumer_that_is_gone_for_good_is_dropped(self, link: Link) -> None:
        """After an hour; then nothing is kept for it."""
        add = "INSERT INTO stillfresh_outbox.consumer VALUES ('gone', '1:1:', 1, now())"
        age = (
            "UPDATE stillfresh_outbox.consumer SET caught_up_at = now() - %s::interval WHERE name ="
        )
        async with opened(link) as (_, consumer):
            link.execute(add)
            link.execute(f"{age} 'gone'".encode(), ("59 minutes",))
            link.execute(RENAME, ("new", 1))
            await consumer.caught_up()
            assert waiting_rows(link) > 0
            link.execute(f"{age} 'gone'".encode(), ("61 minutes",))
            await consumer.caught_up()
            await consumer.caught_up()
            assert rows(link, "SELECT name FROM stillfresh_outbox.consumer") == [("shop",)]
            assert waiting_rows(link) == 0

    async def test_rows_that_writers_dropped_make_everything_stale(self, link: Link) -> None:
        """A consumer that was away while they were replaced cannot miss them."""
        async with Cache("memory://") as cache:
            shop = Shop(link, cache)
            for name, loads in (("tea", 2), ("new", 4)):
                async with OutboxConsumer(cache, address_of(link), "shop") as following:
                    await following.caught_up()
                    assert [await shop.name(1), await shop.name(2)] == [name, "cup"]
                    assert shop.loads == loads
                link.execute(RENAME, ("new", 1))
                link.execute("UPDATE stillfresh_outbox.changed SET at = at - interval '3 hours'")
                link.execute("INSERT INTO products SELECT n FROM generate_series(3, 2000) n")
                link.execute("DELETE FROM products WHERE id > 2")
                tags = rows(
                    link, "SELECT tag FROM stillfresh_outbox.changed WHERE tag IN ('', 'product:1')"
                )
                assert tags == [("",)]

    async def test_rows_that_writers_drop_during_a_delivery_are_not_missed(
        self, link: Link, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """It says that it has caught up when everything was made stale in their place."""
        monkeypatch.setattr(consumer, "ROWS", 2)
        store = SteppedStore(MemoryStore())
        async with opened(link, store, poll="1h") as (shop, following):
            link.execute("SET stillfresh.notify = off")
            for number in (1, 2):
                link.execute(RENAME, ("new", number))
            store.hold("invalidate_tag")
            caught_up = asyncio.ensure_future(following.caught_up())
            await store.reached("invalidate_tag")
            with link.transaction():
                link.execute("DELETE FROM stillfresh_outbox.changed")
                link.execute("INSERT INTO stillfresh_outbox.changed (tag) VALUES ('')")
            store.let_go("invalidate_tag")
            await caught_up
            assert [await shop.name(2), await shop.name(1)] == ["new", "new"]

    async def test_a_database_that_was_made_anew_makes_everything_stale(
        self, postgres: PostgresServer
    ) -> None:
        """From a copy of itself, on the same server: nobody told what differs."""
        address = postgres.new_database()
        name = address.rpartition("/")[2]
        with psycopg.connect(address) as link:
            link.execute(outbox_sql({}).encode())
        async with Cache("memory://") as cache:
            values = iter(["new", "old"])

            @cache.cached("name", fresh_for="1d")
            async def name_of() -> str:
                return next(values)

            async with OutboxConsumer(cache, address) as following:
                await following.caught_up()
            postgres.execute(f"CREATE DATABASE {name}_kept TEMPLATE {name}")
            async with OutboxConsumer(cache, address) as following:
                await following.caught_up()
                assert await name_of() == "new"
            postgres.execute(f"DROP DATABASE {name} WITH (FORCE)")
            postgres.execute(f"ALTER DATABASE {name}_kept RENAME TO {name}")
            async with OutboxConsumer(cache, address) as following:
                await following.caught_up()
                assert await name_of() == "old"

    async def test_everything_is_stale_once_however_often_tables_are_emptied(
        self, link: Link
    ) -> None:
        """A TRUNCATE during the cycle that makes everything stale is for the next cycle."""
        store = SteppedStore(MemoryStore())
        async with opened(link, store, poll="1h") as (shop, consumer):
            await shop.name(1)
            link.execute("SET stillfresh.notify = off")
            link.execute("TRUNCATE products")
            before = store.count("invalidate")
            caught_up = await store.holding("invalidate", consumer.caught_up())
            link.execute("TRUNCATE products")
            store.let_go("invalidate")
            await caught_up
            assert store.count("invalidate") - before <= 2


class TestE6SeveralConsumers:
    async def test_each_name_gets_every_change(self, link: Link) -> None:
        """Two stores; a row stays until both have it."""
        async with opened(link, name="one") as (one, first):
            async with opened(link, name="two") as (two, second):
                link.execute(RENAME, ("new", 1))
                await asyncio.gather(first.caught_up(), second.caught_up())
                assert [await one.name(1), await two.name(1)] == ["new", "new"]
            link.execute(RENAME, ("newer", 1))
            await first.caught_up()
            assert (await one.name(1), waiting_rows(link)) == ("newer", 2)
            async with opened(link, name="two") as (two, second):
                assert await two.name(1) == "newer"
            assert waiting_rows(link) == 0

    async def test_a_row_stays_for_a_consumer_that_saw_its_transaction_open(
        self, link: Link
    ) -> None:
        """Later transactions that this consumer has do not count for the earlier one."""
        two = Cache("memory://")
        async with opened(link, name="one") as (_, first), two:
            shop = Shop(link, two)
            with psycopg.connect(address_of(link)) as slow:
                slow.execute(RENAME, ("slow", 1))
                async with OutboxConsumer(two, address_of(link), "two") as second:
                    link.execute(RENAME, ("quick", 2))
                    await second.caught_up()
                    assert await shop.name(1) == "tea"
            await first.caught_up()
            async with OutboxConsumer(two, address_of(link), "two") as second:
                await second.caught_up()
                assert await shop.name(1) == "slow"

    async def test_a_standby_consumer_knows_the_lag_and_takes_over(self, link: Link) -> None:
        """A standby knows from the database how far the other is, and takes over when it ends."""
        store, address = SteppedStore(MemoryStore()), address_of(link)
        async with opened(link, store) as (shop, first):
            store.hold("invalidate_tag")
            link.execute(RENAME, ("new", 1))
            await store.reached("invalidate_tag")
            other = Cache(store)
            async with other, OutboxConsumer(other, address, "shop") as second:
                caught_up = asyncio.ensure_future(second.caught_up())
                await asyncio.wait([caught_up], timeout=0.3)
                assert not caught_up.done()
                store.let_go("invalidate_tag")
                await caught_up
                assert store.count("invalidate_tag") == 2 * 2  # two tags, which go round twice
                assert await consumer_lags(address) == pytest.approx({"shop": second.lag}, abs=5)
                await first.__aexit__()
                link.execute(RENAME, ("newer", 1))
                await second.caught_up()
                assert await shop.name(1) == "newer"


class TestE6Faults:
    async def test_a_failed_invalidation_is_retried_and_the_lag_grows(
        self, link: Link, caplog: pytest.LogCaptureFixture
    ) -> None:
        """The row stays, the lag grows and is told; when the store is back it is delivered."""
        store = SteppedStore(MemoryStore())
        async with opened(link, store, max_lag="1ms") as (shop, consumer):
            store.broken.add("invalidate_tag")
            link.execute(RENAME, ("new", 1))
            await until(lambda: "cannot invalidate_tag" in caplog.text)
            assert (consumer.lag > 0, waiting_rows(link)) == (True, 2)
            store.broken.clear()
            await consumer.caught_up()
            assert (await shop.name(1), waiting_rows(link)) == ("new", 0)

    async def test_a_refused_tag_does_not_hold_up_others(
        self, link: Link, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A part of the store may be away; it has not caught up before all of it is back."""
        monkeypatch.setattr(consumer, "ROWS", 1)
        async with opened(link) as (shop, following):
            invalidate, away = shop.cache.invalidate_tag, {"product:1"}

            async def refusing(tag: str, *, soft: bool = False) -> list[tuple[str, str]]:
                if tag in away:
                    raise StoreError("away")
                return await invalidate(tag, soft=soft)

            monkeypatch.setattr(shop.cache, "invalidate_tag", refusing)
            link.execute("UPDATE products SET name = 'new'")
            caught_up = asyncio.ensure_future(following.caught_up())
            while await shop.name(2) != "new":
                await asyncio.sleep(0.01)
            assert (await shop.name(1), caught_up.done()) == ("tea", False)
            away.clear()
            await caught_up
            assert await shop.name(1) == "new"

    async def test_a_tag_too_long_for_an_entry_is_passed_over(self, link: Link) -> None:
        """The database counts the bytes of its own encoding, which may be fewer."""
        async with opened(link) as (_, consumer):
            add = "INSERT INTO stillfresh_outbox.changed (tag) VALUES (repeat('x', 100001))"
            link.execute(add)
            await consumer.caught_up()
            assert waiting_rows(link) == 0

    async def test_changes_arrive_by_polling_without_notifications(self, link: Link) -> None:
        """Without NOTIFY changes arrive all the same."""
        async with opened(link, poll="50ms") as (shop, _):
            link.execute("SET stillfresh.notify = off")
            link.execute(RENAME, ("new", 1))
            while await shop.name(1) != "new":
                await asyncio.sleep(0.01)

    async def test_a_notification_starts_a_delivery_at_once(self, link: Link) -> None:
        """Not after the next poll."""
        async with opened(link, poll="1h") as (shop, _), asyncio.timeout(10):
            for name in ("new", "newer", "newest"):
                link.execute(RENAME, (name, 1))
                while await shop.name(1) != name:
                    await asyncio.sleep(0.01)

    async def test_a_long_delivery_keeps_its_transaction(
        self, link: Link, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        """The server ends the transaction of a process that says nothing, not of one that works."""
        store = SteppedStore(MemoryStore())
        monkeypatch.setattr(consumer, "BEGIN", consumer.BEGIN.replace("30s", "1s"))
        monkeypatch.setattr(consumer, "SAID_EVERY", 0.02)
        async with opened(link, store) as (shop, following):
            store.hold("invalidate_tag")
            link.execute(RENAME, ("new", 1))
            await store.reached("invalidate_tag")
            await asyncio.sleep(1.2)  # the server's clock is the one that counts
            assert caplog.text == ""
            with_turn = "SELECT pg_try_advisory_xact_lock(%s, hashtext('shop'))"
            assert rows(link, with_turn, consumer.TURN) == [(False,)]
            store.let_go("invalidate_tag")
            await following.caught_up()
            assert (await shop.name(1), caplog.text) == ("new", "")

    def test_a_server_that_comes_back_is_followed_again(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        """Killed and started again: the consumer connects with growing pauses, and goes on.

        It may have lost commits, so everything is stale. One
        that says nothing any more does not keep the consumer from being closed."""
        with postgres_serving("fsync=on", "synchronous_commit=on") as server:
            with database_at(server.address, PRODUCTS, PAIR, tables=TABLES):
                pass
            asyncio.run(self.restarted(server))
        assert "tried again" in caplog.text

    async def restarted(self, server: PostgresServer) -> None:
        cache = Cache("memory://")
        async with cache, OutboxConsumer(cache, server.address, "shop", poll="50ms") as following:
            loads = count()

            @cache.cached("loads", fresh_for="1d")
            async def loads_of() -> int:
                return next(loads)

            await following.caught_up()
            assert await loads_of() == 0
            await asyncio.to_thread(server.stop)
            await until(lambda: following.lag >= 0.3)
            (server.data / "recovery.signal").touch()  # as after a failover: a new timeline
            server.settings = (*server.settings, "restore_command=false")
            await asyncio.to_thread(server.start)
            with psycopg.connect(server.address, autocommit=True) as link:
                shop = Shop(link, cache)
                await following.caught_up()
                assert (await shop.name(1), await loads_of()) == ("tea", 1)
                link.execute(RENAME, ("new", 1))
                await following.caught_up()
                assert await shop.name(1) == "new"
            server.pause()
            await following.__aexit__()
            server.go_on()


class TestE6Life:
    @pytest.mark.parametrize("name", ["", "a\nb", 'a"b', "x" * 61, 3])
    def test_a_bad_consumer_name_is_refused(self, name: Any) -> None:
        """It stands in logs and metrics."""
        with pytest.raises(ConfigError, match="its name is 1 to 60 letters"):
            OutboxConsumer(Cache("memory://"), "postgresql://", name)

    def test_a_consumer_refuses_a_sync_cache(self) -> None:
        """It has a loop of its own."""
        with pytest.raises(ConfigError, match="a Cache is needed here"):
            OutboxConsumer(SyncCache("memory://"), "postgresql://")  # type: ignore[arg-type]

    async def test_a_database_without_an_outbox_is_refused_with_the_command(
        self, postgres: PostgresServer
    ) -> None:
        """Told when it is opened, with the command that makes one."""
        cache = Cache("memory://")
        with pytest.raises(ConfigError, match="stillfresh outbox create"):
            async with OutboxConsumer(cache, postgres.address):
                pass
        assert cache.lags == {}

    async def test_a_malformed_database_address_is_refused_without_its_password(self) -> None:
        """Without the password in it."""
        with pytest.raises(ConfigError, match=r"not an address; write postgresql://") as refused:
            async with OutboxConsumer(Cache("memory://"), "postgresql://me:secret@[x"):
                pass
        assert "secret" not in str(refused.value)

    def test_a_consumer_can_be_opened_again_in_another_event_loop(
        self, address: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        """And rests there between two cycles, as in the first one."""
        cache = Cache("memory://")
        following = OutboxConsumer(cache, address, poll="1h")

        async def follow() -> None:
            async with cache, following:
                await following.caught_up()
                await following.caught_up()

        for _ in range(2):
            asyncio.run(follow())
        gc.collect()
        assert caplog.text == ""

    async def test_waiting_for_a_consumer_of_another_event_loop_raises(self, address: str) -> None:
        """It is told so, and does not wait for ever."""
        async with Cache("memory://") as cache, OutboxConsumer(cache, address) as following:
            with pytest.raises(NotOpen, match="runs in another event loop"):
                await asyncio.to_thread(asyncio.run, following.caught_up())

    async def test_two_consumers_of_one_name_in_a_cache_are_refused(self, address: str) -> None:
        """The lag of the one would hide that of the other."""
        async with Cache("memory://") as cache, OutboxConsumer(cache, address):
            with pytest.raises(ConfigError, match="choose another name for each database"):
                async with OutboxConsumer(cache, address):
                    pass

    async def test_an_unreachable_database_does_not_stop_the_start(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        """The lag grows from the start on."""
        async with Cache("memory://") as cache:
            nowhere = "postgresql://postgres@127.0.0.1:1/none"
            async with OutboxConsumer(cache, nowhere, "shop") as following:
                await until(lambda: "tried again" in caplog.text)
                assert (await cache.stats()).lags["shop"].seconds > 0
        with pytest.raises(NotOpen, match="this consumer is closed"):
            await following.caught_up()


class TestG7Lag:
    async def test_metrics_and_readyz_report_the_lag(self, link: Link) -> None:
        """Of the consumers of the gateway's cache; past its limit the gateway is not ready."""
        async with opened(link, max_lag="1h") as (shop, _):
            text = prometheus_text(await shop.cache.stats())
            assert 'stillfresh_outbox_lag_seconds{consumer="shop"} 0.' in text
            async with gateway(shop.cache) as app, asked(app) as client:
                ready = await client.get("/readyz")
                assert (ready.status_code, ready.json()["status"]) == (200, "ready")
                assert 0 <= ready.json()["lags"]["shop"] < 30
                assert 'outbox_lag_seconds{consumer="shop"}' in (await client.get("/metrics")).text

    async def test_a_gateway_too_far_behind_is_not_ready(self, link: Link) -> None:
        """Also while its stores answer."""
        async with opened(link, max_lag=0) as (shop, _), gateway(shop.cache) as app:
            async with asked(app) as client:
                late = await client.get("/readyz")
            assert (late.status_code, late.json()["status"]) == (503, "not ready")


def asked(app: Any) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://gateway")


class TestReadYourWrites:
    async def test_a_read_with_the_token_of_a_commit_waits_for_its_delivery(
        self, link: Link, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Without it, the read may come before the consumer (E37)."""
        async with opened(link, poll="1h") as (shop, consumer):
            gate = asyncio.Event()
            invalidate = shop.cache.invalidate_tag

            async def held(tag: str, **options: Any) -> Any:
                await gate.wait()
                return await invalidate(tag, **options)

            monkeypatch.setattr(shop.cache, "invalidate_tag", held)
            token = renamed(link, consumer)
            assert await shop.name(1) == "tea"
            reading = asyncio.create_task(shop.name.of(1).get(at_least=token))
            await asyncio.sleep(0)
            assert not reading.done()
            gate.set()
            assert (await reading).value == "new"

    async def test_no_value_is_made_of_a_part_whose_tag_of_the_same_commit_is_to_come(
        self, link: Link, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Its own tag is invalidated first, and a reader has it made anew at once (E37)."""
        async with opened(link) as (shop, consumer):
            invalidate_tag = shop.cache.invalidate_tag
            was_made = asyncio.Event()

            @shop.cache.cached("list", fresh_for="1d", tags=lambda shop: [f"shop:{shop}"])
            async def names(_: str) -> list[str | None]:
                return [await shop.name(1), await shop.name(2)]

            async def invalidate_the_list_first(tag: str, **options: Any) -> object:
                if tag != "shop:eu":
                    await was_made.wait()
                invalidated = await invalidate_tag(tag, **options)
                if tag == "shop:eu":
                    await names("eu")
                    was_made.set()
                return invalidated

            assert await names("eu") == ["tea", "cup"]
            monkeypatch.setattr(shop.cache, "invalidate_tag", invalidate_the_list_first)
            token = renamed(link, consumer)
            assert (await names.of("eu").get(at_least=token)).value == ["new", "cup"]

    async def test_a_process_that_stands_by_waits_for_the_one_that_works(self, link: Link) -> None:
        """Both have the same consumer, on one store (E37)."""
        store = MemoryStore()
        async with (
            opened(link, SteppedStore(store)) as (shop, consumer),
            opened(link, SteppedStore(store)) as (other_shop, _),
        ):
            for name in ("new", "newer"):
                token = renamed(link, consumer, name)
                answer = await other_shop.name.of(1).get(at_least=token)
                assert answer.value == name
                answer = await shop.name.of(1).get(at_least=token)
                assert answer.value == name

    async def test_a_commit_behind_one_that_is_still_open_is_not_waited_for_in_vain(
        self, link: Link
    ) -> None:
        """(E37)."""
        async with opened(link) as (shop, consumer):
            with psycopg.connect(address_of(link)) as slow:
                slow.execute(RENAME, ("slow", 2))
                token = renamed(link, consumer)
                assert (await shop.name.of(1).get(at_least=token)).value == "new"

    async def test_a_transaction_that_never_began_is_not_waited_for(self, link: Link) -> None:
        """The token was made up, or is another database's (E37)."""
        async with opened(link) as (shop, consumer):
            token = consumer.token(2**63)
            began = consumer.token(1)
            assert (await shop.name.of(1).get(at_least=token)).value == "tea"
            assert (await shop.name.of(1).get(at_least=began)).value == "tea"

    @pytest.mark.parametrize("transaction", ["", "x", None, -1, 2**64, 1.5j])
    async def test_what_is_no_transaction_is_refused(self, link: Link, transaction: Any) -> None:
        """(E37)."""
        async with opened(link) as (_, consumer):
            with pytest.raises(ConfigError, match="pg_current_xact_id"):
                consumer.token(transaction)


def renamed(link: Link, consumer: OutboxConsumer, name: str = "new") -> str:
    """Rename the first product; return the token of the commit."""
    with link.transaction():
        link.execute(RENAME, (name, 1))
        [(xid,)] = rows(link, "SELECT pg_current_xact_id()")
        return consumer.token(xid)
