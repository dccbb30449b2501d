"""A store around another one, which can do exactly what the store inside can do."""

from collections.abc import Awaitable, Callable
from functools import partial
from inspect import iscoroutinefunction
from typing import Any, TypeVar, cast

from stillfresh.stores.capabilities import (
    Capabilities,
    CountsEntries,
    EvictsEntries,
    ListsEntries,
    LivesInProcess,
    PushesChanges,
    ReadsInline,
    ReadsInThreads,
    capabilities_through,
)
from stillfresh.stores.contract import Store

T = TypeVar("T")
Method = TypeVar("Method", bound=Callable[..., object])


def _forwarded(method: Method) -> Method:
    """The method of a wrapped store that calls the same method of the inner store."""
    name = method.__name__
    is_awaited = iscoroutinefunction(method)

    def forwarded(self: "WrappedStore", *args: Any, **options: Any) -> object:  # noqa: ANN401
        work = partial(getattr(self.inner, name), *args, **options)
        return self.step(name, work) if is_awaited else work()

    return cast("Method", forwarded)


class WrappedStore(
    Store,
    ReadsInline,
    ReadsInThreads,
    ListsEntries,
    EvictsEntries,
    CountsEntries,
    PushesChanges,
    LivesInProcess,
):
    """A store around another one, `inner`; every awaited method passes through `step`.

    It has the methods of every protocol, and states the capabilities of the inner store. A subclass
    overrides `step`, or the methods that it changes; and `capabilities`, if it can do less.
    """

    def __init__(self, inner: Store) -> None:
        self.inner = inner

    def capabilities(self) -> Capabilities:
        """What the inner store can do, through this one."""
        return capabilities_through(self, self.inner)

    async def step(self, name: str, work: Callable[[], Awaitable[T]]) -> T:
        """`work` calls the method of that name of the inner store."""
        del name
        return await work()

    open = _forwarded(Store.open)
    close = _forwarded(Store.close)
    read = _forwarded(Store.read)
    acquire = _forwarded(Store.acquire)
    publish = _forwarded(Store.publish)
    new_generation = _forwarded(Store.new_generation)
    put = _forwarded(Store.put)
    renew = _forwarded(Store.renew)
    release = _forwarded(Store.release)
    invalidate = _forwarded(Store.invalidate)
    invalidate_tag = _forwarded(Store.invalidate_tag)
    delete = _forwarded(Store.delete)
    read_now = _forwarded(ReadsInline.read_now)
    read_in_thread = _forwarded(ReadsInThreads.read_in_thread)
    entries = _forwarded(ListsEntries.entries)
    walk = _forwarded(ListsEntries.walk)
    evict = _forwarded(EvictsEntries.evict)
    stats = _forwarded(CountsEntries.stats)
    listen = _forwarded(PushesChanges.listen)
    before_evicting = _forwarded(LivesInProcess.before_evicting)
