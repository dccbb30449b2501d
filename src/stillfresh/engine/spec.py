"""What a resource was declared to be, checked, and what all resources of an open cache share."""

import asyncio
import contextvars
from collections.abc import Awaitable, Callable, Coroutine, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from stillfresh.checks import is_whole
from stillfresh.clock import Clock
from stillfresh.durations import Duration, seconds
from stillfresh.engine.codec import Codec
from stillfresh.engine.keys import checked_tags
from stillfresh.engine.model import Loaded, OwnTerms
from stillfresh.engine.rules import Terms, absent_believed_for
from stillfresh.errors import ConfigError, shown
from stillfresh.freshness import Policy
from stillfresh.stores.contract import Record, Store

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


@dataclass(slots=True)
class Spec(Generic[K, V]):
    """A resource as it was declared; its terms may change while it runs (C1)."""

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
        """E17: what a caller of `put` leaves out is the resource's; a value's own terms win."""
        if not terms:
            return value
        own: dict[str, Any] = {"fresh_for": self.terms.policy.fresh_for, **terms}
        if isinstance(value, Loaded):
            given = {name: getattr(value, name) for name in OwnTerms.__annotations__}
            own |= {name: it for name, it in given.items() if it is not None}
            value = value.value
        return Loaded(value, **own)

    def possible_tags(self, key: K) -> tuple[str | None, ...]:
        """E8: the key's tags; None among them: any tag, since their function failed."""
        try:
            return self.tags_of(key)
        except Exception:  # noqa: BLE001 (a user's function may raise anything)
            return (None,)


def spec_of(
    kind: str,
    load: Callable[[list[K]], Coroutine[Any, Any, Mapping[K, Any]]],
    codec: Codec[V],
    tags: Callable[[K], Sequence[str]] | None,
    *,
    fresh_for: Duration,
    stale_for: Duration,
    error_for: Duration,
    absent_for: Duration | None,
    jitter: float,
    max_batch: int,
    concurrency: int,
    max_entries: int,
    memory_for: Duration,
    lease_for: Duration,
    load_timeout: Duration,
) -> Spec[K, V]:
    """What a declaration says as a `Spec`; each mistake names the resource and the option."""
    policy = Policy(
        seconds(fresh_for, name=f"{kind}: fresh_for"),
        seconds(stale_for, name=f"{kind}: stale_for"),
        seconds(error_for, name=f"{kind}: error_for"),
    )
    if absent_for is not None:
        absent_for = seconds(absent_for, name=f"{kind}: absent_for")
    _check(kind, jitter, tags, codec)
    return Spec(
        kind=kind,
        load=load,
        codec=codec,
        terms=Terms(policy, absent_believed_for(policy.fresh_for, absent_for), jitter),
        tags=tags,
        max_batch=_count(kind, "max_batch", max_batch),
        concurrency=_count(kind, "concurrency", concurrency),
        max_entries=_count(kind, "max_entries", max_entries),
        memory_for=seconds(memory_for, name=f"{kind}: memory_for"),
        lease_for=seconds(lease_for, name=f"{kind}: lease_for", positive=True),
        load_timeout=seconds(load_timeout, name=f"{kind}: load_timeout", positive=True),
    )


def _check(kind: str, jitter: float, tags: object, codec: object) -> None:
    if not isinstance(jitter, float | int) or not 0 <= jitter < 1:
        raise ConfigError(f"{kind}: jitter is a share from 0 to below 1, not {shown(jitter)}")
    if tags is not None and not callable(tags):
        raise ConfigError(f"{kind}: tags is a function of the key, not {shown(tags)}")
    if not callable(getattr(codec, "encode", None)) or not callable(getattr(codec, "decode", None)):
        raise ConfigError(f"{kind}: codec has encode and decode, which {shown(codec)} has not")


def _count(kind: str, option: str, number: int) -> int:
    if not is_whole(number, 1):
        raise ConfigError(
            f"{kind}: {option} must be a whole number of 1 or more, not {shown(number)}"
        )
    return number


@dataclass(frozen=True, slots=True)
class Runtime:
    """What all resources of a cache share while it is open."""

    loop: asyncio.AbstractEventLoop
    store: Store
    clock: Clock
    read_now: Callable[[str, Sequence[str], Mapping[str, str]], dict[str, Record]] | None
    """Reads on the spot, where the store can."""
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
