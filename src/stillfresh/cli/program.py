"""How every command ends: an error is one line and an exit code, Ctrl-C is 130 (G10).

1: it failed. 2: it was called wrongly. Anything else that is raised is a mistake of ours.
"""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final, NoReturn

import click

from stillfresh.cli.output import plain
from stillfresh.errors import ConfigError, StillfreshError

WRONG_USE: Final = 2
INTERRUPTED: Final = 130
"""As shells tell of a process that SIGINT ended."""


class Text(click.ParamType[str]):
    """What a store can have a name for; a shell may hand on bytes that are none."""

    name = "text"

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> str:
        try:
            value.encode()
        except UnicodeEncodeError:
            self.fail(f"{value!a} is not UTF-8.", param, ctx)
        return value


TEXT: Final = Text()


class Command(click.Command):
    """A command whose help ends with how it is called."""

    def __init__(self, *args: Any, examples: Sequence[str], **options: Any) -> None:  # noqa: ANN401
        super().__init__(*args, **options)
        self.examples = tuple(examples)

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        super().format_epilog(ctx, formatter)
        with formatter.section("Examples" if len(self.examples) > 1 else "Example"):
            for example in self.examples:
                formatter.write(f"{'':{formatter.current_indent}}{example}\n")


class CommandGroup(Command, click.Group):
    """Several commands about one thing."""


class Program(CommandGroup):
    """All of them, in the order given; every way out leads through here."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        del ctx
        return list(self.commands)

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        **extra: Any,  # noqa: ANN401
    ) -> NoReturn:
        """Always standalone: who wants the parts imports them, not the commands."""
        del standalone_mode
        for stream in (sys.stdout, sys.stderr):
            if callable(reconfigure := getattr(stream, "reconfigure", None)):
                reconfigure(errors="backslashreplace")  # ids are anybody's, terminals are ASCII
        try:
            with _translated():
                code = super().main(args, prog_name, complete_var, standalone_mode=False, **extra)
        except click.ClickException as exc:
            click.echo(_line(exc), err=True)
            sys.exit(exc.exit_code)
        except click.Abort:
            sys.exit(INTERRUPTED)
        sys.exit(code if isinstance(code, int) else 0)


@contextmanager
def _translated() -> Iterator[None]:
    try:
        yield
    except StillfreshError as exc:
        ended = WrongUse if isinstance(exc, ConfigError) else click.ClickException
        raise ended(str(exc)) from exc
    except OSError as exc:
        raise click.ClickException(": ".join(_parts(exc))) from exc


def _parts(exc: OSError) -> list[str]:
    return [str(part) for part in (exc.filename, exc.strerror or exc) if part is not None]


class WrongUse(click.ClickException):
    exit_code = WRONG_USE


def _line(exc: click.ClickException) -> str:
    """What was wrong, and where help is; help itself where nothing was asked for."""
    if isinstance(exc, getattr(click.exceptions, "NoArgsIsHelpError", ())):
        return exc.format_message()
    lines = [plain(line) for line in exc.format_message().splitlines()]
    if isinstance(exc, click.UsageError) and exc.ctx is not None:
        lines[-1] += f" Try: {exc.ctx.command_path} --help"
    return "\n".join(f"Error: {line}" for line in lines)
