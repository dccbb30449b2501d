"""G6: what the dashboard tells, what it does, and to whom, over HTTP."""

import asyncio
import itertools
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from socket import socketpair
from typing import Any
from urllib.parse import quote, urlencode

import httpx
import msgspec
import pytest

from stillfresh import Cache, StoreError
from stillfresh.engine import ResourceStats
from stillfresh.engine.rules import AGE_BUCKETS
from stillfresh.freshness import Verdict
from stillfresh.gateway import Gateway, gateway
from stillfresh.gateway.entries import CHUNK, MOST_DECODED, MOST_SHOWN, shown_value
from stillfresh.gateway.guard import MOST_ADDRESSES, Operators
from stillfresh.gateway.numbers import KEPT, Gauge, Numbers
from stillfresh.gateway.replies import Problem
from stillfresh.gateway.rules_totals import summed
from stillfresh.gateway.server import Worker, WorkerNumbers
from stillfresh.pages import Page, PageCache
from stillfresh.pages.edge import checked_networks
from stillfresh.pages.model import Head, StoredPage
from stillfresh.pages.stored import PageCodec
from stillfresh.stores.contract import Costs, StoreStats
from stillfresh.stores.memory import MemoryStore
from stillfresh.systems.coordinator import Kind
from stillfresh.testing import ManualClock
from tests.kit.engine import until

TOKEN = "correct-horse"  # noqa: S105 (of the tests)
BEARER = {"Authorization": f"Bearer {TOKEN}"}
OURS = {"X-Stillfresh": "test"}
ODD_IDS = [
    "a/b/c", "a//b", "/a", "a/refresh", "100%", "%2F", "a?b=c&d#e", "späße ☃", "two\nlines",
    "tab\t", "it's \"quoted\"", "<script>alert(1)</script>", ".", "..", "../../etc", "a b+c",
    "\x00", "𝕏" * 50,
]  # fmt: skip


class World:
    """An upstream in the hand, a gateway before it, and a client of its dashboard."""

    def __init__(self, store: str | Cache = "memory://", **options: Any) -> None:
        self.clock = ManualClock(1_000_000.0)
        self.asked: list[list[str]] = []
        self.error: Exception | None = None
        kinds = [Kind("price", fetch=self.fetch, fresh_for="30s", max_batch=4)]
        self.app = gateway(store, kinds=kinds, clock=self.clock, **options)

    async def fetch(self, ids: list[str]) -> dict[str, Any]:
        self.asked.append(list(ids))
        if self.error is not None:
            raise self.error
        return {id_: {"id": id_, "cents": len(self.asked)} for id_ in ids if id_ != "none"}

    async def read(self, *ids: str) -> None:
        for id_ in ids:
            await self.app.hub.resource("price").get(id_)

    @asynccontextmanager
    async def client(
        self, host: str = "127.0.0.1:8080", peer: str = "127.0.0.1", **headers: str
    ) -> AsyncIterator[httpx.AsyncClient]:
        async with self.app, client_of(self.app, host, peer, **headers) as client:
            yield client


def client_of(app: Gateway, host: str, peer: str, **headers: str) -> httpx.AsyncClient:
    transport = httpx.ASGITransport(app=app, client=(peer, 1234))
    url = f"http://{host}/_stillfresh/"
    return httpx.AsyncClient(transport=transport, base_url=url, headers=headers)


def path_of(kind: str, id_: str, action: str = "") -> str:
    """As the page makes it."""
    is_step = id_ in {".", ".."}
    end = f"/{action}" if action else ""
    query = f"?id={id_}" if is_step else ""
    return f"api/entries/{kind}/{'' if is_step else quote(id_, safe='')}{end}{query}"


async def only(client: httpx.AsyncClient) -> dict[str, Any]:
    (row,) = (await client.get("api/stats")).json()["resources"]
    return dict(row)


def shown_page(page: StoredPage) -> dict[str, Any]:
    """As a store keeps it."""
    return shown_value(PageCodec().encode(page), is_page=True)


class TestG6Numbers:
    async def test_the_numbers_have_reads_loads_store_size_and_viewers(self) -> None:
        """Totals by kind, the store's size, and the viewers."""
        world = World()
        async with world.client() as client:
            await world.read("a", "a", "none")
            with world.app.hub.connect() as viewer:
                viewer.subscribe("price", "a")
                told = (await client.get("api/stats")).json()
        (row,) = told["resources"]
        assert (row["cache"], row["kind"]) == ("entities", "price")
        assert row["reads"] == {"fresh": 3, "stale": 0, "expired": 0, "gone": 0}
        assert sum(row["ages"]) == 3
        assert len(row["ages"]) == len(told["age_buckets"]) + 1
        assert (row["loads"], row["loaded"], row["absent"], row["max_batch"]) == (2, 2, 1, 4)
        assert (row["watched"], row["leases_won"], row["superseded"]) == (1, 2, 0)
        assert told["stores"]["entities"]["copies"] == 2
        assert told["stores"]["entities"]["is_paid"] is False
        assert told["live"].pop("max_connections") == 10_000
        assert told["live"] == {"connections": 0, "signed_in": 0, "subscriptions": {"price": 1}}
        assert told["at"] == told["started_at"] == world.clock()

    async def test_the_numbers_have_failing_keys_with_error_and_next_try(self) -> None:
        """How many keys, when the next try is, and what upstream said."""
        world = World()
        world.error = RuntimeError("boom")
        async with world.client() as client:
            await world.app.hub.resource("price").get_many(["a", "b"])
            row = await only(client)
        assert (row["failing"], row["failed"], row["error"]) == (2, 2, "RuntimeError: boom")
        assert row["retry_at"] > world.clock()

    async def test_pages_and_entities_are_shown_with_their_own_numbers(
        self, tmp_path: Path
    ) -> None:
        """Each cache with its own store, its own numbers and its own entries."""
        clock = ManualClock(1_000_000.0)
        pages = PageCache("memory://", clock=clock)
        world = World(f"sqlite:///{tmp_path}/e.db", page_cache=pages)
        async with world.client() as client:
            await world.read("a")
            await pages.get("/blog", lambda: Page(b"<h1>Hi</h1>", 200), "10m")
            told = (await client.get("api/stats")).json()
            listed = (await client.get("api/entries")).json()
            page = (await client.get(path_of("page", "/blog"))).json()
        assert [(it["cache"], it["kind"]) for it in told["resources"]] == [
            ("entities", "price"),
            ("pages", "page"),
        ]
        assert set(told["stores"]) == {"entities", "pages"}
        assert [(it["cache"], it["id"]) for it in listed["entries"]] == [
            ("entities", "a"),
            ("pages", "/blog"),
        ]
        assert listed["kinds"] == ["page", "price"]
        assert (page["value"]["kind"], page["value"]["text"]) == ("page", "<h1>Hi</h1>")
        assert page["can_refresh"] is False

    async def test_two_caches_on_one_store_list_each_entry_once(self, tmp_path: Path) -> None:
        """A page is not shown again as something that the entities' store has, too."""
        url = f"sqlite:///{tmp_path}/both.db"
        pages = PageCache(url, clock=ManualClock(1_000_000.0))
        world = World(url, page_cache=pages)
        async with world.client() as client:
            await world.read("a", "z")
            for number in range(CHUNK + 5):
                await pages.get(f"/{number:03}", lambda: Page(b"x", 200), "10m")
            seen = await every(client)
        assert len(seen) == len(set(seen)) == CHUNK + 7

    async def test_an_unreachable_store_is_reported_beside_the_numbers(self) -> None:
        """The numbers of this process are told all the same."""
        world = World()
        async with world.client() as client:
            await world.app.cache.close()
            told = (await client.get("api/stats")).json()
            listed = await client.get("api/entries")
        assert "closed" in told["stores"]["entities"]["error"]
        assert told["resources"][0]["kind"] == "price"
        assert (listed.status_code, listed.json()["code"]) == (503, "store_away")

    async def test_the_history_holds_the_last_sixty_notes(self) -> None:
        """A note every five seconds, sixty of them, and none of before the start."""
        world = World()
        async with world.client() as client:
            await world.read("a", "a")
            (first, *_) = (await client.get("api/history")).json()
            numbers = Numbers({"entities": world.app.cache}, dict, clock=world.clock)
            for _ in range(KEPT + 10):
                await numbers.note()
        sums = {"hits", "loads", "failed", "store_errors", "load_seconds"}
        assert set(first) == {"at", "reads", "ages", "kinds", "bypassed", *sums}
        assert len(numbers.history()) == KEPT
        assert numbers.history()[-1]["reads"]["fresh"] == 2
        assert sum(kind["reads"] for kind in numbers.history()[-1]["kinds"].values()) == 2

    async def test_the_dashboard_leaves_no_task_when_the_gateway_closes(self) -> None:
        """What notes the minutes ends with the gateway, and begins again with it."""
        before = asyncio.all_tasks()
        world = World()
        for _ in range(2):
            async with world.client() as client:
                await client.get("api/stats")
        assert asyncio.all_tasks() == before


class TestG14NeverBackwards:
    async def test_an_older_snapshot_never_lowers_the_shared_counts(self) -> None:
        """The dashboard's numbers may be half a second old; the shared ones are not."""
        world, board, lines = World(), WorkerNumbers(1, 100_000), socketpair()
        numbers = Numbers({"entities": world.app.cache}, dict, ticks=lambda: 1.0)
        with lines[0], lines[1]:
            numbers.share(Worker(0, board, lines[0]))
            async with world.app:
                told = []
                for tell in (numbers.snapshot, numbers.write, numbers.snapshot):
                    await world.read("a")
                    await tell()
                    total = summed(board.read_all())
                    assert total is not None
                    told.append(total.resources["entities"]["price"].reads[Verdict.FRESH])
        assert told == [1, 2, 2]

    async def test_an_older_count_never_overwrites_a_newer_one(self) -> None:
        """Of two that count at once, the one that began first may be the last to end."""
        world, board, lines = World(), WorkerNumbers(1, 100_000), socketpair()
        numbers = Numbers({"entities": world.app.cache}, dict)
        gates = [asyncio.Event(), asyncio.Event()]
        gates[1].set()
        core = world.app.cache.cores["price"]
        whole, turns = core.stats, iter(gates)

        async def stats() -> ResourceStats:
            found, gate = await whole(), next(turns)
            await gate.wait()
            return found

        core.stats = stats  # type: ignore[method-assign]
        with lines[0], lines[1]:
            numbers.share(Worker(0, board, lines[0]))
            async with world.app.cache:
                first = asyncio.create_task(numbers.write())
                await asyncio.sleep(0)
                await world.read("a")
                second = asyncio.create_task(numbers.write())
                await asyncio.sleep(0)
                gates[0].set()
                await asyncio.gather(first, second)
        total = summed(board.read_all())
        assert total is not None
        assert total.resources["entities"]["price"].reads[Verdict.FRESH] == 1


class Passing(PageCache):
    """Two requests were not cached."""

    def bypassed(self) -> dict[str, int]:
        return {"no-freshness": 2}


class TestI28Counted:
    async def test_bypasses_are_in_the_numbers_the_history_and_the_metrics(self) -> None:
        """By reason, as the page cache counts them; without pages, none."""
        world = World(page_cache=Passing("memory://", clock=ManualClock(1_000_000.0)))
        async with world.client() as client:
            told = (await client.get("api/stats")).json()
            (note, *_) = (await client.get("api/history")).json()
            metrics = (await client.get("../metrics")).text
        assert told["bypassed"] == note["bypassed"] == {"no-freshness": 2}
        assert 'stillfresh_bypassed_total{reason="no-freshness"} 2' in metrics.splitlines()
        async with World().client() as client:
            assert (await client.get("api/stats")).json()["bypassed"] == {}


class TestG13Buckets:
    @pytest.mark.parametrize("fresh_for", [5, 10, 15, 30, 60, 300, 600, 900, 1800, 3600, 86_400])
    def test_age_buckets_end_where_usual_policies_do(self, fresh_for: float) -> None:
        """What is past its freshness is in another bucket than what is not."""
        assert fresh_for in AGE_BUCKETS

    def test_age_buckets_grow_by_at_most_two_and_a_half(self) -> None:
        """From a second to two days, the next bound is at most two and a half times as old."""
        bounds = [bound for bound in AGE_BUCKETS if 1 <= bound <= 172_800]
        assert all(b <= 2.5 * a for a, b in itertools.pairwise(bounds))


class Sized(MemoryStore):
    """Counts how often it is asked for its size, and may be slow, or paid."""

    def __init__(self, ticks: ManualClock, *, took: float = 0.0, paid: bool = False) -> None:
        super().__init__(clock=ticks)
        self.ticks, self.took, self.paid, self.asked = ticks, took, paid, 0

    async def stats(self) -> StoreStats:
        self.asked += 1
        self.ticks.advance(self.took)
        return StoreStats(1, 0, 10, Costs() if self.paid else None)


class TestG6Gauge:
    @pytest.mark.parametrize("address", ["memory://", "sqlite:///{}/a.db"])
    async def test_a_store_that_two_caches_share_is_counted_once(
        self, address: str, tmp_path: Path
    ) -> None:
        """The page adds up the stores that are not marked; `memory://` is a store for each."""
        url = address.format(tmp_path)
        async with Cache(f"{url}?tenant=a") as cache, PageCache(url) as pages:
            told = await gateway(cache, page_cache=pages).dashboard.snapshot()
        assert "is_repeated" not in told["stores"]["entities"]
        assert told["stores"]["pages"].get("is_repeated", False) is url.startswith("sqlite")

    @pytest.mark.parametrize(
        ("took", "paid", "pause"), [(0.0, False, 5), (1.0, False, 50), (0.0, True, 300)]
    )
    async def test_a_store_is_asked_for_its_size_less_often_the_more_it_costs(
        self, took: float, paid: bool, pause: float
    ) -> None:
        """Every five seconds; fifty times what it took; where it is paid, every five minutes."""
        ticks = ManualClock()
        store = Sized(ticks, took=took, paid=paid)
        async with Cache(store) as cache:
            gauge = Gauge(cache, ticks)
            assert (await gauge.look())["copies"] == 1
            ticks.advance(pause - 0.1)
            await gauge.look()
            assert store.asked == 1
            ticks.advance(0.2)
            await gauge.look()
            assert store.asked == 2

    async def test_an_unreachable_store_is_asked_for_its_size_again_soon(self) -> None:
        """However long it took to say so."""
        ticks = ManualClock()

        class Away(Sized):
            async def stats(self) -> StoreStats:
                await super().stats()
                raise StoreError("no route to the store")

        store = Away(ticks, took=2.0)
        async with Cache(store) as cache:
            gauge = Gauge(cache, ticks)
            assert await gauge.look() == {"error": "no route to the store"}
            ticks.advance(5.1)
            await gauge.look()
            assert store.asked == 2

    async def test_several_viewers_ask_the_store_for_its_size_once(self) -> None:
        """While one waits for the store, the others get what was known."""
        ticks, gate = ManualClock(), asyncio.Event()

        class Held(Sized):
            async def stats(self) -> StoreStats:
                await gate.wait()
                return await super().stats()

        store = Held(ticks)
        async with Cache(store) as cache:
            gauge = Gauge(cache, ticks)
            first = asyncio.ensure_future(gauge.look())
            await asyncio.sleep(0)
            assert await gauge.look() == {"error": "not asked yet"}
            gate.set()
            assert (await first)["bytes"] == 10
        assert store.asked == 1


async def every(client: httpx.AsyncClient, **query: str) -> list[str]:
    """All ids, page after page."""
    found: list[str] = []
    after: list[str] | None = []
    while after is not None:
        params = urlencode([*query.items(), *(("after", part) for part in after)])
        told = (await client.get(f"api/entries?{params}")).json()
        found += [entry["id"] for entry in told["entries"]]
        after = told["next"]
    return found


class TestG6Entries:
    async def test_entries_are_searched_by_kind_and_text(self) -> None:
        """The text as it stands, in the id."""
        world = World()
        async with world.client() as client:
            await world.read("apple", "pineapple", "pear", "100%", "100")
            assert await every(client, search="apple") == ["apple", "pineapple"]
            assert await every(client, search="100%") == ["100%"]
            assert await every(client, search="pear", kind="price") == ["pear"]
            assert await every(client, kind="nobody") == []

    async def test_entries_are_listed_page_by_page_in_order(self) -> None:
        """Each entry once, in order, however small the pages are."""
        world = World()
        ids = [f"{number:03}" for number in range(2 * CHUNK + 7)]
        async with world.client() as client:
            await world.app.hub.resource("price").get_many(ids)
            assert await every(client, limit="20") == ids
            assert await every(client, limit=f"{CHUNK}") == ids

    async def test_a_listed_entry_has_verdict_age_size_and_failures(self) -> None:
        """Verdict, age, size, how long it is fresh, what fails."""
        world = World()
        async with world.client() as client:
            await world.read("a")
            world.clock.advance(40)
            (row,) = (await client.get("api/entries")).json()["entries"]
        assert (row["verdict"], row["age"], row["fresh_for"]) == ("stale", 40, -10)
        assert row["size"] == len(msgspec.msgpack.encode({"id": "a", "cents": 1}))
        assert (row["is_absent"], row["is_invalidated"], row["failures"]) == (False, False, 0)

    @pytest.mark.parametrize("query", ["limit=0", "limit=501", "limit=x", "limit=²", "after=a"])
    async def test_a_bad_query_for_entries_gets_422(self, query: str) -> None:
        """Say what is allowed."""
        async with World().client() as client:
            answer = await client.get(f"api/entries?{query}")
        assert answer.status_code == 422
        assert answer.json()["detail"]

    @pytest.mark.parametrize("id_", ODD_IDS)
    async def test_an_entry_with_any_id_can_be_explained_and_changed(self, id_: str) -> None:
        """Found, explained, refreshed, invalidated and deleted by their own name."""
        world = World()
        async with world.client(**OURS) as client:
            await world.read(id_)
            told = (await client.get(path_of("price", id_))).json()
            assert (told["id"], told["verdict"], told["can_refresh"]) == (id_, "fresh", True)
            assert msgspec.json.decode(told["value"]["text"]) == {"id": id_, "cents": 1}
            assert (await client.post(path_of("price", id_, "refresh"))).status_code == 200
            assert world.asked == [[id_], [id_]]
            assert (await client.post(path_of("price", id_, "delete"))).status_code == 200
            assert (await client.get("api/entries")).json()["entries"] == []


class TestG6Explain:
    async def test_explain_shows_the_text_the_terms_and_the_value(self) -> None:
        """The same sentence that `explain` says, and the terms that it follows from."""
        world = World()
        async with world.client() as client:
            await world.read("a")
            world.clock.advance(10)
            told = (await client.get(path_of("price", "a"))).json()
        assert "10.0 s old, fresh for 20.0 s more" in told["text"]
        assert told["terms"] == {"fresh_for": 30, "stale_for": 86400, "error_for": 86400}
        assert (told["in_memory"], told["loading_here"]) == (True, False)
        assert msgspec.json.decode(told["value"]["text"]) == {"id": "a", "cents": 1}

    async def test_an_id_without_an_entry_is_explained_too(self) -> None:
        """There is an explanation of that as well; of a kind that nobody knows there is none."""
        async with World().client() as client:
            told = (await client.get(path_of("price", "never"))).json()
            unknown = await client.get(path_of("nobody", "a"))
            bad = await client.get(path_of("DROP TABLE", "a"))
        assert "there is no copy" in told["text"]
        assert (told["verdict"], told["value"]) == ("gone", None)
        assert (unknown.status_code, bad.status_code) == (404, 404)

    async def test_an_entry_of_an_unknown_kind_is_explained_and_deleted_but_not_refreshed(
        self, tmp_path: Path
    ) -> None:
        """A kind of an older configuration is listed, explained and deleted, but not refreshed."""
        url = f"sqlite:///{tmp_path}/old.db"
        async with World(url).client() as client:
            pass
        old = World(url)
        async with old.client():
            await old.read("a")
        bare = gateway(url, clock=old.clock)
        async with bare, client_of(bare, "localhost", "127.0.0.1", **OURS) as client:
            assert await every(client) == ["a"]
            told = (await client.get(path_of("price", "a"))).json()
            refused = await client.post(path_of("price", "a", "refresh"))
            marked = await client.post(path_of("price", "a", "invalidate"))
            await client.post(path_of("price", "a", "delete"))
            assert await every(client) == []
        assert (told["is_declared"], told["can_refresh"]) == (False, False)
        assert (refused.status_code, refused.json()["code"]) == (409, "not_loadable")
        assert marked.json()["entry"]["is_invalidated"] is True


class TestG6Value:
    def test_a_json_value_is_shown_indented_and_cut(self) -> None:
        """20,000 characters, and the word that there is more."""
        small = shown_value(msgspec.msgpack.encode({"a": [1, None]}))
        large = shown_value(msgspec.msgpack.encode(["x" * 100] * 1_000))
        assert small["text"] == '{\n  "a": [\n    1,\n    null\n  ]\n}'
        assert (small["kind"], small["is_cut"]) == ("json", False)
        assert (len(large["text"]), large["is_cut"]) == (MOST_SHOWN, True)

    @pytest.mark.parametrize(
        "value", [b"\xc1", b"", b"\x00" * (MOST_DECODED + 1), b"\x93\x01", b"\xd4\x01\x00"]
    )
    def test_a_value_that_is_no_json_is_shown_as_its_size(self, value: bytes) -> None:
        """Bytes of another shape, or too many."""
        assert shown_value(value) == {"kind": "bytes", "size": len(value)}

    def test_a_stored_page_is_shown_with_status_headers_and_text(self) -> None:
        """Status, header fields, and the body where it is text."""
        head = Head(status=404, headers=((b"content-type", b"text/html"),))
        text = shown_page(StoredPage(head, "späße".encode()))
        assert (text["status"], text["headers"]) == (404, [["content-type", "text/html"]])
        assert (text["text"], text["is_cut"]) == ("späße", False)
        assert shown_page(StoredPage(head, b"\xff\xfe"))["text"] is None

    def test_a_long_page_is_cut_between_characters(self) -> None:
        """Also where the cut falls into one: what is shown is text all the same."""
        for extra in range(4):
            page = shown_page(StoredPage(Head(), b"x" * extra + "☃".encode() * 200_000))
            assert page["is_cut"] is True
            assert page["text"].startswith("x" * extra + "☃☃")
            assert len(page["text"]) == MOST_SHOWN

    def test_an_absent_value_is_shown_as_absent(self) -> None:
        """Upstream said that there is nothing."""
        assert shown_value(None) == {"kind": "absent"}


class TestG6Actions:
    async def test_the_refresh_action_loads_at_once_and_reports_a_failure(self) -> None:
        """However fresh the copy is; a failure is told, and the copy stays."""
        world = World()
        async with world.client(**OURS) as client:
            await world.read("a")
            told = (await client.post(path_of("price", "a", "refresh"))).json()
            assert '"cents": 2' in told["entry"]["value"]["text"]
            world.error = RuntimeError("boom")
            failed = await client.post(path_of("price", "a", "refresh"))
            still = (await client.get(path_of("price", "a"))).json()
        assert (failed.status_code, failed.json()["code"]) == (502, "load_failed")
        assert "boom" in failed.json()["detail"]
        assert (still["verdict"], still["failures"]) == ("fresh", 1)

    async def test_the_invalidate_action_makes_the_next_read_load(self) -> None:
        """The next read asks upstream."""
        world = World()
        async with world.client(**OURS) as client:
            await world.read("a")
            told = (await client.post(path_of("price", "a", "invalidate"))).json()
            assert (told["entry"]["verdict"], told["entry"]["is_invalidated"]) == ("expired", True)
            await world.read("a")
        assert len(world.asked) == 2

    async def test_the_delete_action_removes_the_entry(self) -> None:
        """Copy and all."""
        world = World()
        async with world.client(**OURS) as client:
            await world.read("a")
            told = (await client.post(path_of("price", "a", "delete"))).json()
        assert (told["said"], told["entry"]["verdict"]) == ("Deleted.", "gone")
        assert "there is no copy" in told["entry"]["text"]

    async def test_refreshing_a_page_marks_it_stale_for_the_next_visitor(self) -> None:
        """Only a visitor brings what its render needs, so the next one does it."""
        clock = ManualClock(1_000_000.0)
        pages = PageCache("memory://", clock=clock)
        world = World(page_cache=pages)
        rendered = []

        def render() -> Page:
            rendered.append(1)
            return Page(b"hi", 200)

        async with world.client(**OURS) as client:
            await pages.get("/a", render, "10m")
            told = (await client.post(path_of("page", "/a", "refresh"))).json()
            assert "Marked stale" in told["said"]
            assert told["entry"]["verdict"] == "stale"
            await pages.get("/a", render, "10m")
            await until(lambda: len(rendered) == 2)

    async def test_refreshing_a_cached_call_marks_it_stale(self) -> None:
        """Its id does not say how to call the function again: nothing is called with a guess."""
        cache = Cache("memory://")
        called: list[int] = []

        @cache.cached("square", fresh_for=30, stale_for=30)
        async def square(number: int) -> int:
            called.append(number)
            return number * number

        app = gateway(cache)
        async with cache, app, client_of(app, "localhost", "127.0.0.1", **OURS) as client:
            await square(7)
            (row,) = (await client.get("api/entries")).json()["entries"]
            told = (await client.post(path_of("square", row["id"], "refresh"))).json()
        assert (told["entry"]["verdict"], told["entry"]["can_refresh"]) == ("stale", False)
        assert called == [7]

    @pytest.mark.parametrize("id_", ["abc", "007", "\uff17", "+7", "7 "])
    async def test_a_whole_number_id_is_found_only_by_its_plain_form(self, id_: str) -> None:
        """`7` is an id of whole numbers; what only reads like it is none."""
        cache = Cache("memory://")

        @cache.batched("number", fresh_for=30)
        async def numbers(ids: list[int]) -> dict[int, str]:
            return {number: str(number) for number in ids}

        app = gateway(cache)
        async with cache, app, client_of(app, "localhost", "127.0.0.1", **OURS) as client:
            await numbers(7)
            assert (await client.post(path_of("number", "7", "refresh"))).status_code == 200
            assert (await client.post(path_of("number", id_, "delete"))).status_code == 404
            assert await every(client) == ["7"]

    @pytest.mark.parametrize("action", ["", "explode", "Refresh"])
    async def test_an_unknown_action_gets_404(self, action: str) -> None:
        """Anything else is not found."""
        async with World().client(**OURS) as client:
            answer = await client.post(f"api/entries/price/a/{action}")
        assert answer.status_code == 404

    async def test_a_get_request_performs_no_action(self) -> None:
        """`…/a/delete` is the address of an entry of that name."""
        world = World()
        async with world.client() as client:
            await world.read("a")
            told = (await client.get("api/entries/price/a/delete")).json()
            assert told["id"] == "a/delete"
            assert await every(client) == ["a"]
            assert (await client.delete("api/entries/price/a")).status_code == 405
            assert (await client.post("api/stats")).status_code == 405


READING = ("", "dashboard.js", "api/stats", "api/history", "api/entries", "api/entries/price/a")


class TestG6ThisMachine:
    @pytest.mark.parametrize(
        ("fields", "may"),
        [
            ({}, True),
            ({b"origin": b"http://localhost:8080"}, True),
            ({b"origin": b"http://localhost:9090"}, False),
            ({b"origin": b"http://evil.example"}, False),
            ({b"origin": b"http://evil@localhost:8080"}, False),
            ({b"origin": b"http://localhost:8080/path"}, False),
            ({b"sec-fetch-site": b"same-origin"}, True),
            ({b"sec-fetch-site": b"same-site"}, False),
            ({b"sec-fetch-site": b"cross-site"}, False),
        ],
    )
    def test_a_page_of_another_origin_is_not_admitted_as_operator(
        self, fields: dict[bytes, bytes], *, may: bool
    ) -> None:
        """Also over the socket, which browsers open to any address."""
        headers = [(b"host", b"localhost:8080"), *fields.items()]
        scope = {"client": ("127.0.0.1", 50_000), "headers": headers}
        assert Operators(None).admits(scope, None) is may

    @pytest.mark.parametrize(("port", "may"), [(b"80", True), (b"81", False)])
    def test_a_default_port_in_the_origin_names_the_same_origin(
        self, port: bytes, *, may: bool
    ) -> None:
        """Whether it is written or not."""
        headers = [(b"host", b"localhost"), (b"origin", b"http://localhost:" + port)]
        scope = {"client": ("127.0.0.1", 50_000), "headers": headers}
        assert Operators(None).admits(scope, None) is may

    @pytest.mark.parametrize("path", READING)
    @pytest.mark.parametrize(
        ("host", "peer", "fields"),
        [
            ("127.0.0.1:8080", "192.0.2.7", {}),
            ("evil.example", "127.0.0.1", {}),
            ("127.0.0.1.evil.example", "127.0.0.1", {}),
            ("localhost.evil.example:8080", "::1", {}),
            ("127.0.0.1:8080", "127.0.0.1", {"X-Forwarded-For": "192.0.2.7"}),
            ("localhost", "127.0.0.1", {"Forwarded": "for=192.0.2.7"}),
        ],
    )
    async def test_without_a_token_other_machines_do_not_see_the_dashboard(
        self, path: str, host: str, peer: str, fields: dict[str, str]
    ) -> None:
        """Not by another peer, not by another name (rebound to 127.0.0.1), not through a proxy."""
        async with World().client(host, peer, **fields) as client:
            answer = await client.get(path)
        assert (answer.status_code, answer.json()["code"]) == (403, "this_machine_only")

    @pytest.mark.parametrize("host", ["127.0.0.1:8080", "localhost:99", "[::1]:8080", "LOCALHOST"])
    @pytest.mark.parametrize("peer", ["127.0.0.1", "::1", "::ffff:127.0.0.1", "127.0.0.9"])
    async def test_without_a_token_this_machine_sees_the_dashboard(
        self, host: str, peer: str
    ) -> None:
        """Under each of its names."""
        async with World().client(host, peer) as client:
            assert (await client.get("api/stats")).status_code == 200
            assert (await client.get("")).headers["content-type"] == "text/html; charset=utf-8"

    @pytest.mark.parametrize(
        "fields",
        [
            {},
            {"Content-Type": "application/x-www-form-urlencoded"},
            {**OURS, "Origin": "https://evil.example"},
            {**OURS, "Origin": "null"},
            {**OURS, "Origin": "http://127.0.0.1:9999"},
            {**OURS, "Sec-Fetch-Site": "cross-site"},
            {**OURS, "Sec-Fetch-Site": "same-site"},
        ],
    )
    async def test_a_hostile_page_cannot_perform_an_action(self, fields: dict[str, str]) -> None:
        """A form cannot send the field, a script of another origin says where it is from."""
        world = World()
        async with world.client(**fields) as client:
            await world.read("a")
            for action in ("refresh", "invalidate", "delete"):
                answer = await client.post(path_of("price", "a", action))
                assert answer.status_code == 403
                assert "access-control-allow-origin" not in answer.headers
            assert len(world.asked) == 1

    @pytest.mark.parametrize("path", READING[2:])
    async def test_a_cross_site_request_cannot_read_the_dashboard(self, path: str) -> None:
        """A request of another site is refused, whatever it could have done with the answer."""
        async with World().client(**{"Sec-Fetch-Site": "cross-site"}) as client:
            answer = await client.get(path)
        assert (answer.status_code, answer.json()["code"]) == (403, "another_origin")

    async def test_the_dashboard_answers_no_cors_preflight(self) -> None:
        """So a browser never sends what would need one."""
        asks = {"Origin": "https://evil.example", "Access-Control-Request-Method": "POST"}
        async with World().client(**asks) as client:
            answer = await client.options(path_of("price", "a", "delete"))
        assert answer.status_code == 405
        assert not any(name.startswith("access-control") for name in answer.headers)

    async def test_the_dashboards_own_page_can_perform_actions(self) -> None:
        """With the field, from its own origin."""
        world = World()
        own = {"Origin": "http://127.0.0.1:8080", "Sec-Fetch-Site": "same-origin"}
        async with world.client(**OURS, **own) as client:
            await world.read("a")
            assert (await client.post(path_of("price", "a", "delete"))).status_code == 200


class TestG6Token:
    @pytest.mark.parametrize("given", [None, "", "Bearer", "Bearer wrong", f"Basic {TOKEN}"])
    async def test_without_the_right_token_only_the_empty_page_is_served(
        self, given: str | None
    ) -> None:
        """Neither from afar nor from this machine."""
        world = World(token=TOKEN)
        fields = {} if given is None else {"Authorization": given}
        async with world.client("fresh.example", "192.0.2.7", **OURS, **fields) as client:
            await world.read("a")
            assert (await client.get("")).status_code == 200
            assert (await client.get("api/access")).json() == {
                "needs_token": True,
                "is_operator": False,
            }
            for path in READING[2:]:
                answer = await client.get(path)
                assert (answer.status_code, answer.json()["code"]) == (401, "sign_in")
                assert answer.headers["www-authenticate"] == "Bearer"
            for action in ("refresh", "invalidate", "delete"):
                answer = await client.post(path_of("price", "a", action))
                assert answer.status_code == 401
        assert len(world.asked) == 1

    async def test_this_machine_needs_the_token_too(self) -> None:
        """Where there is a token, it is asked for everywhere."""
        async with World(token=TOKEN).client() as client:
            assert (await client.get("api/stats")).status_code == 401

    async def test_with_the_token_everything_works_from_afar(self) -> None:
        """Under any name, for any peer; not from a page of another origin."""
        world = World(token=TOKEN)
        async with world.client("fresh.example", "192.0.2.7", **BEARER) as client:
            await world.read("a")
            assert (await client.get("api/access")).json()["is_operator"] is True
            assert (await client.get("api/stats")).status_code == 200
            assert (await client.post(path_of("price", "a", "refresh"))).status_code == 200
            evil = {"Origin": "https://evil.example"}
            refused = await client.post(path_of("price", "a", "refresh"), headers=evil)
        assert refused.status_code == 403
        assert len(world.asked) == 2

    async def test_actions_work_behind_a_proxy_that_changes_the_host(self) -> None:
        """What the browser says of where its request is from counts, not how the proxy calls us."""
        world = World(token=TOKEN)
        own = {"Origin": "https://fresh.example", "Sec-Fetch-Site": "same-origin"}
        async with world.client("127.0.0.1:8080", **BEARER, **own) as client:
            await world.read("a")
            assert (await client.post(path_of("price", "a", "delete"))).status_code == 200

    async def test_a_token_in_the_query_is_not_accepted(self) -> None:
        """A token in the query opens nothing."""
        async with World(token=TOKEN).client() as client:
            answer = await client.get("api/stats", params={"token": TOKEN})
        assert answer.status_code == 401


class TestG12Guesses:
    """The operator's token cannot be guessed at without end."""

    async def test_an_address_may_guess_the_token_ten_times_a_minute(self) -> None:
        """Then nothing is compared any more, not even the right one; others are not concerned."""
        world = World(token=TOKEN)
        async with world.client("fresh.example", "192.0.2.7") as client:
            for number in range(10):
                answer = await client.get("api/stats", headers=bearing(f"guess-{number}"))
                assert answer.status_code == 401
            for given in ("another", TOKEN):
                for path in (*READING[2:], "api/access", "../metrics"):
                    answer = await client.get(path, headers=bearing(given))
                    assert (answer.status_code, answer.json()["code"]) == (429, "too_many_guesses")
                    assert 0 < int(answer.headers["retry-after"]) <= 60
                answer = await client.post(path_of("price", "a", "delete"), headers=bearing(given))
                assert answer.status_code == 429
            assert (await client.get("")).status_code == 200
            assert (await client.get("api/stats")).status_code == 401
        async with world.client("fresh.example", "192.0.2.8", **BEARER) as client:
            assert (await client.get("api/stats")).status_code == 200

    @pytest.mark.parametrize("path", ["api/stats", "api/access", "../metrics"])
    async def test_guesses_through_every_path_are_counted_together(self, path: str) -> None:
        """They are counted together."""
        async with World(token=TOKEN).client("fresh.example", "192.0.2.7") as client:
            for number in range(10):
                await client.get(path, headers=bearing(f"guess-{number}"))
            assert (await client.get("api/stats", headers=BEARER)).status_code == 429

    async def test_the_openapi_description_of_the_metrics_has_429(self) -> None:
        """In the OpenAPI description."""
        async with World(token=TOKEN).client() as client:
            described = (await client.get("../openapi.json")).json()
        assert "Retry-After" in described["paths"]["/metrics"]["get"]["responses"]["429"]["headers"]

    async def test_a_stats_message_counts_as_a_guess(self) -> None:
        """A `stats` message is a guess as well, and is refused like any other."""
        world = World(token=TOKEN)
        scope = scope_of("192.0.2.7")
        async with world.app:
            may = world.app._may_see_figures
            assert may(scope, TOKEN)
            assert not any(may(scope, f"guess-{number}") for number in range(10))
            assert not may(scope, TOKEN)
            assert may(scope_of("192.0.2.8"), TOKEN)

    def test_a_minute_later_the_token_may_be_tried_again(self) -> None:
        """The right token, and ten wrong ones."""
        clock = ManualClock()
        operators = Operators(TOKEN, clock=clock)
        for number in range(10):
            assert not operators.admits(scope_of("192.0.2.7"), f"guess-{number}")
        clock.advance(59)
        with pytest.raises(Problem) as refused:
            operators.admits(scope_of("192.0.2.7"), TOKEN)
        assert refused.value.headers == {"retry-after": "1"}
        clock.advance(1)
        assert operators.admits(scope_of("192.0.2.7"), TOKEN)

    def test_the_same_wrong_token_sent_again_is_one_guess(self) -> None:
        """A tab with an old token polls on, and keeps nobody out; no token is no guess either."""
        operators = Operators(TOKEN, clock=ManualClock())
        for _ in range(50):
            assert not operators.admits(scope_of("192.0.2.7"), "old")
            assert not operators.admits(scope_of("192.0.2.7"), None)
        assert operators.admits(scope_of("192.0.2.7"), TOKEN)

    @pytest.mark.parametrize(
        ("one", "other", "is_same"),
        [
            ("2001:db8::1", "2001:db8::ffff:0:0:2", True),
            ("2001:db8:0:1::1", "2001:db8:0:2::1", False),
            ("::ffff:192.0.2.7", "192.0.2.7", True),
            ("192.0.2.7", "192.0.2.8", False),
            ("/run/a.sock", "", False),
        ],
    )
    def test_guesses_of_one_ipv6_network_are_counted_together(
        self, one: str, other: str, is_same: bool
    ) -> None:
        """An IPv4 address; of IPv6 the network that one customer has."""
        operators = Operators(TOKEN, clock=ManualClock())
        for number in range(10):
            operators.admits(scope_of(one), f"guess-{number}")
        if is_same:
            with pytest.raises(Problem):
                operators.admits(scope_of(other), TOKEN)
        else:
            assert operators.admits(scope_of(other), TOKEN)

    def test_guesses_are_counted_however_many_addresses_guess(self) -> None:
        """The table has a fixed size; another address may take a place over, and none is shared."""
        operators = Operators(TOKEN, clock=ManualClock())
        for number in range(MOST_ADDRESSES + 100):
            operators.admits(scope_of(f"10.{number >> 16}.{number >> 8 & 255}.{number & 255}"), "x")
        for number in range(10):
            assert not operators.admits(scope_of("192.0.2.7"), f"guess-{number}")
        with pytest.raises(Problem):
            operators.admits(scope_of("192.0.2.7"), TOKEN)

    def test_without_a_token_no_guesses_are_counted(self) -> None:
        """There is nothing to guess."""
        operators = Operators(None, clock=ManualClock())
        for number in range(50):
            assert not operators.admits(scope_of("192.0.2.7"), f"{number}")

    def test_behind_a_trusted_proxy_each_client_has_its_own_guesses(self) -> None:
        """The last address that is no proxy counts; what the client wrote before it does not."""
        operators = Operators(TOKEN, clock=ManualClock())
        operators.trusted = checked_networks(["10.0.0.0/8"])
        for number in range(10):
            made_up = passed_on("10.0.0.1", f"198.51.100.{number}, 2001:db8::{number}, 10.0.0.2")
            assert not operators.admits(made_up, f"guess-{number}")
        with pytest.raises(Problem):
            operators.admits(passed_on("10.0.0.1", "2001:db8::ffff"), TOKEN)
        assert operators.admits(passed_on("10.0.0.1", "2001:db8:0:1::1"), TOKEN)

    @pytest.mark.parametrize("client", ["198.51.100.7:{}", "[2001:db8::7]:{}", "unknown-{}"])
    def test_ports_and_names_in_a_proxys_list_do_not_give_more_guesses(self, client: str) -> None:
        """A port or a made-up name would give each connection guesses of its own."""
        operators = Operators(TOKEN, clock=ManualClock())
        operators.trusted = checked_networks(["10.0.0.0/8"])
        for number in range(10):
            chain = f"{client.format(5000 + number)}, 10.0.0.2:80"
            assert not operators.admits(passed_on("10.0.0.1", chain), f"guess-{number}")
        with pytest.raises(Problem):
            operators.admits(passed_on("10.0.0.1", client.format(6000)), TOKEN)

    def test_addresses_that_take_turns_have_ten_guesses_each(self) -> None:
        """Whatever places of the table they have: none pushes another out to start anew."""
        operators = Operators(TOKEN, clock=ManualClock())
        scopes = [scope_of(f"2001:db8:0:{number:x}::1") for number in range(256)]
        for turn in range(10):
            for scope in scopes:
                assert not operators.admits(scope, f"guess-{turn}")
        for scope in scopes:
            with pytest.raises(Problem):
                operators.admits(scope, TOKEN)

    def test_an_untrusted_peer_cannot_make_up_addresses_for_more_guesses(self) -> None:
        """The peer counts, whatever it writes."""
        operators = Operators(TOKEN, clock=ManualClock())
        operators.trusted = checked_networks(["10.0.0.0/8"])
        for number in range(10):
            operators.admits(passed_on("192.0.2.7", f"198.51.100.{number}"), f"guess-{number}")
        with pytest.raises(Problem):
            operators.admits(passed_on("192.0.2.7", "198.51.100.99"), TOKEN)

    def test_guesses_at_all_workers_are_counted_together(self) -> None:
        """What was guessed at one process, the next one counts, too."""
        script = """
import os
from stillfresh.gateway.guard import Operators
scope = {"client": ("192.0.2.7", 1), "headers": []}
operators = Operators("right")
for number in range(10):
    if not (pid := os.fork()):
        operators.admits(scope, f"guess-{number}")
        os._exit(0)
    os.waitpid(pid, 0)
try:
    operators.admits(scope, "right")
except Exception as exc:
    print(exc)
"""
        done = subprocess.run(
            [sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60
        )
        assert "too many wrong tokens" in done.stdout


def passed_on(peer: str, chain: str) -> Any:
    return {**scope_of(peer), "headers": [(b"x-forwarded-for", chain.encode())]}


def bearing(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"}


def scope_of(peer: str) -> dict[str, Any]:
    return {"type": "http", "client": (peer, 1), "headers": []}


class TestG6Files:
    async def test_the_dashboard_page_runs_only_its_own_files(self) -> None:
        """No inline script or style, no other host, no frame around it."""
        async with World().client() as client:
            page = await client.get("")
            policy = page.headers["content-security-policy"]
            names = [word.split('"')[1] for word in page.text.split('href="./')[1:]]
            assert not names
            for name in ("dashboard.js", "dashboard.css", "stillfresh.css", "icon.svg"):
                assert name in page.text
                answer = await client.get(name)
                assert answer.headers["x-content-type-options"] == "nosniff"
                assert (answer.status_code, answer.headers["cache-control"]) == (200, "no-cache")
        assert "default-src 'none'" in policy
        assert "frame-ancestors 'none'" in policy
        assert "unsafe" not in policy
        assert "style=" not in page.text
        assert "onclick" not in page.text
        assert "http" not in page.text.replace("http-equiv", "")

    async def test_the_dashboard_serves_no_other_file(self) -> None:
        """Not a path of the visitor's making."""
        async with World().client() as client:
            for path in ("..%2fapp.py", "dashboard.html", "app.py", "x", "api/", "api"):
                assert (await client.get(path)).status_code == 404

    async def test_the_dashboard_works_under_a_prefix(self) -> None:
        """Mounted elsewhere, its addresses are relative to where it is."""
        from starlette.applications import Starlette  # noqa: PLC0415
        from starlette.routing import Mount  # noqa: PLC0415

        world = World()
        outer = Starlette(routes=[Mount("/fresh", app=world.app)])
        transport = httpx.ASGITransport(app=outer)
        async with (
            world.app,
            httpx.AsyncClient(transport=transport, base_url="http://localhost") as client,
        ):
            await world.read("a/b")
            assert (await client.get("/fresh/_stillfresh/")).status_code == 200
            moved = await client.get("/fresh/_stillfresh")
            told = (await client.get("/fresh/_stillfresh/api/entries/price/a%2Fb")).json()
        assert moved.headers["location"] == "/fresh/_stillfresh/"
        assert told["id"] == "a/b"
