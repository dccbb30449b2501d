"""What goes in and out of the engine: answers, and what a loader may say (E8).

Pure data: no clock is read here but through an answer's own `age`.
"""

from collections.abc import Awaitable, Callable, Iterable, Mapping
from enum import Enum, StrEnum
from typing import Any, Final, Generic, Protocol, TypedDict, TypeVar, cast

from msgspec import Struct
from msgspec.structs import replace

from stillfresh.durations import Duration, seconds
from stillfresh.errors import ConfigError, LoadFailed, StillfreshError, shown
from stillfresh.freshness import Verdict, age_of

V = TypeVar("V")
T = TypeVar("T")

MAX_TAGS: Final = 100_000
"""Bytes of all tags of a key: a store may have to keep them in one row (DynamoDB's are 400 KB)."""


class Origin(StrEnum):
    """Where an answer came from."""

    MEMORY = "memory"
    STORE = "store"
    LOADED = "loaded"
    """By this call's own load."""
    ANOTHER = "another"
    """By a load that another task or another process had begun."""


HITS: Final = (Origin.MEMORY, Origin.STORE)
"""Where an answer comes from that needed no load."""


class Answer(Struct, Generic[V], eq=False):
    """A value and how fresh it is. Shared between callers: treat it, and the value, as frozen."""

    value: V
    """None where `found` is False."""
    found: bool
    """False: upstream says that it does not exist, or (with `error`) nobody could say."""
    verdict: Verdict
    """As it was when served."""
    fetched_at: float
    origin: Origin
    clock: Callable[[], float]
    error: LoadFailed | None = None
    """Why this is not newer: the last refresh failed."""
    unverified: bool = False
    """E26: from memory, since the store could not be asked whether it still holds."""

    @property
    def age(self) -> float:
        """Seconds since the copy was asked for, at the moment you look."""
        return age_of(self.fetched_at, self.clock())

    def __repr__(self) -> str:
        what = repr(self.value) if self.found else "absent"
        failed = f" error={self.error}" if self.error else ""
        source = f"{self.origin}, unverified" if self.unverified else self.origin
        return f"<Answer {what} {self.verdict} age={self.age:.3g}s from {source}{failed}>"


class OwnTerms(TypedDict, total=False):
    """E8, E17: the terms that one entry may have of its own."""

    fresh_for: Duration
    stale_for: Duration
    error_for: Duration


def utf8_size(resource: str, what: str, text: str) -> int:
    """Bytes."""
    try:
        return len(text.encode())
    except UnicodeEncodeError:
        said = f"{resource}: the {what} {shown(text)} cannot be written as UTF-8"
        raise ConfigError(said) from None


def checked_tags(resource: str, tags: object) -> tuple[str, ...]:
    """E8: the tags of one key, each once; one alone may be given as it is."""
    try:
        listed = (tags,) if isinstance(tags, str) else tuple(tags)  # type: ignore[arg-type]
    except TypeError:
        raise ConfigError(f"{resource}: tags are a list of text, not {shown(tags)}") from None
    for tag in listed:
        if not isinstance(tag, str):
            raise ConfigError(f"{resource}: a tag is text, not {shown(tag)}")
    sizes = {tag: utf8_size(resource, "tag", tag) for tag in listed}
    if (size := sum(sizes.values())) > MAX_TAGS:
        raise ConfigError(
            f"{resource}: the tags of a key are {size:,} bytes long, of {MAX_TAGS:,} allowed "
            f"({shown(listed[0])})"
        )
    return tuple(sizes)


class Loaded(Generic[T]):
    """E8: a loader's value with terms of its own; what is not given is the resource's.

    I26: `tags` are those that only the loader knows, beside the key's own. Without them the entry
    keeps those that it had.
    """

    __slots__ = ("error_for", "fresh_for", "stale_for", "tags", "value")

    def __init__(
        self,
        value: T,
        *,
        fresh_for: Duration | None = None,
        stale_for: Duration | None = None,
        error_for: Duration | None = None,
        tags: Iterable[str] | None = None,
    ) -> None:
        self.value = value
        self.tags = None if tags is None else checked_tags("Loaded", tags)
        self.fresh_for = None if fresh_for is None else seconds(fresh_for, name="fresh_for")
        self.stale_for = None if stale_for is None else seconds(stale_for, name="stale_for")
        self.error_for = None if error_for is None else seconds(error_for, name="error_for")


class Private(Struct, Generic[T], frozen=True):
    """A loader's value for the caller that brought the loader; the others find it absent.

    `is_noted`: the store keeps the absence, so that later callers need no load to know of it.
    """

    value: T
    is_noted: bool = True


class Instead(Enum):
    """What the change of an update may return in place of a value."""

    LEAVE = 0
    """Leave it as it is."""
    DELETE = 1
    """Forget it."""


LEAVE: Final = Instead.LEAVE
DELETE: Final = Instead.DELETE


class Amended(Struct, Generic[T], frozen=True):
    """A change's value that is as old as the copy it is made from, and on the same terms.

    Of an invalidated copy, or of none, it is a value like any other.
    """

    value: T


class RetryAfter(StillfreshError):
    """E7: raised (or returned for an id) by a loader that was told when to ask again."""

    def __init__(self, pause: Duration, message: str = "") -> None:
        self.seconds = seconds(pause, name="RetryAfter")
        super().__init__(message or f"asked to wait {self.seconds:g} s")


class Dropped(StillfreshError):
    """Returned for an id by a loader that stopped since nobody wants its answer any more.

    Nothing is published and no cooldown begins: it is no failure of the upstream.
    """


class Codec(Protocol[V]):
    """What `codec=` takes. `decode` may raise anything for bytes that it does not know."""

    def encode(self, value: V, /) -> bytes:
        """The value as bytes."""

    def decode(self, data: bytes, /) -> V:
        """The value that `encode` was given."""


Outcome = Answer[V] | LoadFailed
Read = Answer[V] | Private[Any] | LoadFailed
"""What a caller with a loader of its own is told: stored, private, or failed."""
OwnLoad = Callable[[], Awaitable[object]] | Callable[[], object]
"""A loader that a caller brings for one key: its value, a `Loaded`, or a `Private`.

An async function, or a plain one if the resource's loaders run in threads (E20).
"""


def answered(outcome: Outcome[V], clock: Callable[[], float]) -> Answer[V]:
    """A failure as an answer that says why there is none."""
    if not isinstance(outcome, LoadFailed):
        return outcome
    now, nothing = clock(), cast("V", None)
    return Answer(nothing, False, Verdict.GONE, now, Origin.LOADED, clock, outcome)  # noqa: FBT003


def all_answered(
    outcomes: Mapping[T, Outcome[V]], clock: Callable[[], float]
) -> dict[T, Answer[V]]:
    return {
        key: outcome if isinstance(outcome, Answer) else answered(outcome, clock)
        for key, outcome in outcomes.items()
    }


def left_of(known: Outcome[V] | None, failure: LoadFailed, clock: Callable[[], float]) -> Answer[V]:
    """What is left to show after a failure, and the failure with it."""
    if known is None or isinstance(known, LoadFailed):
        return answered(known or failure, clock)
    return known if known.error is not None else replace(known, error=failure)
