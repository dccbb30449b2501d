"""G10: inspect, explain, invalidate and evict, on stores that others use."""

import asyncio
import json
import sqlite3
import time
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stillfresh import Cache, Policy
from stillfresh.cli import inspecting
from stillfresh.stores import capabilities
from stillfresh.stores.contract import Ask, Copy, Failure, Lease, Store
from stillfresh.stores.memory import MemoryStore
from stillfresh.stores.redis import listing
from stillfresh.stores.sqlite import SqliteStore
from stillfresh.stores.sqlite.view import SqliteView
from stillfresh.stores.tenants import for_tenant
from stillfresh.stores.urls import store_for
from tests.kit.cli import call, fail, filled, neighbours, put, said, stillfresh
from tests.kit.examples import examples
from tests.kit.servers.valkey import Server

if TYPE_CHECKING:
    from tests.kit.servers.aws import Aws

HOUR = Policy(3600, 3600, 3600)


async def fill(store: Store) -> None:
    """Prices, fresh and gone, one that is loading and one that failed; pages with a tag."""
    now = time.time()
    await put(store, "price", ["a", "b"], HOUR, now, "eu")
    await put(store, "price", ["old"], HOUR, now - 5 * 3600)
    await put(store, "page", ["https://example.org/"], HOUR, now - 3700, "path:/", "eu")
    await store.acquire("price", [Ask("loading")], 1000)
    await fail(store, "price", "broken", Failure(3, now + 60, "TimeoutError: no answer"))


@pytest.fixture
def site(tmp_path: Path) -> Path:
    return filled(tmp_path / "site.db", fill)


def lines(text: str) -> list[list[str]]:
    return [line.split() for line in text.splitlines()]


class TestI17CommandLine:
    def test_an_address_with_a_tenant_shows_and_changes_its_entries_only(
        self, tmp_path: Path
    ) -> None:
        """Ids are plain; another tenant's entry of the same id is not touched."""

        async def of_two(store: Store) -> None:
            for tenant in ("a", "b"):
                await put(for_tenant(store, tenant), "page", ["/x"], HOUR, time.time())

        path = filled(tmp_path / "site.db", of_two)
        mine = f"sqlite:///{path}?tenant=a"
        found = json.loads(said("inspect", mine, "--json"))["entries"]
        assert [(it["id"], it["verdict"]) for it in found] == [("/x", "fresh")]
        assert json.loads(said("invalidate", mine, "page", "/x", "--json")) == {"invalidated": 1}
        found = json.loads(said("inspect", str(path), "--json"))["entries"]
        shown = [("TENANT#a#/x", "expired"), ("TENANT#b#/x", "fresh")]
        assert [(it["id"], it["verdict"]) for it in found] == shown


class TestG10Inspect:
    def test_inspect_counts_by_kind_and_verdict(self, site: Path) -> None:
        """Copies, leases, bytes, and a table of kinds."""
        found = lines(said("inspect", f"sqlite:///{site}"))
        assert ["copies", "4"] in found
        assert ["leases", "1"] in found
        assert ["kind", "fresh", "stale", "expired", "gone", "values"] in found
        assert ["page", "0", "1", "0", "0", "5", "B"] in found
        assert ["price", "2", "0", "0", "3", "15", "B"] in found

    def test_inspect_lists_entries_with_their_state(self, site: Path) -> None:
        """Verdict, age, size, and what is the matter with each."""
        text = said("inspect", str(site))
        found = {line.split()[1]: line for line in text.splitlines()[9:]}
        assert "stale" in found["https://example.org/"]
        assert "fresh" in found["a"]
        assert "being loaded" in found["loading"]
        assert "failed 3 times: TimeoutError: no answer" in found["broken"]
        assert "gone" in found["old"]

    def test_inspect_takes_a_kind_a_search_and_a_limit(self, site: Path) -> None:
        """What is counted is what was asked for; the store's own size is the store's."""
        found = json.loads(said("inspect", str(site), "--kind", "price", "--json"))
        assert [entry["id"] for entry in found["entries"]] == ["a", "b", "broken", "loading", "old"]
        assert list(found["kinds"]) == ["price"]
        found = json.loads(said("inspect", str(site), "--search", "example.org", "--json"))
        assert [entry["kind"] for entry in found["entries"]] == ["page"]
        found = json.loads(said("inspect", str(site), "--limit", "2", "--json"))
        assert (len(found["entries"]), found["counted"], found["complete"]) == (2, 6, True)
        assert "No entries." in said("inspect", str(site), "--search", "nothing like it")
        assert len(said("inspect", str(site), "--limit", "0").splitlines()) == 8

    def test_inspect_json_is_one_document_of_every_field(self, site: Path) -> None:
        """Times as seconds since 1970, nothing for what is not there."""
        entry, *_ = json.loads(said("inspect", str(site), "--kind", "price", "--json"))["entries"]
        assert entry["verdict"] == "fresh"
        assert 0 <= time.time() - entry["fetched_at"] < 100
        assert entry["fresh_until"] == pytest.approx(entry["fetched_at"] + 3600)
        assert (entry["size"], entry["error"], entry["held_until"]) == (5, None, None)

    def test_inspect_counts_the_first_entries_or_all(
        self, site: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """And says which."""
        monkeypatch.setattr(inspecting, "COUNTED", 4)
        monkeypatch.setattr(inspecting, "AT_ONCE", 2)
        text = said("inspect", str(site), "--limit", "1")
        assert "first 4 entries; --all" in text
        assert not json.loads(said("inspect", str(site), "--limit", "1", "--json"))["complete"]
        found = json.loads(said("inspect", str(site), "--limit", "1", "--all", "--json"))
        assert (found["counted"], found["complete"], len(found["entries"])) == (6, True, 1)

    def test_inspect_and_explain_change_nothing_in_a_store(self, site: Path) -> None:
        """Not a byte is changed, and nothing is left beside the file."""
        before = neighbours(site)
        said("inspect", str(site))
        said("explain", str(site), "price", "a")
        assert neighbours(site) == before

    async def test_inspect_does_not_disturb_a_process_that_has_the_store_open(
        self, tmp_path: Path
    ) -> None:
        """What it has just written is seen, and it goes on writing."""
        async with Cache(f"sqlite:///{tmp_path}/site.db") as cache:

            @cache.batched("price", fresh_for="5m")
            async def prices(keys: list[str]) -> dict[str, int]:
                return {key: len(key) for key in keys}

            await prices("a")
            found = await asyncio.to_thread(stillfresh, "inspect", f"{tmp_path}/site.db", "--json")
            assert [entry["id"] for entry in json.loads(found.stdout)["entries"]] == ["a"]
            assert await prices("bb") == 2

    def test_inspect_escapes_control_characters_in_ids(self, tmp_path: Path) -> None:
        """Colours, bells and markup are written out; other letters are as they are."""
        ids = ["\x1b[31mred\x1b[0m", "a\nb", "[bold]x[/]", ":smile:", "ключ", "日本", "a\u202eb"]
        path = filled(
            tmp_path / "site.db", lambda store: put(store, "price", ids, HOUR, time.time())
        )
        text = said("inspect", str(path))
        for shown in (r"\x1b[31mred\x1b[0m", r"a\nb", "[bold]x[/]", ":smile:", "ключ", "日本"):
            assert shown in text
        assert "\x1b" not in text
        assert "\u202e" not in text
        assert "\x1b" not in said("explain", str(path), "price", ids[0])

    def test_inspect_writes_long_ids_whole_to_a_pipe(self, tmp_path: Path) -> None:
        """However long an id is; a terminal folds it."""
        long = "x" * 3_000
        path = filled(
            tmp_path / "site.db", lambda store: put(store, "price", [long], HOUR, time.time())
        )
        assert long in said("inspect", str(path))

    def test_inspect_takes_the_address_of_a_redis_server(self, valkey: Server) -> None:
        """The same, by its address."""
        url = valkey.url()

        async def work() -> None:
            store = store_for(url, time.time)
            await store.open()
            await fill(store)
            await store.close()

        asyncio.run(work())
        found = json.loads(said("inspect", url, "--json"))
        assert (found["counted"], found["kinds"]["price"]["fresh"]) == (6, 2)
        assert said("invalidate", url, "--tag", "eu") == "3 entries invalidated\n"
        assert "invalidated" in said("explain", url, "price", "a")

    def test_inspect_takes_the_address_of_a_dynamodb_table(self, aws: "Aws") -> None:
        """What has a copy."""
        table = aws.new_table()

        async def work() -> None:
            store = aws.store(table, time.time)
            await store.open()
            await fill(store)
            await store.close()

        asyncio.run(work())
        found = json.loads(said("inspect", aws.address(table), "--json"))
        assert {entry["id"] for entry in found["entries"]} == {
            "a",
            "b",
            "old",
            "https://example.org/",
        }
        assert said("invalidate", aws.address(table), "price", "a", "c") == "1 entry invalidated\n"


class TestG10View:
    @settings(max_examples=examples(20))
    @given(
        ids=st.sets(st.tuples(st.sampled_from(["a", "a1", "a_1"]), st.text("ab:\0é", max_size=3))),
        kind=st.sampled_from(["a", "a1", "other", None]),
        search=st.text("ab:é", max_size=2),
        after=st.none() | st.tuples(st.sampled_from(["a", "a1"]), st.text("ab:", max_size=2)),
        limit=st.integers(1, 5),
    )
    def test_a_view_lists_the_same_names_in_the_same_order_as_its_store(
        self,
        tmp_path_factory: pytest.TempPathFactory,
        ids: set[tuple[str, str]],
        kind: str | None,
        search: str,
        after: tuple[str, str] | None,
        limit: int,
    ) -> None:
        """The view of a file, its store, and one in memory: the same names in the same order."""

        async def work() -> None:
            path = tmp_path_factory.mktemp("view") / "site.db"
            stores: list[Any] = [MemoryStore(), SqliteStore(path)]
            for store in stores:
                await store.open()
                for name, id_ in ids:
                    await store.acquire(name, [Ask(id_)], 100)
            view = SqliteView(path)
            await view.open()
            names = [
                [(each.kind, each.id) for each in await store.entries(kind, search, after, limit)]
                for store in (*stores, view)
            ]
            for store in (*stores, view):
                await store.close()
            assert names[0] == names[1] == names[2]

        asyncio.run(work())


class TestG10Explain:
    def test_explain_says_what_a_read_would_do(self, site: Path) -> None:
        """The sentence of `explain`, and the record field by field."""
        text = said("explain", str(site), "price", "a")
        assert text.startswith("price 'a': a fresh copy, ")
        found = lines(text)
        assert ["verdict", "fresh"] in found
        assert ["fresh", "for", "60", "min"] in found
        assert ["size", "5", "B"] in found

    def test_explain_names_a_lease_and_the_last_failure(self, site: Path) -> None:
        """Who loads it, and why it could not be loaded."""
        assert "Another process is loading it" in said("explain", str(site), "price", "loading")
        text = said("explain", str(site), "price", "broken")
        assert "3 loads failed (TimeoutError: no answer)" in text
        assert "retry at" in text

    def test_explain_and_inspect_use_the_right_article_and_count(self, tmp_path: Path) -> None:
        """An expired copy; failed once, not "1 times"."""

        async def work(store: Store) -> None:
            await put(store, "price", ["old"], Policy(1, 0, 3600), time.time() - 60)
            await fail(store, "price", "once", Failure(1, time.time() + 60, "no answer"))

        path = filled(tmp_path / "site.db", work)
        assert "price 'old': an expired copy, " in said("explain", str(path), "price", "old")
        assert "The last load failed (no answer)" in said("explain", str(path), "price", "once")
        assert "failed once: no answer" in said("inspect", str(path))

    def test_explain_says_that_an_invalidated_page_must_be_validated(self, site: Path) -> None:
        """As RFC 9111 has it: pages say so, and everything else is still what failing leaves."""
        page, price = ("page", "https://example.org/"), ("price", "a")
        for entry in (page, price):
            said("invalidate", str(site), *entry)
        assert "must be validated before it is served" in said("explain", str(site), *page)
        assert "gets this copy only if that fails" in said("explain", str(site), *price)

    def test_explain_says_that_an_unshared_page_is_personal(self, tmp_path: Path) -> None:
        """It exists: each visitor is sent their own. Of everything else: absent upstream."""

        async def work(store: Store) -> None:
            for kind in ("page", "price"):
                (lease,) = (await store.acquire(kind, [Ask("x")], 10)).values()
                assert isinstance(lease, Lease)
                copy = Copy(lease.token, time.time(), HOUR, None)
                await store.publish(kind, {"x": (lease, copy)})

        path = filled(tmp_path / "site.db", work)
        notes = {line.split()[0]: line for line in said("inspect", str(path)).splitlines()[-2:]}
        assert notes["page"].endswith("not shared")
        assert notes["price"].endswith("absent upstream")
        assert "page 'x': not shared" in said("explain", str(path), "page", "x")
        assert "known to be absent" in said("explain", str(path), "price", "x")

    def test_explain_json_has_every_field_and_the_sentence(self, site: Path) -> None:
        """Every field, and the sentence."""
        found = json.loads(said("explain", str(site), "page", "https://example.org/", "--json"))
        assert (found["kind"], found["id"]) == ("page", "https://example.org/")
        assert (found["verdict"], found["size"], found["fresh_for"]) == ("stale", 5, 3600)
        assert found["text"].startswith("page 'https://example.org/': a stale copy")

    def test_explain_explains_missing_entries_too(self, site: Path) -> None:
        """An id that nobody asked for, a kind that is not in the store."""
        for kind, id_ in (("price", "unknown"), ("unknown", "a")):
            assert "there is no copy" in call("explain", str(site), kind, id_).stdout

    def test_explain_and_invalidate_hint_at_unknown_names(self, site: Path) -> None:
        """On stderr, with the kinds that there are: the answer is the same, and so is the code."""
        for command in ("explain", "invalidate"):
            result = call(command, str(site), "prise", "a")
            assert result.exit_code == 0
            assert "no kind prise; did you mean price?" in result.stderr
            assert result.stderr.count("\n") == 1
            result = call(command, str(site), "price", "nobody")
            assert "no such id; `inspect`" in result.stderr
            result = call(command, str(site), "page", "/blog/")
            assert "whole URL" in result.stderr
            assert call(command, str(site), "price", "a").stderr == ""
        for options in (["--tag", "eux"], ["--kind", "prise", "--all"]):
            result = call("invalidate", str(site), *options)
            assert (result.exit_code, result.stderr.startswith("Note: ")) == (0, True)
        result = call("explain", str(site), "prise", "a", "--json")
        assert (result.exit_code, result.stderr) == (0, "")

    def test_g18_inspect_hints_at_a_kind_too(self, site: Path) -> None:
        """The list is empty, and says why; a search that finds nothing is no mistake."""
        result = call("inspect", str(site), "--kind", "pages")
        assert "did you mean page? it has: page, price" in result.stderr
        assert (result.exit_code, "No entries." in result.stdout) == (0, True)
        assert call("inspect", str(site), "--kind", "page", "--search", "x!").stderr == ""

    def test_an_id_may_begin_with_a_dash(self, tmp_path: Path) -> None:
        """Behind two of them."""
        path = filled(
            tmp_path / "site.db", lambda store: put(store, "price", ["-1"], HOUR, time.time())
        )
        assert "a fresh copy" in said("explain", str(path), "price", "--", "-1")
        assert said("invalidate", str(path), "price", "--", "-1", "-2") == "1 entry invalidated\n"


class TestG10Invalidate:
    def test_invalidate_by_id_counts_the_entries_that_exist(self, site: Path) -> None:
        """Those that are there are counted; nobody is served them before a load."""
        assert said("invalidate", str(site), "price", "a", "unknown") == "1 entry invalidated\n"
        found = json.loads(said("explain", str(site), "price", "a", "--json"))
        assert (found["verdict"], found["invalidated"]) == ("expired", True)
        assert "a fresh copy" in said("explain", str(site), "price", "b")

    def test_invalidate_soft_makes_an_entry_stale(self, site: Path) -> None:
        """Served once more."""
        said("invalidate", str(site), "price", "a", "--soft")
        assert "a stale copy" in said("explain", str(site), "price", "a")

    def test_invalidate_by_tag_reaches_every_kind_once(self, site: Path) -> None:
        """In every kind, each once."""
        found = said("invalidate", str(site), "--tag", "eu", "--tag", "path:/", "--json")
        assert json.loads(found) == {"invalidated": 3}
        nothing = call("invalidate", str(site), "--tag", "unknown")
        assert nothing.stdout == "0 entries invalidated\n"

    def test_invalidate_all_reaches_a_whole_kind_and_no_other(
        self, site: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Page by page; other kinds are left alone."""
        monkeypatch.setattr(capabilities, "WALKED", 2)
        assert said("invalidate", str(site), "--kind", "price", "--all").startswith("5 entries")
        found = json.loads(said("inspect", str(site), "--json"))
        marks = {entry["id"]: entry["invalidated"] for entry in found["entries"]}
        assert marks == {
            "a": True,
            "b": True,
            "old": True,
            "broken": False,
            "https://example.org/": False,
        }

    def test_invalidate_all_of_a_kind_on_redis_is_one_walk(
        self, valkey: Server, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A page that is asked for costs a walk over the whole database: here there are none."""
        walks: list[str] = []
        url = valkey.url()
        names = listing._names

        def counted(link: Any, places: Any, kind: str, search: str) -> Any:
            walks.append(kind)
            return names(link, places, kind, search)

        async def work(store: Store) -> None:
            await store.open()
            await put(store, "price", [f"sku-{i}" for i in range(25)], HOUR, time.time())
            await put(store, "page", ["x"], HOUR, time.time())
            await store.close()

        asyncio.run(work(store_for(url, time.time)))
        monkeypatch.setattr(listing, "_names", counted)
        monkeypatch.setattr(listing, "SLICE", 3)
        monkeypatch.setattr(capabilities, "WALKED", 5)
        done = said("invalidate", url, "--kind", "price", "--all")
        assert (done, len(walks)) == ("25 entries invalidated\n", 1)
        found = json.loads(said("inspect", url, "--limit", "100", "--json"))["entries"]
        assert {(it["kind"], it["invalidated"]) for it in found} == {
            ("price", True),
            ("page", False),
        }

    def test_invalidate_of_an_unknown_kind_creates_no_table(self, site: Path) -> None:
        """A word that was mistyped makes no tables."""
        before = {
            entry["kind"] for entry in json.loads(said("inspect", str(site), "--json"))["entries"]
        }
        assert call("invalidate", str(site), "prise", "a").stdout.startswith("0")
        assert call("invalidate", str(site), "--kind", "prise", "--all").stdout.startswith("0")
        with closing(sqlite3.connect(site)) as file:
            tables = [name for (name,) in file.execute("SELECT name FROM sqlite_schema")]
        assert not [name for name in tables if "prise" in name]
        assert before == {"price", "page"}

    async def test_a_running_process_sees_an_invalidation_at_its_next_read(
        self, tmp_path: Path
    ) -> None:
        """And what it was loading meanwhile is not published."""
        async with Cache(f"sqlite:///{tmp_path}/site.db") as cache:
            loads: list[str] = []

            @cache.batched("price", fresh_for="5m")
            async def prices(keys: list[str]) -> dict[str, int]:
                loads.extend(keys)
                return {key: len(loads) for key in keys}

            assert (await prices("a"), await prices("a")) == (1, 1)
            done = await asyncio.to_thread(
                stillfresh, "invalidate", f"{tmp_path}/site.db", "price", "a"
            )
            assert done.stdout == "1 entry invalidated\n"
            assert await prices("a") == 2

    @pytest.mark.parametrize(
        "arguments",
        [
            [],
            ["price"],
            ["price", "a", "--tag", "eu"],
            ["price", "a", "--all"],
            ["--all"],
            ["--kind", "price"],
            ["--kind", "price", "--all", "--tag", "eu"],
            ["price", "--all"],
            ["--tag", "eu", "--kind", "price"],
        ],
    )
    def test_invalidate_takes_exactly_one_way_to_name_entries(
        self, site: Path, arguments: list[str]
    ) -> None:
        """Anything else is wrong use: nothing is invalidated by a guess."""
        result = call("invalidate", str(site), *arguments)
        assert result.exit_code == 2
        assert "or --kind KIND --all" in result.stderr


class TestG10Evict:
    def test_evict_drops_entries_that_are_gone(self, site: Path) -> None:
        """And says how many; the rest stays."""
        assert said("evict", str(site)) == "1 entry evicted\n"
        assert json.loads(said("evict", str(site), "--json")) == {"evicted": 0}
        assert json.loads(said("inspect", str(site), "--json"))["copies"] == 3
