"""T13: `make proof` runs what proves more than a change needs, and notes when it did."""

import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from scripts import proof
from tests.kit.processes import ROOT

TABLE = """| part | runs | last run | result |
| --- | --- | --- | --- |
| `good` | what passes | never | – |
| `bad` | what fails | 2026-01-01 | passed, 3 min |
| `other` | more | 2026-01-02 | passed, 1 min |
"""


@pytest.fixture
def page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A page of three parts, of which one fails."""
    parts = (
        proof.Part("good", ("-c", "")),
        proof.Part("bad", ("-c", "raise SystemExit(3)")),
        proof.Part("other", ("-c", "")),
    )
    table = tmp_path / "reliability.md"
    table.write_text(TABLE)
    monkeypatch.setattr(proof, "PARTS", parts)
    monkeypatch.setattr(proof, "PAGE", table)
    return table


class TestT13Proof:
    def test_each_part_that_ran_gets_its_date_and_its_result(
        self, page: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """A part that was not asked for keeps the date of its last run."""
        monkeypatch.setattr(sys, "argv", ["proof", "good", "bad"])
        assert proof.main() == 1
        good, bad, other = proof.ROW.findall(page.read_text())
        assert good[3] == "passed, 0 min"
        assert bad[3] == "failed, 0 min"
        assert good[2] == bad[2] > "2026-01-02"
        assert other == ("other", "more", "2026-01-02", "passed, 1 min")
        assert "bad: failed, 0 min" in capsys.readouterr().out

    def test_without_a_name_all_parts_run(
        self, page: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(proof, "PARTS", (proof.PARTS[0], proof.PARTS[2]))
        monkeypatch.setattr(sys, "argv", ["proof"])
        assert proof.main() == 0
        assert page.read_text().count("passed, 0 min") == 2

    def test_an_unknown_part_is_refused_by_its_name(
        self, page: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setattr(sys, "argv", ["proof", "better"])
        with pytest.raises(SystemExit):
            proof.main()
        assert "better" in capsys.readouterr().err
        assert page.read_text() == TABLE

    def test_the_page_lists_the_parts_that_there_are(self) -> None:
        rows = proof.ROW.findall((ROOT / "docs" / "reliability.md").read_text())
        assert [row[0] for row in rows] == [part.name for part in proof.PARTS]

    def test_every_part_starts_a_module_or_a_script_that_exists(self) -> None:
        for part in proof.PARTS:
            option, *rest = part.arguments
            if option == "-m":
                assert find_spec(rest[0]) is not None, part
            else:
                assert (ROOT / option).exists(), part
