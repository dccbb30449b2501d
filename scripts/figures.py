"""Writes the README's figures, all of them from docs/benchmarks.md: `python scripts/figures.py`.

`make bench` runs it; `tests/test_docs.py` fails when the README is not as this would write it.
"""

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
MEASURED = ROOT / "docs" / "benchmarks.md"
MARKS = re.compile(r"(<!-- figures -->\n).*?(<!-- /figures -->)", re.DOTALL)
PEERS = {
    "async-lru": "`async-lru`, `alru_cache`",
    "cachebox": "`cachebox`, `cached`",
    "moka-py": "`moka-py`, `cached(wait_concurrent=True)`",
    "theine": "`theine`, `Memoize`",
    "aiocache": "`aiocache`, `cached` in memory",
    "cashews": "`cashews`, `cache` on `mem://`",
}
"""As the table of behaviours calls them, and the rows of E14."""
BEHAVIOURS = {
    "a waiter is cancelled, the others are served": "a waiter is cancelled",
    "invalidated while it loads, the next reader gets a newer value": "invalidated while loading",
    "16 tasks, one cold key: loads": "16 tasks",
}
"""The README's words, and how the columns begin."""
MAPS = ["cachebox", "TtlCache", "moka-py", "theine", "cachetools"]
OURS = "**stillfresh**"


def rows(measured: str) -> list[list[str]]:
    lines = [line for line in measured.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]


def rounded(ratio: float) -> str:
    """Two digits: the next run differs in the third."""
    return f"{ratio:.1f}" if ratio < 9.95 else f"{ratio:.0f}"


def hits(measured: str) -> dict[str, str]:
    """How long each takes for a hit, ours = 1."""
    found = {row[1].partition(", against")[0]: row[2] for row in rows(measured) if row[0] == "E14"}
    peers = {name: rounded(float(found[row].split()[0])) for name, row in PEERS.items()}
    return {OURS: "1", **peers}


def behaviours(measured: str) -> dict[str, list[str]]:
    """What each did, scenario by scenario."""
    [head] = [row for row in rows(measured) if row[0] == "library"]
    columns = [
        next(at for at, title in enumerate(head) if title.startswith(begin))
        for begin in BEHAVIOURS.values()
    ]
    found = {row[0]: row for row in rows(measured) if len(row) == len(head)}
    return {name: [found[name][at] for at in columns] for name in (OURS, *PEERS)}


def maps(measured: str) -> dict[str, str]:
    """A hot key of a cache in memory, `TtlCache` = 1."""
    listed = measured.partition("- a hot key, ns:\n")[2].partition("\n- ")[0]
    found = {name: float(ns) for name, ns in re.findall(r"  - ([\w.-]+): (\S+)", listed)}
    return {name: rounded(found[name] / found["TtlCache"]) for name in MAPS}


def table(head: list[str], lines: list[list[str]]) -> str:
    return "\n".join(f"| {' | '.join(line)} |" for line in [head, ["---"] * len(head), *lines])


def tables(measured: str) -> str:
    took, did = hits(measured), behaviours(measured)
    compared = table(
        ["an async function, cached", "time of a hit", *BEHAVIOURS],
        [[name, took[name], *did[name]] for name in (OURS, *PEERS)],
    )
    told = " · ".join(f"`{name}` {ratio}" for name, ratio in maps(measured).items())
    return f"{compared}\n\nThe time to read a hot key of a cache in memory, by itself: {told}.\n"


def drawn(readme: str, measured: str) -> str:
    """The README with its figures as they should be."""
    return MARKS.sub(lambda marks: f"{marks[1]}{tables(measured)}{marks[2]}", readme)


if __name__ == "__main__":
    README.write_text(drawn(README.read_text(), MEASURED.read_text()))
