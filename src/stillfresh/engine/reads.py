"""What one turn of the event loop asks of a store is asked in one go (E4).

For stores that are asked over a network; one that reads on the spot has no use for it.
"""

import asyncio
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Generic, TypeVar

from stillfresh.engine.spec import Runtime
from stillfresh.engine.tasks import looked_at
from stillfresh.errors import NotOpen
from stillfresh.stores.contract import Record

K = TypeVar("K", bound=Hashable)


class Question:
    """The ids of one turn, and the generations that all who asked for them know."""

    __slots__ = ("ids", "known")

    def __init__(self) -> None:
        self.ids: dict[str, None] = {}
        self.known: dict[str, str] = {}

    def add(self, ids: Sequence[str], known: Mapping[str, str]) -> None:
        for id_ in ids:
            generation = known.get(id_)
            if id_ not in self.ids:
                self.ids[id_] = None
                if generation is not None:
                    self.known[id_] = generation
            elif self.known.get(id_) != generation:
                self.known.pop(id_, None)


class Step(Generic[K]):
    """A read of the store under way, and which of its keys were invalidated meanwhile (E6)."""

    __slots__ = ("dirty", "keys")

    def __init__(self, keys: Iterable[K]) -> None:
        self.keys = frozenset(keys)
        self.dirty: set[K] = set()


class Reads:
    """The reads of one resource while its cache is open."""

    def __init__(self, kind: str, runtime: Runtime, *, lag: float) -> None:
        self._kind = kind
        self._runtime = runtime
        self._lag = lag
        self._next: tuple[Question, asyncio.Task[dict[str, Record]]] | None = None

    async def read(self, ids: Sequence[str], known: Mapping[str, str]) -> dict[str, Record]:
        """Those of `ids` that the store knows; who stops waiting takes nobody along."""
        if self._next is None:
            question = Question()
            task = self._runtime.spawn(self._ask(question), self._runtime.context)
            task.add_done_callback(looked_at)
            self._next = question, task
        question, task = self._next
        question.add(ids, known)
        try:
            records = await asyncio.shield(task)
        except asyncio.CancelledError:
            if task.cancelled() and not _is_cancelled():
                raise NotOpen(f"{self._kind}: the cache is closed") from None
            raise
        return {id_: records[id_] for id_ in ids if id_ in records}

    async def _ask(self, question: Question) -> dict[str, Record]:
        """Begins when the turn is over. E9, I7: who allows a lag is read for at a lower price."""
        self._next = None
        ids, known, runtime = list(question.ids), question.known, self._runtime
        if self._lag and runtime.read_lagging is not None:
            return await runtime.read_lagging(self._kind, ids, known, self._lag)
        return await runtime.store.read(self._kind, ids, known)


def _is_cancelled() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
