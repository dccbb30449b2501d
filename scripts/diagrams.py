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
CALLERS = ("nobody", "before it began", "before its copy was sent to the store", "at any time")
AGAIN = {
    Again.IF_WAITED: "for the callers that are left",
    Again.AS_WANTED: "for the callers that are left; also if this was a background refresh",
    Again.LIMITED: f"at once, {MAX_ROUNDS} times; then for the callers that are left",
    Again.ALWAYS: "at once",
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
        f"| {how}{', and the key was changed meanwhile' if overtaken else ''} "
        f"| {CALLERS[it.told]}{', as STALE' if it.is_overtaken else ''} | {AGAIN[it.again]} |"
        for (how, overtaken), it in load_states.ENDINGS.items()
    ]
    head = ["| the load | its result goes to callers that came | another load follows |"]
    return "\n".join([*head, "| --- | --- | --- |", *rows, ""])


def imported(of: Callable[[ast.AST], str]) -> dict[str, set[str]]:
    """Box -> the boxes that it imports. `of` gives the module that a piece of code names, or ''."""
    found: dict[str, set[str]] = {}
    for path in SRC.rglob("*.py"):
        here = _box(path.relative_to(SRC).parts[0].removesuffix(".py"))
        modules = map(of, ast.walk(ast.parse(path.read_text())))
        targets = {_box(it.split(".")[1]) for it in modules if it.startswith("stillfresh.")}
        found.setdefault(here, set()).update(targets - {here})
    return {it: found[it] for it in sorted(found.keys() - {"testing", "__init__", "__main__"})}


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
