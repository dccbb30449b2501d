"""The command line (G10): it chooses the adapters and prints what they answer.

Nothing is decided here, and nothing large is imported before a command needs it.
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
    """Keeps cached data fresh.

    STORE is a store's address: sqlite:///site.db (or the file's name alone), redis://host:6379/0,
    postgresql://user@host/database, dynamodb://table?bucket=name. Commands that take --json print
    one JSON document and nothing else. They end with 0, with 1 if it failed, with 2 if they were
    called wrongly or a library is not installed.
    """
