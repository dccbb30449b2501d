"""T12: `make mutants` changes our own code, and shows what no test notices."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.kit.processes import ROOT
from tests.mutation.changes import Change, changes
from tests.mutation.mutants import Mutants, is_listed
from tests.mutation.touched import Touched

ADULTS = '''\
"""Words <= that nobody runs."""
import logging
log = logging.getLogger(__name__)

def is_adult(age: int, since: int) -> bool:
    """Whether age >= since and nothing else."""
    log.debug("asked for %d", age + 1)
    return age >= since
'''
STRONG = """\
from stillfresh.adults import is_adult

def test_adult():
    assert [is_adult(age, 18) for age in (17, 18, 19)] == [False, True, True]
"""
CHILDREN = """\
TILL = float(18)

def is_child(age: int) -> bool:
    return age < TILL
"""
WEAK = """\
from stillfresh.children import is_child

def test_child():
    assert is_child(3)
"""
ELDERS = """\
def is_elder(age: int, since: int) -> bool:
    return age > since
"""
APART = """\
import subprocess, sys
from stillfresh.elders import is_elder

ASKS = "from stillfresh.elders import is_elder; print([is_elder(age, 65) for age in (64, 65, 66)])"

def test_elder():
    is_elder(3, 65)
    done = subprocess.run([sys.executable, "-c", ASKS], capture_output=True, text=True, check=True)
    assert done.stdout == "[False, False, True]\\n"
"""


def outcomes(root: Path) -> dict[str, str]:
    """What the command says of every change: the line that comes -> its outcome."""
    found = root / "found.json"
    command = [sys.executable, "-m", "tests.mutation.mutants", "--root", str(root), "--seed", "7"]
    done = subprocess.run(
        [*command, "--json", str(found)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1, done.stdout + done.stderr
    assert "ran: tests/test_weak.py (1)" in done.stdout
    assert "8 caught" in done.stdout
    return {it["diff"][-1][1:].strip(): it["outcome"] for it in json.loads(found.read_text())}


class TestT12Mutants:
    def test_a_weak_test_lets_changes_live_and_a_strong_one_catches_them(
        self, tmp_path: Path
    ) -> None:
        """A change in what a test only calls survives; one in what a test checks is caught, also
        if the test checks it in another process."""
        for name, text in {
            "src/stillfresh/__init__.py": "",
            "src/stillfresh/adults.py": ADULTS,
            "src/stillfresh/children.py": CHILDREN,
            "tests/test_strong.py": STRONG,
            "tests/test_weak.py": WEAK,
            "src/stillfresh/elders.py": ELDERS,
            "tests/test_apart.py": APART,
        }.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        assert outcomes(tmp_path) == {
            "return age > since": "caught",
            "return age < since": "caught",
            "TILL = float(36)": "survived",
            "return age <= TILL": "survived",
            "return age >= TILL": "caught",
            "return age >= since": "caught",
            "return age <= since": "caught",
            "return None": "caught",
        }
        assert (tmp_path / "src/stillfresh/adults.py").read_text() == ADULTS

    def test_the_same_seed_chooses_the_same_changes(self, tmp_path: Path) -> None:
        """Another seed chooses others; listed changes are left out and counted."""
        (tmp_path / "ages.py").write_text(ADULTS)

        def chosen(seed: int, *listed: dict[str, str]) -> list[Change]:
            mutants = Mutants(tmp_path, ["ages.py"], [], seed, tmp_path / "kept")
            mutants.listed = [*listed]
            return [*mutants.chosen()]

        assert chosen(1) == chosen(1)
        assert len({tuple(chosen(seed)) for seed in range(9)}) > 1
        assert len(chosen(1, {"gone": "age >= since"})) == len(chosen(1)) - 3

    @pytest.mark.parametrize(
        ("source", "becomes"),
        [
            ("x = a < b", {"x = a <= b", "x = a >= b"}),
            ("x = a and b", {"x = (a or b)", "x = (a)", "x = (b)"}),
            ("x = not a", {"x = (a)"}),
            ("x = 3", {"x = 4"}),
            ("x = 30", {"x = 60"}),
            ("x = True", {"x = False"}),
            ("x = a - b", {"x = (a + b)"}),
            ("x = a if b else c", {"x = (c if b else a)"}),
            ("x = min(a, b)", {"x = max(a, b)"}),
            ("x = f(a, b=c, d=e)", {"x = f(a, d=e)", "x = f(a, b=c, )"}),
            ("x = check(a, name='a')", set()),
            ("a.b = c", {"pass"}),
            ("del a[b]", {"pass"}),
            ("f(a)", {"pass"}),
            ("raise ValueError(f'{a + 1}')", {"pass"}),
            ("log.info(a + 1)", set()),
            ("x: int = 3", {"x: int = 4"}),
            ("x = 'a < b and c'", set()),
            (
                "x = 'SELECT a WHERE b <= ? AND c'",
                {"x = 'SELECT a WHERE b < ? AND c'", "x = 'SELECT a WHERE b <= ? OR c'"},
            ),
            ("x = f'''\nredis.call({a})\n-- a < b'''", {"x = f'''\n\n-- a < b'''"}),
            ("x = 'token = :token'", {"x = 'token <> :token'"}),
        ],
    )
    def test_each_mutation_changes_one_piece_of_code(self, source: str, becomes: set[str]) -> None:
        """Each change replaces one piece of code, SQL or Lua, and no text that people read."""
        assert {change.applied(source) for change in changes("a.py", source)} == becomes

    def test_a_listed_change_is_known_by_its_lines(self) -> None:
        """The list names what goes and what comes, and no line number."""
        diff = ["-    if a < b:", "+    if a <= b:"]
        assert is_listed({"path": "^src/a", "gone": "a < b", "comes": "<="}, "src/a.py", diff)
        assert not is_listed({"path": "^src/b", "gone": "a < b"}, "src/a.py", diff)
        assert not is_listed({"path": "^src/a", "gone": "a <= b"}, "src/a.py", diff)

    def test_measured_coverage_follows_moved_lines(self, tmp_path: Path) -> None:
        """A line is still touched by the same tests after others were put above it."""
        (tmp_path / "a.py").write_text("def f():\n    return 1\n")
        (tmp_path / "test_a.py").write_text("")
        ran = {"test_a.py::test_f": [0.1, {"a.py": hex(1 << 2)}]}
        Touched(tmp_path, tmp_path / "kept").keep("test_a.py", ran)
        (tmp_path / "a.py").write_text("b = 1\nc = 2\ndef f():\n    return 1\n")
        (change,) = [it for it in changes("a.py", (tmp_path / "a.py").read_text()) if it.line == 4][
            :1
        ]
        again = Touched(tmp_path, tmp_path / "kept")
        assert again.missing(["test_a.py", "test_b.py"]) == ["test_b.py"]
        assert again.tests_for(change) == ["test_a.py::test_f"]

    def test_a_mutated_default_is_tried_with_the_tests_that_call_its_function(
        self, tmp_path: Path
    ) -> None:
        """Its line is run by whatever imports it first, which says nothing."""
        (tmp_path / "a.py").write_text("def f(\n    a=1,\n):\n    return a\n")
        (tmp_path / "test_a.py").write_text("")
        ran = {
            "test_a.py::test_imports": [0.1, {"a.py": hex(1 << 1 | 1 << 2)}],
            "test_a.py::test_calls": [0.1, {"a.py": hex(1 << 4)}],
        }
        touched = Touched(tmp_path, tmp_path / "kept")
        touched.keep("test_a.py", ran)
        (change, *_) = changes("a.py", (tmp_path / "a.py").read_text())
        assert (change.line, touched.tests_for(change)) == (2, ["test_a.py::test_calls"])
