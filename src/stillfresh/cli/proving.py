"""`stillfresh prove`: a store under faults, and what its readers saw."""

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
from stillfresh.nines import shown_nines

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
    "stillfresh prove redis://localhost:6379/0 --peer cashews --peer nginx --json proof.json",
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
    "--peer",
    "peers",
    multiple=True,
    type=click.Choice(sorted(PEERS)),
    help="Also this cache; may be given several times. Libraries use the same Redis.",
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
    peers: tuple[str, ...],
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
    names = ["", *(checked_peer(peer, store) for peer in dict.fromkeys(peers))]  # itself first
    reports: list[Report] = []
    _write(file, b"")  # before the work, if it cannot be written
    with ending() as over, working("Faults survived:") as advance, quietly(logging.CRITICAL):
        for name in names:
            with (
                own_file(store, "prove") as place,
                proving(place, name) as stage,
                tempfile.TemporaryDirectory(prefix="stillfresh-prove-") as folder,
            ):
                library = name or "stillfresh"
                click.echo(
                    f"Proving {library} for {age_text(minutes * 60)}, seed {seed}. "
                    "Ctrl-C ends it early, with the report.",
                    err=True,
                )
                run = ProofRun(library, stage, Path(folder), seed, workers, over=over)
                faults = _count_faults(run.decks(minutes * 60), advance)
                reports.append(run.go(faults))
            if stage.left:
                click.echo(plain(stage.left), err=True)
            if over.is_set():
                break
    tell(reports)
    document = {"store": without_password(store), "reports": reports}
    _write(file, msgspec.json.encode(document) + b"\n")
    if reports[0].sentences:
        sys.exit(1)
    sys.exit(INTERRUPTED if over.is_set() else 0)


def _write(file: Path | None, data: bytes) -> None:
    if file is None:
        return
    try:
        file.write_bytes(data)
    except OSError as exc:
        problem = f"cannot write {file}: {exc.strerror}."
        ctx = click.get_current_context()
        raise click.BadParameter(problem, ctx, param_hint="'--json'") from exc


@contextmanager
def ending() -> Iterator[threading.Event]:
    """Set by Ctrl-C or SIGTERM; a second one ends the command at once."""
    over = threading.Event()

    def end(*_: object) -> None:
        over.set()
        for number in before:
            signal.signal(number, signal.default_int_handler)

    before = {number: signal.signal(number, end) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield over
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _count_faults(names: Iterator[str], advance: Callable[[int], None]) -> Iterator[str]:
    for name in names:
        yield name
        advance(1)


def tell(reports: list[Report]) -> None:
    """Print the figures of the reports side by side, and then the broken promises."""
    head = ("", *(report.store for report in reports))
    columns = [_figures(report) for report in reports]
    names = dict.fromkeys(name for column in columns for name in column)
    rows = [(name, *(column.get(name, "-") for column in columns)) for name in names]
    print_table(head, rows, right=head[1:])
    click.echo()
    for report in reports:
        for line in _sentences_about_reads(report):
            click.echo(f"{report.store}: {line}")
    for name, note in NOTES.items():
        if any(report.counts[name] for report in reports):
            click.echo(note)
    for report in reports:
        click.echo()
        _tell_broken(report)
    if len(reports) > 1:
        click.echo()
        for line in comparison(reports):
            click.echo(line)


def comparison(reports: list[Report]) -> Iterator[str]:
    """One table of all runs in Markdown, for a README."""
    yield "| | reads judged | not judged | wrong | supported nines |"
    yield "| --- | ---: | ---: | ---: | ---: |"
    for report in reports:
        share = report.unjudged.total() / report.reads if report.reads else 0.0
        cells = (
            report.store,
            f"{report.judged:,}",
            f"{share:.1%}",
            f"{report.wrong:,}",
            shown_nines(report.wrong, report.judged),
        )
        yield f"| {' | '.join(cells)} |"


def _sentences_about_reads(report: Report) -> Iterator[str]:
    """How many reads were judged, and what was not, with the reason."""
    counts = report.counts
    if counts["blind"]:
        yield f"{counts['blind']:,} of {counts['served']:,} reads were without the store."
    if counts["excused"]:
        yield (
            f"{counts['excused']:,} reads got an older copy without the store, and said so: "
            f"stale and unverified."
        )
    if counts["uncertain"]:
        yield (
            f"{counts['uncertain']:,} reads got a copy from before an invalidation that was never "
            f"confirmed: right if it was not done, so they were judged against both."
        )
    for reason, count in report.unjudged.most_common():
        yield f"{count:,} reads were not judged: {reason}."
    if report.judged:
        wrong = f"{report.wrong:,} of them wrong" if report.wrong else "none was wrong"
        nines = shown_nines(report.wrong, report.judged)
        yield f"{report.judged:,} reads were judged, {wrong}: {nines} nines."


def _tell_broken(report: Report) -> None:
    if not report.counts["served"]:
        click.echo(f"{report.store}: nothing was read, so nothing is proved.")
    elif not report.sentences:
        ended = ", in a run that was ended early" if report.is_cut_short else ""
        click.echo(f"{report.store}: every promise was kept{ended}:")
        for promise in report.broken:
            click.echo(f"  {promise}.")
    for promise, sentences in report.broken.items():
        if sentences:
            click.echo(f"{report.store}: broken ({len(sentences):,}): {promise}.")
            for line in sentences[:SHOWN]:
                click.echo(f"  {plain(line)}")
            if not report.peer and promise in MEANING:
                click.echo(f"  {plain(MEANING[promise])}")
    for line in [*report.too_many_unjudged, *report.complaints[:SHOWN]]:
        click.echo(f"{report.store}: {plain(line)}")


def _figures(report: Report) -> dict[str, str]:
    """The figures of a run by their names, as rows of the table."""
    counts = report.counts
    figures = {
        "seed": str(report.seed),
        "lasted": age_text(report.seconds),
        "fresh_for": age_text(report.fresh_for),
        "stale_for": age_text(report.stale_for),
        "reads": f"{counts['served']:,}",
        "reads without the store": f"{counts['blind']:,}",
        "reads that said so of an older copy": f"{counts['excused']:,}",
        "reads that were wrong": f"{report.wrong:,}",
        "reads that failed": f"{counts['failed']:,}",
        "loads": f"{counts['load']:,}",
        "loads beside another of the same key": f"{counts['together']:,}",
        "invalidations confirmed": f"{counts['invalidated']:,}",
        "invalidations refused": f"{counts['refused']:,}",
        "invalidations lost": f"{len(report.broken[LOST]):,}",
    }
    if DOUBLED[0] in report.broken:  # peers have no leases
        doubled = sum(len(report.broken.get(promise, ())) for promise in DOUBLED)
        figures["leases doubled"] = f"{doubled:,}"
    if counts["forgotten"]:
        figures["copies that were gone"] = f"{counts['forgotten']:,}"
    for name, age in report.ages.items():
        figures[f"age at serving, {name}"] = f"{age:.3g} s"
    for name, times in sorted(report.faults.items()):
        figures[f"fault: {name}"] = f"{times:,}"
    longest = max(report.recoveries, default=0.0)
    figures["longest until all worked again"] = f"{longest:.1f} s"
    return figures
