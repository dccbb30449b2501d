"""From what a declaration says to a checked `Spec`: each mistake names the resource and the option.

Pure: values in, a Spec out, or a `ConfigError`.
"""

from collections.abc import Callable, Coroutine, Hashable, Mapping, Sequence
from typing import Any, TypeVar

from stillfresh.durations import Duration, seconds
from stillfresh.engine.codec import Codec
from stillfresh.engine.rules import Terms, absent_believed_for
from stillfresh.engine.spec import Spec
from stillfresh.errors import ConfigError, shown
from stillfresh.freshness import Policy

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


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
    if not isinstance(number, int) or isinstance(number, bool) or number < 1:
        raise ConfigError(
            f"{kind}: {option} must be a whole number of 1 or more, not {shown(number)}"
        )
    return number
