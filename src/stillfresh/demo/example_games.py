"""Where the demo's game service comes from: it is an example program, not a part of stillfresh.

In a clone of the repository it lies in `examples/game_service`, and the demo starts it from there.
An installed stillfresh has no examples: the demo's games card then says how to get it.
"""

import random
import sys
from contextlib import AbstractAsyncContextManager
from importlib import import_module
from pathlib import Path
from typing import Final, Protocol

from starlette.types import ASGIApp

EXAMPLES: Final = Path(__file__).parents[3] / "examples"
"""In a clone, where `src` and `examples` lie side by side."""
NO_SERVICE: Final = (
    "The games are played by an example program, which is not installed with stillfresh. "
    "Clone the repository and run make demo there to play."
)


class OpenGameService(Protocol):
    """`open_service` of `examples/game_service/service.py`."""

    def __call__(
        self, folder: Path, bot_thinks: tuple[float, float], dice: random.Random
    ) -> AbstractAsyncContextManager[ASGIApp]:
        """Open the service; its app is for the upstream to serve."""


def find_game_service() -> OpenGameService | None:
    """Return how to open the service, or None if there is no clone around this package."""
    if not (EXAMPLES / "game_service" / "service.py").is_file():
        return None
    if str(EXAMPLES) not in sys.path:
        sys.path.append(str(EXAMPLES))
    service = import_module("game_service.service")
    open_service: OpenGameService = service.open_service
    return open_service
