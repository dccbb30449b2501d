"""`stillfresh plan`: other terms for recorded reads, replayed and compared."""

from collections.abc import Iterable, Iterator, Sequence
from html import escape
from math import floor, log
from pathlib import Path
from typing import Final

import click

from stillfresh.cli.places import say
from stillfresh.cli.program import (
    age_text,
    as_json,
    command,
    plain,
    print_json,
    print_table,
    size_text,
    working,
)
from stillfresh.errors import ConfigError
from stillfresh.lab.plan import (
    Choice,
    Figures,
    Planned,
    budget_of,
    duration,
    frontier,
    objective_of,
    percent,
    planned,
    rungs,
    traffic_of,
)

HEAD: Final = ("terms", "requests/s", "p50", "p99", "stale", "waited", "copies", "memory")
COLUMNS, LINES = 60, 12
MOST_ASKED: Final = 0.999
"""The share of waiting reads up to which an objective can ask for it."""
STYLE: Final = """:root { color-scheme: light dark; font: 16px/1.5 system-ui, sans-serif; }
body { max-width: 60rem; margin: auto; padding: 1rem; } table { border-spacing: .8rem .2rem; }
td:nth-child(n+3) { text-align: right; } pre, table { overflow-x: auto; display: block; }"""


@command(
    'stillfresh plan reads.jsonl --objective "p99<60s" --budget "50/s"',
    'stillfresh plan reads.jsonl --objective "p99<5m, stale<5%" --html plan.html',
    'stillfresh plan reads.jsonl --budget "200/m" --json',
)
@click.argument("file")
@click.option("--objective", help='How fresh: one of the list above, or several: "a, b".')
@click.option("--budget", help='Most upstream requests, all kinds together: "50/s", "200/m".')
@click.option("--html", "page", metavar="PATH", help="Write a report to this file, too.")
@as_json
def plan(
    *, file: str, objective: str | None, budget: str | None, page: str | None, is_json: bool
) -> None:
    """Propose fresh_for and stale_for for recorded reads.

    FILE is a recording, written by `stillfresh serve --record FILE` or `cache.recording(...)`. The
    command replays its reads in virtual time, with about 20 policies for each kind. It proposes
    the policy that meets the objective with the fewest upstream requests. With --budget alone, it
    proposes the one with the youngest copies within the budget. It proposes nothing that makes
    more reads wait for a load than in the recording, unless the objective has a limit of `waited`.

    \b
    Objectives:
      p50<10s     half of the reads are younger than 10 s when they are served
      p99<60s     99 % of the reads are younger than 60 s
      stale<5%    less than 5 % of the reads get a copy older than fresh_for
      waited<20%  less than 20 % of the reads wait for a load
    """
    limits = objective_of(objective) if objective is not None else ()
    most = budget_of(budget) if budget is not None else None
    kinds, cut = traffic_of(file)
    if not kinds:
        raise ConfigError(f"{file}: no reads were recorded")
    length = max(it.seconds for it in kinds.values())
    if not rungs(length):
        said = f"covers {length:.3g} s, too short to try anything; record 2 s at least, or an hour"
        raise ConfigError(f"{file}: {said}")
    if cut is not None:
        say(f"line {cut} is cut off, and left out", is_json=is_json)
    with working("Reads replayed:") as advance:
        found = planned(kinds, limits, most, advance)
    if page is not None:
        Path(page).write_text("\n".join(_html(found, f"Plan for {Path(file).name}")))
    if is_json:
        told = {"file": file, "seconds": length, "limits": limits, "budget": most}
        told |= {"recorded": found.recorded, "tried": found.tried, "choice": found.choice}
        print_json(told)
        return
    for line in _sentences(found):
        click.echo(plain(line))
    for name in kinds:
        click.echo()
        print_table((name, *HEAD), _rows(name, found), right=HEAD[1:])
        click.echo("\n" + "\n".join(_plot(name, found)))


def _marked(name: str, found: Planned, others: Iterable[Figures]) -> list[tuple[str, Figures]]:
    """The proposed and the recorded come last: in a plot they cover the others."""
    recorded = found.recorded[name]
    proposed = [] if found.choice is None else [("P", found.choice.chosen[name])]
    marked = [(".", it) for it in others if ("P", it) not in proposed and it != recorded]
    return [*marked, ("R", recorded), *proposed]


def _rows(name: str, found: Planned) -> Iterator[tuple[str, ...]]:
    """The policies worth a look, as `HEAD` names their cells; the proposed one first."""
    for mark, it in reversed(_marked(name, found, reversed(frontier(found.tried[name])))):
        ages, shares = map(age_text, (it.p50, it.p99)), map(percent, (it.stale, it.waited))
        sizes = f"{it.copies:,}", size_text(it.bytes)
        yield mark.strip("."), str(it.terms), f"{it.requests:.3g}", *ages, *shares, *sizes


def _plot(name: str, found: Planned) -> Iterator[str]:
    """A plot of all tries; both axes are logarithmic."""
    marked = _marked(name, found, found.tried[name])
    ages, requests = [it.p99 for _, it in marked], [it.requests for _, it in marked]
    grid = [[" "] * COLUMNS for _ in range(LINES)]
    for mark, it in marked:
        line = grid[LINES - 1 - _place(it.p99, ages, LINES)]
        line[_place(it.requests, requests, COLUMNS)] = mark
    sides = {0: age_text(max(ages)), LINES - 1: age_text(min(ages))}
    first, last = f"{min(requests):.3g}/s", f"{max(requests):.3g}/s"
    yield "age at serving, p99 (R as recorded, P proposed, . tried)"
    yield from (f"{sides.get(at, ''):>9} |{''.join(it).rstrip()}" for at, it in enumerate(grid))
    yield f"{'':9} +{'-' * COLUMNS}"
    yield f"{'':11}{first}{last:>{COLUMNS - len(first)}} upstream"


def _place(value: float, among: Sequence[float], count: int) -> int:
    low = max(min(among), max(among) / 1e6, 1e-9)
    high = max(*among, low)
    return round(log(max(value, low) / low) / (log(high / low) or 1.0) * (count - 1))


def _html(found: Planned, title: str) -> Iterator[str]:
    """One page: no script, nothing from elsewhere, light or dark."""
    yield f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{escape(title)}</title>'
    yield f"<style>{STYLE}</style><h1>{escape(title)}</h1>"
    yield from (f"<p>{escape(line)}</p>" for line in _sentences(found))
    for name in found.kinds:
        plot = escape("\n".join(_plot(name, found)))
        yield f"<h2>{escape(name)}</h2><pre>{plot}</pre><table>"
        for row in [("", *HEAD), *_rows(name, found)]:
            yield "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>"
        yield "</table>"
    yield "</html>\n"


def _sentences(plan: Planned) -> Iterator[str]:
    """The recorded figures, the proposal, and whether it meets the objective."""
    for name, traffic in plan.kinds.items():
        keys = len({id_ for event in traffic.events for id_ in event.ids})
        share = "" if traffic.share == 1 else f" ({percent(traffic.share)} of all keys)"
        tried = rungs(traffic.seconds)
        times = f"fresh_for from {duration(tried[0])} to {duration(tried[-1])} was tried"
        yield f"{name}: {keys:,} keys{share} in {age_text(traffic.seconds)}; {times}."
        yield f"  as recorded: {_sentence(plan.recorded[name])}"
        if plan.choice is not None:
            yield f"  proposed: {_sentence(plan.choice.chosen[name])}"
    if plan.choice is not None:
        yield from _verdict(plan, plan.choice)


def _sentence(it: Figures) -> str:
    """The figures of one policy."""
    waits = f", {percent(it.waited)} of reads wait for a load" if it.waited >= 0.001 else ""
    return f"{it.terms}: {_each(it.requests)}, 99% of reads younger than {age_text(it.p99)}{waits}"


def _each(count: float) -> str:
    shown = f"{count:.3g}"
    return f"{shown} request{'s' * (shown != '1')} a second"


def _waiting(name: str, plan: Planned, figures: Figures) -> Iterator[str]:
    """The objective takes more waiting than today: what that would give, and how to ask for it."""
    objective = ", ".join(map(str, plan.limits))
    today = percent(plan.recorded[name].waited)
    said = f"nothing that was tried meets {objective} without making more reads wait"
    yield f"{name}: {said} than today ({today})."
    if figures.waited < MOST_ASKED:
        asked = f"waited<{(floor(figures.waited * 1_000) + 1) / 10:g}%"
        yield f'  With --objective "{objective}, {asked}" it can be met: {_sentence(figures)}'


def _verdict(plan: Planned, choice: Choice) -> Iterator[str]:
    for name in choice.missed:
        worst = max(plan.limits, key=lambda it: it.excess(choice.chosen[name]))
        value = getattr(choice.chosen[name], worst.name)
        got = age_text(value) if worst.name.startswith("p") else percent(value)
        if name in choice.waiting:
            yield from _waiting(name, plan, choice.waiting[name])
            continue
        yield f"{name}: nothing that was tried meets {worst}; the nearest has {worst.name} = {got}."
    if plan.budget is not None:
        yield from _spent(plan, choice, plan.budget)


def _spent(plan: Planned, choice: Choice, budget: float) -> Iterator[str]:
    """Whether the proposal is within the budget, and what would be."""
    most = _each(budget)
    total = _each(choice.total)
    if choice.total <= budget:
        yield f"Within the budget: {total} of {most}."
        return
    over = f"{choice.total - budget:.3g} too many"
    objective = ", ".join(map(str, plan.limits))
    if choice.missed:
        yield f"Over the budget of {most}: the proposal takes {total}, {over}."
    elif plan.limits:
        both = f"The objective {objective} and the budget of {most} cannot both be met"
        yield f"{both}: {total} are needed, {over}."
    else:
        yield f"The budget of {most} cannot be met: {total} are needed, {over}."
    if choice.within is not None:
        yield f"Within the budget ({_each(choice.within.total)}), the freshest that was tried:"
        for name, figures in choice.within.chosen.items():
            yield f"  {name}: {_sentence(figures)}"
    elif plan.limits:
        yield "Nothing that was tried is within the budget."
