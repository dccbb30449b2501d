"""Draws the diagrams of the docs from the code's own tables: `python scripts/diagrams.py`.

`tests/test_docs.py` fails when a page is not as this would write it.
"""

import ast
import re
from collections.abc import Callable, Mapping
from enum import StrEnum
from pathlib import Path
from typing import Any

import stillfresh
from stillfresh.engine import lane, load_states
from stillfresh.engine.load_states import MAX_ROUNDS, Again

SRC = Path(stillfresh.__file__).parent
DOCS = Path(__file__).parent.parent / "docs"
PAGES = (DOCS / "coordinator.md", DOCS / "engine.md", DOCS / "architecture.md")
MARKS = re.compile(r"(<!-- (lane|load|ends|packages) -->\n).*?(<!-- /\2 -->)", re.DOTALL)
CALLERS = (
    "no caller gets it",
    "callers from before the load get it",
    "callers from before the copy was sent get it",
    "all callers get it",
)
AGAIN = {
    Again.IF_WAITED: "next load for the callers left",
    Again.AS_WANTED: "next load for the callers left, or as a refresh",
    Again.LIMITED: f"next load at once, {MAX_ROUNDS} times",
    Again.ALWAYS: "next load at once",
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
    """How a load can end, and what follows: which callers get its result, and when it is repeated.

    A dotted arrow is followed if the key was changed during the load, and the other one if not.
    """
    ways = list(dict.fromkeys(way for way, _ in load_states.ENDINGS))
    outcomes = list(dict.fromkeys(map(_outcome, load_states.ENDINGS.values())))
    lines = ["```mermaid", "flowchart LR"]
    lines += [f'    w{number}["{way}"]' for number, way in enumerate(ways)]
    lines += [f'    o{number}(["{outcome}"])' for number, outcome in enumerate(outcomes)]
    for number, way in enumerate(ways):
        unchanged, changed = (
            outcomes.index(_outcome(load_states.ENDINGS[way, was_changed]))
            for was_changed in (False, True)
        )
        lines.append(f"    w{number} --> o{unchanged}")
        if changed != unchanged:
            lines.append(f"    w{number} -.-> o{changed}")
    return "\n".join([*lines, "```", ""])


def _outcome(ending: load_states.EndRule) -> str:
    stale = ", as STALE" if ending.is_overtaken else ""
    return f"{CALLERS[ending.told]}{stale}<br>{AGAIN[ending.again]}"


def imported(of: Callable[[ast.AST], str]) -> dict[str, set[str]]:
    """Box -> the boxes that it imports. `of` gives the module that a piece of code names, or ''."""
    found: dict[str, set[str]] = {}
    for path in SRC.rglob("*.py"):
        here = _box(path.relative_to(SRC).parts[0].removesuffix(".py"))
        modules = map(of, ast.walk(ast.parse(path.read_text())))
        targets = {_box(it.split(".")[1]) for it in modules if it.startswith("stillfresh.")}
        found.setdefault(here, set()).update(targets - {here})
    return {it: found[it] for it in sorted(found.keys() - {"__init__", "__main__"})}


def _imports(node: ast.AST) -> str:
    return (node.module or "") if isinstance(node, ast.ImportFrom) else ""


def _extras(node: ast.AST) -> str:
    """What a command imports when it is called: `extra("stillfresh.gateway.config", …)`."""
    match node:
        case ast.Call(ast.Name("extra"), [ast.Constant(str(module)), *_]):
            return module
    return ""


def _box(name: str) -> str:
    """Where the diagram shows a room, or a module of the top."""
    is_room = (SRC / name).is_dir() or name.startswith("__")
    return name if is_room else "basics"


def packages() -> str:
    """Who imports whom. An arrow that a longer way of arrows says as well is left out."""
    direct, later = imported(_imports), imported(_extras)

    def below(names: set[str]) -> set[str]:
        return set[str]().union(*(direct[it] | below(direct[it]) for it in names))

    lines = ["```mermaid", "flowchart TD"]
    for name, targets in direct.items():
        known = below(targets)
        lines += [f"    {name} --> {it}" for it in sorted(targets - known)]
        lines += [f"    {name} -.-> {it}" for it in sorted(later[name] - targets - known)]
    return "\n".join([*lines, "```", ""])


def _label(text: str) -> str:
    """A colon ends a label."""
    return text.replace(":", ",")


DRAWN: dict[str, Callable[[], str]] = {
    "lane": lambda: states(lane.NEXT, lane.LaneState.OUT),
    "load": lambda: states(load_states.NEXT, load_states.ENDED),
    "ends": ends,
    "packages": packages,
}


def drawn(page: str) -> str:
    """The page with its diagrams as they should be."""
    return MARKS.sub(lambda marks: f"{marks[1]}{DRAWN[marks[2]]()}{marks[3]}", page)


if __name__ == "__main__":
    for path in PAGES:
        path.write_text(drawn(path.read_text()))
