"""A store around another one: what it changes, it overrides; the rest passes through.

Nothing of what a store means may live here: that is `contract.py`.
"""

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from functools import partial
from typing import Any, TypeVar, cast

from stillfresh.stores.channel import Channel, Tell
from stillfresh.stores.contract import Entry, Record, Store

T = TypeVar("T")
Method = TypeVar("Method", bound=Callable[..., object])


def _forwarded(method: Method) -> Method:
    name = method.__name__

    async def forwarded(self: "WrappedStore", *args: Any, **options: Any) -> object:  # noqa: ANN401
        return await self.step(name, partial(getattr(self.inner, name), *args, **options))

    return cast("Method", forwarded)


class WrappedStore(Store):
    """Another store, `inner`; every method that is awaited passes through `step`.

    A subclass overrides `step`, or the methods that it changes.
    """

    def __init__(self, inner: Store) -> None:
        self.inner = inner
        for capability in Store.__annotations__:
            setattr(self, capability, getattr(inner, capability))

    async def step(self, name: str, work: Callable[[], Awaitable[T]]) -> T:
        """`work` calls the method of that name of the store inside."""
        del name
        return await work()

    def read_now(
        self, kind: str, ids: Sequence[str], known: Mapping[str, str] | None = None
    ) -> dict[str, Record]:
        return self.inner.read_now(kind, ids, known)

    def before_evicting(self, kind: str, keeps: Callable[[str], bool]) -> None:
        self.inner.before_evicting(kind, keeps)

    def walk(self, kind: str) -> AsyncIterator[list[Entry]]:
        return self.inner.walk(kind)

    def listen(self, tell: Tell) -> AbstractAsyncContextManager[Channel]:
        return self.inner.listen(tell)

    open = _forwarded(Store.open)
    close = _forwarded(Store.close)
    read = _forwarded(Store.read)
    acquire = _forwarded(Store.acquire)
    publish = _forwarded(Store.publish)
    renew = _forwarded(Store.renew)
    release = _forwarded(Store.release)
    invalidate = _forwarded(Store.invalidate)
    invalidate_tag = _forwarded(Store.invalidate_tag)
    delete = _forwarded(Store.delete)
    evict = _forwarded(Store.evict)
    stats = _forwarded(Store.stats)
    entries = _forwarded(Store.entries)
