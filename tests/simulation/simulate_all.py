"""`make simulate`: many seeds of every scenario, on every core, with the result in one table (T2).

A seed that fails is printed at the end, made small, with what happened; the exit code is 1.
"""

import argparse
import gc
import multiprocessing
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from stillfresh.nines import shown_nines
from stillfresh.testing import SimulationFailed, simulate
from tests.simulation.scenarios import SCENARIOS

CHUNK = 5
COLUMNS = ("scenario", "seeds", "steps", "requests", "faults", "virtual hours", "failed")
PAGE = Path(__file__).parent.parent.parent / "docs" / "reliability.md"
BEGIN, END = "<!-- simulated -->", "<!-- end -->"


class Done(NamedTuple):
    """What one seed came to."""

    name: str
    seed: int
    steps: int
    seconds: float
    requests: int
    faults: int
    failure: str | None
    reads: int
    excused: dict[str, int]
    unjudged: dict[str, int]


def begin_worker() -> None:
    """What is loaded by now is no garbage, so that to look for some after each seed is fast."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    gc.freeze()


def done(work: tuple[str, int]) -> Done:
    name, seed = work
    gc.collect()  # a run leaves itself as garbage, and no other run looks at it
    try:
        run, failure = simulate(SCENARIOS[name], seed=seed), None
    except SimulationFailed as exc:
        run, failure = exc.first, f"{name}, {exc}"
    counts = (run.steps, run.seconds, run.requests, run.faults)
    judged = (run.reads, dict(run.excused), dict(run.unjudged))
    return Done(name, seed, *counts, failure, *judged)


def works(count: int, start: int, names: list[str]) -> Iterator[tuple[str, int]]:
    """So many seeds in all, the scenarios in turn."""
    for number in range(count):
        yield names[number % len(names)], start + number // len(names)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=10_000)
    parser.add_argument("--start", type=int, default=0)
    parser.add_argument(
        "--only", choices=sorted(SCENARIOS), action="append", help="may be given several times"
    )
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--write", action="store_true", help="put the result into the docs")
    options = parser.parse_args()
    names = options.only or list(SCENARIOS)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    began, console = time.monotonic(), Console()
    columns = (TextColumn("simulating"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    found: list[Done] = []
    with (
        multiprocessing.Pool(options.processes, begin_worker) as pool,
        Progress(*columns, console=console) as progress,
    ):
        bar = progress.add_task("", total=options.seeds)
        work = works(options.seeds, options.start, names)
        with suppress(KeyboardInterrupt):  # what was done until then is told
            for it in pool.imap_unordered(done, work, CHUNK):
                found.append(it)
                progress.advance(bar)
                if it.failure:
                    console.print(f"[red]{it.name}, seed {it.seed}: failed[/red]")
    took = time.monotonic() - began
    report(console, found, took)
    if options.write:
        write(found, took)
    return int(any(it.failure for it in found))


def rows(found: list[Done]) -> Iterator[tuple[str, ...]]:
    for name in SCENARIOS:
        if ours := [it for it in found if it.name == name]:
            yield row(name.replace("_", " "), ours)
    yield row("all", found)


def write(found: list[Done], took: float) -> None:
    """Between the two marks of the page."""
    seeds, cores = len(found), os.cpu_count()
    version = ".".join(map(str, sys.version_info[:2]))
    lines = [
        f"{seeds:,} seeds in {took / 60:,.0f} minutes, on {cores} cores, Python {version}:",
        "",
        f"| {' | '.join(COLUMNS)} |",
        f"|{' --- |' * len(COLUMNS)}",
        *(f"| {' | '.join(cells)} |" for cells in rows(found)),
    ]
    before, _, rest = PAGE.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    PAGE.write_text(f"{before}{BEGIN}\n" + "\n".join(lines) + f"\n{END}{after}")


def report(console: Console, found: list[Done], took: float) -> None:
    table = Table(*COLUMNS)
    for cells in rows(found):
        table.add_row(*cells)
    console.print(table)
    console.print(f"{len(found):,} seeds in {took:,.0f} s")
    for line in judged(found):
        console.print(line)
    for it in sorted(found):
        if it.failure:
            console.print(it.failure, markup=False, highlight=False)


def judged(found: list[Done]) -> Iterator[str]:
    """T15: the reads of clean runs, the nines that they support, and what was excused, and why."""
    clean = [it for it in found if it.failure is None]
    reads = sum(it.reads for it in clean)
    if reads:
        yield f"{reads:,} reads were judged, none was wrong: {shown_nines(0, reads)} nines"
    excused: Counter[str] = Counter()
    for it in clean:
        excused.update(it.excused)
    for reason, count in excused.most_common():
        yield f"{count:,} of them ({count / reads:.2%}) were old and excused: {reason}"
    unjudged: Counter[str] = Counter()
    for it in clean:
        unjudged.update(it.unjudged)
    for reason, count in unjudged.most_common():
        yield f"{count:,} more had no value to judge: {reason}"


def row(name: str, found: list[Done]) -> tuple[str, ...]:
    sums: Counter[str] = Counter()
    for it in found:
        sums.update(steps=it.steps, requests=it.requests, faults=it.faults)
    hours = sum(it.seconds for it in found) / 3600
    failed = sum(it.failure is not None for it in found)
    counts = (len(found), sums["steps"], sums["requests"], sums["faults"])
    return name, *(f"{count:,}" for count in counts), f"{hours:,.1f}", str(failed)


if __name__ == "__main__":
    sys.exit(main())
