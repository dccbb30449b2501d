"""What `@cache.cached` makes of an async function: still a function, whose calls are entries.

The hit is written out in the call: one lookup, one clock reading, one addition.
"""

from collections.abc import Callable, Coroutine
from types import MethodType
from typing import (
    Any,
    Concatenate,
    Generic,
    ParamSpec,
    Protocol,
    Self,
    TypeAlias,
    TypeVar,
    overload,
)

from stillfresh.engine.calls import Call, Signature
from stillfresh.engine.entry import Entry
from stillfresh.engine.face import EntriesOutsideBlocks, Face
from stillfresh.engine.model import Answer, Loaded, Outcome
from stillfresh.engine.resource import (
    Handle,
    Resource,
    answer_or_raise,
    like_function,
    value_or_key_error,
)
from stillfresh.engine.rules import FOR_EVER
from stillfresh.errors import MissingMethod

V = TypeVar("V")
P = ParamSpec("P")
Q = ParamSpec("Q")
S = TypeVar("S")
Arguments: TypeAlias = tuple[object, ...]
ByArguments: TypeAlias = (
    dict[Arguments, Entry[Call[P], V]] | EntriesOutsideBlocks[Arguments, Call[P], V]
)


class CachedFunction(Face[Call[P], V], Generic[P, V]):
    """What cached functions for event loops and for threads have in common."""

    __name__: str
    __wrapped__: Callable[..., Any]
    what = "cached function"

    def __init__(
        self, resource: Face[Call[P], V], signature: Signature[P], function: Callable[P, object]
    ) -> None:
        self._noted: dict[Arguments, Entry[Call[P], V]] = {}
        super().__init__(resource.core)
        self.signature = signature
        like_function(self, function, signature.shown)

    def stand_back(self) -> None:
        owner = self.core.owner
        with owner.running_loaders.lock:
            super().stand_back()
            entries = {} if owner.blocks else self._noted
            self._by_arguments: ByArguments[P, V]
            self._by_arguments = EntriesOutsideBlocks(self, entries) if self.is_watched else entries

    def _note(self, args: Arguments, entry: Entry[Call[P], V]) -> None:
        """Remember the entry of these arguments for the next call."""
        if len(self._noted) >= self.core.spec.max_entries:
            self._noted.clear()
        self._noted[args] = entry

    def __set_name__(self, owner: type, name: str) -> None:
        self.signature.check_in(owner, name)


for _method in (
    *("changing", "delete", "explain", "invalidate", "peek", "put"),
    *("refresh", "update", "watch"),
):
    _text = (
        f"{{0}} is a cached function, and {_method}() is for one of its entries; "
        f"write {{0}}.of(...).{_method}(), with the arguments of the call in of(...)"
    )
    setattr(CachedFunction, _method, MissingMethod(_text))
CachedFunction.cache_clear = MissingMethod(  # type: ignore[attr-defined] # of functools
    "{0} is a cached function of stillfresh; write {0}.invalidate_all()"
)
CachedFunction.cache_info = MissingMethod(  # type: ignore[attr-defined]
    "{0} is a cached function of stillfresh; write cache.stats(), of the whole cache"
)


class Function(CachedFunction[P, V]):
    """A cached function, made by `@cache.cached`. `await report(2026)` returns the value itself.

    The call raises LoadFailed if there is nothing to serve and the function failed.
    """

    def __init__(
        self,
        resource: Resource[Call[P], V],
        signature: Signature[P],
        function: Callable[P, object],
    ) -> None:
        super().__init__(resource, signature, function)
        self.resource: Resource[Any, V] = resource

    async def __call__(self, *args: P.args, **kwargs: P.kwargs) -> V:
        """Return the value. Raises LoadFailed if there is none to serve and the load fails."""
        try:
            entry = None if kwargs else self._by_arguments[args]
        except (KeyError, TypeError):  # TypeError: `get` names an unhashable argument by its value
            entry = None
        if entry is not None:
            clock = self._clock
            answer = entry.answer
            if clock() < entry.until and answer.found:
                if entry.is_used:
                    for _ in self._reads.unsampled:  # as in `ReadCounts.hit`
                        return answer.value
                self._reads.hit(entry, answer, clock())
                return answer.value
            if answer is not None:  # None: memory has dropped the entry
                known = self.core.reads.from_entry(entry.key, entry, clock())
                if known is not None:
                    return value_or_key_error(known, args)
        return value_or_key_error(answer_or_raise(await self._read(*args, **kwargs)), args)

    async def get(self, *args: P.args, **kwargs: P.kwargs) -> Answer[V]:
        """Return the answer of a call with these arguments. For a `max_age`, use `of(...).get`."""
        return answer_or_raise(await self._read(*args, **kwargs))

    def _read(self, *args: P.args, **kwargs: P.kwargs) -> Coroutine[Any, Any, Outcome[V]]:
        """The read of the entry that these arguments name; no coroutine around another."""
        call = self.signature.call(*args, **kwargs)
        entry = self.entry_by_key.get(call)
        if entry is None:
            return self.core.reads.answer(call, FOR_EVER, self.core.spec.patience)
        if not kwargs and self.signature.is_plain:
            self._note(args, entry)
        return self.resource.get(call)

    async def invalidate_all(self, *, soft: bool = False) -> int:
        """Invalidate the entries of all arguments, in all processes; return how many there are.

        `soft`: reads get the old copies while they are refreshed. Raises StoreError.
        """
        return await self.resource.invalidate_all(soft=soft)

    def of(self, *args: P.args, **kwargs: P.kwargs) -> Handle[V]:
        """Return the handle of the entry that these arguments name."""
        return self.resource.handle_class(self.resource, self.signature.call(*args, **kwargs))

    @overload
    def __get__(self, obj: None, owner: type | None = None) -> Self: ...

    @overload
    def __get__(
        self: "Function[Concatenate[S, Q], V]", obj: S, owner: type | None = None
    ) -> "Function[Q, V]": ...

    def __get__(self, obj: Any, owner: type | None = None) -> "Function[Any, V]":
        """Bind like a method; a plain function stays as it is."""
        return self if obj is None or not self.signature.is_method else Bound(self, obj)


class Bound(Function[Q, V]):
    """A cached method of one object: the same function with that object as first argument."""

    def __init__(self, function: "Function[Any, V]", obj: object) -> None:
        bind(self, function, obj)
        self.__func__ = function
        self.__self__ = obj

    def __reduce__(self) -> Any:  # noqa: ANN401 (as in `object`)
        return getattr, (self.__self__, self.__name__)

    def __call__(self, *args: Q.args, **kwargs: Q.kwargs) -> Coroutine[Any, Any, V]:
        return self.__func__(self.__self__, *args, **kwargs)

    async def get(self, *args: Q.args, **kwargs: Q.kwargs) -> Answer[V]:
        return await self.__func__.get(self.__self__, *args, **kwargs)

    def of(self, *args: Q.args, **kwargs: Q.kwargs) -> Handle[V]:
        return self.__func__.of(self.__self__, *args, **kwargs)


class CachedDecorator(Protocol):
    """What `cached(...)` returns: the parameters and the value's type pass through."""

    @overload
    def __call__(
        self, function: Callable[P, Coroutine[Any, Any, Loaded[V]]], /
    ) -> Function[P, V]: ...
    @overload
    def __call__(
        self, function: Callable[P, Coroutine[Any, Any, V | Loaded[V]]], /
    ) -> Function[P, V]: ...
    @overload
    def __call__(self, function: Callable[P, Loaded[V]], /) -> Function[P, V]: ...
    @overload
    def __call__(self, function: Callable[P, V | Loaded[V]], /) -> Function[P, V]: ...


def bind(bound: Any, function: Any, obj: object) -> None:  # noqa: ANN401 (faces of any kind)
    """Give a bound method the attributes of its function, and the signature without self."""
    bound.__dict__.update(function.__dict__)
    del bound.__signature__
    bound.__wrapped__ = MethodType(function.__wrapped__, obj)
