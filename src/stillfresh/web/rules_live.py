"""What a live connection may do, and when it has ended: limits, pace, heartbeat, origin (G3).

Pure: what was seen and the time go in, decisions come out. Nothing else may live here.
"""

from collections.abc import Collection
from dataclasses import dataclass
from enum import IntEnum, StrEnum
from typing import Final
from urllib.parse import urlsplit

PORTS: Final = {"http": 80, "https": 443}


class Close(IntEnum):
    """Why a connection was closed, as a client sees it."""

    POLICY = 1008
    """Ten bad messages, or a flood."""
    TOO_BIG = 1009
    BROKEN = 1011
    """A mistake of ours."""
    RESTART = 1012
    """Come again in a moment."""
    FULL = 1013
    SILENT = 4408
    """Nothing was heard, or nothing was read, for too long."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Of one connection."""

    max_message: int
    """Bytes."""
    max_subscriptions: int
    max_bad: int
    rate: float
    """Messages a second in the long run; one of many items counts for more."""
    burst: float
    heartbeat: float
    patience: float
    """Seconds that a reader may leave what was sent unread."""
    sign_in_timeout: float
    check_every: float
    """Seconds between two checks of a viewer's token."""
    unconfirmed_for: float
    """Seconds that a viewer stays signed in while nobody can say whose the token is."""


class Pace:
    """How much a viewer may still say: refilled steadily, up to a burst."""

    __slots__ = ("_at", "_burst", "_left", "_rate")

    def __init__(self, limits: Limits, now: float) -> None:
        self._rate = limits.rate
        self._burst = self._left = limits.burst
        self._at = now

    def spend(self, items: int, now: float) -> bool:
        """False: too much. Twenty items count as one message more."""
        self._left = min(self._burst, self._left + max(0.0, now - self._at) * self._rate)
        self._at = now
        self._left -= 1 + items // 20
        return self._left >= 0


class Pulse(StrEnum):
    """What to do about a connection that may be gone."""

    FINE = "fine"
    ASK = "ask"
    GONE = "gone"


def pulse(
    heard_at: float, asked_at: float | None, sending_since: float | None, limits: Limits, now: float
) -> Pulse:
    """Silent for a heartbeat: asked; for as long again, or not reading: gone."""
    if sending_since is not None and now - sending_since >= limits.patience:
        return Pulse.GONE
    if now - heard_at < limits.heartbeat:
        return Pulse.FINE
    if asked_at is None or asked_at <= heard_at:
        return Pulse.ASK
    if sending_since is not None:  # who reads, however slowly, is there
        return Pulse.FINE
    return Pulse.GONE if now - asked_at >= limits.heartbeat else Pulse.FINE


def is_check_due(asked_at: float, limits: Limits, now: float) -> bool:
    """G12: a token is checked again so often that a revoked one is noticed within a minute."""
    return now - asked_at >= limits.check_every


def has_lapsed(confirmed_at: float, limits: Limits, now: float) -> bool:
    """G12: an outage of the identity service signs nobody out at once, but does in the end."""
    return now - confirmed_at >= limits.unconfirmed_for


def is_allowed_origin(origin: str, host: str, origins: Collection[str]) -> bool:
    """A page of this very host, or of one that was named; who sends none is no browser."""
    if not origin or origin in origins:
        return True
    try:
        here, there = urlsplit(origin), urlsplit(f"//{host}")
        default = PORTS.get(here.scheme)
        ports = (here.port or default, there.port or default)
    except ValueError:
        return False
    return (
        default is not None
        and here.hostname is not None
        and here.hostname == there.hostname
        and ports[0] == ports[1]
    )
