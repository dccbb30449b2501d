"""Read your writes: tokens of changes, and reads that accept nothing older than such a change.

A token is a short text that says which changes its bearer has seen. A caller that changes an entry
gets one, and hands it to its next read, in this process or in another one. Two kinds of changes are
in a token:

- *Makers*: the caches that made changes. Each opening of a cache in a process is one maker. A
  change by this very cache is in its memory already, since a change drops the entry from memory
  before and after its step. For a change by any other maker, memory is not enough: the store is
  asked. It had the change before the token existed, so its answer is no older. No position in the
  store is needed for that, and a forged token has nothing to lie about: at worst its bearer's reads
  ask the store.
- *Positions* of commits in a database with an outbox, by the name of its consumer. The store learns
  of such a commit only when the consumer has delivered it, so a read waits for that.

A read with a token differs from other reads in four ways. Memory answers it only if all changes are
its own. A copy that was invalidated is no answer, not even if loading fails or while it is
refreshed: it may be the one from before the change. A load that runs already may have begun
before the change, so the reader waits for the next one, which finds what the first one stored.

What a loader reads, of its own cache or of another one, is read in the same way, whoever the load
is for. Otherwise a value could be made of a copy that memory has kept too long, or that is being
refreshed, and be stored after the change that concerns both: fresh for everybody, and older than
the change. There is one difference: if no reader with a token waits for the load, memory answers
while the store cannot be asked, so that an outage costs no more loads than without.

`reading` opens a block in which all reads of the task, or of the thread, have a token. While such a
block is open, the public objects look at the context of each read before they answer from memory;
without one, they do not. Nor do they while a loader runs, except those whose memory may lag.
"""

import asyncio
import logging
import re
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from secrets import token_urlsafe
from typing import TYPE_CHECKING, Final

from msgspec import Struct

from stillfresh.engine.work import CURRENT
from stillfresh.errors import ConfigError, LoadTimeout, shown

if TYPE_CHECKING:
    from stillfresh.engine.lifecycle import Lifecycle

FORM: Final = "1"  # the first part of every token
MAKER: Final = "c"
POSITION: Final = "p"
ANY: Final = "*"  # more makers than a token names
MOST_MAKERS: Final = 4
MOST_POSITIONS: Final = 4
MOST_LETTERS: Final = 400  # of a token; a longer one is not looked into
LONGEST_WAIT: Final = 5.0  # seconds that a read waits for an outbox
MAKER_NAME: Final = re.compile(r"[A-Za-z0-9_-]{1,16}|\*", re.ASCII)
POSITION_NAME: Final = re.compile(r"([0-9]{1,20})\.([A-Za-z0-9_.-]{1,60})", re.ASCII)

logger = logging.getLogger(__name__)


class AtLeast(Struct, frozen=True):
    """The changes that a caller has seen: it accepts nothing older."""

    makers: frozenset[str] = frozenset()
    positions: Mapping[str, int] = {}
    """By the name of an outbox consumer: the transaction that it must have delivered."""
    is_of_loader: bool = False
    """Only a loader asks, without a token: memory answers while the store cannot be asked."""

    def is_only_by(self, maker: str) -> bool:
        """True if this maker made all changes, so that its own memory has them."""
        return not self.positions and self.makers == {maker}

    def text(self) -> str:
        """The token; "" if there is no change."""
        parts = [f"{MAKER}.{maker}" for maker in sorted(self.makers)]
        parts += [f"{POSITION}.{at}.{name}" for name, at in sorted(self.positions.items())]
        return "~".join([FORM, *parts]) if parts else ""


ANYTHING: Final = AtLeast(frozenset([ANY]))
"""Some change by somebody: what a token means that cannot be read."""
LOADERS: Final = AtLeast(frozenset([ANY]), is_of_loader=True)
"""What a loader reads must be at least, if no reader with a token waits for it."""


def at_least_of(token: str) -> AtLeast | None:
    """What a token says; None for an empty one. Raises ConfigError if it is not text.

    A token comes from a client. One that cannot be read, or is too long, stands for some change.
    """
    if not isinstance(token, str):
        raise ConfigError(f"at_least: takes a token, which is text, not {shown(token)}")
    if not token:
        return None
    form, *parts = token[: MOST_LETTERS + 1].split("~")
    if len(token) > MOST_LETTERS or form != FORM or not parts:
        return ANYTHING
    makers: set[str] = set()
    positions: dict[str, int] = {}
    for part in parts:
        what, _, text = part.partition(".")
        if what == MAKER and MAKER_NAME.fullmatch(text):
            makers.add(text)
        elif what == POSITION and (match := POSITION_NAME.fullmatch(text)):
            at, name = match.groups()
            positions[name] = max(int(at), positions.get(name, 0))
        else:
            return ANYTHING
    return _bounded(makers, positions)


def joined(first: AtLeast | None, second: AtLeast | None) -> AtLeast | None:
    """All changes of both. Of too many outboxes, those of the first are kept."""
    if first is None or second is None:
        return first or second
    positions = {**first.positions}
    for name, at in second.positions.items():
        positions[name] = max(at, positions.get(name, 0))
    is_of_loader = first.is_of_loader and second.is_of_loader
    return _bounded(first.makers | second.makers, positions, is_of_loader=is_of_loader)


def _bounded(
    makers: set[str] | frozenset[str], positions: Mapping[str, int], *, is_of_loader: bool = False
) -> AtLeast:
    if ANY in makers or len(makers) > MOST_MAKERS:
        makers = {ANY}
    first_positions = dict([*positions.items()][:MOST_POSITIONS])
    return AtLeast(frozenset(makers), first_positions, is_of_loader)


def merge_tokens(*tokens: str) -> str:
    """Return one token for the changes of all these. Empty ones do not count.

    It names at most four outboxes, those of the first tokens.
    """
    merged: AtLeast | None = None
    for token in tokens:
        merged = joined(merged, at_least_of(token))
    return "" if merged is None else merged.text()


def new_maker() -> str:
    """A name that no other cache has, in any process."""
    return token_urlsafe(9)


class Outboxes:
    """The outbox consumers of a cache in this process, which know what they have delivered."""

    def __init__(self) -> None:
        self._waits: dict[str, Callable[[int], Awaitable[object]]] = {}
        self._unknown: set[str] = set()

    def follow(self, name: str, wait: Callable[[int], Awaitable[object]]) -> None:
        """`wait` returns when the consumer of this name has delivered a transaction."""
        self._waits[name] = wait

    def leave(self, name: str) -> None:
        self._waits.pop(name, None)

    async def wait_for(self, positions: Mapping[str, int]) -> LoadTimeout | None:
        """Wait until all are delivered; return the error if that takes too long.

        A position of a consumer that this process does not run cannot be waited for. It is logged
        once, since the token may have been made up.
        """
        name = ""
        try:
            async with asyncio.timeout(LONGEST_WAIT):
                for name, position in positions.items():
                    wait = self._waits.get(name)
                    if wait is not None:
                        await wait(position)
                    else:
                        self._report(name)
        except TimeoutError:
            return LoadTimeout(
                f"the outbox consumer {name!r} has not delivered the caller's change within "
                f"{LONGEST_WAIT:g} s"
            )
        return None

    async def have_delivered(self, token: str) -> bool:
        """Wait for the commits of a token, for packages of stillfresh. False if it takes too long.

        Reads of a resource wait by themselves.
        """
        seen = at_least_of(token)
        if seen is None or not seen.positions:
            return True
        return await self.wait_for(seen.positions) is None

    def _report(self, name: str) -> None:
        if name not in self._unknown and len(self._unknown) < MOST_POSITIONS:
            self._unknown.add(name)
            logger.warning(
                "a token names the outbox consumer %r, which this cache does not have: reads with "
                "it do not wait. Run an OutboxConsumer of this name beside this cache, too; one of "
                "them works, and the others follow.",
                name,
            )


class InvalidatedEntries(list[tuple[str, str]]):
    """What `invalidate_tag` reached: the resource and the id of each entry."""

    def __init__(self, entries: Iterable[tuple[str, str]], token: str) -> None:
        super().__init__(entries)
        self.token = token
        """For `get(at_least=…)`: the answer is no older than this change."""


class NotedChanges:
    """The changes that were made inside a block of `noted_changes()`."""

    def __init__(self, outer: "NotedChanges | None" = None) -> None:
        self._seen: AtLeast | None = None
        self._outer = outer

    def note(self, change: AtLeast) -> None:
        """Add a change, for packages of stillfresh. Blocks around this one note it, too."""
        self._seen = joined(self._seen, change)
        if self._outer is not None:
            self._outer.note(change)

    @property
    def token(self) -> str:
        """The token of all changes so far; "" if there are none."""
        return "" if self._seen is None else self._seen.text()


_NOTING: ContextVar[NotedChanges | None] = ContextVar("stillfresh_noted_changes", default=None)
_READING: ContextVar[AtLeast | None] = ContextVar("stillfresh_at_least", default=None)


@contextmanager
def noted_changes() -> Iterator[NotedChanges]:
    """Inside `with`, note what this task or thread changes in any cache; `.token` is its token.

    Blocks around this one note it, too.
    """
    before = _NOTING.get()
    changes = NotedChanges(before)
    _NOTING.set(changes)
    try:
        yield changes
    finally:
        _NOTING.set(before)


def note_change(change: AtLeast) -> None:
    """Note a change for the block of `noted_changes()`, if one is open."""
    changes = _NOTING.get()
    if changes is not None:
        changes.note(change)


def note_token(token: str) -> None:
    """Note the changes of a token, for packages of stillfresh; "" names none."""
    change = at_least_of(token)
    if change is not None:
        note_change(change)


def commit_token(consumer: str, position: int) -> str:
    """The token of a commit that the outbox consumer of this name delivers; it is noted, too."""
    change = AtLeast(positions={consumer: position})
    note_change(change)
    return change.text()


@contextmanager
def reading(cache: "Lifecycle", token: str) -> Iterator[None]:
    """Inside the block, reads of this task or thread accept nothing older than these changes."""
    at_least = joined(at_least_of(token), _READING.get())
    if at_least is None:
        yield
        return
    before = _READING.get()
    with cache.watching_reads():
        _READING.set(at_least)
        try:
            yield
        finally:
            _READING.set(before)


def demanded() -> AtLeast | None:
    """What reads of this code must be at least: of a block, or of a loader that runs."""
    at_least = _READING.get()
    if at_least is None:
        load = CURRENT.get()
        if load is not None and load.is_loading:
            return ANYTHING if load.has_token else LOADERS
    return at_least
