"""Issue 22: what a recording holds, what it never holds, and that no read suffers from it."""

import asyncio
import json
import logging
import os
import stat
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import pytest

from stillfresh import (
    Cache,
    ConfigError,
    Loaded,
    LoadFailed,
    Recording,
    StillfreshError,
    SyncCache,
)
from stillfresh.pages import IsrMiddleware, PageCache
from stillfresh.testing import ManualClock
from tests.kit.isr import Site

SECRET = "anna@example.org"  # noqa: S105 (a key that is nobody's business)


def lines(path: Path, *tags: str) -> list[list[Any]]:
    found = [json.loads(line) for line in path.read_text().splitlines()]
    return [line for line in found if not tags or line[0] in tags or line[-1] in tags]


def reads(path: Path) -> int:
    return sum(len(line[3]) for line in lines(path, "read"))


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "reads.jsonl"


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(1_000.0)


@pytest.fixture
def cache(clock: ManualClock) -> Cache:
    return Cache("memory://", clock=clock)


@pytest.fixture
def prices(cache: Cache, clock: ManualClock) -> Any:
    @cache.batched("price", fresh_for="30s", stale_for="1m", max_batch=10, tags=lambda _: ["all"])
    async def prices(skus: list[str]) -> dict[str, Any]:
        clock.advance(0.25)
        found: dict[str, Any] = {sku: f"value of {sku}" for sku in skus if sku != "none"}
        found |= {sku: ConnectionError("down") for sku in skus if sku == "bad"}
        return found | {sku: Loaded("own", fresh_for=5) for sku in skus if sku == "own"}

    return prices


class TestRecorded:
    async def test_every_read_is_a_line_of_the_recording(
        self, cache: Cache, prices: Any, file: Path
    ) -> None:
        """However it is read: hits, misses, many at once, without a load, through a function."""

        @cache.cached("report", fresh_for="1h")
        async def report(year: int) -> int:
            return year

        async with cache, cache.recording(file):
            await prices("a")
            await prices("a")
            await prices.get("a")
            await prices.get_many(["a", "b"])
            await prices.known(["b"])
            await prices.of("b").get(max_age="10s")
            await report(2026)
            await report(2026)
            await report.get(2026)
        found = Counter((it[2], len(it[3])) for it in lines(file, "read"))
        assert found == {("price", 1): 5, ("price", 2): 1, ("report", 1): 3}
        assert lines(file)[0] == ["stillfresh-recording", 1, 1.0]
        kinds = {it[1]: it[2:4] for it in lines(file, "kind")}
        assert kinds == {"price": [30.0, 60.0], "report": [3600.0, 0.0]}

    async def test_a_recorded_load_has_its_duration_and_outcome(
        self, cache: Cache, prices: Any, file: Path
    ) -> None:
        """Also what failed, what does not exist, and what said terms of its own."""
        async with cache, cache.recording(Recording(file, plain_ids=True)):
            await prices.get_many(["a", "bad", "none"])
            await prices.get("own")
        ok, own = lines(file, "load")
        size = len("value of a") + 1  # a byte for its length, in MessagePack
        assert ok[1:] == [
            0.0,
            "price",
            ["a", "bad", "none"],
            0.25,
            3,
            size,
            ["bad"],
            ["none"],
            None,
        ]
        assert own[3:] == [["own"], 0.25, 1, 4, [], [], [5.0, 60.0, 0.0]]

    async def test_times_of_a_recorded_load_are_in_whole_milliseconds(
        self, cache: Cache, clock: ManualClock, file: Path
    ) -> None:
        """Both when it began and how long it took."""

        @cache.batched("price", fresh_for=30)
        async def slow(keys: list[str]) -> dict[str, int]:
            clock.advance(0.01234)
            return dict.fromkeys(keys, 1)

        async with cache, cache.recording(Recording(file, plain_ids=True)):
            clock.advance(0.1004)
            await slow("a")
        ((_, began, _, _, took, *_),) = lines(file, "load")
        assert (began, took) == (0.1, 0.012)

    async def test_changes_and_watches_are_recorded(
        self, cache: Cache, prices: Any, file: Path
    ) -> None:
        """They decide what is loaded, as reads do."""
        async with cache:
            await prices("a")
            with prices.watch("b"):
                async with cache.recording(Recording(file, plain_ids=True)):
                    await prices.put("a", "x")
                    await prices.invalidate("a")
                    await prices.invalidate("a", soft=True)
                    await prices.delete("a")
                    await prices("a")
                    await cache.invalidate_tag("all")
                    with prices.watch("a"):
                        pass
        found = [(it[4], it[3]) for it in lines(file, "use") if it[4] != "read"]
        assert found[:5] == [
            ("watch", ["b"]),
            ("put", ["a"]),
            ("invalidate", ["a"]),
            ("soft", ["a"]),
            ("delete", ["a"]),
        ]
        assert ("invalidate", ["a"]) in found[5:]
        assert found[-2:] == [("watch", ["a"]), ("unwatch", ["a"])]

    def test_reads_of_a_sync_cache_are_recorded(self, file: Path) -> None:
        """SyncCache: the same block, without an event loop."""
        with SyncCache("memory://") as cache:

            @cache.batched("price", fresh_for="1h")
            def prices(skus: list[str]) -> dict[str, int]:
                return dict.fromkeys(skus, 1)

            prices("a")
            with cache.recording(file):
                prices("a")
                prices.get("a")
                prices.get_many(["a", "b"])
            prices("a")
        assert reads(file) == 4

    async def test_a_page_visit_is_recorded_as_one_read(
        self, file: Path, clock: ManualClock
    ) -> None:
        """Also of a page that the server has at hand; afterwards it is at hand again."""
        pages, site = PageCache("memory://", clock=clock), Site(clock)
        transport = httpx.ASGITransport(IsrMiddleware(site, pages, {"*": "1m"}))
        async with pages, httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            await client.get("/a")
            await client.get("/a")
            async with pages.cache.recording(file):
                for path in ("/a", "/a", "/b", "/b"):
                    assert (await client.get(path)).status_code == 200
                clock.advance("90s")
                await client.get("/a")  # stale: rendered anew behind it
                for _ in range(100):
                    await asyncio.sleep(0)
            await client.get("/a")
        assert site.renders == 3
        assert Counter(it[3][0] for it in lines(file, "read")).most_common() == [
            (lines(file, "read")[0][3][0], 3),
            (lines(file, "read")[2][3][0], 2),
        ]
        assert len(lines(file, "load")) == 2


class TestPrivate:
    async def test_a_recording_contains_neither_values_nor_ids(
        self, cache: Cache, prices: Any, file: Path
    ) -> None:
        """A hash that is another in each recording; only its owner may read the file."""
        async with cache:
            for path in (file, file.with_name("again.jsonl")):
                async with cache.recording(path):
                    await prices(SECRET)
        text = file.read_text()
        assert SECRET not in text
        assert "value of" not in text
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
        first, second = (lines(it, "read")[0][3] for it in (file, file.with_name("again.jsonl")))
        assert first != second
        assert len(first[0]) == 12

    async def test_a_recording_over_an_old_file_is_readable_by_its_owner_only(
        self, cache: Cache, prices: Any, file: Path
    ) -> None:
        """The file may be an old one, with another mode."""
        file.write_text("old")
        file.chmod(0o644)
        async with cache, cache.recording(file):
            await prices("a")
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
        assert "old" not in file.read_text()

    async def test_a_recording_contains_ids_with_plain_ids(
        self, cache: Cache, prices: Any, file: Path
    ) -> None:
        """For keys that are no personal data."""
        async with cache, cache.recording(Recording(file, plain_ids=True)):
            await prices("a")
        assert lines(file, "read")[0][3] == ["a"]


class TestSampled:
    async def test_a_key_is_recorded_with_all_of_its_reads_or_with_none(
        self, cache: Cache, prices: Any, file: Path
    ) -> None:
        """By its hash: so a key that is recorded keeps its own pattern."""
        async with cache, cache.recording(Recording(file, share=0.3)):
            for _ in range(3):
                await prices.get_many([f"sku-{number}" for number in range(1_000)])
        counts = Counter(id_ for line in lines(file, "read") for id_ in line[3])
        assert set(counts.values()) == {3}
        assert 230 < len(counts) < 370

    @pytest.mark.parametrize("share", [0, -1, 1.1, True, "half"])
    def test_a_recording_share_outside_0_to_1_is_refused(self, file: Path, share: Any) -> None:
        """Anything else is refused, before anything is written."""
        with pytest.raises(ConfigError, match=r"^share: "):
            Recording(file, share=share)
        assert not file.exists()


class TestBounded:
    async def test_a_recording_ends_at_its_size_limit(
        self, cache: Cache, prices: Any, file: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        """The reads go on; its lines are whole."""
        async with cache, cache.recording(Recording(file, max_bytes=10_000)) as recorded:
            for _ in range(20):
                await prices.get_many([f"sku-{number}" for number in range(100)])
                cache.clock.advance(1.5)  # type: ignore[attr-defined]
            assert (await prices("a")) == "value of a"
        assert recorded.is_over
        assert file.stat().st_size <= 10_000
        assert lines(file)
        (said,) = [it.message for it in caplog.records if "nothing more is recorded" in it.message]
        assert "max_bytes=10,000" in said

    @pytest.mark.parametrize("fault", ["raises", "is short"])
    async def test_a_failing_disk_ends_the_recording_but_no_read(
        self,
        cache: Cache,
        prices: Any,
        file: Path,
        fault: str,
        monkeypatch: pytest.MonkeyPatch,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        """It is said once."""

        def write(_: int, data: bytes) -> int:
            if fault == "raises":
                raise OSError(5, "Input/output error")
            return len(data) // 2

        monkeypatch.setattr("stillfresh.engine.recordings.os.write", write)
        async with cache, cache.recording(file) as recorded:
            for _ in range(3):
                assert await prices("a") == "value of a"
                cache.clock.advance(2)  # type: ignore[attr-defined]
        assert recorded.is_over
        assert [it.levelno for it in caplog.records if str(file) in it.message] == [logging.WARNING]

    async def test_a_recording_file_that_cannot_be_created_raises_at_once(
        self, cache: Cache, tmp_path: Path
    ) -> None:
        """Nothing is left standing back."""
        with pytest.raises(OSError, match="No such file"):
            async with cache.recording(tmp_path / "missing" / "reads.jsonl"):
                pass
        assert (cache.blocks, cache.recording_to) == (0, None)


class TestBlock:
    async def test_after_a_recording_hits_write_nothing(
        self, cache: Cache, prices: Any, file: Path
    ) -> None:
        """The core is not asked, and nothing is written, also if somebody keeps the block."""
        async with cache:
            async with (block := cache.recording(file)):
                await prices("a")
            assert (cache.blocks, cache.recording_to) == (0, None), block
            size, answer = file.stat().st_size, await prices.get("a")
            assert await prices.get("a") is answer
            assert file.stat().st_size == size

    async def test_a_cache_has_one_recording_at_a_time(
        self, cache: Cache, prices: Any, file: Path
    ) -> None:
        """The second is refused, and the first goes on."""
        async with cache, cache.recording(file):
            with pytest.raises(StillfreshError, match="being recorded already"):
                async with cache.recording(file.with_name("other.jsonl")):
                    pass
            await prices("a")
        assert reads(file) == 1

    async def test_a_file_takes_one_recording_at_a_time(
        self, cache: Cache, prices: Any, file: Path
    ) -> None:
        """Another process would truncate it; it is refused, and the first goes on."""
        async with cache, cache.recording(file):
            with pytest.raises(StillfreshError, match="is being written by another recording"):
                Recording(file).open(0.0)
            await prices("a")
        assert reads(file) == 1
        Recording(file).begin(0.0)

    async def test_a_changed_wall_clock_does_not_change_recorded_times(
        self, prices: Any, file: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Times are monotonic, and a load takes no negative time."""
        wall = ManualClock(1_000.0)
        monkeypatch.setattr("stillfresh.engine.recorded.wall", wall)
        cache = Cache("memory://", clock=wall)

        @cache.cached("report", fresh_for="1h")
        async def report(year: int) -> int:
            wall.advance(-3600)
            return year

        async with cache, cache.recording(file):
            await report(1)
            wall.advance(86_400)
            await report(2)
        assert all(0 <= it[1] < 60 for it in lines(file, "read", "load"))
        assert [it[4] for it in lines(file, "load")] == [0, 0]

    async def test_two_caches_may_share_a_recording(
        self, cache: Cache, prices: Any, file: Path
    ) -> None:
        """As the entities and the pages of a gateway do."""
        other, shared = Cache("memory://", clock=cache.clock), Recording(file)

        @other.cached("report", fresh_for="1h")
        async def report(year: int) -> int:
            return year

        async with cache, other, cache.recording(shared):
            async with other.recording(shared):
                await report(2026)
            await prices("a")
        assert [it[2] for it in lines(file, "read")] == ["report", "price"]

    async def test_a_recording_leaves_no_thread(
        self, cache: Cache, prices: Any, file: Path
    ) -> None:
        """The one that writes ends with the block."""
        async with cache, cache.recording(file):
            with pytest.raises(LoadFailed):
                await prices("bad")
        assert not [it for it in threading.enumerate() if it.name.startswith("stillfresh-rec")]

    def test_a_refused_recording_closes_its_file(self, file: Path) -> None:
        """So many recordings leave no descriptor open."""
        first = Recording(file)
        first.open(0.0)
        with pytest.raises(StillfreshError, match="is being written by another recording"):
            (second := Recording(file)).open(0.0)
        first.close()
        first.open(7.0)
        assert first.since(8.5) == 1.5, "it begins anew"
        first.close()
        for one in (first, second):
            with pytest.raises(OSError, match="Bad file descriptor"):
                os.fstat(one._file)

    def test_forked_processes_write_whole_lines_to_one_recording(self, file: Path) -> None:
        """Forked workers share what the parent began: the same hash for the same id."""
        shared = Recording(file)
        shared.begin(0.0)
        children = [os.fork() for _ in range(2) if os.getpid() == PARENT]
        if os.getpid() != PARENT:
            try:
                asyncio.run(_worked(shared))
            finally:
                os._exit(0)
        for child in children:
            assert os.waitpid(child, 0)[1] == 0
        assert reads(file) == 2 * 3_000
        assert len({line[3][0] for line in lines(file, "read")}) == 30
        assert len(lines(file, "stillfresh-recording")) == 1


PARENT = os.getpid()


async def _worked(shared: Recording) -> None:
    cache = Cache("memory://")

    @cache.batched("price", fresh_for="1h")
    async def prices(skus: list[str]) -> dict[str, int]:
        return dict.fromkeys(skus, 1)

    async with cache, cache.recording(shared):
        for number in range(3_000):
            await prices(f"sku-{number % 30}")
