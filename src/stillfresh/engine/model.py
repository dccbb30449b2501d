"""The data that goes in and out of the engine: answers, and results of loaders.

Pure data. A clock is read only for `Answer.age`, and for the answer of a failure.
"""

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from contextvars import Context
from dataclasses import dataclass, field
from enum import Enum, StrEnum
from typing import Any, Final, Generic, Literal, Protocol, TypeAlias, TypedDict, TypeVar

from msgspec import Struct

from stillfresh.durations import Duration, seconds
from stillfresh.errors import ConfigError, LoadFailed, StillfreshError, shown
from stillfresh.freshness import Policy, Verdict, age_of
from stillfresh.stores.contract import Mark
from stillfresh.stores.versions import NO_VERSION, Version, packed_version

V = TypeVar("V")
T = TypeVar("T")

MAX_TAGS: Final = 100_000
"""The most bytes that all tags of one key may have: DynamoDB keeps them in one item."""


NO_TIMES: Final = Policy(0)
"""The policy of an answer that was made from no copy."""


class Origin(StrEnum):
    """Where an answer came from."""

    MEMORY = "memory"
    """From the memory of this process."""
    STORE = "store"
    """From the store."""
    LOADED = "loaded"
    """From a load that this call started."""
    ANOTHER = "another"
    """From a load that another task or process had started."""


HITS: Final = (Origin.MEMORY, Origin.STORE)
"""The origins of answers that needed no load."""


class Answer(Struct, Generic[V], eq=False):
    """A value and how fresh it is. Callers share it: change neither the answer nor the value."""

    value: V
    """The value; None if `found` is False."""
    found: bool
    """False if the upstream does not have the key, or (with `error`) if its load failed."""
    verdict: Verdict
    """How fresh the copy was when it was served."""
    fetched_at: float
    """When the loader was called for this copy, in seconds since 1970."""
    origin: Origin
    """Where the answer came from."""
    clock: Callable[[], float]
    error: LoadFailed | None = None
    """The error of the last load, if it failed and the copy is old; else None.

    It stays until a load succeeds, a value is put, or the entry is deleted, in every process.
    """
    unverified: bool = False
    """True if the store did not say that it is still valid: it is from memory, or of a load that
    had begun for another caller, and the store did not answer."""
    policy: Policy = NO_TIMES
    """The times of the copy: how long it is fresh, and how long it is served after that."""
    mark: Mark = Mark.NONE
    """Whether the copy was invalidated: NONE, SOFT or HARD."""

    @property
    def age(self) -> float:
        """Seconds since `fetched_at`, at the moment you ask."""
        return age_of(self.fetched_at, self.clock())

    def __repr__(self) -> str:
        what = repr(self.value) if self.found else "absent"
        failed = f" error={self.error}" if self.error else ""
        source = f"{self.origin}, unverified" if self.unverified else self.origin
        return f"<Answer {what} {self.verdict} age={self.age:.3g}s from {source}{failed}>"

    def with_error(self, error: LoadFailed) -> "Answer[V]":
        """The same answer with an error."""
        return Answer(
            self.value,
            self.found,
            self.verdict,
            self.fetched_at,
            self.origin,
            self.clock,
            error,
            self.unverified,
            self.policy,
            self.mark,
        )


class EntryAnswer(Answer[V], gc=False, eq=False):
    """The answer that an entry keeps, with a value that leads nowhere and without an error.

    There may be very many, so the garbage collector does not look at them. An error would lead to a
    traceback, whose frames may lead back to the answer; and so may a value, if it is an object that
    the collector tracks.
    """


@dataclass(slots=True, eq=False)
class Span:
    """One load, step of the store, or render; the last five fields are set when it has ended."""

    what: Literal["load", "store", "render"]
    kind: str
    """The kind of the resource; empty for a step that concerns all kinds."""
    keys: Sequence[object]
    """The keys of a load, the ids of a step, the path of a page."""
    step: str
    """Which step of the store: `read`, `acquire`, `publish`, …; empty for a load and a render."""
    callers: tuple[Context, ...]
    """Copies of the callers' contexts, for work that runs in none of them."""
    is_waited: bool
    """False if no caller waits, as in a background refresh."""
    seconds: float = field(default=0.0, init=False)
    """How long the loader, the step or the app took. A load's span covers its lease as well."""
    verdict: Verdict | None = field(default=None, init=False)
    """The worst verdict of a load's keys: GONE if one failed.

    Of a render: GONE if the page is not stored. None for a store step, and if
    the work was cancelled or the app raised.
    """
    origin: Origin | None = field(default=None, init=False)
    """LOADED; or ANOTHER if another process held the lease and this one waited."""
    status: int | None = field(default=None, init=False)
    """The app's status, for a render."""
    error: BaseException | None = field(default=None, init=False)
    """The error of the loader, the store or the app."""


Hook: TypeAlias = Callable[[Span], AbstractContextManager[object]]
"""The type of `hooks=`: called around each load, store step and render, never for a hit."""


class OwnTerms(TypedDict, total=False):
    """The times that one value may have of its own; one left out is the resource's."""

    fresh_for: Duration
    stale_for: Duration
    error_for: Duration


def utf8_size(resource: str, what: str, text: str) -> int:
    """The size in bytes."""
    try:
        return len(text.encode())
    except UnicodeEncodeError:
        why = f"{resource}: the {what} {shown(text)} cannot be written as UTF-8"
        raise ConfigError(why) from None


def checked_tags(resource: str, tags: object) -> tuple[str, ...]:
    """Return the tags without repeats. Raise ConfigError for one that cannot be used."""
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
    return listed if len(sizes) == len(listed) else tuple(sizes)


class Loaded(Generic[T]):
    """A value with terms or tags of its own, returned by a loader or given to `put`.

    Terms that are left out are the resource's. `tags` are added to those that the key has. Without
    `tags` the entry keeps the tags of its last load; `[]` removes them. `version` is an integer or
    a text that grows with each change of the value at its source: a put of a smaller version is not
    stored. Without `version` the entry keeps the one that it has.
    """

    __slots__ = ("error_for", "fresh_for", "stale_for", "tags", "value", "version", "version_form")

    def __init__(
        self,
        value: T,
        *,
        fresh_for: Duration | None = None,
        stale_for: Duration | None = None,
        error_for: Duration | None = None,
        tags: Iterable[str] | None = None,
        version: Version | None = None,
    ) -> None:
        self.value = value
        self.version = version
        self.version_form = NO_VERSION if version is None else packed_version(version)
        self.tags = None if tags is None else checked_tags("Loaded", tags)
        self.fresh_for = None if fresh_for is None else seconds(fresh_for, name="fresh_for")
        self.stale_for = None if stale_for is None else seconds(stale_for, name="stale_for")
        self.error_for = None if error_for is None else seconds(error_for, name="error_for")


class Private(Struct, Generic[T], frozen=True):
    """A value only for the caller that brought the loader. Other callers find the key absent.

    `is_noted`: the store keeps the absence, so later callers see it without a load.
    """

    value: T
    is_noted: bool = True


class Instead(Enum):
    """What an update's function may return in place of a value."""

    LEAVE = 0
    """Store nothing."""
    DELETE = 1
    """Delete the entry."""


LEAVE: Final = Instead.LEAVE
"""Return it from the function given to `update`: store nothing."""
DELETE: Final = Instead.DELETE
"""Return it from the function given to `update`: delete the entry."""


class Keep(Enum):
    """Stands for the value that is stored."""

    KEEP = 0


KEEP: Final = Keep.KEEP
"""The value of a `Loaded` that is put to give the stored value new times."""


class Stored(Struct, frozen=True, eq=False):
    """What a put did. Two are equal if the store did the same; the token does not count."""

    stored: bool
    """False if a copy with a greater version stays, if this process invalidated the key after the
    call, or inside `bypassed()`."""
    version: Version | None = None
    """The version of the copy that is stored now; None if it has none."""
    token: str = ""
    """For `get(at_least=…)`: the answer is no older than this put. "" if nothing was stored.

    It names the cache that made the change, not the put: two puts may return the same text."""

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Stored):
            return NotImplemented
        return (self.stored, self.version) == (other.stored, other.version)

    def __hash__(self) -> int:
        return hash((self.stored, self.version))


class RefreshEnd(StrEnum):
    """How the refresh of one key ended."""

    STORED = "stored"
    """The store has the new copy. This process loaded it, or another one did meanwhile."""
    SUPERSEDED = "superseded"
    """The entry was changed during the load, so the copy was not stored. The answer is STALE."""
    UNSTORED = "unstored"
    """The store did not confirm the copy, or the call was inside `bypassed()`."""
    FAILED = "failed"
    """The load failed: the answer has an `error`."""


class Refreshed(Struct, Generic[V], frozen=True):
    """What a refresh of one key did."""

    answer: Answer[V]
    """The new answer; if the load failed, what is left, with `error`."""
    end: RefreshEnd


class Amended(Struct, Generic[T], frozen=True):
    """Return it from the function given to `update`: a value with the age and times of the copy.

    If there is no copy, or it was invalidated, the value is stored like any other.
    """

    value: T


class RetryAfter(StillfreshError):
    """Raised by a loader, or returned for a key: it failed, and is not tried again for `pause`.

    `message` is shown in errors and logs.
    """

    _plain = True

    def __init__(self, pause: Duration, message: str = "") -> None:
        self.seconds = seconds(pause, name="RetryAfter")
        super().__init__(message or f"asked to wait {self.seconds:g} s")


class Dropped(StillfreshError):
    """Returned for a key by a loader that has nothing to store and did not fail.

    For example, no caller waits any more, or a site answered with an old page of its own.
    Nothing is published, and no cooldown begins.
    """


class Codec(Protocol[V]):
    """The type of `codec=`: turns values into bytes and back."""

    def encode(self, value: V, /) -> bytes:
        """Return the value as bytes. An error means that the value cannot be stored."""

    def decode(self, data: bytes, /) -> V:
        """Return the value that `encode` was given. If this raises, the value is loaded again."""


class CodecMaker(ABC):
    """Returned by `zstd()` and `encrypted()`. It makes a codec for each resource that names it."""

    @abstractmethod
    def make(self, resource: str, chosen: Callable[[], Codec[Any]]) -> Codec[Any]:
        """Return the codec. `chosen` makes the one that the resource would have without it."""


Outcome = Answer[V] | LoadFailed
"""The result of a load for one key."""
Read = Answer[V] | Private[Any] | LoadFailed
"""What a caller with its own loader receives: a stored answer, a private value, or an error."""
OwnLoad = Callable[[], Awaitable[object]] | Callable[[], object]
"""A loader that a caller brings for one key. It returns a value, a `Loaded` or a `Private`.

An async function, or a plain one if the resource's loaders run in threads.
"""


def answered(failure: LoadFailed, clock: Callable[[], float]) -> Answer[Any]:
    """A failure as an answer with `error`."""
    return Answer(None, False, Verdict.GONE, clock(), Origin.LOADED, clock, failure)  # noqa: FBT003


def all_answered(
    outcomes: Mapping[T, Outcome[V]], keys: Iterable[T], clock: Callable[[], float]
) -> dict[T, Answer[V]]:
    return {
        key: outcome if isinstance(outcome := outcomes[key], Answer) else answered(outcome, clock)
        for key in keys
    }


def left_of(known: Outcome[V] | None, failure: LoadFailed, clock: Callable[[], float]) -> Answer[V]:
    """The answer after a failure: the copy that can still be shown, if any, with the error."""
    if known is None or isinstance(known, LoadFailed):
        return answered(known or failure, clock)
    return known if known.error is not None else known.with_error(failure)
