"""Resources with `share=False`, for threads: each caller gets a value of its own."""

from collections.abc import Callable, Hashable
from typing import Any, Never, ParamSpec, TypeVar

from stillfresh.engine import Answer, Resource, Signature
from stillfresh.sync.function import SyncBound, SyncFunction
from stillfresh.sync.resource import Run, SyncResource

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")
P = ParamSpec("P")
Q = ParamSpec("Q")


class UnsharedSyncResource(SyncResource[K, V]):
    """A resource with `share=False`. What the loop thread returns is the caller's own already."""

    def _own(self, answer: Answer[V] | None) -> Answer[V] | None:
        return None if answer is None else self.own(answer)

    def hit(self, key: K) -> Answer[V] | None:
        return self._own(super().hit(key))

    def confirmed(self, key: K, *, waits: bool = False) -> Answer[V] | None:
        return self._own(super().confirmed(key, waits=waits))

    def stored(self, keys: list[K]) -> dict[K, Answer[V]] | None:
        answers = super().stored(keys)
        if answers is None:
            return None
        return {key: self.own(answer) for key, answer in answers.items()}

    def __call__(self, key: K, *others: Never) -> V:
        if others:
            raise self._one_key(key, *others)
        answer = self.get_nowait(key)
        if answer is not None and answer.found:
            return answer.value
        return self._run(self._resource, key)


class UnsharedSyncFunction(SyncFunction[P, V]):
    """A cached function with `share=False`."""

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> V:
        return self._resource(self._call(*args, **kwargs))

    def __get__(  # type: ignore[override]
        self,
        obj: Any,  # noqa: ANN401 (of any class)
        owner: type | None = None,
    ) -> SyncFunction[Any, V]:
        if obj is None or not self.signature.is_method:
            return self
        return UnsharedSyncBound(self, obj)


class UnsharedSyncBound(SyncBound[Q, V]):
    """A cached method with `share=False`, of one object."""

    def __call__(self, *args: Q.args, **kwargs: Q.kwargs) -> V:
        return self._resource(self._call(*args, **kwargs))


def sync_resource(run: Run, resource: Resource[K, V]) -> SyncResource[K, V]:
    """The public object of a resource, by its `share=`."""
    made_of = SyncResource if resource.is_shared else UnsharedSyncResource
    return made_of(run, resource)


def sync_function(
    resource: SyncResource[Any, V], signature: Signature[P], function: Callable[P, object]
) -> SyncFunction[P, V]:
    """The public object of a cached function, by its `share=`."""
    made_of = SyncFunction if resource.is_shared else UnsharedSyncFunction
    return made_of(resource, signature, function)
