"""What a resource was declared to be, and what all resources of an open cache share."""

import asyncio
import contextvars
from collections.abc import Awaitable, Callable, Coroutine, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeAlias, TypeVar

from stillfresh.clock import Clock
from stillfresh.engine.codec import Codec
from stillfresh.engine.keys import checked_tags
from stillfresh.engine.model import Loaded, OwnTerms
from stillfresh.engine.rules import Terms, jittered, own_policy
from stillfresh.stores.contract import Copy, Record, Store

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


@dataclass(frozen=True, slots=True)
class Spec(Generic[K, V]):
    """A resource as it was declared."""

    kind: str
    load: Callable[[list[K]], Coroutine[Any, Any, Mapping[K, Any]]]
    codec: Codec[V]
    terms: Terms
    tags: Callable[[K], Sequence[str]] | None
    max_batch: int
    concurrency: int
    max_entries: int
    memory_for: float
    lease_for: float
    load_timeout: float
    by_id: bool = True
    """A key that is made of its id alone can be loaded."""

    def tags_of(self, key: K) -> tuple[str, ...]:
        """E8: the key's tags, or what their function raised, or what is wrong with them."""
        return () if self.tags is None else checked_tags(self.kind, self.tags(key))

    def with_terms(self, value: V | Loaded[V], terms: OwnTerms) -> V | Loaded[V]:
        """E17: what a caller of `put` leaves out is the resource's."""
        if not terms:
            return value
        own: OwnTerms = {"fresh_for": self.terms.policy.fresh_for, **terms}
        return Loaded(value, **own)  # type: ignore[arg-type]

    def kept(
        self, value: object, generation: str, sent: float, dice: Callable[[], float]
    ) -> tuple[Copy, V]:
        """A copy of the value, and the value through the codec and back, so that all see the same.

        What the codec raises goes to the caller.
        """
        policy = self.terms.policy
        if isinstance(value, Loaded):
            policy, value = own_policy(self.terms, value), value.value
        if self.terms.jitter:
            policy = jittered(policy, self.terms.jitter, dice())
        data = self.codec.encode(value)  # type: ignore[arg-type]  # an annotation is a promise
        return Copy(generation, sent, policy, data), self.codec.decode(data)

    def possible_tags(self, key: K) -> tuple[str | None, ...]:
        """E8: the key's tags; None among them: any tag, since their function failed."""
        try:
            return self.tags_of(key)
        except Exception:  # noqa: BLE001 (a user's function may raise anything)
            return (None,)


ReadLagging: TypeAlias = Callable[
    [str, Sequence[str], Mapping[str, str], float], Awaitable[dict[str, Record]]
]


@dataclass(frozen=True, slots=True)
class Runtime:
    """What all resources of a cache share while it is open."""

    loop: asyncio.AbstractEventLoop
    store: Store
    clock: Clock
    read_now: Callable[[str, Sequence[str], Mapping[str, str]], dict[str, Record]] | None
    """Reads on the spot, where the store can."""
    read_lagging: ReadLagging | None
    """Reads for less, where the store can."""
    sleep: Callable[[float], Awaitable[object]]
    dice: Callable[[], float]
    spawn: Callable[[Coroutine[Any, Any, Any], contextvars.Context | None], asyncio.Task[Any]]
    """A task that the cache waits for, and cancels when it closes."""
    child: Callable[[Coroutine[Any, Any, Any], contextvars.Context | None], asyncio.Task[Any]]
    """A task that the cache waits for, and its parent cancels."""
    step: Callable[[Coroutine[Any, Any, Any]], asyncio.Task[Any]]
    """As `child`, and the end of the loop does not cut it off."""
    finish: Callable[[Coroutine[Any, Any, None]], Awaitable[None]]
    """Awaits something that closing the cache lets finish."""
    context: contextvars.Context
    grace: float
    """Seconds in which all this has to end when the cache closes."""


class Owner(Protocol):
    """The cache that a resource belongs to."""

    async def runtime(self) -> Runtime:
        """Opens the cache if it was never opened, or its loop ended; NotOpen if it was closed."""

    def check_not_closed(self) -> None:
        """NotOpen if it was closed, and is not to be opened by a read."""
