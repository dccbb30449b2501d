"""Writes the figures of the README and of docs/comparison.md: `python scripts/figures.py`.

Times and behaviours come from docs/benchmarks.md, the count of rules from docs/seeds.md. The
pictures of docs/comparison.md are drawn from the same times. `make bench` runs it;
`tests/test_docs.py` fails when a page or a picture is not as this would write it.
"""

import math
import re
import sys
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))  # it runs as a script, and benchmarks is not installed

from benchmarks.bars import bars  # noqa: E402

README = ROOT / "README.md"
MEASURED = ROOT / "docs" / "benchmarks.md"
RULES = ROOT / "docs" / "seeds.md"
COMPARISON = ROOT / "docs" / "comparison.md"
PICTURES = ROOT / "docs" / "images" / "benchmarks"
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
        "one miss in memory, with a loader that only returns a value, in async code",
        "one miss, µs",
        "`cached`",
        "`async-lru`",
    ),
    (
        "the same for one of 100 missing keys of a batch",
        "a cold batch, µs a key",
        "`get_many` of 100 cold keys",
        "cashews, `get_many` and `set_many` by hand",
    ),
    (
        "read a value from Redis, not from memory, in async code",
        "Redis on the loopback, reads, µs",
        "`await prices.get(key)` through Redis",
        "`await client.get(key)`, bare",
    ),
    (
        "store a value in Redis, in async code",
        "Redis on the loopback, puts, µs",
        "`await prices.put(key, value)`",
        "`await client.set(key, value)`, bare",
    ),
    (
        "store 100 values in Redis, in async code",
        "Redis on the loopback, puts, µs",
        "`put_many` of 100 keys",
        "one bare pipeline of 100 `SET`",
    ),
    (
        "store a value in Redis, in sync code",
        "a read in a thread, µs",
        "`prices.put(key, value)` on Redis",
        "`client.set(key, value)` of redis-py",
    ),
    (
        "read a value from PostgreSQL, not from memory, in async code",
        "PostgreSQL on the loopback, µs",
        "`await prices.get(key)` through PostgreSQL",
        "a bare `SELECT` of one row",
    ),
    (
        "store a value in PostgreSQL, in async code",
        "PostgreSQL on the loopback, µs",
        "`await prices.put(key, value)` through PostgreSQL",
        "a bare upsert of one row",
    ),
    (
        "store a value in a file, in sync code",
        "SQLite, one put or read, µs",
        "`prices.put(key, value)` of a `SyncCache`",
        "`cache.set(key, value)` of diskcache",
    ),
    (
        "one miss in memory, in sync code",
        "a read in a thread, µs",
        "`prices(key)` of a cold key on `memory://`",
        "`get_or_create` of a cold key in dogpile.cache",
    ),
    ("Django `cache.set` on Redis", "Django, `set`, µs", "Redis", "django-redis"),
    ("Django `cache.add` on Redis", "Django, `add, new`, µs", "Redis", "django-redis"),
    ("Django `cache.touch` on Redis", "Django, `touch`, µs", "Redis", "django-redis"),
    ("Django `cache.incr` on Redis", "Django, `incr`, µs", "Redis", "django-redis"),
    (
        "Django `cache.delete` of a missing key on Redis",
        "Django, `delete, missing`, µs",
        "Redis",
        "django-redis",
    ),
    (
        "Django `cache.get_or_set` of a missing key on Redis",
        "Django, `get_or_set, missing`, µs",
        "Redis",
        "django-redis",
    ),
    ("Django `cache.set` on a file", "Django, `set`, µs", "SQLite", "FileBasedCache"),
    (
        "Django `cache.add` of an existing key on a file",
        "Django, `add, existing`, µs",
        "SQLite",
        "FileBasedCache",
    ),
    ("Django `cache.touch` on a file", "Django, `touch`, µs", "SQLite", "FileBasedCache"),
    (
        "Django `cache.get` of a missing key on a file",
        "Django, `get, missing`, µs",
        "SQLite",
        "FileBasedCache",
    ),
    (
        "`set` of a `DiskCache`, for code that was written for diskcache",
        "`set`, text of 30 bytes, µs of CPU",
        "DiskCache",
        "diskcache",
    ),
    (
        "`incr` of a `DiskCache`",
        "`incr`, text of 30 bytes, µs of CPU",
        "DiskCache",
        "diskcache",
    ),
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
    "`await client.set(key, value)`, bare": "`redis`, without a cache",
    "one bare pipeline of 100 `SET`": "`redis`, a pipeline without a cache",
    "`get_or_create` of a cold key in dogpile.cache": "`dogpile.cache`",
    "`async-lru`": "`async-lru`",
    "cashews, `get_many` and `set_many` by hand": "`cashews`, which takes no lease",
    "`client.set(key, value)` of redis-py": "`redis`, without a cache",
    "a bare `SELECT` of one row": "`psycopg`, without a cache",
    "a bare upsert of one row": "`psycopg`, without a cache",
    "`cache.set(key, value)` of diskcache": "`diskcache`",
    "FileBasedCache": "Django's `FileBasedCache`",
    "diskcache, the list as one value": "`diskcache`, the list as one value",
}
OURS = "**stillfresh**"
MOKA_PLAIN = "`moka-py`, `cached`"
"""Without `wait_concurrent`, callers that come during a load begin loads of their own."""


class Picture(NamedTuple):
    """One comparison: which bars of which list of docs/benchmarks.md, and what they are called."""

    title: str
    note: str
    listed: str
    """The title of the list."""
    ours: dict[str, str]
    """What a bar is called -> its line of the list."""
    theirs: dict[str, str]


LESS = "less is better"
MORE = "more is better"
DRAWN = {
    "hit": Picture(
        "A hit in memory, of an async function",
        f"µs, {LESS}",
        "a hot key, ns",
        {"stillfresh": "`await prices(key)`"},
        PEERS | {"moka-py": MOKA_PLAIN, "moka-py, which waits for a load": PEERS["moka-py"]},
    ),
    "miss": Picture(
        "One miss in memory, of an async function whose loader is cheap",
        f"µs of CPU, {LESS}",
        "one miss, µs",
        {
            "stillfresh": "`cached`",
            "stillfresh, the loader waits once": "`cached`, a loader that waits once",
        },
        {
            "async-lru": "`async-lru`",
            "async-lru, the loader waits once": "`async-lru`, a loader that waits once",
        },
    ),
    "redis-write": Picture(
        "Django: cache.set on Redis, sync",
        f"µs, {LESS}",
        "Django, `set`, µs",
        {"stillfresh": "Redis"},
        {"django-redis": "django-redis", "Django's RedisCache": "RedisCache"},
    ),
    "gateway": Picture(
        "Pages of 10 KB, each request with another head, as browsers ask",
        f"requests a second, one worker each, {MORE}",
        "requests a second, different heads",
        {"stillfresh serve": "`stillfresh serve`, memory://"},
        {"nginx, proxy_cache": "nginx proxy_cache, one worker"},
    ),
    "processes": Picture(
        "Eight processes write to one SQLite file",
        f"writes a second, all together, {MORE}",
        "Puts a second, of all processes",
        {"stillfresh": "stillfresh, 8 processes"},
        {"diskcache": "diskcache, 8 processes"},
    ),
}
"""The pictures of docs/comparison.md, by the names of their files."""


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
    """What another does faster, and how long both take; nothing of a list that is not there."""
    lines = []
    for what, title, ours, other in FASTER:
        times = listed(measured, title)
        if ours not in times or times[ours] <= times[other]:
            continue
        name = CALLED.get(other, f"`{other}`")
        lines.append([what, microseconds(times[ours]), f"{microseconds(times[other])}, {name}"])
    return lines


def table(head: list[str], lines: list[list[str]]) -> str:
    return "\n".join(f"| {' | '.join(line)} |" for line in [head, ["---"] * len(head), *lines])


def sentences(measured: str, rules: str) -> dict[str, str]:
    """The README's sentences with a figure: how to find each, and how it should read."""
    times = hits(measured)
    did = behaviours(measured)
    peers = {name: did[name] for name in PEERS}
    waiters = [row[0] for row in peers.values()]
    invalidations = [row[1] for row in peers.values() if row[1] != "—"]
    count = {name: row[2].strip("*") for name, row in peers.items()}
    most = max(count, key=lambda name: int(count[name]))
    return {
        r"\*\*\d+ of the \d+\*\* other libraries": (
            f"**{len(invalidations) - invalidations.count('yes')} of the {len(invalidations)}** "
            "other libraries"
        ),
        r"cause \*\*\d+\*\* load \([\w-]+: \d+\)": (
            f"cause **{did[OURS][2]}** load ({most}: {count[most]})"
        ),
        r"with \d+ of \d+ other libraries": (
            f"with {len(waiters) - waiters.count('yes')} of {len(waiters)} other libraries"
        ),
        r"A hit takes \*\*[\d.]+ µs\*\*, against [\d.]+ µs to [\d.]+ µs": (
            f"A hit takes **{times[OURS]}**, against {' to '.join(least_and_most(measured))}"
        ),
        r"\*\*\d+\*\* numbered": f"**{tested(rules)}** numbered",
    }


def least_and_most(measured: str) -> tuple[str, str]:
    """How long the quickest and the slowest of the others take for a hit, each in every mode."""
    calls = [*PEERS.values(), MOKA_PLAIN]
    of_peers = [listed(measured, "a hot key, ns")[call] for call in calls]
    return microseconds(min(of_peers)), microseconds(max(of_peers))


def tested(rules: str) -> int:
    """How many rules have a test."""
    rows_of_rules = re.findall(r"^\| ([A-Z]\d+) \|", rules, re.MULTILINE)
    untested = rules.partition("<!-- not built -->")[2].partition("<!-- /not built -->")[0]
    return len(set(rows_of_rules)) - len(re.findall(r"^- [A-Z]\d+:", untested, re.MULTILINE))


def compared(measured: str) -> str:
    """Each library on an async function: the time of a hit, and how it behaves."""
    took = hits(measured)
    did = behaviours(measured)
    lines = table(
        ["an async function, cached", "time of a hit", *BEHAVIOURS],
        [[name, took[name], *did[name]] for name in (OURS, *PEERS)],
    )
    plain = microseconds(listed(measured, "a hot key, ns")[MOKA_PLAIN])
    return (
        f"{lines}\n\n"
        "moka-py is in its waiting mode here (`wait_concurrent=True`). In its plain mode a hit "
        f"takes {plain}, and callers that come during a load begin loads of their own. aiocache is "
        "used with `@cached`. Its `@cached_stampede` loads a cold key once in a process, and does "
        "the same as `@cached` when a waiter is cancelled or the key is invalidated.\n"
    )


def pictures(measured: str) -> dict[str, str]:
    """The SVG of each comparison, by the name of its file."""
    drawings = {}
    for name, picture in DRAWN.items():
        figures = listed(measured, picture.listed)
        bars_of = {**picture.ours, **picture.theirs}
        ordered = sorted(bars_of, key=lambda bar: figures[bars_of[bar]])
        chosen = {bar: figures[bars_of[bar]] for bar in ordered}
        drawings[f"{name}.svg"] = bars(picture.title, picture.note, chosen, picture.ours)
    return drawings


def lost(measured: str) -> str:
    return table(["where others are faster", "stillfresh", "the other"], faster(measured)) + "\n"


def between(page: str, name: str, text: str) -> str:
    """The page with this text between the two marks of that name."""
    before, begin, after = page.partition(f"<!-- {name} -->\n")
    _, end, below = after.partition(f"<!-- /{name} -->")
    return f"{before}{begin}{text}{end}{below}"


def drawn(readme: str, comparison: str, measured: str, rules: str) -> tuple[str, str]:
    """Both pages with their figures as they should be."""
    for pattern, sentence in sentences(measured, rules).items():
        readme = re.sub(pattern, sentence, readme)
    comparison = between(comparison, "figures", compared(measured))
    comparison = between(comparison, "faster", lost(measured))
    return readme, comparison


def main() -> None:
    pages = README.read_text(), COMPARISON.read_text()
    measured = MEASURED.read_text()
    try:
        drawings = pictures(measured)
        readme, comparison = drawn(*pages, measured, RULES.read_text())
    except KeyError as exc:
        sys.exit(
            f"figures: docs/benchmarks.md has no figure of {exc}; a part was not measured (are "
            f"nginx and wrk here?), so README and comparison stay as they are"
        )
    README.write_text(readme)
    COMPARISON.write_text(comparison)
    PICTURES.mkdir(exist_ok=True)
    for name, drawing in drawings.items():
        (PICTURES / name).write_text(drawing)


if __name__ == "__main__":
    main()
