"""T3: an application's own rule in the simulator: the bug in it is found, and told."""

import importlib.util
from pathlib import Path
from typing import Any

from stillfresh.testing import Promise


def example() -> Any:
    path = Path(__file__).parent.parent.parent / "examples" / "reprice.py"
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class TestT3OwnRules:
    def test_the_simulator_example_finds_its_planted_bug(self) -> None:
        """Within a few seeds, although nothing need go wrong for it to show."""
        failed = example().first_failure(example().hasty, seeds=25)
        assert failed.promise == Promise.FRESH
        assert failed.smallest.plan.size[0] == 0
        assert "has announced price" in str(failed)

    def test_the_simulator_example_holds_with_the_right_order(self) -> None:
        assert example().first_failure(example().careful, seeds=20) is None
