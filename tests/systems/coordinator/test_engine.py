"""C15, C18: the coordinator on the engine: one file, one refresh path, and cheap neighbours."""

import asyncio
import shutil
from collections.abc import Mapping
from pathlib import Path

import apsw
import msgspec
import pytest

from stillfresh import Cache, LoadFailed, Policy, StoreError
from stillfresh.stores.contract import Copy, Put
from stillfresh.systems.coordinator import TtlConfig, database
from stillfresh.systems.coordinator.database import FIRST_RELEASE
from stillfresh.systems.coordinator.rules import kept_fresh
from stillfresh.testing import ManualClock
from tests.kit.coordinator import VIEWER, Site, made, milliseconds, post
from tests.kit.engine import turns
from tests.kit.old_sqlite import OLD_FILE, OLD_KIND


def subscribe(site: Site, *numbers: int) -> None:
    for number in numbers:
        site.ttl.subscribe_post(composite_post_id=f"a:{number}")


def look_ups(site: Site, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The ids whose rows are read, from now on."""
    looked: list[str] = []
    read_now = site.controller.database.read_now

    def noted(kind: str, ids: list[str], known: dict[str, str] | None = None) -> object:
        looked.extend(ids)
        return read_now(kind, ids, known)

    monkeypatch.setattr(site.controller.database, "read_now", noted)
    return looked


async def all_fresh(site: Site, count: int) -> None:
    site.ttl.configure(post_max_batch_size=count)
    subscribe(site, *range(count))
    await site.ttl.tick()
    await site.ttl.tick()


class TestC15OnTheEngine:
    async def test_a_larger_batch_is_one_request(self, tmp_path: Path, clock: ManualClock) -> None:
        """C1: configured before the first tick, and while it runs."""
        site = made(tmp_path, clock, TtlConfig(post_max_batch_size=30))
        async with site.controller, site.ttl:
            site.ttl.sign_in(VIEWER)
            site.ttl.set_visible(True)
            subscribe(site, *range(30))
            await site.ttl.tick()
            site.ttl.configure(post_max_batch_size=50)
            clock.advance(301)
            subscribe(site, *range(30, 50))
            await site.ttl.tick()
            assert [len(ids) for ids in site.nexus.posts] == [30, 50]

    async def test_an_edit_is_not_stored_in_the_next_viewers_file(self, site: Site) -> None:
        """C11: the second edit waits for the first; by then another viewer has signed in."""
        controller = site.controller
        edits = [asyncio.create_task(controller.touch("post", "a:1", post("a:1"))) for _ in "12"]
        await turns(2)
        site.ttl.sign_in("another")
        await controller.prepare()
        _, second = await asyncio.gather(*edits, return_exceptions=True)
        assert "the file belongs to another viewer" in str(second)
        assert site.rows("post_ttl") == {}

    async def test_two_processes_fetch_an_id_once(self, site: Site) -> None:
        """The lease is the store's: the other process waits for the view that is being fetched."""
        other = made(site.folder, site.clock)
        async with other.controller, other.ttl:
            other.ttl.sign_in(VIEWER)
            other.ttl.set_visible(True)
            await other.ttl.tick()
            subscribe(site, 1)
            fetching = await site.nexus.holding(site.ttl.tick())
            subscribe(other, 1)
            waiting = asyncio.create_task(other.ttl.tick())
            await turns()
            site.nexus.let_go()
            await asyncio.gather(fetching, waiting)
            assert await other.version("a:1") == 1
        assert (site.nexus.posts, other.nexus.posts) == ([["a:1"]], [])

    @pytest.mark.parametrize("forced", [False, True])
    async def test_no_row_is_read_after_a_batch_is_stored(
        self, site: Site, monkeypatch: pytest.MonkeyPatch, forced: bool
    ) -> None:
        """The load's result says what was stored, and when each id is stale again."""
        await site.ttl.tick()
        subscribe(site, 1, 2)
        ids = ["a:1", "a:2"]
        refresh = site.controller.force_refresh("post", ids) if forced else site.ttl.tick()
        refreshing = await site.nexus.holding(refresh)
        looked = look_ups(site, monkeypatch)
        site.nexus.let_go()
        await refreshing
        assert looked == []
        assert site.told == [("updated", "post", ids)]
        site.clock.advance(300)
        await site.ttl.tick()
        assert site.nexus.posts == [ids]
        site.clock.advance(0.001)
        await site.ttl.tick()
        assert site.nexus.posts == [ids, ids]

    async def test_no_row_is_read_after_a_batch_has_failed(
        self, site: Site, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """C9: each id cools down all the same."""
        await site.ttl.tick()
        subscribe(site, 1, 2)
        site.nexus.error = ConnectionError()
        ticking = await site.nexus.holding(site.ttl.tick())
        looked = look_ups(site, monkeypatch)
        site.nexus.let_go()
        await ticking
        assert looked == []
        assert site.ttl.snapshot().cooling["post"].keys() == {"a:1", "a:2"}

    @pytest.mark.parametrize("absent", [False, True])
    async def test_a_view_that_another_process_fetched_for_another_viewer_is_not_shown(
        self, site: Site, absent: bool
    ) -> None:
        """C2: nor is its absence. Its viewer has signed in there, and holds the lease."""
        other = made(site.folder, site.clock)
        other.nexus.absent = {"a:1"} if absent else set()
        await site.ttl.tick()
        async with other.controller:
            other.ttl.sign_in("another")
            theirs = other.controller.force_refresh("post", ["a:1"])
            fetching = await other.nexus.holding(theirs)
            refresh = site.controller.force_refresh("post", ["a:1"])
            waiting = asyncio.create_task(refresh)
            while not (await site.controller.cache.stats()).resources["post"].leases_denied:
                await asyncio.sleep(0)
            other.nexus.let_go()
            await fetching
            with pytest.raises(LoadFailed, match="another viewer"):
                await waiting
        assert site.nexus.posts == []
        assert site.told == []

    async def test_an_edit_keeps_the_view_that_another_process_has_stored_meanwhile(
        self, site: Site, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """C11: `touch` without a view means the view that is stored at that moment."""
        database = site.controller.database
        put = database.put

        async def put_late(kind: str, puts: Mapping[str, Put]) -> object:
            monkeypatch.setattr(database, "put", put)
            async with made(site.folder, site.clock).controller as other:
                await other.force_refresh_posts_by_ids(["a:1"], VIEWER)
            return await put(kind, puts)

        subscribe(site, 1)
        site.nexus.version = 7
        await site.ttl.tick()
        monkeypatch.setattr(database, "put", put_late)
        await site.controller.touch("post", "a:1")
        assert await site.version("a:1") == 1

    async def test_a_cooldown_outlives_the_process(
        self, tmp_path: Path, clock: ManualClock
    ) -> None:
        """It is the engine's, in the file: a restart asks a failing server no more often."""
        for asked in ([["a:1"]], []):
            site = made(tmp_path, clock)
            site.nexus.error = ConnectionError()
            async with site.controller, site.ttl:
                site.ttl.sign_in(VIEWER)
                site.ttl.set_visible(True)
                subscribe(site, 1)
                await site.ttl.tick()
            assert site.nexus.posts == asked

    async def test_a_forced_refresh_that_fails_replaces_a_longer_cooldown(self, site: Site) -> None:
        """C9: another process wrote that one, perhaps with a clock that is ahead."""
        later = milliseconds(site.clock) + 200_000
        await site.ttl.tick()
        site.write(
            "INSERT INTO post_ttl(id, failures, retry_at, error) VALUES ('a:1', 1, ?, 'no')", later
        )
        subscribe(site, 1)
        site.nexus.error = ConnectionError()
        with pytest.raises(LoadFailed):
            await site.controller.force_refresh("post", ["a:1"])
        site.nexus.error = None
        site.clock.advance(20.001)
        await site.ttl.tick()
        await site.ttl.tick()
        assert site.nexus.posts == [["a:1"], ["a:1"]]

    async def test_a_cache_opens_the_file_of_a_coordinator(self, site: Site) -> None:
        """A cache opens it, and sees what the coordinator keeps in it."""
        subscribe(site, 1)
        await site.ttl.tick()
        await site.ttl.stop()
        await site.controller.close()
        async with Cache(f"sqlite:///{site.file}", clock=site.clock) as cache:
            (entry,) = await cache.entries()
        assert (entry.kind, entry.id, entry.verdict) == ("post", "a:1", "fresh")

    async def test_a_file_that_is_away_costs_no_id_its_place(
        self, site: Site, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Nothing was asked of the server, so nothing cools down: the next tick asks."""

        async def away(*_: object, **__: object) -> None:
            raise StoreError("the file is unavailable")

        await site.ttl.tick()
        with monkeypatch.context() as patched:
            patched.setattr(site.controller.database, "serve", away)
            site.ttl.sign_in("another")
            subscribe(site, 1)
            await site.ttl.tick()
            assert (site.nexus.posts, site.ttl.snapshot().cooling["post"]) == ([], {})
        await site.ttl.tick()
        assert site.nexus.posts == [["a:1"]]

    async def test_an_edit_ends_a_cooldown_and_keeps_the_view(self, site: Site) -> None:
        """Without a view, `touch` keeps the one there is for another TTL."""
        subscribe(site, 1)
        await site.ttl.tick()
        site.clock.advance(301)
        site.nexus.error = ConnectionError()
        await site.ttl.tick()
        await site.controller.touch("post", "a:1")
        assert site.ttl.snapshot().cooling["post"] == {}
        assert await site.version("a:1") == 1
        assert site.rows("post_ttl") == {"a:1": milliseconds(site.clock)}


class TestC18Neighbours:
    async def test_only_what_another_process_wrote_is_looked_up(
        self, site: Site, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Not all that is subscribed."""
        await all_fresh(site, 100)
        site.write_row("post", "a:7", milliseconds(site.clock) - 300_001)
        site.write("DELETE FROM post_ttl WHERE id = 'a:9'")
        site.write("UPDATE post_ttl SET mark = 2 WHERE id = 'a:11'")
        looked = look_ups(site, monkeypatch)
        await site.ttl.tick()
        assert sorted(site.nexus.posts[-1]) == ["a:11", "a:7", "a:9"]
        assert set(looked) == {"a:7", "a:9", "a:11"}

    async def test_an_id_that_nobody_subscribed_to_is_not_looked_up_when_another_process_writes_it(
        self, site: Site, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A neighbour's screen is its own."""
        await all_fresh(site, 5)
        site.write_row("post", "b:1", 0)
        looked = look_ups(site, monkeypatch)
        await site.ttl.tick()
        assert looked == []

    async def test_all_ids_are_looked_up_after_more_changes_than_the_file_remembers(
        self, tmp_path: Path, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The file remembers the last changes only, so it does not grow with them."""
        monkeypatch.setattr(database, "REMEMBERED", 5)
        site = made(tmp_path, clock)
        async with site.controller, site.ttl:
            site.ttl.sign_in(VIEWER)
            site.ttl.set_visible(True)
            await all_fresh(site, 20)
            site.write_row("post", "a:3", 0)
            for number in range(6):
                site.write_row("post", f"b:{number}", 0)
            await site.ttl.tick()
            assert site.nexus.posts[-1] == ["a:3"]

    async def test_more_subscribed_than_can_be_kept_fresh_is_said_once(
        self, site: Site, caplog: pytest.LogCaptureFixture
    ) -> None:
        """With the setting that helps; again only if the settings change."""
        site.ttl.configure(post_ttl_ms=10_000, post_max_batch_size=2)
        subscribe(site, *range(4))
        await site.ttl.tick()
        assert caplog.messages == []
        subscribe(site, 4)
        for _ in range(3):
            await site.ttl.tick()
        (line,) = caplog.messages
        assert "post: 5 are subscribed" in line
        assert "only 4 can be kept fresh" in line
        assert "raise MAX_BATCHES_PER_TICK" in line
        site.ttl.configure(max_batches_per_tick=2)
        await site.ttl.tick()
        assert len(caplog.messages) == 1

    def test_the_defaults_keep_1200_posts_fresh(self, tmp_path: Path, clock: ManualClock) -> None:
        """20 ids every 5 s, each fresh for 5 minutes."""
        kinds = made(tmp_path, clock).controller.kinds
        assert kept_fresh(kinds["post"], TtlConfig()) == 1_200


def first_release(path: Path, owner: str, now: int) -> apsw.Connection:
    """A file as the first release wrote it, still open."""
    connection = apsw.Connection(str(path))
    connection.execute(f"""
        CREATE TABLE stillfresh_owner(kind TEXT PRIMARY KEY NOT NULL, owner TEXT NOT NULL)
            WITHOUT ROWID;
        PRAGMA application_id = {FIRST_RELEASE};
        PRAGMA user_version = 1;
        PRAGMA journal_mode = wal;
        CREATE TABLE post(id TEXT PRIMARY KEY NOT NULL, view BLOB NOT NULL);
        CREATE TABLE post_ttl(
            id TEXT PRIMARY KEY NOT NULL, last_updated_at INTEGER NOT NULL
        ) WITHOUT ROWID;
    """).fetchall()
    connection.execute("INSERT INTO stillfresh_owner VALUES ('post', ?)", (owner,))
    for id_, age in (("a:1", 0), ("a:2", 300_001)):
        view = msgspec.msgpack.encode(post(id_, 7))
        connection.execute("INSERT INTO post VALUES (?, ?)", (id_, view))
        connection.execute("INSERT INTO post_ttl VALUES (?, ?)", (id_, now - age))
    connection.execute("INSERT INTO post_ttl VALUES ('a:3', ?)", (now,))
    return connection


class TestC15FirstRelease:
    @pytest.mark.parametrize("killed", [False, True])
    async def test_views_rows_and_owner_of_a_first_release_file_are_carried_over(
        self, tmp_path: Path, clock: ManualClock, killed: bool
    ) -> None:
        """Fresh ones are not fetched again; also of a process that left its log behind."""
        site = made(tmp_path, clock)
        old = first_release(tmp_path / "old.db", f"viewer:{VIEWER}", milliseconds(clock))
        if killed:
            shutil.copy(tmp_path / "old.db-wal", tmp_path / "app.db-wal")
        else:
            old.close()
        shutil.copy(tmp_path / "old.db", site.file)
        async with site.controller, site.ttl:
            site.ttl.sign_in(VIEWER)
            site.ttl.set_visible(True)
            assert (await site.version("a:1"), await site.version("a:2")) == (7, 7)
            subscribe(site, 1, 2, 3)
            await site.ttl.tick()
            assert site.nexus.posts == [["a:2"]]
            assert await site.version("a:3") is None

    async def test_a_first_release_file_shows_another_viewer_nothing(
        self, tmp_path: Path, clock: ManualClock
    ) -> None:
        """It was carried over for its owner."""
        site = made(tmp_path, clock)
        first_release(site.file, "viewer:somebody", milliseconds(clock)).close()
        async with site.controller, site.ttl:
            site.ttl.sign_in(VIEWER)
            assert await site.version("a:1") is None
            await site.controller.prepare()
            assert site.rows("post_ttl") == {}

    async def test_rows_of_a_first_release_file_are_evicted_only_when_they_are_old(
        self, tmp_path: Path, clock: ManualClock
    ) -> None:
        """As if this release had written it."""
        site = made(tmp_path, clock)
        first_release(site.file, f"viewer:{VIEWER}", milliseconds(clock)).close()
        async with site.controller:
            assert await site.controller.evict() == 0
            clock.advance(30 * 86_400 + 1)
            assert await site.controller.evict() == 3


OLD_TRIGGERS = """
    CREATE TABLE stillfresh_owner(kind TEXT PRIMARY KEY NOT NULL, owner TEXT NOT NULL)
        WITHOUT ROWID;
    CREATE TABLE stillfresh_changes(number INTEGER PRIMARY KEY, kind TEXT, id TEXT);
    CREATE TRIGGER "stillfresh_post_insert" AFTER INSERT ON "post_ttl"
        WHEN new.last_updated_at IS NOT NULL
    BEGIN
        INSERT INTO stillfresh_changes(kind, id) VALUES ('post', new.id);
        DELETE FROM stillfresh_changes WHERE number <= last_insert_rowid() - 10000;
    END;
    CREATE TRIGGER "stillfresh_post_update" AFTER UPDATE OF last_updated_at, mark ON "post_ttl"
        WHEN new.last_updated_at IS NOT NULL
    BEGIN
        INSERT INTO stillfresh_changes(kind, id) VALUES ('post', new.id);
        DELETE FROM stillfresh_changes WHERE number <= last_insert_rowid() - 10000;
    END;
"""
OLD_VIEW = """
    INSERT INTO post_ttl(id, last_updated_at, generation, fresh_for, stale_for, error_for)
    VALUES (?, ?, ?, 0, 315360000, 0)
"""


def layout_1(path: Path, now: int) -> None:
    """A file as the last release wrote it before copies had versions."""
    connection = apsw.Connection(str(path))
    connection.execute(OLD_FILE + OLD_KIND.format(kind="post") + OLD_TRIGGERS)
    connection.pragma("journal_mode", "wal")
    owner = f"viewer:{VIEWER}"
    connection.execute("INSERT INTO stillfresh_owner VALUES ('post', ?)", (owner,))
    for id_, age in (("a:1", 0), ("a:2", 300_001)):
        connection.execute(OLD_VIEW, (id_, now - age, f"generation of {id_}"))
        view = msgspec.msgpack.encode((owner, post(id_, 7)))
        connection.execute("INSERT INTO post VALUES (?, ?)", (id_, view))
    connection.close()


class TestC15Layout:
    async def test_a_file_without_versions_is_carried_over(
        self, tmp_path: Path, clock: ManualClock
    ) -> None:
        """S13: its views are served, fresh ones are not fetched again, others are refreshed."""
        site = made(tmp_path, clock)
        layout_1(site.file, milliseconds(clock))
        async with site.controller, site.ttl:
            site.ttl.sign_in(VIEWER)
            site.ttl.set_visible(True)
            assert (await site.version("a:1"), await site.version("a:2")) == (7, 7)
            subscribe(site, 1, 2)
            await site.ttl.tick()
            assert site.nexus.posts == [["a:2"]]
            assert (await site.version("a:1"), await site.version("a:2")) == (7, 1)

    async def test_a_put_into_a_carried_over_file_is_among_the_changes_for_another_process(
        self, tmp_path: Path, clock: ManualClock
    ) -> None:
        """C18: a new id and an old one, in a file that was carried over."""
        site, other = made(tmp_path, clock), made(tmp_path, clock)
        layout_1(site.file, milliseconds(clock))
        async with site.controller, site.ttl, other.controller, other.ttl:
            for each in (site, other):
                each.ttl.sign_in(VIEWER)
                await each.controller.prepare()
            database = site.controller.database
            watching = other.controller.database
            await watching.changes()
            copy = Copy(database.new_generation(), clock(), Policy(60), b"view")
            await database.put("post", {"a:1": Put(copy), "a:3": Put(copy)})
            assert await watching.changes() == {"post": ["a:1", "a:3"]}
