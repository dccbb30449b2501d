"""What a resource's store says of keys, or memory while the store is away (E6, E26, S5)."""

from collections.abc import Callable, Hashable, Mapping
from typing import Generic, TypeVar

from stillfresh.engine.answers import Answers
from stillfresh.engine.reads import Reads, Step
from stillfresh.engine.spec import Runtime, Spec
from stillfresh.errors import StoreError
from stillfresh.stores.contract import Copy, Record

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class Records(Generic[K, V]):
    """For one resource, while its cache is open."""

    def __init__(
        self,
        spec: Spec[K, V],
        runtime: Runtime,
        shelf: Answers[K, V],
        steps: set[Step[K]],
        check_open: Callable[[Runtime], None],
    ) -> None:
        self._kind = spec.kind
        self._runtime = runtime
        self._reads = Reads(spec.kind, runtime, lag=spec.memory_for)
        self._shelf = shelf
        self._steps = steps
        """The reads under way: an invalidation marks its keys in them."""
        self._check_open = check_open

    async def of(self, texts: Mapping[K, str], unread: set[K] | None = None) -> dict[str, Record]:
        """What the store has, without the values that memory has.

        While it is away: what memory has. The keys that could not be asked for go to `unread`.
        """
        entries, runtime = self._shelf.front.entries, self._runtime
        held = {id_: entries[key].copy for key, id_ in texts.items() if key in entries}
        known = {id_: copy.generation for id_, copy in held.items()}
        try:
            if runtime.read_now is not None:
                return runtime.read_now(self._kind, list(texts.values()), known)
            return await self._read(texts, known, held)
        except StoreError:
            self._check_open(runtime)
            self._shelf.meter.store_errors += 1
            if unread is not None:
                unread.update(texts)
            return {id_: Record(copy) for id_, copy in held.items()}

    async def _read(
        self, texts: Mapping[K, str], known: dict[str, str], held: dict[str, Copy]
    ) -> dict[str, Record]:
        """E6: what was invalidated while it was read is taken for missing, in memory as well."""
        step = Step(texts)
        self._steps.add(step)
        front = self._shelf.front
        entries = front.entries
        pinned = {key: (entry.copy, entry.answer) for key in texts if (entry := entries.get(key))}
        try:
            records = await self._reads.read(list(texts.values()), known)
        finally:
            self._steps.discard(step)
            for key in step.dirty:
                held.pop(texts[key], None)
        self._check_open(self._runtime)
        for key in step.dirty:
            records.pop(texts[key], None)
        for key in pinned.keys() - entries.keys() - step.dirty:
            copy, answer = pinned[key]  # pushed out while the store was asked
            front.put(key, copy, answer)
        return records
