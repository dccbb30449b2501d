"""Draws the diagrams of the docs from the code's own tables: `python scripts/diagrams.py`.

`tests/test_docs.py` fails when a page is not as this would write it.
"""

import re
from pathlib import Path

from stillfresh.engine.lane import NEXT, State

PAGE = Path(__file__).parent.parent / "docs" / "coordinator.md"
MARKS = re.compile(r"(<!-- lane -->\n).*?(<!-- /lane -->)", re.DOTALL)


def lane() -> str:
    """Where an id can stand, and what moves it."""
    lines = ["```mermaid", "stateDiagram-v2"]
    for state, events in NEXT.items():
        for event, following in events.items():
            lines.append(f"    {_name(state)} --> {_name(following)}: {_label(event)}")
    return "\n".join([*lines, "```", ""])


def _name(state: State) -> str:
    return "[*]" if state is State.OUT else state.value


def _label(text: str) -> str:
    """A colon ends a label."""
    return text.replace(":", ",")


def drawn(page: str) -> str:
    """The page with its diagram as it should be."""
    return MARKS.sub(lambda marks: f"{marks[1]}{lane()}{marks[2]}", page)


if __name__ == "__main__":
    PAGE.write_text(drawn(PAGE.read_text()))
