"""How every command ends: an error is one line and an exit code, Ctrl-C is 130 (G10).

1: it failed. 2: it was called wrongly. Anything else that is raised is a mistake of ours.
"""

import sys
from collections.abc import Sequence
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
            code = super().main(args, prog_name, complete_var, standalone_mode=False, **extra)
        except click.Abort:
            sys.exit(INTERRUPTED)
        except click.ClickException as exc:
            click.echo(_line(exc), err=True)
            sys.exit(exc.exit_code)
        except (StillfreshError, OSError) as exc:
            click.echo(_lines(_said(exc)), err=True)
            sys.exit(WRONG_USE if isinstance(exc, ConfigError) else 1)
        sys.exit(code if isinstance(code, int) else 0)


def _said(exc: Exception) -> str:
    if not isinstance(exc, OSError):
        return str(exc)
    return ": ".join(str(it) for it in (exc.filename, exc.strerror or exc) if it is not None)


def _line(exc: click.ClickException) -> str:
    """What was wrong, and where help is; help itself where nothing was asked for."""
    if isinstance(exc, getattr(click.exceptions, "NoArgsIsHelpError", ())):
        return exc.format_message()
    ctx = exc.ctx if isinstance(exc, click.UsageError) else None
    return _lines(exc.format_message() + (f" Try: {ctx.command_path} --help" if ctx else ""))


def _lines(text: str) -> str:
    return "\n".join(f"Error: {plain(line)}" for line in text.splitlines())
