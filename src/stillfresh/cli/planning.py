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
COLUMNS: Final = 60
LINES: Final = 12
MOST_ASKED: Final = 0.999
"""The largest share of waiting reads that a suggested objective names."""
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
    length = max(traffic.seconds for traffic in kinds.values())
    if not rungs(length):
        raise ConfigError(
            f"{file}: covers {length:.3g} s, too short to try anything; "
            "record 2 s at least, or an hour"
        )
    if cut is not None:
        say(f"line {cut} is cut off, and left out", is_json=is_json)
    with working("Reads replayed:") as advance:
        result = planned(kinds, limits, most, advance)
    if page is not None:
        Path(page).write_text("\n".join(_html(result, f"Plan for {Path(file).name}")))
    if is_json:
        print_json(
            {
                "file": file,
                "seconds": length,
                "limits": limits,
                "budget": most,
                "recorded": result.recorded,
                "tried": result.tried,
                "choice": result.choice,
            }
        )
        return
    for line in _sentences(result):
        click.echo(plain(line))
    for name in kinds:
        click.echo()
        print_table((name, *HEAD), _rows(name, result), right=HEAD[1:])
        click.echo("\n" + "\n".join(_plot(name, result)))


def _with_marks(name: str, plan: Planned, others: Iterable[Figures]) -> list[tuple[str, Figures]]:
    """Figures with the letter of each; the proposed and the recorded come last.

    In a plot, the last ones cover the others.
    """
    recorded = plan.recorded[name]
    proposed = None if plan.choice is None else plan.choice.chosen[name]
    marked = [(".", figures) for figures in others if figures not in (proposed, recorded)]
    marked.append(("R", recorded))
    if proposed is not None:
        marked.append(("P", proposed))
    return marked


def _rows(name: str, plan: Planned) -> Iterator[tuple[str, ...]]:
    """The policies worth a look, as `HEAD` names their cells; the proposed one first."""
    marked = _with_marks(name, plan, reversed(frontier(plan.tried[name])))
    for mark, figures in reversed(marked):
        yield (
            mark.strip("."),
            str(figures.terms),
            f"{figures.requests:.3g}",
            age_text(figures.p50),
            age_text(figures.p99),
            percent(figures.stale),
            percent(figures.waited),
            f"{figures.copies:,}",
            size_text(figures.bytes),
        )


def _plot(name: str, plan: Planned) -> Iterator[str]:
    """A plot of all tries; both axes are logarithmic."""
    marked = _with_marks(name, plan, plan.tried[name])
    ages = [figures.p99 for _, figures in marked]
    requests = [figures.requests for _, figures in marked]
    grid = [[" "] * COLUMNS for _ in range(LINES)]
    for mark, figures in marked:
        line = grid[LINES - 1 - _place(figures.p99, ages, LINES)]
        line[_place(figures.requests, requests, COLUMNS)] = mark
    labels = {0: age_text(max(ages)), LINES - 1: age_text(min(ages))}
    yield "age at serving, p99 (R as recorded, P proposed, . tried)"
    for number, cells in enumerate(grid):
        yield f"{labels.get(number, ''):>9} |{''.join(cells).rstrip()}"
    yield f"{'':9} +{'-' * COLUMNS}"
    first = f"{min(requests):.3g}/s"
    last = f"{max(requests):.3g}/s"
    yield f"{'':11}{first}{last:>{COLUMNS - len(first)}} upstream"


def _place(value: float, among: Sequence[float], count: int) -> int:
    """The value's place among `count` places of a logarithmic axis."""
    low = max(min(among), max(among) / 1e6, 1e-9)
    high = max(*among, low)
    return round(log(max(value, low) / low) / (log(high / low) or 1.0) * (count - 1))


def _html(plan: Planned, title: str) -> Iterator[str]:
    """One page: no script, nothing from elsewhere, light or dark."""
    yield f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{escape(title)}</title>'
    yield f"<style>{STYLE}</style><h1>{escape(title)}</h1>"
    for line in _sentences(plan):
        yield f"<p>{escape(line)}</p>"
    for name in plan.kinds:
        plot = escape("\n".join(_plot(name, plan)))
        yield f"<h2>{escape(name)}</h2><pre>{plot}</pre><table>"
        for row in [("", *HEAD), *_rows(name, plan)]:
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


def _sentence(figures: Figures) -> str:
    """The figures of one policy."""
    sentence = (
        f"{figures.terms}: {_per_second(figures.requests)}, "
        f"99% of reads younger than {age_text(figures.p99)}"
    )
    if figures.waited >= 0.001:
        sentence += f", {percent(figures.waited)} of reads wait for a load"
    return sentence


def _per_second(count: float) -> str:
    shown = f"{count:.3g}"
    return f"{shown} {'request' if shown == '1' else 'requests'} a second"


def _waiting(name: str, plan: Planned, figures: Figures) -> Iterator[str]:
    """The objective is met only if more reads wait: what that would give, and how to ask for it."""
    objective = ", ".join(map(str, plan.limits))
    today = percent(plan.recorded[name].waited)
    yield (
        f"{name}: nothing that was tried meets {objective} without making more reads wait "
        f"than today ({today})."
    )
    if figures.waited < MOST_ASKED:
        limit = f"waited<{(floor(figures.waited * 1_000) + 1) / 10:g}%"
        yield f'  With --objective "{objective}, {limit}" it can be met: {_sentence(figures)}'


def _verdict(plan: Planned, choice: Choice) -> Iterator[str]:
    """Which objectives were missed, and whether the proposal is within the budget."""
    for name in choice.missed:
        if name in choice.waiting:
            yield from _waiting(name, plan, choice.waiting[name])
            continue
        nearest = choice.chosen[name]
        excesses = [limit.excess(nearest) for limit in plan.limits]
        worst = plan.limits[excesses.index(max(excesses))]
        value = getattr(nearest, worst.name)
        got = age_text(value) if worst.name.startswith("p") else percent(value)
        yield f"{name}: nothing that was tried meets {worst}; the nearest has {worst.name} = {got}."
    if plan.budget is not None:
        yield from _budget_verdict(plan, choice, plan.budget)


def _budget_verdict(plan: Planned, choice: Choice, budget: float) -> Iterator[str]:
    """Whether the proposal is within the budget, and what would be."""
    most = _per_second(budget)
    total = _per_second(choice.total)
    if choice.total <= budget:
        yield f"Within the budget: {total} of {most}."
        return
    over = f"{choice.total - budget:.3g} too many"
    objective = ", ".join(map(str, plan.limits))
    if choice.missed:
        yield f"Over the budget of {most}: the proposal takes {total}, {over}."
    elif plan.limits:
        yield (
            f"The objective {objective} and the budget of {most} cannot both be met: "
            f"{total} are needed, {over}."
        )
    else:
        yield f"The budget of {most} cannot be met: {total} are needed, {over}."
    if choice.within is not None:
        within = _per_second(choice.within.total)
        yield f"Within the budget ({within}), the freshest that was tried:"
        for name, figures in choice.within.chosen.items():
            yield f"  {name}: {_sentence(figures)}"
    elif plan.limits:
        yield "Nothing that was tried is within the budget."
