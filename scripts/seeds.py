"""Writes the tests of every rule into docs/seeds.md: `python scripts/seeds.py`.

A test names its rules in its own name (`class TestE17Put`, `def test_s3_…`) or in the first words
of its docstring ("E17, S5: …"). A module's docstring does so for rules that nothing in it names.
The page itself keeps the title and the notes of each rule: only its column of tests and its list
of what is not built yet are written here. `tests/test_docs.py` fails when the page is out of date.
"""

import ast
import re
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "seeds.md"
NOT_BUILT = "not built yet"
ROW = re.compile(r"^\| ([A-Z]\d+) \| ([^|]+) \| ([^|]+) \|", re.MULTILINE)
LIST = re.compile(r"(<!-- not built -->\n).*?(<!-- /not built -->)", re.DOTALL)
NAMED = re.compile(r"Test([A-Z]\d+)|test_([a-z]\d+)_")
SAID = re.compile(r"([A-Z]\d+(?:-[A-Z]\d+)?(?:, [A-Z]\d+(?:-[A-Z]\d+)?)*):\s")
Definition = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
Tests = dict[str, dict[str, list[str]]]
"""Rule -> file -> the classes and functions that name it; none of them: the file as a whole."""


def rules_of(node: Definition | ast.Module) -> dict[str, None]:
    """The rules that a module, a class or a function names, in its order."""
    named = None if isinstance(node, ast.Module) else NAMED.match(node.name)
    rules = [(named[1] or named[2]).upper()] if named else []
    if said := SAID.match(ast.get_docstring(node) or ""):
        for part in said[1].split(", "):
            first, _, last = part.partition("-")
            numbers = range(int(first[1:]), int((last or first)[1:]) + 1)
            rules += [f"{first[0]}{number}" for number in numbers]
    return dict.fromkeys(rules)


def named_in(module: ast.Module) -> dict[str, list[str]]:
    """Rule -> what names it in one file; a method counts if its class does not name the rule."""
    found: dict[str, list[str]] = {rule: [] for rule in rules_of(module)}
    for node in module.body:
        if isinstance(node, Definition):
            rules = rules_of(node)
            for rule in rules:
                found.setdefault(rule, []).append(node.name)
            for method in node.body if isinstance(node, ast.ClassDef) else []:
                if isinstance(method, Definition):
                    for rule in rules_of(method).keys() - rules.keys():
                        found.setdefault(rule, []).append(f"{node.name}::{method.name}")
    return found


def collected(root: Path = ROOT) -> Tests:
    """Every rule that a file below `tests` names; the kit only helps to prove."""
    found: Tests = {}
    for file in sorted((root / "tests").rglob("*.py")):
        path = file.relative_to(root).as_posix()
        if not path.startswith("tests/kit/"):
            for rule, names in named_in(ast.parse(file.read_text())).items():
                found.setdefault(rule, {})[path] = names
    return found


def mistakes(page: str, tests: Tests) -> list[str]:
    """What the page cannot be written with: rules that are not in it, and tests that went."""
    rows = {row[1]: row[3] for row in ROW.finditer(page)}
    unknown = [
        f"{rule} is no rule of docs/seeds.md: {', '.join(tests[rule])}"
        for rule in tests - rows.keys()
    ]
    lost = [
        f"{rule} had tests and has none now: write one, or put '{NOT_BUILT}' into its row"
        for rule, cell in rows.items()
        if rule not in tests and cell != NOT_BUILT
    ]
    return unknown + lost


def cell(files: dict[str, list[str]]) -> str:
    """One line for each file."""
    lines = [
        f"`{path}`" + (f": {', '.join(f'`{name}`' for name in names)}" if names else "")
        for path, names in files.items()
    ]
    return "<br>".join(lines)


def written(page: str, tests: Tests) -> str:
    """The page with the tests of each rule, and the rules that have none."""
    page = ROW.sub(
        lambda row: f"| {row[1]} | {row[2]} | {cell(tests.get(row[1], {})) or NOT_BUILT} |", page
    )
    missing: dict[str, list[str]] = {}
    for row in ROW.finditer(page):
        if row[3] == NOT_BUILT:
            missing.setdefault(row[1][0], []).append(f"{row[1]} ({row[2]})")
    told = "".join(f"{', '.join(rules)}.\n\n" for rules in missing.values())
    return LIST.sub(lambda marks: f"{marks[1]}\n{told}{marks[2]}", page)


if __name__ == "__main__":
    PAGE_AS_IT_IS, TESTS = PAGE.read_text(), collected()
    if WRONG := mistakes(PAGE_AS_IT_IS, TESTS):
        sys.exit("\n".join(WRONG))
    PAGE.write_text(written(PAGE_AS_IT_IS, TESTS))
