"""Requests that passed through uncached, counted by reason (I28)."""

from collections.abc import Callable, Mapping
from typing import TypeAlias

from stillfresh.isr import PageCache

Bypassed: TypeAlias = Callable[[], Mapping[str, int]]
"""How many requests passed through since the start, by reason; every reason in one word."""


def bypassed_by(pages: PageCache | None) -> Bypassed:
    """Return what these pages count; without pages nothing is counted."""
    return dict if pages is None else pages.bypassed
