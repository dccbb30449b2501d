"""`stillfresh diskcache …`: from a directory of diskcache to a DiskCache of stillfresh."""

import logging
from contextlib import closing

import click

from stillfresh.cli.program import (
    CommandGroup,
    as_json,
    command,
    extra,
    plain,
    print_json,
    working,
)
from stillfresh.logs import quietly

PACKAGE = "stillfresh.integrations.diskcache"
CONVERT = "stillfresh diskcache convert var/cache"


@click.group(cls=CommandGroup, examples=[CONVERT])
def diskcache() -> None:
    """Leave diskcache without losing its plain values."""


@command(CONVERT, "stillfresh diskcache convert var/cache --to var/new --names")
@click.argument("directory", type=click.Path(file_okay=False))
@click.option("--to", "target", type=click.Path(file_okay=False), help="Instead of DIRECTORY.")
@click.option("--names", "is_naming", is_flag=True, help="Name the entries that are left out.")
@as_json
def convert(*, directory: str, target: str | None, is_naming: bool, is_json: bool) -> None:
    """Copy text, bytes and numbers of the diskcache in DIRECTORY into a DiskCache.

    What diskcache has pickled is not read, since that could run code: it is counted. The old files
    stay as they are. Without --to, the new file stillfresh.db is in the same directory. Entries
    that it has already are kept, so the command can be run again.
    """
    package = extra(PACKAGE, "cli")
    extra(f"{PACKAGE}.converting", "cli").old_files(directory)  # before a new cache is made
    with quietly(logging.ERROR):  # that the old cache is not read, and how to convert it
        into = package.DiskCache(target or directory, size_limit=None)
    with closing(into), working("entries") as count:  # opened by its first write, not before
        result = package.convert(directory, into, count)
    left_out = sum(result.reasons.values())
    if is_json:
        figures = {"taken": result.taken, "expired": result.expired, "present": result.present}
        names = [{"name": entry.name, "reason": entry.reason} for entry in result.left_out]
        print_json({**figures, "left_out": dict(result.reasons), "names": names})
        return
    click.echo(f"taken over: {result.taken:,}")
    click.echo(f"ended already: {result.expired:,}")
    click.echo(f"there already: {result.present:,}")
    click.echo(f"left out: {left_out:,}")
    for reason, number in result.reasons.most_common():
        click.echo(f"  {number:,}: {reason}")
    if is_naming:
        for entry in result.left_out:
            click.echo(plain(f"  {entry.name}: {entry.reason}"))


diskcache.add_command(convert)
