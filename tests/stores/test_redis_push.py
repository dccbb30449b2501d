"""S10: on real servers one process hears of another's changes at once, or knows that it may not."""

import asyncio
import time
from itertools import pairwise
from uuid import uuid4

import pytest

from stillfresh import Cache, Origin, Resource
from stillfresh.errors import StoreError
from stillfresh.stores.channel import Channel
from stillfresh.stores.contract import Store
from stillfresh.stores.redis.channel import SLICE
from stillfresh.stores.redis.layout import Keyspace
from tests.kit.engine import until
from tests.kit.proxies.flaky import FlakyProxy
from tests.kit.pushes import KIND, Told, opened, published
from tests.kit.servers.cluster import Move, clustered
from tests.kit.servers.valkey import HOST, Server, binary_of, serving

DEADLINE = 30.0


async def check_told(store: Store, channel: Channel, told: Told) -> None:
    """Everything that is done by one is told before a beat that the other sends after it."""
    generation = await published(store, "a", "eu")
    await channel.beat()
    assert told == [(KIND, "a", generation)]
    for step in (
        lambda: store.invalidate(KIND, ["a"], soft=True),
        lambda: store.invalidate_tag("eu"),
        lambda: store.delete(KIND, ["a"]),
        lambda: store.invalidate(KIND, ["a"]),
    ):
        told.clear()
        await step()
        await channel.beat()
        assert {it for it in told if it[0] == KIND} == {(KIND, "a", None)}


class TestS10Channel:
    async def test_every_change_is_told_before_the_next_beat(self, valkey: Server) -> None:
        """A publication with its generation; an invalidation, also of what is not there."""
        url, told = valkey.url(timeout="10s"), Told()
        async with (
            opened(url) as one,
            opened(url) as other,
            one.listen(lambda *it: told.append(it)) as channel,
        ):
            await channel.beat()
            await check_told(other, channel, told)

    async def test_another_prefix_and_another_tenant_are_not_heard(self, valkey: Server) -> None:
        """Each hears of its own ids, by their own names."""
        url, told = valkey.url(timeout="10s"), Told()
        async with (
            opened(f"{url}&tenant=acme") as one,
            opened(f"{url}&tenant=else") as other,
            opened(valkey.url()) as stranger,
            one.listen(lambda *it: told.append(it)) as channel,
        ):
            await published(other, "b")
            await published(stranger, "c")
            generation = await published(one, "a")
            await channel.beat()
        assert told == [(KIND, "a", generation)]

    async def test_a_channel_that_was_cut_has_no_beat(self, valkey: Server) -> None:
        """The server closes it: an error, at once."""
        url = valkey.url(timeout="10s")
        async with opened(url) as store, store.listen(lambda *_: None) as channel:
            await channel.beat()
            valkey.command("CLIENT KILL TYPE pubsub")
            with pytest.raises(StoreError, match="ended"):
                await channel.beat()

    async def test_many_messages_leave_the_loop_its_turns(self, valkey: Server) -> None:
        """E28: however many have arrived already, others have their turn after a few."""
        url, told, heard = valkey.url(timeout="10s"), Told(), [0]
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

    async def test_a_half_open_channel_has_no_beat(
        self, valkey: Server, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Nothing comes, and nobody says so: an error after the time-out."""
        async with FlakyProxy(HOST, valkey.port) as proxy:
            proxy.hurry(monkeypatch, "redis.link", "channel")
            url = valkey.url(timeout="30s").replace(f":{valkey.port}/", f":{proxy.port}/")
            async with opened(url) as store, store.listen(lambda *_: None) as channel:
                await channel.beat()
                proxy.lose("silently")
                with pytest.raises(StoreError):
                    await channel.beat()

    async def test_a_cluster_tells_from_every_node(
        self, tmp_path_factory: pytest.TempPathFactory
    ) -> None:
        """Also while a slot moves; and when it has moved, the channel is over and begun anew."""
        with clustered(tmp_path_factory.mktemp("cluster")) as cluster:
            prefix, told = f"test-{uuid4().hex}", Told()
            url = f"{cluster.url}?prefix={prefix}&timeout=10s"
            async with opened(url) as one, opened(url) as other:
                async with one.listen(lambda *it: told.append(it)) as channel:
                    ids = [f"id-{number}" for number in range(64)]
                    tokens = {id_: await published(other, id_) for id_ in ids}
                    await channel.beat()
                    assert sorted(told) == sorted((KIND, *it) for it in tokens.items())
                    (place,) = Keyspace(prefix).of(KIND, ["id-0"])
                    move = Move(cluster, place.key)
                    move.begin(move.key)
                    told.clear()
                    await other.invalidate(KIND, ["id-0"])
                    await channel.beat()
                    assert set(told) == {(KIND, "id-0", None)}
                    move.end()
                    with pytest.raises(StoreError):
                        await channel.beat()
                async with one.listen(lambda *it: told.append(it)) as channel:
                    told.clear()
                    await other.invalidate(KIND, ["id-0"])
                    await channel.beat()
                    assert set(told) == {(KIND, "id-0", None)}


def declared(cache: Cache, versions: dict[str, int]) -> Resource[str, int]:
    @cache.batched(KIND, fresh_for=60, memory_for="1s")
    async def prices(skus: list[str]) -> dict[str, int]:
        return {sku: versions.setdefault(sku, 1) for sku in skus}

    return prices


class TestS10Processes:
    async def test_memory_asks_nothing_and_hears_at_once(self, valkey: Server) -> None:
        """A hit costs no round trip long after `memory_for`, and another's change is seen."""
        url, versions = valkey.url(), dict[str, int]()
        ours, theirs = Cache(url), Cache(url)
        here, there = declared(ours, versions), declared(theirs, versions)
        async with ours, theirs:
            await here("a")
            assert ours.opened is not None
            news = ours.opened.news
            assert news is not None
            await until(lambda: news.proved_at > news.since)
            await here.refresh("a")
            await there.put("a", 7)
            await until(lambda: here.peek("a") is not None)
            deadline = time.monotonic() + DEADLINE
            while await here("a") != 7:
                assert time.monotonic() < deadline
                await asyncio.sleep(0)
            proved = news.proved_at
            await until(lambda: news.proved_at > proved + 1)
            assert (await here.get("a")).origin is Origin.MEMORY

    async def test_a_restarted_server_is_heard_again(
        self, tmp_path_factory: pytest.TempPathFactory
    ) -> None:
        """The channel comes back by itself, and memory is checked before it is trusted."""

        binary = binary_of("valkey")
        assert binary is not None
        with serving(binary, tmp_path_factory.mktemp("mortal")) as server:
            url, versions = server.url(timeout="30s"), dict[str, int]()
            ours, theirs = Cache(url), Cache(url)
            here, there = declared(ours, versions), declared(theirs, versions)
            async with ours, theirs:
                await here("a")
                news = ours.opened.news if ours.opened is not None else None
                assert news is not None
                await until(lambda: news.proved_at > news.since)
                began = news.since
                server.stop()
                server.start()
                await until(lambda: began < news.since <= news.proved_at)
                await there.put("a", 9)
                deadline = time.monotonic() + DEADLINE
                while await here("a") != 9:  # it is told, or `memory_for` ends
                    assert time.monotonic() < deadline
                    await asyncio.sleep(0.01)
