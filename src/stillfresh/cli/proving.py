"""`stillfresh prove`: a store under faults, and what its readers saw (T11)."""

import logging
import random
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import click
import msgspec

from stillfresh.cli.places import own_file
from stillfresh.cli.program import INTERRUPTED, age_text, command, plain, print_table, working
from stillfresh.errors import without_password
from stillfresh.lab.prove import (
    DOUBLED,
    LOST,
    MEANING,
    PEERS,
    ProofRun,
    Report,
    checked_peer,
    proving,
)
from stillfresh.logs import quietly

SHOWN = 3
"""Examples of each broken promise."""
LONGEST = 10_000
NOTES = {
    "together": "loads beside another of the same key: stillfresh allows them while the store is "
    "out of reach, after an invalidation during the first load, and after the first load's lease "
    "ended, for example because its process was paused.",
    "refused": "invalidations refused: the store was out of reach, `invalidate` raised StoreError, "
    "and your code must try again.",
    "forgotten": "copies that were gone: the store was restarted without its data, or evicted "
    "them. They are loaded again, and no promise is broken.",
}
"""What a count means, if it is not 0."""


def _minutes(ctx: click.Context, param: click.Parameter, value: str) -> float:
    del ctx, param
    try:
        minutes = float(value)
    except ValueError:
        minutes = 0.0
    if not 0 < minutes <= LONGEST:
        allowed = f"a number of minutes, such as 0.33, up to {LONGEST}"
        raise click.BadParameter(f"{value!r} is not {allowed}.")
    return minutes


@command(
    "stillfresh prove redis://localhost:6379/0 --minutes 10",
    "stillfresh prove redis://localhost:6379/0 --peer cashews --seed 7 --json proof.json",
    "stillfresh prove cache.db --minutes 1",
)
@click.argument("store")
@click.option(
    "--minutes",
    default="2",
    show_default=True,
    metavar="NUMBER",
    callback=_minutes,
    help="How long, such as 0.33; with --peer, for each.",
)
@click.option("--seed", type=int, help="Chooses the faults and their order.  [default: any]")
@click.option(
    "--workers", default=4, show_default=True, type=click.IntRange(2, 64), help="Processes."
)
@click.option(
    "--peer", type=click.Choice(sorted(PEERS)), help="Also this library, on the same Redis."
)
@click.option(
    "--json",
    "file",
    metavar="FILE",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write the report to this file, too; the table is printed all the same.",
)
def prove(
    *,
    store: str,
    minutes: float,
    seed: int | None,
    workers: int,
    peer: str | None,
    file: Path | None,
) -> None:
    """Prove that STORE keeps its promises while things break.

    Processes read, load and invalidate, with a namespace of their own in STORE, which is deleted
    in the end. They are killed and paused, and their connections are cut, delayed and half
    answered by a proxy (not with TLS, a cluster or Sentinel: what is done there is up to you). Fail
    over your own servers meanwhile. A SQLite store is proved in a new file beside it. Exit code 1:
    stillfresh broke a promise; a peer's broken promises do not count. Ctrl-C ends it early, with
    the report.
    """
    seed = random.randrange(1_000_000) if seed is None else seed  # noqa: S311 (no secret)
    names = ["", *([checked_peer(peer, store)] if peer is not None else [])]
    reports: list[Report] = []
    _write(file, b"")  # before the work, if it cannot be written
    with ending() as over, working("Faults survived:") as advance, quietly(logging.CRITICAL):
        for name in names:
            with (
                own_file(store, "prove") as place,
                proving(place, name) as stage,
                tempfile.TemporaryDirectory(prefix="stillfresh-prove-") as folder,
            ):
                begun = f"Proving {name or 'stillfresh'} for {age_text(minutes * 60)}, seed {seed}."
                click.echo(f"{begun} Ctrl-C ends it early, with the report.", err=True)
                run = ProofRun(name or "stillfresh", stage, Path(folder), seed, workers, over=over)
                faults = _counted(run.decks(minutes * 60), advance)
                reports.append(run.go(faults))
            if stage.left:
                click.echo(plain(stage.left), err=True)
            if over.is_set():
                break
    tell(reports)
    told = {"store": without_password(store), "reports": reports}
    _write(file, msgspec.json.encode(told) + b"\n")
    sys.exit(1 if reports[0].sentences else INTERRUPTED * over.is_set())


def _write(file: Path | None, told: bytes) -> None:
    if file is not None:
        try:
            file.write_bytes(told)
        except OSError as exc:
            said, ctx = f"cannot write {file}: {exc.strerror}.", click.get_current_context()
            raise click.BadParameter(said, ctx, param_hint="'--json'") from exc


@contextmanager
def ending() -> Iterator[threading.Event]:
    """Set by Ctrl-C or SIGTERM; a second one ends the command at once."""
    over = threading.Event()

    def end(*_: object) -> None:
        over.set()
        for number in before:
            signal.signal(number, signal.default_int_handler)

    before = {it: signal.signal(it, end) for it in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield over
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _counted(names: Iterator[str], advance: Callable[[int], None]) -> Iterator[str]:
    for name in names:
        yield name
        advance(1)


def tell(reports: list[Report]) -> None:
    head = ("", *(it.store for it in reports))
    columns = [_figures(it) for it in reports]
    rows = ((name, *(it.get(name, "-") for it in columns)) for name in columns[0])
    print_table(head, rows, right=head[1:])
    click.echo()
    for report in reports:
        for line in _judged(report):
            click.echo(f"{report.store}: {line}")
    for name, note in NOTES.items():
        if any(it.counts[name] for it in reports):
            click.echo(note)
    for report in reports:
        click.echo()
        _tell_broken(report)


def _judged(report: Report) -> Iterator[str]:
    """How many reads were judged, and what was not, with the reason."""
    counts = report.counts
    if counts["blind"]:
        yield f"{counts['blind']:,} of {counts['served']:,} reads were without the store."
    if counts["excused"]:
        yield (
            f"{counts['excused']:,} reads got an older copy without the store, and said so: "
            f"stale and unverified."
        )
    if counts["unknown"]:
        yield (
            f"{counts['unknown']:,} reads were not judged against invalidations: the library "
            f"could not ask the store, and does not say how fresh its answer is."
        )
    if report.judged and not report.broken[LOST]:
        yield f"{report.judged:,} reads were judged, none was wrong: {report.nines:.1f} nines."


def _tell_broken(report: Report) -> None:
    if not report.counts["served"]:
        click.echo(f"{report.store}: nothing was read, so nothing is proved.")
    elif not report.sentences:
        ended = ", in a run that was ended early" if report.is_cut_short else ""
        click.echo(f"{report.store}: every promise was kept{ended}:")
        for promise in report.broken:
            click.echo(f"  {promise}.")
    for promise, found in report.broken.items():
        if found:
            click.echo(f"{report.store}: broken ({len(found):,}): {promise}.")
            meaning = "" if report.peer else MEANING.get(promise, "")
            for line in filter(None, (*found[:SHOWN], meaning)):
                click.echo(f"  {plain(line)}")
    for line in report.complaints[:SHOWN]:
        click.echo(f"{report.store}: {plain(line)}")


def _figures(it: Report) -> dict[str, str]:
    """What a run came to, in words and numbers."""
    counts = it.counts
    doubled = sum(len(it.broken.get(name, ())) for name in DOUBLED)
    return {
        "seed": str(it.seed),
        "lasted": age_text(it.seconds),
        "fresh_for": age_text(it.fresh_for),
        "stale_for": age_text(it.stale_for),
        "reads": f"{counts['served']:,}",
        "reads without the store": f"{counts['blind']:,}",
        "reads that said so of an older copy": f"{counts['excused']:,}",
        "reads that failed": f"{counts['failed']:,}",
        "loads": f"{counts['load']:,}",
        "loads beside another of the same key": f"{counts['together']:,}",
        "invalidations confirmed": f"{counts['invalidated']:,}",
        "invalidations refused": f"{counts['refused']:,}",
        "invalidations lost": f"{len(it.broken[LOST]):,}",
        **({"leases doubled": f"{doubled:,}"} if DOUBLED[0] in it.broken else {}),
        **({"copies that were gone": f"{counts['forgotten']:,}"} if counts["forgotten"] else {}),
        **{f"age at serving, {name}": f"{age:.3g} s" for name, age in it.ages.items()},
        **{f"fault: {name}": f"{times:,}" for name, times in sorted(it.faults.items())},
        "longest until all worked again": f"{max(it.recoveries, default=0.0):.1f} s",
    }
