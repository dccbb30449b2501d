"""`stillfresh replay`: one simulated history as a page that one can step through."""

import sys
from pathlib import Path

import click

from stillfresh.cli.program import command, plain
from stillfresh.errors import ConfigError
from stillfresh.lab.replay import SCENARIOS, page_of, play_of, replayed


@command(
    "stillfresh replay --scenario invalidation --out invalidation.html",
    "stillfresh replay --scenario visitors --seed 7",
    "stillfresh replay --scenario my_tests.scenarios:of_orders --seed 4711",
)
@click.option(
    "--scenario",
    default="invalidation",
    show_default=True,
    metavar="NAME",
    help=f"One of {', '.join(SCENARIOS)}; or your own for the simulator, as module:function.",
)
@click.option("--seed", default=0, show_default=True, help="Which history of the scenario.")
@click.option(
    "--out",
    default="replay.html",
    show_default=True,
    metavar="FILE",
    type=click.Path(dir_okay=False, path_type=Path),
    help="The page to write.",
)
def replay(*, scenario: str, seed: int, out: Path) -> None:
    """Write one history of the simulator as a web page.

    The page has a lane for each process and for the store, with messages, leases, loads and judged
    reads. One can step through it, play it and zoom in, with the keyboard too. It is one file that
    loads nothing. The same seed gives the same page.
    """
    if ":" in scenario:
        # The path of an installed program has the program's folder, and not the current one.
        sys.path.insert(0, str(Path.cwd()))
    try:
        play = play_of(scenario)
    except ConfigError as exc:
        raise click.BadParameter(plain(str(exc)), param_hint="'--scenario'") from exc
    history = replayed(play, seed)
    try:
        out.write_text(page_of(history), encoding="utf-8")
    except OSError as exc:
        problem = f"cannot write {out}: {exc.strerror}."
        raise click.BadParameter(problem, param_hint="'--out'") from exc
    outcome = "every promise was kept" if history.broken is None else f"broken: {history.broken}"
    click.echo(plain(f"{out}: {len(history.steps):,} steps, {outcome}."))
