"""D2: an old diskcache directory is taken over without reading anything that is pickled."""

import json
import os
import pickle
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import diskcache as old
import pytest
from click.testing import CliRunner

from stillfresh import ConfigError
from stillfresh.cli import main
from stillfresh.integrations.diskcache import DiskCache, LeftOut, convert
from stillfresh.testing import ManualClock

PLAIN: dict[Any, Any] = {
    "text": "text",
    "long text": "Tée " * 20_000,
    b"bytes": b"\x00bytes",
    "long bytes": b"x" * 100_000,
    5: 5,
    -1.5: 2.5,
    2**63 - 1: -(2**63),
}


class Trap:
    """Writes a file when it is unpickled."""

    def __init__(self, file: Path) -> None:
        self.file = str(file)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return open, (self.file, "w")


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "old"


def converted(directory: Path, **options: Any) -> tuple[DiskCache, Any]:
    with DiskCache(directory.parent / "new", **options) as cache:
        result = convert(directory, cache)
    return cache, result


class TestD2Converting:
    def test_text_bytes_and_numbers_are_taken_over(self, directory: Path) -> None:
        """Also those that diskcache has put into files of their own."""
        with old.Cache(directory) as cache:
            for key, value in PLAIN.items():
                cache[key] = value
        new, result = converted(directory)
        assert (result.taken, result.left_out) == (len(PLAIN), [])
        with new:
            assert {key: new[key] for key in new} == PLAIN

    def test_ends_and_tags_are_kept_and_ended_entries_left(self, directory: Path) -> None:
        with old.Cache(directory) as cache:
            cache.set("later", 1, expire=1_000, tag="red")
            cache.set("sooner", 2, expire=10, tag=5)
            cache.set("always", 3, tag=b"blue")
            _, later = cache.get("later", expire_time=True)
        clock = ManualClock(start=later - 500)
        new, result = converted(directory, clock=clock)
        assert (result.taken, result.expired) == (2, 1)
        with new:
            value, end, tag = new.get("later", expire_time=True, tag=True)
            assert (value, tag) == (1, "red")
            assert end == pytest.approx(later, abs=0.01)
            assert new.get("always", expire_time=True, tag=True) == (3, None, b"blue")
            assert new.evict(b"blue") == 1
            clock.advance(501)
            assert "later" not in new

    def test_what_is_pickled_is_named_and_not_read(self, directory: Path, tmp_path: Path) -> None:
        """In the row and in a file, as a value and as a key."""
        trap = tmp_path / "sprung"
        with old.Cache(directory) as cache:
            cache["taken"] = 1
            cache["list"] = [1, 2]
            cache["trap"] = Trap(trap)
            cache["in a file"] = [Trap(trap), "x" * 100_000]
            cache[("a", "tuple")] = 1
        assert not trap.exists()
        new, result = converted(directory)
        assert not trap.exists(), "something was unpickled"
        assert result.left_out == [
            LeftOut("'list'", "its value is pickled"),
            LeftOut("'trap'", "its value is pickled"),
            LeftOut("'in a file'", "its value is pickled"),
            LeftOut("row 5", "its key is pickled"),
        ]
        assert result.reasons == {"its value is pickled": 3, "its key is pickled": 1}
        with new:
            assert list(new) == ["taken"]
        pickle.loads(pickle.dumps(Trap(trap))).close()  # noqa: S301 (what would have happened)
        assert trap.exists()

    def test_a_file_name_cannot_lead_out_of_the_directory(
        self, directory: Path, tmp_path: Path
    ) -> None:
        (tmp_path / "secret").write_text("secret")
        with old.Cache(directory) as cache:
            for name in ("a", "b", "lost"):
                cache[name] = b"x" * 100_000
        with sqlite3.connect(directory / "cache.db") as rows:
            rows.execute("UPDATE Cache SET filename = '../secret' WHERE key = 'a'")
            rows.execute(
                "UPDATE Cache SET filename = ? WHERE key = 'b'", (str(tmp_path / "secret"),)
            )
            rows.execute("UPDATE Cache SET filename = 'nowhere' WHERE key = 'lost'")
        rows.close()
        _, result = converted(directory)
        assert result.taken == 0
        assert dict(result.reasons) == {
            "its file is not in the directory": 2,
            "its file cannot be read": 1,
        }

    @pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="there are no named pipes")
    def test_a_pipe_instead_of_a_file_is_not_read(self, directory: Path) -> None:
        """Reading it would wait for a writer."""
        with old.Cache(directory) as cache:
            cache["key"] = b"x" * 100_000
        (file,) = directory.rglob("*.val")
        file.unlink()
        os.mkfifo(file)
        _, result = converted(directory)
        assert dict(result.reasons) == {"its file cannot be read": 1}

    def test_an_end_that_is_no_number_is_named(self, directory: Path) -> None:
        with old.Cache(directory) as cache:
            for name in ("text", "bytes", "taken"):
                cache.set(name, 1, expire=1_000)
        with sqlite3.connect(directory / "cache.db") as rows:
            rows.execute("UPDATE Cache SET expire_time = 'soon' WHERE key = 'text'")
            rows.execute("UPDATE Cache SET expire_time = x'00' WHERE key = 'bytes'")
        rows.close()
        _, result = converted(directory)
        assert result.taken == 1
        assert dict(result.reasons) == {"its end is not a number": 2}

    @pytest.mark.parametrize("column", ["key", "value", "tag", "mode"])
    def test_text_that_is_no_text_is_named_and_the_others_are_taken(
        self, directory: Path, column: str
    ) -> None:
        """diskcache writes none: that row is damaged."""
        with old.Cache(directory) as cache:
            cache.set("damaged", "value", tag="tag")
            cache["whole"] = "value"
        with sqlite3.connect(directory / "cache.db") as rows:
            rows.execute(f"UPDATE Cache SET {column} = CAST(x'ff' AS TEXT) WHERE key = 'damaged'")
        rows.close()
        new, result = converted(directory)
        (left_out,) = result.left_out
        assert left_out.reason == "its text is not UTF-8"
        assert left_out.name == ("row 1" if column == "key" else "'damaged'")
        with new:
            assert {key: new[key] for key in new} == {"whole": "value"}

    def test_entries_of_the_new_cache_are_kept_and_it_can_be_run_again(
        self, directory: Path
    ) -> None:
        with old.Cache(directory) as cache:
            for number in range(500):
                cache[number] = number
        with DiskCache(directory) as new:
            new[7] = "newer"
            first = convert(directory, new)
            assert (first.taken, first.present) == (499, 1)
            assert new[7] == "newer"
            again = convert(directory, new)
            assert (again.taken, again.present) == (0, 500)

    def test_the_shards_of_a_fanout_cache_are_taken_over(self, directory: Path) -> None:
        with old.FanoutCache(directory, shards=3) as cache:
            for number in range(20):
                cache[number] = number
        new, result = converted(directory)
        assert result.taken == 20
        with new:
            assert list(new) == list(range(20))

    def test_a_directory_without_a_cache_is_refused(self, directory: Path) -> None:
        directory.mkdir()
        with pytest.raises(ConfigError, match=r"there is no cache\.db of diskcache"):
            converted(directory)
        (directory / "cache.db").write_bytes(b"something else, " * 100)
        with pytest.raises(ConfigError, match="not a cache of diskcache"):
            converted(directory)

    def test_progress_counts_every_entry(self, directory: Path) -> None:
        steps: list[int] = []
        with old.Cache(directory) as cache:
            for number in range(10):
                cache[number] = [number] if number % 2 else number
        with DiskCache(directory.parent / "new") as new:
            convert(directory, new, steps.append)
        assert sum(steps) == 10


class TestD2Command:
    def test_the_command_converts_in_place_and_says_what_it_left(self, directory: Path) -> None:
        with old.Cache(directory) as cache:
            cache["a"] = 1
            cache["b"] = [1]
        done = CliRunner().invoke(main, ["diskcache", "convert", str(directory), "--names"])
        assert done.exit_code == 0, done.output
        assert done.output.splitlines() == [
            "taken over: 1",
            "ended already: 0",
            "there already: 0",
            "left out: 1",
            "  1: its value is pickled",
            "  'b': its value is pickled",
        ]
        with DiskCache(directory) as new:
            assert dict.fromkeys(new) == {"a": None}

    def test_json_is_one_document(self, directory: Path, tmp_path: Path) -> None:
        with old.Cache(directory) as cache:
            cache["a"] = 1
            cache["b"] = [1]
        target = str(tmp_path / "new")
        arguments = ["diskcache", "convert", str(directory), "--to", target, "--json"]
        done = CliRunner().invoke(main, arguments)
        assert json.loads(done.stdout) == {
            "taken": 1,
            "expired": 0,
            "present": 0,
            "left_out": {"its value is pickled": 1},
            "names": [{"name": "'b'", "reason": "its value is pickled"}],
        }

    def test_a_directory_without_a_cache_is_one_line(self, tmp_path: Path) -> None:
        done = CliRunner().invoke(main, ["diskcache", "convert", str(tmp_path)])
        assert done.exit_code != 0
        assert "there is no cache.db of diskcache" in done.output
        assert list(tmp_path.iterdir()) == []

    def test_a_directory_that_is_not_there_is_not_made(self, tmp_path: Path) -> None:
        done = CliRunner().invoke(main, ["diskcache", "convert", str(tmp_path / "nowhere")])
        assert done.exit_code != 0
        assert "there is no cache.db of diskcache" in done.output
        assert list(tmp_path.iterdir()) == []
