"""Real processes under load on one store, while faults come one after another: `make torture` (T4).

The runs are those of `stillfresh prove` (`stillfresh.lab.prove`), on stores that are started here,
and to which more can be done. The seed chooses the faults.
"""

import argparse
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from stillfresh.lab.prove import CHECKS, ProofRun, Report
from stillfresh.nines import shown_nines
from tests.proof.torture_stages import STAGES, NotHere


def watched(names: Iterator[str], progress: Progress, store: str, seconds: float) -> Iterator[str]:
    """The same, with a bar that moves with the time."""
    task, began = progress.add_task(store, total=seconds), time.monotonic()
    for name in names:
        progress.update(task, completed=time.monotonic() - began, description=f"{store}: {name}")
        yield name
    progress.update(task, completed=seconds, description=store)


def tortured(name: str, seed: int, minutes: float, workers: int, progress: Progress) -> Report:
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="torture-")))
        stage = stack.enter_context(STAGES[name](folder))
        run = ProofRun(name, stage, folder, seed, workers)
        names = run.decks(minutes * 60)
        return run.go(watched(names, progress, name, minutes * 60))


def tables(reports: list[Report]) -> Iterator[Table]:
    """Load held, faults survived, nothing lost."""
    yield table("load held", reports, load_held)
    names = dict.fromkeys(name for report in reports for name in report.faults)
    yield table(
        "faults survived", reports, lambda it: {name: str(it.faults[name]) for name in names}
    )
    yield table(
        "violations",
        reports,
        lambda it: {promise: str(len(it.broken[promise])) for promise in CHECKS},
    )


def table(title: str, reports: list[Report], rows: Callable[[Report], dict[str, str]]) -> Table:
    """A column for each store."""
    shown = Table("", *(f"{report.store}" for report in reports), title=title, title_justify="left")
    columns = [rows(report) for report in reports]
    for row in columns[0]:
        shown.add_row(row, *(column[row] for column in columns))
    return shown


def load_held(report: Report) -> dict[str, str]:
    counts, seconds = report.counts, report.seconds
    return {
        "seed": str(report.seed),
        "seconds": f"{seconds:.0f}",
        "processes at a time": str(report.workers),
        "reads": f"{counts['served']:,} ({counts['served'] / seconds:,.0f}/s)",
        "of these without the store": f"{counts['blind']:,}",
        "old, stale and unverified": f"{counts['excused']:,}",
        "copies from before an unconfirmed invalidation": f"{counts['uncertain']:,}",
        "not judged": f"{report.unjudged.total():,}",
        "judged": f"{report.judged:,}",
        "wrong": f"{report.wrong:,}",
        "supported nines": shown_nines(report.wrong, report.judged),
        "loads": f"{counts['load']:,}",
        "published": f"{counts['published']:,}",
        "invalidated": f"{counts['invalidated']:,}",
        "invalidations refused": f"{counts['refused']:,}",
        "faults": str(sum(report.faults.values())),
        "longest until all worked again": f"{max(report.recoveries, default=0):.1f} s",
    }


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("stores", nargs="*", default=list(STAGES), help=", ".join(STAGES))
    options.add_argument("--minutes", type=float, default=2.0, help="for each store")
    options.add_argument("--seed", type=int, default=random.randrange(1_000_000))
    options.add_argument("--workers", type=int, default=4)
    given = options.parse_args()
    errors, reports = Console(stderr=True), []
    errors.print(f"seed {given.seed}")
    columns = (TextColumn("{task.description:40}"), BarColumn(), TimeRemainingColumn())
    with Progress(*columns, console=errors) as progress:
        for name in given.stores:
            try:
                reports.append(tortured(name, given.seed, given.minutes, given.workers, progress))
            except NotHere as exc:
                errors.print(f"{name}: not run: {exc}")
    return told(reports)


def told(reports: list[Report]) -> int:
    """The tables, and each violation in a sentence; the exit code."""
    console = Console()
    for each in tables(reports) if reports else ():
        console.print(each)
    sentences = [f"{it.store}: {each}" for it in reports for each in it.sentences]
    for sentence in sentences[:50]:
        console.print(sentence)
    return 1 if sentences or not reports else 0


if __name__ == "__main__":
    sys.exit(main())
