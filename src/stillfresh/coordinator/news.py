"""What is news to a viewer of a hub (C14): the update itself, and what makes it one."""

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any, Final

import msgspec

from stillfresh.engine import Answer
from stillfresh.freshness import Verdict

SLICE: Final = 50
"""Views read at once for who looks again."""


class HubUpdate(msgspec.Struct, frozen=True):
    """A new view of something that this viewer looks at."""

    kind: str
    id: str
    answer: Answer[Any]
    """`value` is the view; `found` is False if it does not exist (any more)."""


class News:
    """What waits for one viewer: the newest of each id, and of what failed the first time."""

    __slots__ = ("failed", "fresh")

    def __init__(self, kinds: Iterable[str]) -> None:
        self.fresh: dict[str, dict[str, Answer[Any]]] = {kind: {} for kind in kinds}
        self.failed: dict[str, dict[str, Answer[Any]]] = {kind: {} for kind in self.fresh}

    def forget(self, kind: str, id_: str) -> None:
        self.fresh[kind].pop(id_, None)
        self.failed[kind].pop(id_, None)

    def clear(self) -> None:
        for waiting in (*self.fresh.values(), *self.failed.values()):
            waiting.clear()

    def take(self, limit: int) -> list[HubUpdate]:
        """Up to so many."""
        taken: list[HubUpdate] = []
        for by_kind in (self.fresh, self.failed):
            for kind, waiting in by_kind.items():
                for id_ in list(islice(waiting, limit - len(taken))):
                    taken.append(HubUpdate(kind, id_, waiting.pop(id_)))  # noqa: PERF401 (it pops)
        return taken

    def next(self) -> HubUpdate | None:
        """One new view; failures are for who takes."""
        for kind, waiting in self.fresh.items():
            for id_ in waiting:
                return HubUpdate(kind, id_, waiting.pop(id_))
        return None


def slices(keys: list[str]) -> Iterator[list[str]]:
    for begin in range(0, len(keys), SLICE):
        yield keys[begin : begin + SLICE]


def is_as_had(answer: Answer[Any], since: float | None) -> bool:
    """The same copy, and as good as it was."""
    return answer.fetched_at == since and answer.error is None and answer.verdict is Verdict.FRESH


def is_still_absent(before: Answer[Any] | None, now: Answer[Any]) -> bool:
    """As was told."""
    if now.found or before is None or before.found:
        return False
    return before.error is None and now.error is None


def is_news(before: Answer[Any] | None, now: Answer[Any]) -> bool:
    """Another copy; that nobody could say is none."""
    if (now.error is not None and not now.found) or is_still_absent(before, now):
        return False
    return before is None or (before.fetched_at, before.found, before.value) != (
        now.fetched_at,
        now.found,
        now.value,
    )
