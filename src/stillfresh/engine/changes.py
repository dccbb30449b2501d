"""Changes of keys by this process, and the steps of the store that must learn of them.

A step of the store takes time: a read, a put, an invalidation. Meanwhile this process may change
one of its keys. The fence knows; this module asks it at the right moments. Every change advances
the fence before its step and after it, so that nothing that began before the change *ended* goes
to memory.
"""

from collections.abc import Collection, Hashable, Iterator, Sequence
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

from msgspec import Struct

from stillfresh.engine.fence import Fence
from stillfresh.engine.keys import Spec
from stillfresh.engine.memory import Memory
from stillfresh.engine.watcher import Watcher
from stillfresh.errors import StoreError, note_unconfirmed

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class StoreStep(Struct, Generic[K], eq=False):
    """`with step:` stands around a step of the store.

    Afterwards `changed` says which of its keys this process changed meanwhile.
    """

    _steps: "dict[StoreStep[K], None]"
    """Those that run now, in their order."""
    _fence: Fence[K]
    keys: Collection[K]
    _began: int = 0
    changed: set[K] = set()

    def __enter__(self) -> Self:
        self._began = self._fence.clock.now
        self._fence.begins()
        self._steps[self] = None
        return self

    def __exit__(self, *_: object) -> None:
        self.changed = self._fence.changed_keys(self.keys, self._began)
        self._steps.pop(self, None)
        self._fence.ends()


class KeyChanges(Generic[K, V]):
    """The changes of one resource's keys."""

    def __init__(
        self, spec: Spec[K, V], fence: Fence[K], memory: Memory[K, V], watcher: Watcher[K, V]
    ) -> None:
        self._spec = spec
        self._fence = fence
        self._memory = memory
        self._watcher = watcher
        self._steps: dict[StoreStep[K], None] = {}

    def begin_anew(self) -> None:
        """Forget running steps: they belong to a life of the cache that has ended."""
        self._steps.clear()
        self._fence.void_all()  # a put that still runs would not learn what is invalidated now

    def keys_in_steps(self) -> Iterator[K]:
        """The keys that the store is asked about now."""
        for step in self._steps:
            yield from step.keys

    def step(self, keys: Collection[K]) -> StoreStep[K]:
        """A step that knows, when the block ends, which of its keys were changed meanwhile."""
        return StoreStep(self._steps, self._fence, keys)

    def overtaking(self, keys: Sequence[K], *, voids: bool = True) -> "OvertakingBlock[K]":
        """Advance the keys' fence around a store step, so that concurrent changes are noticed."""
        return OvertakingBlock(self, self.step(keys), voids)

    def overtake(self, keys: Collection[K], *, voids: bool = True) -> None:
        """Drop keys from memory. Loads and steps that run now began too early to be kept.

        `voids`: the keys are invalidated or deleted, so puts that began earlier are not stored.
        """
        bare = keys if self._spec.held is None else map(self._spec.held, keys)
        if voids:
            self._fence.void(bare)
        else:
            self._fence.change(bare)
        self._watcher.look_again(keys)
        truth = self._memory.counts.truth
        if truth is not None:
            truth.note_change(keys, "invalidated" if voids else "put")
        for key in keys:
            self._memory.drop(key)
            self._memory.forget_refusal(key)

    def overtake_tag(self, tag: str) -> None:
        """Drop keys with this tag from memory. Loads, reads and puts that run now are void."""
        self._fence.clock.void_tag(tag)
        self.overtake(self._memory.tagged(tag))


class OvertakingBlock(Struct, Generic[K], eq=False):
    """The block of `KeyChanges.overtaking`."""

    _changes: KeyChanges[K, Any]
    _step: StoreStep[K]
    _voids: bool

    def __enter__(self) -> StoreStep[K]:
        self._changes.overtake(self._step.keys, voids=self._voids)
        return self._step.__enter__()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._step.__exit__(kind, error, traceback)
        self._changes.overtake(self._step.keys, voids=self._voids)
        if isinstance(error, StoreError):
            note_unconfirmed(error)
