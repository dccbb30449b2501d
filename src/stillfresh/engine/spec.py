"""What a resource was declared to be, checked."""

from collections.abc import Callable, Coroutine, Hashable, Mapping, Sequence
from typing import Any, Generic, TypeVar

from stillfresh.checks import checked_whole
from stillfresh.durations import Duration, seconds
from stillfresh.engine.codec import Codec
from stillfresh.engine.keys import checked_tags
from stillfresh.engine.model import Loaded, OwnTerms
from stillfresh.engine.rules import Terms, absent_believed_for
from stillfresh.errors import ConfigError, shown
from stillfresh.freshness import Policy

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class Spec(Generic[K, V]):
    """A resource as it was declared; its terms may change while it runs (C1).

    Each mistake names the resource and the option.
    """

    def __init__(
        self,
        kind: str,
        load: Callable[[list[K]], Coroutine[Any, Any, Mapping[K, Any]]],
        codec: Codec[V],
        tags: Callable[[K], Sequence[str]] | None,
        terms: Terms,
        *,
        max_batch: int,
        concurrency: int,
        max_entries: int,
        memory_for: Duration,
        lease_for: Duration,
        load_timeout: Duration,
        by_id: bool = True,
    ) -> None:
        if tags is not None and not callable(tags):
            raise ConfigError(f"{kind}: tags is a function of the key, not {shown(tags)}")
        if not all(callable(getattr(codec, name, None)) for name in ("encode", "decode")):
            raise ConfigError(f"{kind}: codec has encode and decode, which {shown(codec)} has not")
        self.kind = kind
        self.load = load
        self.codec = codec
        self.tags = tags
        self.terms = terms
        self.max_batch = checked_whole(f"{kind}: max_batch", max_batch)
        self.concurrency = checked_whole(f"{kind}: concurrency", concurrency)
        self.max_entries = checked_whole(f"{kind}: max_entries", max_entries)
        self.memory_for = seconds(memory_for, name=f"{kind}: memory_for")
        self.lease_for = seconds(lease_for, name=f"{kind}: lease_for", positive=True)
        self.load_timeout = seconds(load_timeout, name=f"{kind}: load_timeout", positive=True)
        self.by_id = by_id
        """A key that is made of its id alone can be loaded."""

    def tags_of(self, key: K) -> tuple[str, ...]:
        """E8: the key's tags, or what their function raised, or what is wrong with them."""
        return () if self.tags is None else checked_tags(self.kind, self.tags(key))

    def with_terms(self, value: V | Loaded[V], terms: OwnTerms) -> V | Loaded[V]:
        """E17: what a caller of `put` leaves out is the resource's; a value's own terms win."""
        if not terms:
            return value
        for unknown in terms.keys() - OwnTerms.__annotations__.keys():
            names = ", ".join(OwnTerms.__annotations__)
            raise TypeError(f"{self.kind}: there is no term {unknown!r}; there are {names}")
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


def terms_of(  # noqa: PLR0917 (the order of `Policy`, and then what counts beside it)
    kind: str,
    fresh_for: Duration,
    stale_for: Duration,
    error_for: Duration,
    absent_for: Duration | None,
    jitter: float = 0.0,
) -> Terms:
    """The terms that a declaration says."""
    policy = Policy(
        seconds(fresh_for, name=f"{kind}: fresh_for"),
        seconds(stale_for, name=f"{kind}: stale_for"),
        seconds(error_for, name=f"{kind}: error_for"),
    )
    if absent_for is not None:
        absent_for = seconds(absent_for, name=f"{kind}: absent_for")
    if not isinstance(jitter, float | int) or not 0 <= jitter < 1:
        raise ConfigError(f"{kind}: jitter is a share from 0 to below 1, not {shown(jitter)}")
    return Terms(policy, absent_believed_for(policy.fresh_for, absent_for), jitter)
