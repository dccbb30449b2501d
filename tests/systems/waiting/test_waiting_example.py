"""W14: what `make examples` shows of the cache."""

import importlib.util
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[3] / "examples" / "next_game.py"


async def test_the_example_prints_what_each_turn_costs(capsys: pytest.CaptureFixture[str]) -> None:
    """A hundred turns of one game ask once; two games by turns ask each time."""
    spec = importlib.util.spec_from_file_location("next_game", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    await example.run()
    shown = [line.split("next: ")[1].split() for line in capsys.readouterr().out.splitlines()]
    assert [int(line[-1]) for line in shown] == [1, 2, 2, 2, 8, 9, 10]
    assert shown[3][:5] == ["chess", "go", "poker", "dice", "snapshot"]
    assert shown[5][4] == "pending"
    assert shown[6][:4] == ["chess", "go", "dice", "server"]
