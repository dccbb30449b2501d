"""S10: on PostgreSQL one process hears of another's changes at once, or knows that it may not."""

import asyncio
import re
import time
from itertools import pairwise

import pytest

from stillfresh import Cache, Origin, Policy, Resource
from stillfresh.errors import StoreError
from stillfresh.stores.contract import Copy, Lease, Put
from stillfresh.stores.postgres import create
from stillfresh.stores.postgres.channel import SLICE
from tests.kit.engine import until
from tests.kit.proxies.flaky import FlakyProxy
from tests.kit.pushes import KIND, Told, opened, published
from tests.kit.servers.postgres import HOST, PostgresServer

DEADLINE = 30.0
LONG = "é" * 9_000
DENSE = "".join(chr(0x4E00 + number * 7919 % 20_000) for number in range(3_000))
"""That no index can take, however it is compressed."""
CHANNELS = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE query LIKE 'LISTEN%'"


class TestS10PostgresChannel:
    @pytest.mark.parametrize("id_", ["a", "", "a\0b \n!", "\ud800", LONG, DENSE], ids=str.__len__)
    async def test_every_change_is_told_before_the_next_beat(
        self, postgres: PostgresServer, id_: str
    ) -> None:
        """A publication or put with its generation; an invalidation, also of what is not there.

        Of an id of any bytes, also of one that no notification is long enough for.
        """
        url, told = postgres.new_store(), Told()
        async with (
            opened(url) as one,
            opened(url) as other,
            one.listen(lambda *it: told.append(it)) as channel,
        ):
            await channel.beat()
            generation = await published(other, id_, f"tag of {id_}")
            await channel.beat()
            assert told == [(KIND, id_, generation)]
            told.clear()
            put = Copy(other.new_generation(), time.time(), Policy(60), b"put")
            await other.put(KIND, {id_: Put(put, (f"tag of {id_}",))})
            await channel.beat()
            assert told == [(KIND, id_, put.generation)]
            await other.put(KIND, {id_: Put(put, (f"tag of {id_}",))})
            await channel.beat()
            assert told == [(KIND, id_, put.generation)]
            for step in (
                lambda: other.invalidate(KIND, [id_], soft=True),
                lambda: other.invalidate_tag(f"tag of {id_}"),
                lambda: other.delete(KIND, [id_]),
                lambda: other.invalidate(KIND, [id_]),
            ):
                told.clear()
                await step()
                await channel.beat()
                assert {it for it in told if it[0] == KIND} == {(KIND, id_, None)}
            await other.invalidate_tag(f"unknown {id_}")
            await channel.beat()
            assert told[-1] == ("", f"unknown {id_}", None)

    async def test_changes_that_were_not_made_are_not_announced(
        self, postgres: PostgresServer
    ) -> None:
        """A publication that was superseded; another schema's; another tenant's by its name."""
        url, told = postgres.new_store(), Told()
        async with (
            opened(f"{url}&tenant=acme") as one,
            opened(f"{url}&tenant=else") as other,
            opened(postgres.new_store()) as stranger,
            one.listen(lambda *it: told.append(it)) as channel,
        ):
            await published(other, "b")
            await published(stranger, "c")
            generation = await published(one, "a")
            lease = Lease("a", generation, time.time() + 10)
            copy = Copy(generation, time.time(), Policy(60), b"x")
            assert await one.publish(KIND, {"a": (lease, copy)}) == {"a"}
            await channel.beat()
        assert told == [(KIND, "a", generation)]

    async def test_many_messages_leave_the_loop_its_turns(self, postgres: PostgresServer) -> None:
        """E28: however many come at once, others have their turn after a few."""
        url, told, heard = postgres.new_store(), Told(), [0]
        async with (
            opened(url) as one,
            opened(url) as other,
            one.listen(lambda *it: told.append(it)) as channel,
        ):
            steps = asyncio.create_task(other.invalidate(KIND, [str(it) for it in range(3_000)]))
            while len(told) < 3_000:
                await asyncio.sleep(0)
                heard.append(len(told))
            await steps
            await channel.beat()
        assert max(later - before for before, later in pairwise(heard)) <= SLICE

    async def test_a_channel_that_was_cut_has_no_beat(self, postgres: PostgresServer) -> None:
        """The server closes it: an error, at once; opened again, it tells again."""
        url, told = postgres.new_store(), Told()
        async with opened(url) as store:
            async with store.listen(lambda *_: None) as channel:
                await channel.beat()
                postgres.execute(CHANNELS)
                with pytest.raises(StoreError, match="ended"):
                    await channel.beat()
            async with store.listen(lambda *it: told.append(it)) as channel:
                generation = await published(store, "a")
                await channel.beat()
            assert told == [(KIND, "a", generation)]

    async def test_a_half_open_channel_has_no_beat(
        self, postgres: PostgresServer, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Nothing comes, and nobody says so: an error after the time-out."""
        async with FlakyProxy(HOST, postgres.port) as proxy:
            proxy.hurry(monkeypatch, "postgres.link", "channel")
            url = re.sub(r":\d+/", f":{proxy.port}/", postgres.new_store(timeout="30s"))
            async with opened(url) as store, store.listen(lambda *_: None) as channel:
                await channel.beat()
                proxy.lose("silently")
                with pytest.raises(StoreError):
                    await channel.beat()

    async def test_push_can_be_turned_off_for_all_processes(self, postgres: PostgresServer) -> None:
        """Not for one process: another one would trust a memory that it was not told about."""
        url = postgres.new_store()
        await create(url, pushes=False)
        async with opened(url) as store:
            with pytest.raises(StoreError, match="table create --push"):
                async with store.listen(lambda *_: None):
                    pass
            assert await published(store, "a")
            await create(url, pushes=True)
        async with opened(url) as store, store.listen(lambda *_: None) as channel:
            await channel.beat()


def declared(cache: Cache, versions: dict[str, int]) -> Resource[str, int]:
    @cache.batched(KIND, fresh_for=60, memory_for="1s")
    async def prices(skus: list[str]) -> dict[str, int]:
        return {sku: versions.setdefault(sku, 1) for sku in skus}

    return prices


async def seen(prices: Resource[str, int], version: int) -> None:
    deadline = time.monotonic() + DEADLINE
    while await prices("a") != version:
        assert time.monotonic() < deadline
        await asyncio.sleep(0)


class TestS10PostgresProcesses:
    async def test_memory_asks_nothing_and_hears_at_once(self, postgres: PostgresServer) -> None:
        """A hit costs no round trip after `memory_for`; a change, and a cut, are seen."""
        url, versions = postgres.new_store(timeout="30s"), dict[str, int]()
        ours, theirs = Cache(url), Cache(url)
        here, there = declared(ours, versions), declared(theirs, versions)
        async with ours, theirs:
            await here("a")
            news = ours.opened.news if ours.opened is not None else None
            assert news is not None
            await until(lambda: news.proved_at > news.since)
            await here.refresh("a")
            await there.put("a", 7)
            await seen(here, 7)
            proved = news.proved_at
            await until(lambda: news.proved_at > proved + 1)
            assert (await here.get("a")).origin is Origin.MEMORY
            began = news.since
            postgres.execute(CHANNELS)
            await until(lambda: began < news.since <= news.proved_at)
            await there.put("a", 9)
            await seen(here, 9)
