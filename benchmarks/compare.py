"""`python -m benchmarks.compare --old PATH --only engine`: two source trees, measured in turns.

Each part of each tree is run by that tree's own benchmarks, in a process of its own, alternately.
Prints the medians of what both measure, and new divided by old.
"""

import argparse
import random
import sys
from collections.abc import Iterable
from pathlib import Path
from statistics import median

from benchmarks.harness import Section
from benchmarks.plan import PARTS
from benchmarks.report import table
from benchmarks.runner import ROOT, run

TOLERANCE = 1.05
"""Two runs of the same code differ by as much."""


def values(section: Section) -> dict[str, float]:
    """Its rows by rule and name, its plain figures by title and name."""
    rows = {f"{row.rule}: {row.what}": row.measured for row in section.rows}
    figures = {
        f"{title}: {name}": value
        for title, found in section.figures.items()
        for name, value in found.items()
    }
    return {**rows, **figures}


def medians(sections: Iterable[Section]) -> dict[str, float]:
    found: dict[str, list[float]] = {}
    for section in sections:
        for name, value in values(section).items():
            found.setdefault(name, []).append(value)
    return {name: median(taken) for name, taken in found.items()}


def compared(old: list[Section], new: list[Section]) -> str:
    """What was measured in both; a row that wants more is worse if it has less."""
    before, after = medians(old), medians(new)
    more = {f"{row.rule}: {row.what}" for it in new for row in it.rows if row.at_least}
    lines = []
    for name in [name for name in after if before.get(name)]:
        ratio = after[name] / before[name]
        worse = (1 / ratio if name in more and ratio else ratio) > TOLERANCE
        cells = f"{before[name]:.4g}", f"{after[name]:.4g}", f"{ratio:.3f}"
        lines.append([name, *cells, "**worse**" if worse else ""])
    return table(["what", "old", "new", "new / old", ""], lines)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.compare", description=__doc__)
    parser.add_argument("--old", type=Path, required=True, metavar="PATH", help="the older tree")
    parser.add_argument("--new", type=Path, default=ROOT, metavar="PATH", help="by default this")
    parser.add_argument("--only", action="append", choices=[part.name for part in PARTS])
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    trees = {"old": options.old.resolve(), "new": options.new.resolve()}
    dice, failed = random.Random(1), False
    for part in [part for part in PARTS if not options.only or part.name in options.only]:
        sections: dict[str, list[Section]] = {"old": [], "new": []}
        for number in range(options.rounds):
            for name in dice.sample(["old", "new"], 2):
                print(f"{part.name}, round {number + 1}: {name}", file=sys.stderr, flush=True)
                sections[name].append(run(part, lambda _: None, trees[name]))
        why = {it.failed for found in sections.values() for it in found if it.failed}
        failed = failed or bool(why)
        print(f"## {part.title}\n")
        print(f"**Not measured**: {', '.join(sorted(why))}\n" if why else compared(**sections))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
