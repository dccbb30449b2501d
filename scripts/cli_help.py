"""Writes what the commands say of themselves into docs/cli.md: `python scripts/cli_help.py`.

`tests/cli/test_cli_program.py` fails when the page is not as this would write it.
"""

import re
from pathlib import Path

import click

from stillfresh.cli import main

PAGE = Path(__file__).parent.parent / "docs" / "cli.md"
MARKS = re.compile(r"(<!-- help: ([a-z ]+) -->\n).*?(<!-- /help -->)", re.DOTALL)
WIDTH = 80


def help_of(path: str) -> str:
    """As a terminal of 80 columns shows it."""
    command: click.Command = main
    context = click.Context(main, info_name="stillfresh", terminal_width=WIDTH)
    for name in path.split()[1:]:
        assert isinstance(command, click.Group)  # noqa: S101 (a script of ours)
        below = command.get_command(context, name)
        assert below is not None  # noqa: S101
        command = below
        context = click.Context(
            command,
            context,
            info_name=name,
            terminal_width=WIDTH,
            help_option_names=["-h", "--help"],
        )
    return command.get_help(context)


def written(page: str) -> str:
    """The page with every help as it is."""
    return MARKS.sub(lambda it: f"{it[1]}```text\n{help_of(it[2])}\n```\n{it[3]}", page)


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text()))
