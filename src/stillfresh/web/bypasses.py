"""Requests that passed through uncached, counted by reason (I28)."""

from collections.abc import Callable, Mapping
from typing import Protocol, TypeAlias, runtime_checkable

__all__ = ["Bypassed", "bypassed_by"]

Bypassed: TypeAlias = Callable[[], Mapping[str, int]]
"""How many requests passed through since the start, by reason; every reason in one word."""


@runtime_checkable
class CountsBypasses(Protocol):
    """A page cache that says why requests passed it by."""

    def bypassed(self) -> Mapping[str, int]:
        """By reason."""


def bypassed_by(pages: object) -> Bypassed:
    """What these pages count; nothing without pages."""
    return pages.bypassed if isinstance(pages, CountsBypasses) else dict
