"""What `@cache.cached` makes of a `def` function: still a function, for any thread.

The hit is written out in the call, as in `engine/function.py`.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, Concatenate, ParamSpec, Self, TypeVar, overload

from stillfresh.engine import Answer, Call, Signature
from stillfresh.engine.thread_face import CachedFunction, bind
from stillfresh.sync.resource import SyncHandle, SyncResource

V = TypeVar("V")
P = ParamSpec("P")
Q = ParamSpec("Q")
S = TypeVar("S")


class SyncFunction(CachedFunction[P, V]):
    """A cached function, made by `@cache.cached`. `report(2026)` returns the value itself.

    The call raises LoadFailed if there is nothing to serve and the function failed.
    """

    def __init__(
        self,
        resource: SyncResource[Any, V],
        signature: Signature[P],
        function: Callable[P, object],
    ) -> None:
        super().__init__(resource, signature, function)
        self._resource = resource
        self._thread_reads = resource.thread_reads
        self._call = signature.call

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> V:
        """Return the value. Raises LoadFailed if there is none to serve and the load fails."""
        try:
            entry = None if kwargs else self._by_arguments[args]
        except (KeyError, TypeError):  # TypeError: an argument that cannot be hashed
            entry = None
        if entry is None:
            return self._resource(self._call_of(*args, **kwargs))
        clock = self._clock
        answer = entry.answer
        now = clock()
        if now < entry.until and entry.answer is answer and answer.found:
            reads = self._thread_reads.counts
            if entry.is_used:
                for _ in reads.unsampled:  # as in `ReadCounts.hit`
                    return answer.value
            reads.hit(entry, answer, now)
            return answer.value
        return self._resource(entry.key)

    def _call_of(self, *args: P.args, **kwargs: P.kwargs) -> Call[P]:
        """The call of these arguments; remember its entry for the next time."""
        call = self._call(*args, **kwargs)
        if self.signature.is_plain and not kwargs:
            entry = self.entry_by_key.get(call)
            if entry:
                self._note(args, entry)
        return call

    def get(self, *args: P.args, **kwargs: P.kwargs) -> Answer[V]:
        """Return the answer of a call with these arguments. For a `max_age`, use `of(...).get`."""
        return self._resource.get(self._call(*args, **kwargs))

    def invalidate_all(self, *, soft: bool = False) -> int:
        """Invalidate the entries of all arguments, in all processes; return how many there are.

        `soft`: reads get the old copies while they are refreshed. Raises StoreError.
        """
        return self._resource.invalidate_all(soft=soft)

    def of(self, *args: P.args, **kwargs: P.kwargs) -> SyncHandle[V]:
        """Return the handle of the entry that these arguments name."""
        return SyncHandle(self._resource, self._call(*args, **kwargs))

    @overload
    def __get__(self, obj: None, owner: type | None = None) -> Self: ...

    @overload
    def __get__(
        self: "SyncFunction[Concatenate[S, Q], V]", obj: S, owner: type | None = None
    ) -> "SyncFunction[Q, V]": ...

    def __get__(self, obj: Any, owner: type | None = None) -> "SyncFunction[Any, V]":
        if obj is None or not self.signature.is_method:
            return self
        return SyncBound(self, obj)


class SyncBound(SyncFunction[Q, V]):
    """A cached method of one object: the same function with that object as first argument."""

    def __init__(self, function: SyncFunction[Any, V], obj: object) -> None:
        bind(self, function, obj)
        self.__func__ = function
        self.__self__ = obj
        self._call = partial(function.signature.call, obj)

    def __reduce__(self) -> Any:  # noqa: ANN401 (as in `object`)
        return getattr, (self.__self__, self.__name__)
