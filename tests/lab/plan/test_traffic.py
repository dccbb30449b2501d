"""Issue 22: reading recordings: what is in them, what is wrong with them, and how much is kept."""

import json
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stillfresh import ConfigError
from stillfresh.lab.plan import traffic_of

HEAD = ["stillfresh-recording", 1, 1.0]
KIND = ["kind", "price", 30.0, 60.0, 0.0, 3.0, 100, 4, 30.0]


def written(path: Path, *lines: object) -> Path:
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return path


def many(count: int, keys: int) -> Iterable[list[object]]:
    for number in range(count):
        yield ["use", number / 10, "price", [f"id-{number % keys}"], "read"]


class TestLines:
    @pytest.mark.parametrize(
        ("lines", "said"),
        [
            ([{"a": 1}], "line 1: not a recording of stillfresh"),
            ([KIND], "line 1: not a recording of stillfresh"),
            ([["stillfresh-recording", 2, 1.0, "new"]], "line 1: version 2; .* reads version 1"),
            ([HEAD, KIND, ["use", 1.0, "price"]], "line 3: not a line of a recording"),
            (
                [HEAD, KIND, ["use", "now", "price", ["a"], "read"]],
                "line 3: not a line of a recording",
            ),
            (
                [HEAD, KIND, ["use", 1.0, "price", ["a"], "guess"]],
                "line 3: not a line of a recording",
            ),
            (
                [HEAD, ["use", 1.0, "price", ["a"], "read"]],
                "line 2: it names a kind that no earlier line declares",
            ),
            ([HEAD, KIND, HEAD], "line 3: another recording begins here"),
            ([["stillfresh-recording", 1, 0]], "line 1: not a recording of stillfresh"),
            ([HEAD, KIND, ["use", 1e308, "price", ["a"], "read"]], "line 3: not a line"),
            ([HEAD, KIND, ["load", 1.0, "price", ["a"], -0.1, 1]], "line 3: not a line"),
            ([HEAD, KIND, ["load", 1.0, "price", ["a"], 0.1, 0]], "line 3: not a line"),
        ],
    )
    def test_wrong_lines_of_a_recording_are_named_by_number(
        self, tmp_path: Path, lines: list[object], said: str
    ) -> None:
        """By the file and the number of the line."""
        path = written(tmp_path / "reads.jsonl", *lines)
        with pytest.raises(ConfigError, match=f"reads.jsonl: {said}"):
            traffic_of(path)

    def test_an_empty_file_is_refused_as_a_recording(self, tmp_path: Path) -> None:
        """It is said to be empty."""
        with pytest.raises(ConfigError, match="empty"):
            traffic_of(written(tmp_path / "reads.jsonl"))

    def test_a_last_line_that_is_cut_off_is_left_out_of_the_traffic(self, tmp_path: Path) -> None:
        """As a process leaves it that was killed; its number is told."""
        path = written(tmp_path / "reads.jsonl", HEAD, KIND, *many(5, 5))
        whole = path.read_text()
        path.write_text(whole + '["read",0.9,"pri')
        kinds, cut = traffic_of(path)
        assert (len(kinds["price"].events), cut) == (5, 8)

    @given(
        st.lists(st.binary(max_size=40) | st.just(b'["use",1,"price",["a"],"read"]'), max_size=5)
    )
    def test_any_lines_are_traffic_or_a_config_error(
        self, tmp_path_factory: pytest.TempPathFactory, lines: list[bytes]
    ) -> None:
        """T5: no other exception."""
        path = tmp_path_factory.mktemp("bad") / "reads.jsonl"
        path.write_bytes(b"\n".join([json.dumps(HEAD).encode(), json.dumps(KIND).encode(), *lines]))
        with suppress(ConfigError):
            traffic_of(path)


class TestKept:
    def test_lines_of_several_processes_are_sorted_by_time(self, tmp_path: Path) -> None:
        """Each wrote its own when it had some."""
        lines = [
            HEAD,
            KIND,
            ["use", 2.5, "price", ["a"], "read"],
            ["use", 0.5, "price", ["b"], "put"],
        ]
        kinds, _ = traffic_of(written(tmp_path / "reads.jsonl", *lines))
        assert [it.at for it in kinds["price"].events] == [0.5, 2.5]
        assert kinds["price"].seconds == 2

    def test_of_too_many_reads_whole_keys_are_sampled(self, tmp_path: Path) -> None:
        """A key that is kept has all of its reads; the share says how many keys that are."""
        path = written(tmp_path / "reads.jsonl", HEAD, KIND, *many(4_000, 400))
        kinds, _ = traffic_of(path, 1_000)
        events = kinds["price"].events
        assert 600 < len(events) <= 1_400
        assert len(events) == 10 * len({it.ids for it in events})
        assert kinds["price"].share == 0.25
        assert kinds["price"].seconds == 399.9

    def test_sampled_loads_have_the_same_keys_as_reads(self, tmp_path: Path) -> None:
        """With how each of them ended, and their part of the bytes."""
        ids = [f"id-{number}" for number in range(400)]
        load = ["load", 0.0, "price", ids, 0.5, 400, 4_000, ids[:200], [], None]
        path = written(tmp_path / "reads.jsonl", HEAD, KIND, load, *many(4_000, 400))
        found = traffic_of(path, 1_000)[0]["price"]
        (kept,) = found.loads
        assert set(kept.ids) == {id_ for it in found.events for id_ in it.ids}
        assert set(kept.failed) == set(kept.ids) & set(ids[:200])
        assert kept.size == pytest.approx(10 * len(kept.ids))

    def test_a_kind_without_reads_is_left_out(self, tmp_path: Path) -> None:
        """There is nothing to replay."""
        assert traffic_of(written(tmp_path / "reads.jsonl", HEAD, KIND)) == ({}, None)
