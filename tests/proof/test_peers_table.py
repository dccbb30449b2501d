"""T15: the table of `stillfresh prove --peer` in README and docs, which `make proof` writes."""

import re
from typing import Any

import pytest

from scripts import proof
from stillfresh.lab.prove import PEERS
from tests.proof import peers

REPORTS: list[dict[str, Any]] = [
    {
        "store": "stillfresh",
        "seed": 7,
        "counts": {"served": 30_000},
        "unjudged": {},
        "wrong": 0,
        "faults": {"a process killed": 5},
    },
    {
        "store": "other",
        "seed": 7,
        "counts": {"served": 900, "failed": 100},
        "unjudged": {"the read failed, and gave no answer": 100},
        "wrong": 3,
        "faults": {"a process killed": 3, "connections cut": 1},
    },
]


def block(page: str) -> str:
    """What stands between the marks."""
    match = peers.MARKS.search(page)
    assert match is not None
    return match[0]


def test_the_readme_has_the_table_of_the_last_run() -> None:
    """T15: the same as docs/reliability.md, with stillfresh and each peer."""
    readme, page = [block(path.read_text()) for path in peers.PAGES]
    assert readme == page
    rows = [line for line in readme.splitlines() if line.startswith("| ")][2:]
    names = [re.sub(r"[|* ]*([a-z]+).*", r"\1", row) for row in rows]
    assert names == ["stillfresh", *PEERS]


def test_make_proof_repeats_the_run_of_the_table() -> None:
    """T15: it is one of its parts."""
    assert ("-m", "tests.proof.peers") in [part.arguments for part in proof.PARTS]


def test_the_table_shows_judged_and_wrong_reads_and_nines() -> None:
    """T15: the nines are those that the reads support; what was not judged is a share."""
    table = peers.table_of(REPORTS, ["**stillfresh**", "other 1.0"], 2.0)
    lines = table.splitlines()
    assert lines[2:4] == [
        "| **stillfresh** | 30,000 | 0.0% | 0 | 4.0 |",
        "| other 1.0 | 900 | 10.0% | 3 | 2.0 |",
    ]
    assert "2 minutes each, four processes, seed 7, at least 4 faults" in lines[-1]


def test_only_what_stands_between_the_marks_is_written() -> None:
    """T15: the rest of the page belongs to its authors."""
    page = "before\n<!-- nines -->\nold\n<!-- /nines -->\nafter\n"
    assert peers.written(page, "new\n") == "before\n<!-- nines -->\nnew\n<!-- /nines -->\nafter\n"


@pytest.mark.parametrize("name", ["stillfresh", "cashews", "aiocache"])
def test_the_table_names_versions(name: str) -> None:
    """T15: of the others; stillfresh is this checkout."""
    title = peers.title_of({"store": name})
    assert name in title
    assert bool(re.search(r"\d+\.\d+", title)) == (name != "stillfresh")
