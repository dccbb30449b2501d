"""The Longest-Waiting cache: next-game navigation that never guesses an order.

`WaitingCache` and its rules need nothing but the core. `client` joins it to a service over HTTP,
and needs the `web` extra; `examples/game_service` of the repository is such a service.
"""

from stillfresh.systems.waiting.cache import WaitingCache
from stillfresh.systems.waiting.model import (
    GameId,
    Navigation,
    Proof,
    RefetchRequest,
    Screen,
    Snapshot,
    State,
)
from stillfresh.systems.waiting.rules import step

__all__ = [
    "GameId",
    "Navigation",
    "Proof",
    "RefetchRequest",
    "Screen",
    "Snapshot",
    "State",
    "WaitingCache",
    "step",
]
