"""The command line: it chooses the adapters and prints their answers.

It decides nothing, and imports nothing large before a command needs it.
"""

import sys
from importlib import import_module
from typing import Final

try:
    import click
except ModuleNotFoundError:
    if sys.argv[1:] == ["--version"]:
        version = import_module("importlib.metadata").version("stillfresh")
        sys.stdout.write(f"stillfresh, version {version}\n")
        raise SystemExit(0) from None
    sys.stderr.write("Error: the commands need click: install stillfresh[cli]\n")
    raise SystemExit(2) from None

from stillfresh.cli.program import Program

__all__ = ["main"]

COMMANDS: Final = {
    "demo": ("stillfresh.cli.serving", "Run a site to see what stillfresh does."),
    "serve": ("stillfresh.cli.serving", "Serve pages and entities, kept fresh."),
    "check": ("stillfresh.cli.serving", "Check a file of settings, as `serve` takes it."),
    "warm": ("stillfresh.cli.warming", "Fill a cache before visitors come."),
    "inspect": ("stillfresh.cli.inspecting", "Show what is in STORE, and how fresh it is."),
    "stats": (
        "stillfresh.cli.counting",
        "Show how much a store holds, or what a gateway counts.",
    ),
    "explain": ("stillfresh.cli.inspecting", "Say why one entry is as it is."),
    "invalidate": (
        "stillfresh.cli.invalidating",
        "Invalidate entries: by their ids, by a tag, or all of a kind.",
    ),
    "evict": ("stillfresh.cli.invalidating", "Delete entries that can no longer be served."),
    "plan": ("stillfresh.cli.planning", "Propose fresh_for and stale_for for recorded reads."),
    "prove": ("stillfresh.cli.proving", "Prove that STORE keeps its promises while things break."),
    "replay": ("stillfresh.cli.replaying", "Write one history of the simulator as a web page."),
    "bench": (
        "stillfresh.cli.measuring",
        "Measure stillfresh on this machine, in less than a minute.",
    ),
    "table": (
        "stillfresh.cli.tables",
        "Create or show the tables of a PostgreSQL or DynamoDB store.",
    ),
    "outbox": (
        "stillfresh.cli.outbox",
        "Invalidate entries when rows of a PostgreSQL database change.",
    ),
    "browser": (
        "stillfresh.cli.browser",
        "Write the modules for browsers, with types, as an npm package.",
    ),
    "diskcache": ("stillfresh.cli.converting", "Leave diskcache without losing its plain values."),
}
"""By the name of each command, its module and the first line of its help."""


@click.group(
    cls=Program,
    listed=COMMANDS,
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
