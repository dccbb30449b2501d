"""Writes the README's figures, all of them from docs/benchmarks.md: `python scripts/figures.py`.

`make bench` runs it; `tests/test_docs.py` fails when the README is not as this would write it.
"""

import math
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
"""As the table of behaviours calls them, and the list of a hot key."""
BEHAVIOURS = {
    "a waiter is cancelled, the others are served": "a waiter is cancelled",
    "invalidated while it loads, the next reader gets a newer value": "invalidated while loading",
    "16 tasks, one cold key: loads": "16 tasks",
}
"""The README's words, and how the columns begin."""
FASTER = [
    ("read a key in memory, `TtlCache`", "a hot key, ns", "TtlCache", "cachebox"),
    ("insert a key in memory, `TtlCache`", "`insert` over 20,000 keys, ns", "TtlCache", "cachebox"),
    (
        "read a value from Redis, not from memory",
        "Redis on the loopback, reads, µs",
        "`await prices.get(key)` through Redis",
        "`await client.get(key)`, bare",
    ),
    ("Django `cache.set` on Redis", "Django, `set`, µs", "Redis", "django-redis"),
    ("Django `cache.set` on a file", "Django, `set`, µs", "SQLite", "FileBasedCache"),
    (
        "read a stored list of 100 topics of 5 KB",
        "100 topics of 5 KB, µs",
        "a list, from the file, as typed topics",
        "diskcache, the list as one value",
    ),
]
"""Where another is faster: what, the list in docs/benchmarks.md, ours in it, the other's."""
CALLED = {
    "`await client.get(key)`, bare": "`redis`, without a cache",
    "FileBasedCache": "Django's `FileBasedCache`",
    "diskcache, the list as one value": "`diskcache`, the list as one value",
}
OURS = "**stillfresh**"


def rows(measured: str) -> list[list[str]]:
    lines = [line for line in measured.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]


def listed(measured: str, title: str) -> dict[str, float]:
    """A plain list of the page, in microseconds; of lists with one title, all rows together."""
    found: dict[str, float] = {}
    for block in measured.split(f"- {title}:\n")[1:]:
        lines = re.findall(r"^  - (.+): (\S+)$", block.partition("\n- ")[0], re.MULTILINE)
        found |= {
            name: float(value) / (1000 if title.endswith("ns") else 1) for name, value in lines
        }
    return found


def microseconds(time: float) -> str:
    """Two digits: the next run differs in the third."""
    digits = 1 - math.floor(math.log10(time))
    return f"{round(time, digits):.{max(digits, 0)}f} µs"


def hits(measured: str) -> dict[str, str]:
    """How long each takes for a hit."""
    found = listed(measured, "a hot key, ns")
    calls = {OURS: "`await prices(key)`", **PEERS}
    return {name: microseconds(found[call]) for name, call in calls.items()}


def behaviours(measured: str) -> dict[str, list[str]]:
    """What each did, scenario by scenario."""
    [head] = [row for row in rows(measured) if row[0] == "library"]
    columns = [
        next(at for at, title in enumerate(head) if title.startswith(begin))
        for begin in BEHAVIOURS.values()
    ]
    found = {row[0]: row for row in rows(measured) if len(row) == len(head)}
    return {name: [found[name][at] for at in columns] for name in (OURS, *PEERS)}


def faster(measured: str) -> list[list[str]]:
    """What another does faster, and how long both take."""
    lines = []
    for what, title, ours, other in FASTER:
        times = listed(measured, title)
        name = CALLED.get(other, f"`{other}`")
        lines.append([what, microseconds(times[ours]), f"{microseconds(times[other])}, {name}"])
    return lines


def table(head: list[str], lines: list[list[str]]) -> str:
    return "\n".join(f"| {' | '.join(line)} |" for line in [head, ["---"] * len(head), *lines])


def tables(measured: str) -> str:
    took, did = hits(measured), behaviours(measured)
    compared = table(
        ["an async function, cached", "time of a hit", *BEHAVIOURS],
        [[name, took[name], *did[name]] for name in (OURS, *PEERS)],
    )
    lost = table(["where others are faster", "stillfresh", "the other"], faster(measured))
    return f"{compared}\n\n{lost}\n"


def drawn(readme: str, measured: str) -> str:
    """The README with its figures as they should be."""
    return MARKS.sub(lambda marks: f"{marks[1]}{tables(measured)}{marks[2]}", readme)


if __name__ == "__main__":
    README.write_text(drawn(README.read_text(), MEASURED.read_text()))
