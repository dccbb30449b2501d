"""Writes the tests of every rule into docs/seeds.md: `python scripts/seeds.py`.

A test names its rules in its own name (`class TestE17Put`, `def test_s3_…`) or in the first words
of its docstring ("E17, S5: …"). A module's docstring does so for rules that nothing in it names.
The page itself keeps each rule's sentence: only the last column, with the files of its tests, and
the list of rules without any are written here. `tests/test_docs.py` fails when the page is old.

A rule needs a test that `make test` runs: one that is marked `proof` is not enough.
"""

import ast
import re
import sys
from collections.abc import Collection
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "seeds.md"
NOT_BUILT = "not built yet"
RULE = re.compile(r"^\| ([A-Z]\d+) \| (.+) \| (.*) \|$", re.MULTILINE)
"""A rule's id, its sentence, and its tests."""
LIST = re.compile(r"(<!-- not built -->\n).*?(<!-- /not built -->)", re.DOTALL)
NAMED = re.compile(r"Test([A-Z]\d+)|test_([a-z]\d+)_")
SAID = re.compile(r"([A-Z]\d+(?:-[A-Z]\d+)?(?:, [A-Z]\d+(?:-[A-Z]\d+)?)*):\s")
TYPES = "tests/typing/api.py"
"""`make test` checks it with mypy."""
PROOF = "pytest.mark.proof"
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


def is_proof(node: ast.stmt) -> bool:
    """True for a test, and for a class of tests, that only `make proof` runs."""
    if not isinstance(node, Definition):
        return False
    if any(ast.unparse(decorator) == PROOF for decorator in node.decorator_list):
        return True
    methods = node.body if isinstance(node, ast.ClassDef) else []
    tests = [step for step in methods if isinstance(step, Definition) and step.name[:4] == "test"]
    return bool(tests) and all(map(is_proof, tests))


def without_proofs(module: ast.Module) -> ast.Module:
    """What `make test` runs of a file."""
    assignments = [node for node in module.body if isinstance(node, ast.Assign)]
    if any(ast.unparse(node) == f"pytestmark = {PROOF}" for node in assignments):
        return ast.Module([], [])
    everyday = [node for node in module.body if not is_proof(node)]
    for node in everyday:
        if isinstance(node, ast.ClassDef):
            node.body = [step for step in node.body if not is_proof(step)]
    return ast.Module(everyday, [])


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


def collected(root: Path = ROOT) -> tuple[Tests, set[str]]:
    """What names each rule in the files below `tests`, and the rules that `make test` tests.

    The kit only helps to prove.
    """
    found: Tests = {}
    everyday: set[str] = set()
    for file in sorted((root / "tests").rglob("*.py")):
        path = file.relative_to(root).as_posix()
        if not path.startswith("tests/kit/"):
            module = ast.parse(file.read_text())
            for rule, names in named_in(module).items():
                found.setdefault(rule, {})[path] = names
            if file.name.startswith("test_") or path == TYPES:
                everyday |= named_in(without_proofs(module)).keys()
    return found, everyday


def mistakes(page: str, tests: Tests, everyday: Collection[str]) -> list[str]:
    """What the page cannot be written with: rules that are not in it, and tests that went."""
    shown = {rule[1]: rule[3] for rule in RULE.finditer(page)}
    unknown = [
        f"{rule} is no rule of docs/seeds.md: {', '.join(tests[rule])}"
        for rule in tests.keys() - shown.keys()
    ]
    lost = [
        f"{rule} had tests and has none now: write one, or put '{NOT_BUILT}' into its last column"
        for rule, text in shown.items()
        if rule not in tests and text != NOT_BUILT
    ]
    slow = [
        f"{rule} is tested in make proof only: {', '.join(tests[rule])}"
        for rule in shown
        if rule in tests and rule not in everyday
    ]
    return unknown + lost + slow


def link(path: str) -> str:
    """A file of tests, by its name: `engine/reads`."""
    name = path.removeprefix("tests/").removesuffix(".py").replace("test_", "")
    return f"[{name}](../{path})"


def written(page: str, tests: Tests) -> str:
    """The page with the files that test each rule, and the rules that have none."""

    def row(rule: re.Match[str]) -> str:
        links = ", ".join(link(path) for path in tests.get(rule[1], ())) or NOT_BUILT
        return f"| {rule[1]} | {rule[2]} | {links} |"

    missing = [f"- {rule[1]}: {rule[2]}" for rule in RULE.finditer(page) if rule[1] not in tests]
    return LIST.sub(
        lambda marks: "\n".join([marks[1], *missing, "", marks[2]]), RULE.sub(row, page)
    )


if __name__ == "__main__":
    PAGE_AS_IT_IS = PAGE.read_text()
    TESTS, EVERYDAY = collected()
    if WRONG := mistakes(PAGE_AS_IT_IS, TESTS, EVERYDAY):
        sys.exit("\n".join(WRONG))
    PAGE.write_text(written(PAGE_AS_IT_IS, TESTS))
