"""The parts of docs/waiting.md that come from the code: the rules, the diagrams, what was explored.

`python -m tests.systems.waiting.waiting_page` writes them.
"""

from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from unittest.mock import patch

from stillfresh.systems.waiting import rules
from stillfresh.systems.waiting.model import Answered, Event, Pause, Refetch, State, Step
from stillfresh.testing import Explored, PromiseBroken
from tests.systems.waiting import waiting_world as world
from tests.systems.waiting.waiting_explorations import EXPLORATIONS, LOOP, Exploration
from tests.systems.waiting.waiting_mutants import MUTANTS, Mutant

__all__ = ["PAGE", "from_rules", "marked", "mutant_row", "state_count"]

PAGE = Path(__file__).parents[3] / "docs" / "waiting.md"
NAMES = [event.__name__ for event in rules.RULES]


def marked(name: str, text: str) -> str:
    """A part of the page, between its marks."""
    return f"<!-- from the code: {name} -->\n\n{text}\n\n<!-- end -->"


def table(*rows: list[str]) -> str:
    head, *rest = rows
    return "\n".join(f"| {' | '.join(row)} |" for row in [head, ["---"] * len(head), *rest])


def rules_table() -> str:
    """Each event with its rule, in the words of the function that keeps it."""
    rows = [
        [f"`{event.__name__}`", f"`{rule.__name__}`", str(rule.__doc__).splitlines()[0]]
        for event, rule in rules.RULES.items()
    ]
    return table(["event", "rule", "what it keeps"], *rows)


@cache
def observed() -> dict[tuple[State, Event], Step]:
    """Every step that the rules take in the first moments of every exploration."""
    seen = dict[tuple[State, Event], Step]()
    step = rules.step

    def watched(state: State, event: Event) -> Step:
        return seen.setdefault((state, event), step(state, event))

    with patch.object(rules, "step", watched):
        Exploration("", world.begin("A", "B", "C", "D", limit=3), world.ALL, 5).run()
        Exploration("", LOOP.start, LOOP.happenings, 9).run()
    return seen


def pool_change(before: State, event: Event, after: State) -> str | None:
    if isinstance(event, Answered):
        return "the answer is the pool"
    if after.is_restored and not before.is_restored:
        return "the pool is put back from its snapshot"
    if len(after.pool) == len(before.pool):
        return None
    longer = len(after.pool) > len(before.pool)
    return "the game is appended" if longer else "the game leaves the pool"


def request_change(before: State, after: Step) -> str | None:
    state, effects = after
    if Refetch() in effects and state.in_flight is not None:
        return "refetch" if state.in_flight.snapshot_of is None else "refetch with snapshot"
    if state.follows == before.follows:
        return None
    return "refetch after a pause" if Pause() in effects else "refetch after the one in flight"


def outcomes() -> Iterator[tuple[str, str]]:
    for (before, event), after in observed().items():
        changes = pool_change(before, event, after.state), request_change(before, after)
        yield from ((type(event).__name__, change) for change in changes if change is not None)


def rules_diagram() -> str:
    """What each event was seen to do."""
    found = set(outcomes())
    targets = {what: f"o{at}" for at, what in enumerate(sorted({what for _, what in found}))}
    lines = [f'    {node}(["{what}"])' for what, node in targets.items()]
    for name in NAMES:
        ends = [node for what, node in targets.items() if (name, what) in found]
        lines.append(f"    {name} --> {' & '.join(ends)}" if ends else f"    {name}")
    return "\n".join(["```mermaid", "flowchart LR", *lines, "```"])


def phase(state: State) -> str:
    if state.in_flight is None:
        return "resting" if state.follows is None else "pausing"
    return "in_flight" if state.follows is None else "in_flight_and_wanted"


def refetch_diagram() -> str:
    """W3 (R0): from phase to phase, by the events that were seen to lead there."""
    edges: dict[tuple[str, str], set[str]] = {}
    for (before, event), after in observed().items():
        ends = phase(before), phase(after.state)
        edges.setdefault(ends, set()).add(type(event).__name__)
    lines = [
        f"    {before} --> {after}: {', '.join(sorted(events, key=NAMES.index))}"
        for (before, after), events in sorted(edges.items())
        if before != after
    ]
    return "\n".join(["```mermaid", "stateDiagram-v2", "    [*] --> resting", *lines, "```"])


def state_count(exploration: Exploration, explored: Explored) -> str:
    return f"| {exploration.name} | {explored.depth} | {explored.states:,} |"


def mutant_row(mutant: Mutant, broken: PromiseBroken) -> str:
    history = [*mutant.where.history, *map(str, broken.history)]
    cells = [mutant.rule, mutant.what, broken.promise, str(len(history)), " · ".join(history)]
    return f"| {' | '.join(cells)} |"


def explored_table() -> str:
    found = [one.run() for one in EXPLORATIONS]
    rows = [state_count(*both) for both in zip(EXPLORATIONS, found, strict=True)]
    rows.append(f"| together | | {sum(one.states for one in found):,} |")
    return "\n".join(["| histories | steps | states |", "| --- | --- | --- |", *rows])


def mutants_table() -> str:
    head = "| rule | taken back | what breaks | steps | the shortest history |"
    caught = [(mutant, mutant.caught()) for mutant in MUTANTS]
    rows = [mutant_row(mutant, broken) for mutant, broken in caught if broken is not None]
    return "\n".join([head, "| --- | --- | --- | --- | --- |", *rows])


def from_rules() -> dict[str, Callable[[], str]]:
    """What is quick to make; a test compares it whole."""
    return {"rules": rules_table, "what rules do": rules_diagram, "refetches": refetch_diagram}


def main() -> None:
    page = PAGE.read_text()
    makers = from_rules() | {"states": explored_table, "mutants": mutants_table}
    for name, make in makers.items():
        before, rest = page.split(f"<!-- from the code: {name} -->", 1)
        page = before + marked(name, make()) + rest.split("<!-- end -->", 1)[1]
    PAGE.write_text(page)
    print(f"written: {PAGE.name}")


if __name__ == "__main__":
    main()
