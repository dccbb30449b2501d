"""What every command shares: its help, its output, and its exit codes.

Tables for people, one JSON document for scripts. An error is one line and an exit code: 1, it
failed; 2, it was called wrongly; 130, Ctrl-C. Any other exception is a mistake of ours. Ids, errors
and addresses may contain anything: control characters never reach the terminal.
"""

import inspect
import json
import logging
import os
import re
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any, Final, NoReturn, TextIO

import click
import msgspec

from stillfresh.errors import ConfigError, StillfreshError, needs

if TYPE_CHECKING:
    from rich.console import Console

WRONG_USE: Final = 2
INTERRUPTED: Final = 130
"""The exit code of a process that SIGINT ended, as in shells."""
COLOURS: Final = {
    "fresh": "green",
    "stale": "yellow",
    "expired": "dark_orange",
    "gone": "bright_black",
}
"""As on the dashboard."""
WIDE: Final = 10_000
"""Columns of a pipe, so that lines stay whole."""
UNITS: Final = ("B", "kB", "MB", "GB")
SPANS: Final = ((86400, "d"), (3600, "h"), (60, "min"), (1, "s"))
PROMISE: Final = re.compile(
    r"; stillfresh tries it again (?:within|every) [\d.]+ s(?: or sooner)?"
    r"|[;,] (?:and|it) is tried again(?: in a moment)?"
)
"""Parts of errors and log lines that are true only in programs that keep running."""
PATIENCE: Final = 1.0
"""Seconds of work before a bar is shown."""

as_json = click.option("--json", "is_json", is_flag=True, help="One JSON document, for scripts.")


def extra(module: str, named: str = "aws") -> ModuleType:
    """Import a part that needs an extra; if a library is missing, the error names the extra."""
    with needs(named, "this command"):
        return import_module(module)


def plain(text: str) -> str:
    """The text with control characters written out."""
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)


def without_promises(text: str) -> str:
    """Remove promises to try again: the command ends and tries nothing again."""
    return PROMISE.sub("", text)


class CommandLog(logging.Handler):
    """Logs to standard error, for commands without log settings of their own."""

    def emit(self, record: logging.LogRecord) -> None:
        click.echo(plain(without_promises(self.format(record))), err=True)


@contextmanager
def _logging() -> Iterator[None]:
    """Print warnings as lines. `serve` and `outbox follow`, which go on, have own handlers."""
    before = logging.lastResort
    logging.lastResort = CommandLog(logging.WARNING)
    try:
        yield
    finally:
        logging.lastResort = before


def size_text(size: float | None) -> str:
    if size is None:
        return "-"
    power = 0
    while size >= 1000 and power < len(UNITS) - 1:
        size = size / 1000
        power += 1
    if power == 0 or size >= 100:
        return f"{size:.0f} {UNITS[power]}"
    return f"{size:.3g} {UNITS[power]}"


def age_text(seconds: float | None) -> str:
    """An age in the largest unit of which it has at least two."""
    if seconds is None:
        return "-"
    size, unit = next((span for span in SPANS if abs(seconds) >= 2 * span[0]), SPANS[-1])
    count = seconds / size
    if unit == "s" and 0 < abs(count) < 10:
        return f"{count:.1f} {unit}"
    return f"{count:.0f} {unit}"


def moment_text(at: float | None, now: float) -> str:
    """A time of the day, and how far away it is."""
    if at is None:
        return "-"
    try:
        when = datetime.fromtimestamp(at, UTC).isoformat(sep=" ", timespec="seconds")
    except (OverflowError, ValueError, OSError):
        return "for ever" if at > now else "never"
    away = age_text(abs(at - now))
    if at > now:
        return f"{when} (in {away})"
    return f"{when} ({away} ago)"


def print_json(document: Any, *, by_line: bool = False) -> None:  # noqa: ANN401 (any JSON)
    """Indented for people; by the line for programs, which is much faster."""
    plain_document = msgspec.to_builtins(document, str_keys=True)
    is_indented = sys.stdout.isatty() and not by_line
    click.echo(json.dumps(plain_document, indent=2 if is_indented else None))


def console(*, err: bool = False) -> "Console":
    """Create the console. Importing rich takes a tenth of a second, so --help does not do it."""
    rich_console: Console = extra("rich.console", "cli").Console(
        stderr=err, highlight=False, soft_wrap=False
    )
    if not rich_console.is_terminal:
        rich_console.width = WIDE
    return rich_console


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
    terminal = console()
    with terminal.capture() as captured:
        terminal.print(table)
    lines = captured.get().splitlines()
    if not terminal.is_terminal:
        lines = [line.rstrip() for line in lines]
    click.echo("\n".join(lines), color=True)


@contextmanager
def working(what: str) -> Iterator[Callable[[int], None]]:
    """A bar on the terminal for work of more than a second; it yields a function that counts."""
    if not sys.stderr.isatty():
        yield lambda _: None
        return
    progress = extra("rich.progress", "cli")
    bar = progress.Progress(
        progress.SpinnerColumn(),
        progress.TextColumn("{task.description} {task.completed:,}"),
        progress.TimeElapsedColumn(),
        console=console(err=True),
        transient=True,
    )
    task = bar.add_task(what, total=None)
    starter = threading.Timer(PATIENCE, bar.start)
    starter.daemon = True
    starter.start()
    try:
        yield lambda done: bar.advance(task, done)
    finally:
        starter.cancel()
        starter.join()
        bar.stop()


class Text(click.ParamType[str]):
    """Text that can be a name in a store; refuses bytes of a shell that are not UTF-8."""

    name = "text"

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> str:
        try:
            value.encode()
        except UnicodeEncodeError:
            self.fail(f"{value!a} is not UTF-8.", param, ctx)
        return value


TEXT: Final = Text()


class Command(click.Command):
    """A command whose help ends with examples."""

    def __init__(self, *args: Any, examples: Sequence[str], **options: Any) -> None:  # noqa: ANN401
        super().__init__(*args, **options)
        self.examples = tuple(examples)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except click.UsageError as exc:
            exc.ctx = exc.ctx or ctx  # click leaves it out if an option lacks its value
            raise

    def invoke(self, ctx: click.Context) -> object:
        """Run it; an async function in an event loop of its own."""
        result: object = super().invoke(ctx)
        if not inspect.iscoroutine(result):
            return result
        return ctx.invoke(import_module("asyncio").run, result)

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        super().format_epilog(ctx, formatter)
        with formatter.section("Examples" if len(self.examples) > 1 else "Example"):
            for example in self.examples:
                formatter.write(f"{'':{formatter.current_indent}}{example}\n")


def command(*examples: str) -> Callable[[Callable[..., object]], Command]:
    return click.command(cls=Command, examples=examples)


class CommandGroup(Command, click.Group):
    """Several commands about one thing."""


class Program(CommandGroup):
    """The whole program: its commands in the order given, and every way to end.

    A command's module is imported when the command is used. For the list of all commands it would
    take a second, so `listed` has their modules and short texts.
    """

    def __init__(self, *args: Any, listed: Mapping[str, tuple[str, str]], **options: Any) -> None:  # noqa: ANN401
        """`listed`: by the name of each command, its module and one line about it."""
        super().__init__(*args, **options)
        self.listed = listed

    def list_commands(self, ctx: click.Context) -> list[str]:
        del ctx
        return list(self.listed)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        del ctx
        if cmd_name not in self.listed:
            return None
        module, _ = self.listed[cmd_name]
        found_command: click.Command = getattr(import_module(module), cmd_name)
        return found_command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        del ctx
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in self.listed.items()])

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        **extra: Any,  # noqa: ANN401
    ) -> NoReturn:
        """Always standalone: Python code imports the parts, not the commands."""
        del standalone_mode
        sys.stdout = sys.stdout or _nowhere()
        sys.stderr = sys.stderr or _nowhere()
        for stream in (sys.stdout, sys.stderr):
            reconfigure = getattr(stream, "reconfigure", None)
            if callable(reconfigure):  # ids may have any character, and a terminal may be ASCII
                reconfigure(errors="backslashreplace")
        try:
            with _logging():
                code = super().main(args, prog_name, complete_var, standalone_mode=False, **extra)
        except click.Abort:
            sys.exit(INTERRUPTED)
        except click.ClickException as exc:
            click.echo(_usage_error_text(exc), err=True)
            sys.exit(exc.exit_code)
        except (StillfreshError, OSError) as exc:
            click.echo(_error_lines(_failure_text(exc)), err=True)
            sys.exit(WRONG_USE if isinstance(exc, ConfigError) else 1)
        sys.exit(code if isinstance(code, int) else 0)


def _nowhere() -> TextIO:
    """Return a stream to nowhere, for one that was closed before the program began."""
    return open(os.devnull, "w")  # noqa: PTH123 (for as long as the program runs)


def _failure_text(exc: Exception) -> str:
    if not isinstance(exc, OSError):
        return without_promises(str(exc))
    problem = str(exc.strerror or exc)
    return problem if exc.filename is None else f"{exc.filename}: {problem}"


def _usage_error_text(exc: click.ClickException) -> str:
    """The error, and how to get help; without arguments the help itself."""
    if isinstance(exc, getattr(click.exceptions, "NoArgsIsHelpError", ())):
        return exc.format_message()
    message = exc.format_message()
    if isinstance(exc, click.UsageError) and exc.ctx:
        message += f" Try: {exc.ctx.command_path} --help"
    return _error_lines(message)


def _error_lines(text: str) -> str:
    return "\n".join(f"Error: {plain(line)}" for line in text.splitlines())
