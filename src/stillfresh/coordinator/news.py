"""What is news to a viewer of a hub (C14): the update itself, and what makes it one."""

from collections.abc import Iterator
from itertools import islice
from typing import Any, Final

import msgspec

from stillfresh.engine import Answer
from stillfresh.freshness import Verdict

__all__ = ["HubUpdate", "is_as_had", "is_news", "slices", "taken"]

SLICE: Final = 50
"""Views read at once for who looks again."""


class HubUpdate(msgspec.Struct, frozen=True):
    """A new view of something that this viewer looks at."""

    kind: str
    id: str
    answer: Answer[Any]
    """`value` is the view; `found` is False if it does not exist (any more)."""


def taken(news: dict[tuple[str, str], HubUpdate], limit: int) -> list[HubUpdate]:
    if len(news) <= limit:
        taken = list(news.values())
        news.clear()
        return taken
    return [news.pop(it) for it in list(islice(news, limit))]


def slices(keys: list[str]) -> Iterator[list[str]]:
    for begin in range(0, len(keys), SLICE):
        yield keys[begin : begin + SLICE]


def is_as_had(answer: Answer[Any], since: float | None) -> bool:
    """The same copy, and as good as it was."""
    return answer.fetched_at == since and answer.error is None and answer.verdict is Verdict.FRESH


def is_news(before: Answer[Any] | None, now: Answer[Any]) -> bool:
    """Another copy; that nobody could say is none."""
    if now.error is not None and not now.found:
        return False
    return before is None or (before.fetched_at, before.found, before.value) != (
        now.fetched_at,
        now.found,
        now.value,
    )
