"""Draws the diagrams of the docs from the code's own tables: `python scripts/diagrams.py`.

`tests/test_docs.py` fails when a page is not as this would write it.
"""

import re
from collections.abc import Callable, Mapping
from enum import StrEnum
from pathlib import Path
from typing import Any

from stillfresh.engine import flight, lane

DOCS = Path(__file__).parent.parent / "docs"
PAGES = (DOCS / "coordinator.md", DOCS / "engine.md")
MARKS = re.compile(r"(<!-- (lane|load|ends) -->\n).*?(<!-- /\2 -->)", re.DOTALL)
CALLERS = ("nobody", "before it began", "before its copy was sent", "at any time")
AGAIN = {
    flight.Again.IF_WAITED: "for the callers that are left",
    flight.Again.AS_WANTED: "for the callers that are left, or for nobody if this one was",
    flight.Again.LIMITED: f"at once, {flight.MAX_ROUNDS} times; then for the callers that are left",
    flight.Again.ALWAYS: "at once",
}


def states(table: Mapping[Any, Mapping[Any, StrEnum]], outside: str) -> str:
    """Where something can stand, and what moves it."""
    lines = ["```mermaid", "stateDiagram-v2"]
    for state, events in table.items():
        for event, following in events.items():
            first, then = ("[*]" if it == outside else it for it in (state, following))
            lines.append(f"    {first} --> {then}: {_label(event)}")
    return "\n".join([*lines, "```", ""])


def ends() -> str:
    """What each end of a load means."""
    rows = [
        f"| {how}{', and the key was invalidated meanwhile' if overtaken else ''} "
        f"| {CALLERS[it.told]}{', as STALE' if it.is_overtaken else ''} | {AGAIN[it.again]} |"
        for (how, overtaken), it in flight.ENDINGS.items()
    ]
    head = ["| the load | is told to the callers that came | another load follows |"]
    return "\n".join([*head, "| --- | --- | --- |", *rows, ""])


def _label(text: str) -> str:
    """A colon ends a label."""
    return text.replace(":", ",")


DRAWN: dict[str, Callable[[], str]] = {
    "lane": lambda: states(lane.NEXT, lane.LaneState.OUT),
    "load": lambda: states(flight.NEXT, flight.ENDED),
    "ends": ends,
}


def drawn(page: str) -> str:
    """The page with its diagrams as they should be."""
    return MARKS.sub(lambda marks: f"{marks[1]}{DRAWN[marks[2]]()}{marks[3]}", page)


if __name__ == "__main__":
    for path in PAGES:
        path.write_text(drawn(path.read_text()))
