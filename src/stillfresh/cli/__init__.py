"""The command line: it chooses the adapters and prints their answers.

It decides nothing, and imports nothing large before a command needs it.
"""

import sys
from importlib.metadata import version

try:
    import click
except ModuleNotFoundError:
    if sys.argv[1:] == ["--version"]:
        sys.stdout.write(f"stillfresh, version {version('stillfresh')}\n")
        raise SystemExit(0) from None
    sys.stderr.write("Error: the commands need click: install stillfresh[cli]\n")
    raise SystemExit(2) from None

from stillfresh.cli.counting import stats
from stillfresh.cli.inspecting import explain, inspect
from stillfresh.cli.invalidating import evict, invalidate
from stillfresh.cli.measuring import bench
from stillfresh.cli.outbox import outbox
from stillfresh.cli.planning import plan
from stillfresh.cli.program import Program
from stillfresh.cli.proving import prove
from stillfresh.cli.serving import check, demo, serve
from stillfresh.cli.tables import table
from stillfresh.cli.warming import warm

__all__ = ["main"]


@click.group(
    cls=Program,
    commands=[
        *(demo, serve, check, warm, inspect, stats, explain, invalidate, evict),
        *(plan, prove, bench, table, outbox),
    ],
    examples=["stillfresh inspect sqlite:///site.db"],
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.version_option(package_name="stillfresh")
def main() -> None:
    """Run a caching gateway, and inspect, fill and invalidate stores of stillfresh.

    STORE is a store's address: sqlite:///site.db (or the file's name alone), redis://host:6379/0,
    postgresql://user@host/database, dynamodb://table?bucket=name.

    With --json a command prints one JSON document and nothing else; only `prove --json FILE` writes
    it to a file, and prints a table. Exit status: 0 for success, 1 for a failure, 2 for a wrong
    call or a library that is not installed.
    """
