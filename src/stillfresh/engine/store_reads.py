"""Reads of a store that is asked over a network: one question in a turn of the loop.

All reads of one turn of the loop go into one `Question`, which is sent when the turn is over. While
the store is asked, the keys of each read are a `StoreStep`. If this process changes one of them
meanwhile, the store's answer about it is not used: it may be older than the change.
"""

import asyncio
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Generic, TypeVar

from msgspec import Struct

from stillfresh.engine.fence import Fence
from stillfresh.engine.keys import Spec
from stillfresh.engine.memory import Memory
from stillfresh.engine.runtime import Runtime
from stillfresh.engine.spans import apart
from stillfresh.errors import NotOpen
from stillfresh.stores.contract import Copy, Record
from stillfresh.tasks import is_cancelled, looked_at

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class StoreStep(Struct, Generic[K], eq=False):
    """A step of the store, and which of its keys this process changed while it ran."""

    keys: frozenset[K]
    changed: set[K] = set()
    """Known when the step has ended."""


class Question:
    """The ids that one turn of the loop asks a store for, and what all its callers know."""

    def __init__(self) -> None:
        self.ids: dict[str, None] = {}
        self.known: dict[str, str] = {}
        self.task: asyncio.Task[dict[str, Record]]

    def add(self, ids: Iterable[str], known: Mapping[str, str]) -> None:
        for id_ in ids:
            generation = known.get(id_)
            if id_ not in self.ids:
                self.ids[id_] = None
                if generation is not None:
                    self.known[id_] = generation
            elif self.known.get(id_) != generation:
                self.known.pop(id_, None)


class StoreReads(Generic[K, V]):
    """Asks the store for copies, and notes what is invalidated meanwhile."""

    def __init__(self, spec: Spec[K, V], memory: Memory[K, V]) -> None:
        self.spec = spec
        self.memory = memory
        self._runtime: Runtime | None = None
        self.fence: Fence[K]
        self._steps: set[StoreStep[K]] = set()
        self._question: Question | None = None

    def _check_open(self, runtime: Runtime) -> None:
        """Raise if the cache was closed meanwhile: what this call has read is outdated."""
        if self._runtime is not runtime:
            raise NotOpen(f"{self.spec.kind}: the cache is closed; open it again")

    async def _asked(
        self, runtime: Runtime, texts: Mapping[K, str], known: dict[str, str], held: dict[str, Copy]
    ) -> dict[str, Record]:
        """Ask with all other reads of this turn of the loop. A cancelled caller cancels no other.

        A key that was invalidated while it was read counts as missing, in memory as well.
        """
        if (question := self._question) is None:
            question = self._question = Question()
            question.task = runtime.spawn(self._ask(runtime, question), apart(runtime.hooks))
            question.task.add_done_callback(looked_at)
        question.add(texts.values(), known)
        entries = self.memory.entries
        pinned = {
            entry.key: (entry.copy, entry.answer, entry.size)
            for entry in map(entries.get, texts)
            if entry
        }
        step: StoreStep[K] | None = None
        try:
            with self.step(texts) as step:
                records = await asyncio.shield(question.task)
        except asyncio.CancelledError:
            if question.task.cancelled() and not is_cancelled():
                raise NotOpen(f"{self.spec.kind}: the cache is closed; open it again") from None
            raise
        finally:
            for key in step.changed if step is not None else ():
                held.pop(texts[key], None)
        self._check_open(runtime)
        for key in pinned.keys() - entries.keys() - step.changed:
            copy, answer, size = pinned[key]  # dropped from memory while the store was asked
            self.memory.put(key, copy, answer, size=size)
        clean = (id_ for key, id_ in texts.items() if key not in step.changed)
        return {id_: records[id_] for id_ in clean if id_ in records}

    async def _ask(self, runtime: Runtime, question: Question) -> dict[str, Record]:
        """Start when the turn is over. With `memory_for`, a cheaper read is allowed."""
        if self._question is question:
            self._question = None
        ids = list(question.ids)
        return await runtime.store.read(self.spec.kind, ids, question.known, self.spec.memory_for)

    @contextmanager
    def step(self, keys: Iterable[K]) -> Iterator[StoreStep[K]]:
        """A step that knows, when the block ends, which of its keys were changed meanwhile."""
        step = StoreStep(frozenset(keys))
        self._steps.add(step)
        with self.fence.starting() as start:
            try:
                yield step
            finally:
                step.changed = start.changed(step.keys)
                self._steps.discard(step)


class InTurn(Generic[K]):
    """`async with InTurn(last, keys)`: one change of a key at a time, in the order of the calls.

    No generator: the end of the loop would close it in the middle of its block.
    """

    def __init__(self, last: dict[K, "asyncio.Future[None]"], keys: Sequence[K]) -> None:
        self._last = last
        self._keys = keys

    async def __aenter__(self) -> None:
        last = self._last
        self._done = asyncio.get_running_loop().create_future()
        before = {last[key] for key in self._keys if key in last}
        last.update(dict.fromkeys(self._keys, self._done))
        try:
            if before:
                await asyncio.wait(before)
        except BaseException:
            self._end()
            raise

    async def __aexit__(self, *_: object) -> None:
        self._end()

    def _end(self) -> None:
        self._done.set_result(None)
        for key in self._keys:
            if self._last.get(key) is self._done:
                del self._last[key]
