"""The Longest-Waiting cache: next-game navigation that never guesses an order (seed 003).

`WaitingCache` and its rules need nothing but the core. The service that it was made for is in
`stillfresh.waiting.backend`, the client that joins the two in `stillfresh.waiting.client`; both
need the `web` extra.
"""

from stillfresh.waiting.cache import WaitingCache
from stillfresh.waiting.model import (
    GameId,
    Navigation,
    Proof,
    RefetchRequest,
    Screen,
    Snapshot,
    State,
)
from stillfresh.waiting.rules import step

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
