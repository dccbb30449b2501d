"""What the commands print: tables for people, one JSON document for scripts (G10).

Ids, errors and addresses are anybody's text: nothing in them reaches a terminal as a command.
"""

import json
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any, Final

import click
import msgspec

from stillfresh.errors import StillfreshError

if TYPE_CHECKING:
    from rich.console import Console

COLOURS: Final = {
    "fresh": "green",
    "stale": "yellow",
    "expired": "dark_orange",
    "gone": "bright_black",
}
"""As on the dashboard."""
WIDE: Final = 10_000
"""Columns where nobody looks: what reads a pipe wants whole lines."""
UNITS: Final = ("B", "kB", "MB", "GB")
SPANS: Final = ((86400, "d"), (3600, "h"), (60, "min"), (1, "s"))
PATIENCE: Final = 1.0
"""Seconds of work before a bar is shown."""

as_json = click.option("--json", "is_json", is_flag=True, help="One JSON document, for scripts.")


def extra(module: str, named: str = "aws") -> ModuleType:
    """A part that needs libraries of its own; without one, the error names the extra."""
    try:
        return import_module(module)
    except ModuleNotFoundError as exc:
        if exc.name is None or exc.name.partition(".")[0] == "stillfresh":
            raise
        raise StillfreshError(
            f"this command needs {exc.name}: install stillfresh[{named}]"
        ) from exc


def plain(text: str) -> str:
    """With what a terminal would obey written out."""
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)


def size_text(size: float | None) -> str:
    if size is None:
        return "-"
    power = 0
    while size >= 1000 and power < len(UNITS) - 1:
        size, power = size / 1000, power + 1
    return (
        f"{size:.0f} {UNITS[power]}" if power == 0 or size >= 100 else f"{size:.3g} {UNITS[power]}"
    )


def age_text(seconds: float | None) -> str:
    """In the largest unit that it has two of."""
    if seconds is None:
        return "-"
    size, unit = next((span for span in SPANS if abs(seconds) >= 2 * span[0]), SPANS[-1])
    count = seconds / size
    return f"{count:.1f} {unit}" if unit == "s" and 0 < abs(count) < 10 else f"{count:.0f} {unit}"


def moment_text(at: float | None, now: float) -> str:
    """A time of the day, and how far away it is."""
    if at is None:
        return "-"
    try:
        when = datetime.fromtimestamp(at, UTC).isoformat(sep=" ", timespec="seconds")
    except (OverflowError, ValueError, OSError):
        return "for ever" if at > now else "never"
    away = age_text(abs(at - now))
    return f"{when} ({f'in {away}' if at > now else f'{away} ago'})"


def print_json(document: Any) -> None:  # noqa: ANN401 (whatever JSON can say)
    """Indented for people; by the line for programs, which is much faster."""
    plain_document = msgspec.to_builtins(document, str_keys=True)
    click.echo(json.dumps(plain_document, indent=2 if sys.stdout.isatty() else None))


def console(*, err: bool = False) -> "Console":
    """Imported when something is printed: a tenth of a second that --help need not wait."""
    found: Console = extra("rich.console", "cli").Console(
        stderr=err, highlight=False, soft_wrap=False
    )
    if not found.is_terminal:
        found.width = WIDE
    return found


def print_table(
    head: Sequence[str], rows: Iterable[Sequence[str]], *, right: Sequence[str] = ()
) -> None:
    """Columns named in `right` hold numbers; a verdict has its colour where there are colours."""
    text_of = extra("rich.text", "cli").Text
    table = extra("rich.table", "cli").Table(
        box=None, pad_edge=False, header_style="bold", show_header=any(head)
    )
    for name in head:
        side = "right" if name in right else "left"
        table.add_column(name, justify=side, no_wrap=name in right, overflow="fold")
    for row in rows:
        table.add_row(*(text_of(cell, style=COLOURS.get(cell, "")) for cell in map(plain, row)))
    place = console()
    with place.capture() as text:
        place.print(table)
    lines = text.get().splitlines()
    click.echo("\n".join(lines if place.is_terminal else map(str.rstrip, lines)), color=True)


@contextmanager
def working(what: str) -> Iterator[Callable[[int], None]]:
    """A bar on the terminal for what takes longer than a second; call what it gives to count."""
    if not sys.stderr.isatty():
        yield lambda _: None
        return
    shown = extra("rich.progress", "cli")
    counted = shown.TextColumn("{task.description} {task.completed:,}")
    columns = shown.SpinnerColumn(), counted, shown.TimeElapsedColumn()
    bar = shown.Progress(*columns, console=console(err=True), transient=True)
    task = bar.add_task(what, total=None)
    late = threading.Timer(PATIENCE, bar.start)
    late.daemon = True
    late.start()
    try:
        yield lambda done: bar.advance(task, done)
    finally:
        late.cancel()
        late.join()
        bar.stop()
