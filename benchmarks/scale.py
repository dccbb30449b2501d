"""How cost grows: `python -m benchmarks.scale` measures it, draws it and writes it down.

A run writes docs/scale.json; from it come the plots in docs/images/scale and the tables and
the calculation in docs/scale.md. `--only tags,viewers` measures these parts anew and leaves the
others as they were. `--quick` shows that everything runs, with small sizes; it writes nothing.
"""

import argparse
import os
import re
import sys
import time
from collections import defaultdict
from pathlib import Path

import msgspec

from benchmarks.harness import Figures
from benchmarks.machine import machine
from benchmarks.plan import Part
from benchmarks.report import table
from benchmarks.runner import run
from benchmarks.scale_fleet import calculation
from benchmarks.scale_plots import plot
from benchmarks.watching import watching

__all__ = ["Measured", "drawn", "plots"]

DOCS = Path(__file__).parent.parent / "docs"
PAGE, FILE, IMAGES = DOCS / "scale.md", DOCS / "scale.json", DOCS / "images" / "scale"
MARKS = re.compile(r"(<!-- scale: (\w+) -->\n).*?(<!-- /scale -->)", re.DOTALL)
PARTS = (
    Part("keys", "Keys held", "benchmarks.scale_parts:keys", 150),
    Part("tags", "Keys of one tag", "benchmarks.scale_parts:tags", 130),
    Part("processes", "Processes", "benchmarks.scale_parts:processes", 130),
    Part("watched", "Watched keys", "benchmarks.scale_parts:watched", 20),
    Part("viewers", "Viewers", "benchmarks.scale_parts:viewers", 120),
    Part("pages", "Pages", "benchmarks.scale_parts:pages", 40),
)
LONGEST = 20.0


class Measured(msgspec.Struct):
    """What docs/scale.json holds. `taken` and `load` by part: when, and the machine's load then."""

    machine: list[list[str]]
    taken: dict[str, str]
    load: dict[str, str]
    figures: dict[str, dict[str, Figures]]
    """By part and name; each by size."""


ACROSS = {
    "keys": "keys held",
    "tags": "keys of the tag",
    "processes": "processes",
    "watched": "watched keys",
    "viewers": "viewers",
    "pages": "pages held",
}
HOLD = "Longest hold of the event loop, ms"
HOLDS = "Longest hold of the event loop on any store, ms"
PLOTS = (
    ("keys-hit", "hit, µs", "A hit, µs"),
    ("keys-cold", "cold read, µs", "A cold read, µs"),
    ("keys-tag", "`invalidate_tag` of ten, µs", "invalidate_tag of ten keys, µs"),
    ("keys-page", "`entries()`, a page of 100, µs", "entries(), a page of 100, µs"),
    ("keys-hold", "holds", HOLDS),
    ("tags-key", "`invalidate_tag`, µs a key", "invalidate_tag, µs for each key"),
    ("tags-hold", "`invalidate_tag`: hold, ms", HOLD),
    ("tags-other", "another process's load, longest, ms", "Longest load of another process, ms"),
    ("processes-loads", "loads a second", "Loads a second, of all processes"),
    ("processes-reads", "reads a second", "Reads of the store a second, of all processes"),
    (
        "processes-news",
        "CPU of the server for a publication, µs",
        "Server CPU for a publication, µs, by listeners",
    ),
    ("watched-refresh", "refresh of all, µs of CPU a key", "Refresh of a watched key, µs of CPU"),
    ("watched-hold", "holds", HOLD),
    ("viewers-cpu", "CPU of an update, µs", "An update to one viewer, µs of CPU"),
    ("viewers-p99", "p99 from the upstream's answer, ms", "Upstream's answer to viewer, p99, ms"),
    ("viewers-hold", "gateway: hold, ms", HOLD),
    ("pages-hit", "page: hit, µs", "A page from the cache, µs"),
    ("pages-render", "page: render, µs", "Render and store a page, µs"),
    ("pages-hold", "holds", HOLDS),
)
"""The file, whose name begins with the part; the figure, `holds` for all holds of it; the title."""


def lines(figures: dict[str, Figures], name: str) -> dict[str, dict[float, float]]:
    """By series; of holds, the longest of all stores."""
    found: dict[str, dict[float, float]] = defaultdict(dict)
    for full, by_size in figures.items():
        what, _, series = full.partition(" | ")
        is_hold = name == "holds" and what.endswith(": hold, ms")
        line = what.removesuffix(": hold, ms").replace("`", "") if is_hold else series
        for size, value in by_size.items() if is_hold or what == name else ():
            found[line][float(size)] = max(value, found[line].get(float(size), 0.0))
    return found


def plots(measured: Measured) -> dict[str, str]:
    """By the name of the file."""
    made = {}
    for file, name, title in PLOTS:
        part = file.partition("-")[0]
        if found := lines(measured.figures.get(part, {}), name):
            limit = LONGEST if title in {HOLD, HOLDS} else None
            made[f"{file}.svg"] = plot(title, ACROSS[part], found, limit)
    return made


def number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def tables(measured: Measured, part: str) -> str:
    figures = measured.figures.get(part, {})
    sizes = sorted({int(size) for it in figures.values() for size in it})
    head = ["what", "where", *(f"{size:,}" for size in sizes)]
    rows = []
    for full, by_size in figures.items():
        what, _, series = full.partition(" | ")
        cells = [number(by_size[str(it)]) if str(it) in by_size else "" for it in sizes]
        rows.append([what, series, *cells])
    return table(head, rows)


def machine_text(measured: Measured) -> str:
    kept = [row for row in measured.machine if row[0] != "peers"]
    rows = [[part, measured.taken[part], measured.load[part]] for part in measured.taken]
    head = ["part", "measured (UTC)", "load of the machine, before and after"]
    return f"{table(['what', 'which'], kept)}\n\n{table(head, rows)}"


def drawn(page: str, measured: Measured) -> str:
    """The page with its tables as they should be."""

    def written(marks: re.Match[str]) -> str:
        match marks[2]:
            case "machine":
                text = machine_text(measured)
            case "fleet":
                text = calculation(measured.figures)
            case part:
                text = tables(measured, part)
        return f"{marks[1]}{text}\n{marks[3]}"

    return MARKS.sub(written, page)


def load() -> str:
    return f"{os.getloadavg()[0]:.1f}"


def write(measured: Measured) -> None:
    FILE.write_bytes(msgspec.json.format(msgspec.json.encode(measured), indent=1) + b"\n")
    IMAGES.mkdir(parents=True, exist_ok=True)
    for name, text in plots(measured).items():
        (IMAGES / name).write_text(text)
    PAGE.write_text(drawn(PAGE.read_text(), measured))


def measure(wanted: list[str], measured: Measured, *, is_written: bool) -> bool:
    """Each part is written when it ends; True if every one came to its end."""
    parts, is_whole = [part for part in PARTS if part.name in wanted], True
    with watching(parts) as watch:
        for part in parts:
            before = load()
            section = run(part, watch.doing)
            watch.ended(section)
            is_whole = is_whole and not section.failed
            if not section.failed:
                rounded = {
                    name: {size: float(f"{value:.4g}") for size, value in it.items()}
                    for name, it in section.figures.items()
                }
                measured.figures[part.name] = rounded
                measured.taken[part.name] = time.strftime("%Y-%m-%d %H:%M", time.gmtime())
                measured.load[part.name] = f"{before}, {load()}"
            if is_written:
                write(measured)
    return is_whole


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scale", description=__doc__)
    names = ",".join(part.name for part in PARTS)
    parser.add_argument("--only", default=names, help=f"parts, of {names}")
    parser.add_argument("--quick", action="store_true", help="small sizes; nothing is written")
    parser.add_argument("--draw", action="store_true", help="only draw what docs/scale.json has")
    options = parser.parse_args()
    wanted = options.only.split(",")
    if unknown := set(wanted) - {part.name for part in PARTS}:
        parser.error(f"--only: no part is called {', '.join(sorted(unknown))}; there are {names}")
    measured = Measured(machine(), {}, {}, {})
    if FILE.exists() and not options.quick:
        measured = msgspec.json.decode(FILE.read_bytes(), type=Measured)
    if options.draw:
        write(measured)
        return 0
    if options.quick:
        os.environ["STILLFRESH_SCALE_QUICK"] = "1"
    measured.machine = machine()
    is_whole = measure(wanted, measured, is_written=not options.quick)
    for part in wanted:
        print(f"\n## {part}\n\n{tables(measured, part)}")
    return 0 if is_whole else 1


if __name__ == "__main__":
    sys.exit(main())
