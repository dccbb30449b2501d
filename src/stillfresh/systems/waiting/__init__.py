"""The Longest-Waiting cache: next-game navigation that never guesses an order (seed 003).

`WaitingCache` and its rules need nothing but the core. The service that it was made for is in
its `backend`, the client that joins the two in its `client`; both need the `web` extra.
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
