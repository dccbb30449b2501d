"""Watch: some keys of a resource, kept fresh while they are used (`with prices.watch("sku-1")`).

The object that callers hold. `watcher.py` keeps the keys fresh.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Collection, Hashable
from dataclasses import dataclass
from inspect import iscoroutinefunction
from typing import TYPE_CHECKING, Generic, Self, TypeVar

from stillfresh.engine.model import Answer
from stillfresh.errors import ConfigError, StillfreshError, shown

if TYPE_CHECKING:
    from stillfresh.engine.watcher import Watcher

logger = logging.getLogger(__name__)

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


@dataclass(frozen=True, slots=True)
class Update(Generic[K, V]):
    """A new copy of a watched key."""

    key: K
    answer: Answer[V]


class Watch(Generic[K, V]):
    """Keys of a resource that are kept fresh inside `with`; iterate over it for new copies.

    If several copies of one key arrive before you look, you receive the newest.
    """

    def __init__(
        self,
        watcher: "Watcher[K, V]",
        keys: Collection[K],
        *,
        tell: Callable[[Update[K, V]], object] | None = None,
        fail: Callable[[Update[K, V]], object] | None = None,
        end: Callable[[], object] | None = None,
    ) -> None:
        self._watcher = watcher
        watcher.core.names.check(keys)
        self._keys = dict.fromkeys(keys)
        for name, listener in (("tell", tell), ("fail", fail), ("end", end)):
            _check_plain(name, listener)
        self._tell = tell
        self._fail = fail
        self._end = end
        self.hears_failures = fail is not None
        self._news: dict[K, Update[K, V]] = {}
        self._changed = asyncio.Event()
        self.is_open = self._was_entered = False

    def add(self, *keys: K) -> None:
        """Watch more keys."""
        self._watcher.core.names.check(keys)
        if self.is_open:
            self._watcher.check_loop()
        self._keys.update(dict.fromkeys(keys))
        if self.is_open:
            self._watcher.follow(self, keys, came=True)

    def discard(self, *keys: K) -> None:
        """Stop watching these keys."""
        for known in (self._keys, self._news) if self._news else (self._keys,):
            for key in keys:
                known.pop(key, None)
        if self.is_open:
            self._watcher.follow(self, keys)

    def has(self, key: K) -> bool:
        """Return True if this key is watched now."""
        return self.is_open and key in self._keys

    @property
    def keys(self) -> tuple[K, ...]:
        """The keys that are watched."""
        return tuple(self._keys)

    def close(self) -> None:
        """Stop watching. A loop over the watch ends."""
        if self.is_open:
            self.is_open = False
            self._watcher.follow(self, self.keys)
            if self._end is not None:
                _call(self._end)
        self._changed.set()

    def tell(self, update: Update[K, V]) -> None:
        """Pass an update on, or keep it until somebody iterates. Does nothing once closed."""
        if self.is_open and self._tell is not None:
            _call(self._tell, update)
        elif self.is_open:
            self._news[update.key] = update
            self._changed.set()

    def tell_failure(self, update: Update[K, V]) -> None:
        """Report that a refresh failed: what is left, with its error."""
        if self.is_open and self._fail is not None:
            _call(self._fail, update)

    def __enter__(self) -> Self:
        if self._was_entered:
            raise StillfreshError("this watch was entered already; make another one")
        self._watcher.check_loop()
        self.is_open = self._was_entered = True
        self._watcher.follow(self, self.keys, came=True)
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __aiter__(self) -> AsyncIterator[Update[K, V]]:
        return self

    async def __anext__(self) -> Update[K, V]:
        while not self._news:
            if not self.is_open:
                raise StopAsyncIteration
            self._changed.clear()
            await self._changed.wait()
        return self._news.pop(next(iter(self._news)))


def _call(listener: Callable[..., object], *arguments: object) -> None:
    """Call a listener. An error is logged, and the other listeners are still called."""
    try:
        listener(*arguments)
    except Exception:
        logger.exception("listener %r failed on %r", listener, arguments)


def _check_plain(name: str, listener: object) -> None:
    """Refuse an async listener: nobody would await it."""
    if listener is None:
        return
    if not callable(listener) or any(map(iscoroutinefunction, (listener, listener.__call__))):
        instead = "iterate over the watch" if name == "tell" else "start a task of your own in it"
        raise ConfigError(
            f"{name}: takes a plain function, not {shown(listener)}; to await, {instead}"
        )
