"""Connection: one viewer's subscriptions, and the news that the viewer has not read yet.

One set of subscriptions: each id with the last answer that the viewer got. Of several new views of
an id the newest is kept, so a slow reader never has more waiting views than subscriptions.

`waiting` can be the hub's own dict of a moment, which many viewers share (`is_shared`): it is then
copied before this viewer changes it (`_own`).

An answer comes in one of two ways, and what is news differs:

pushed: The hub's watch reports it when it happens (`push_copies`, `push_failure_or_absence`). A new
copy is always news. A failure or an absence is reported again and again, and only the first is news
(`is_news_when_pushed`).

read: The connection itself reads what there is now, when the viewer subscribes (`read_present`), is
visible again (`set_visible`) or has changed something (`see`). The viewer may have that answer
already, or a newer one, so the two are compared (`is_news_when_read`). If the hub is about to push
an answer, nothing that was read is news.

News stay in `waiting` until they are taken or sent (`take`, `mark_sent`). Then they are what the
viewer has.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Iterable
from itertools import islice
from typing import TYPE_CHECKING, Any, Final, Self, TypeAlias

import msgspec

from stillfresh.backoff import pause_after
from stillfresh.engine import Answer, merge_tokens
from stillfresh.engine.rules import without_cause
from stillfresh.errors import NotOpen, StillfreshError, StoreError
from stillfresh.freshness import Verdict

if TYPE_CHECKING:
    from stillfresh.gateway.live.hub import Hub, Viewed

READ: Final = 50
"""Views read at once for a viewer that returns."""
SHORTEST_PAUSE: Final = 0.25
LONGEST_PAUSE: Final = 5.0
"""Seconds after a failed read of the store; it doubles up to this."""
LastSent: TypeAlias = Answer[Any] | float | None
"""What a viewer has of an id: an answer, a copy fetched at this time, or nothing."""

logger = logging.getLogger(__name__)


class HubUpdate(msgspec.Struct, frozen=True):
    """A new view of an item that a viewer subscribes to."""

    kind: str
    id: str
    answer: Answer[Any]
    """`value` is the view; `found` is False if the item does not exist (any more)."""


class Connection:
    """The subscriptions of one viewer. Iterate over it for new views: of each id, the newest."""

    def __init__(
        self,
        hub: "Hub",
        viewer_id: str | None,
        *,
        visible: bool,
        tell: Callable[[], object] | None = None,
    ) -> None:
        self.viewer_id = viewer_id
        self.is_visible = visible
        self.is_open = True
        self.waiting: dict[Viewed, Answer[Any]] = {}
        """The newest unread update of each id."""
        self.is_shared = False
        """True if `waiting` is one object for all viewers, so it must not be changed."""
        self._hub = hub
        self._last_sent: dict[Viewed, LastSent] = {}
        """All subscribed ids, with the last answer that the viewer got."""
        self._extra_subscriptions: dict[Viewed, int] = {}
        """How often a counted id was subscribed after the first time."""
        self._to_read: dict[Viewed, None] = {}
        """Ids to be read from memory or the store."""
        self.token = ""
        """The changes that the viewer has seen: views from before them are not sent."""
        self._to_load: dict[Viewed, None] = {}
        """Ids whose view is older than those changes, or was not there."""
        self._reader: asyncio.Task[None] | None = None
        self._failures = 0
        self._changed: asyncio.Event | None = None
        if tell is None:
            self._changed = asyncio.Event()
            tell = self._changed.set
        self._listener = tell

    def subscribe(self, kind: str, id: str) -> None:  # noqa: A002 (as it is called)
        """Receive new views of an item; `get` returns the present one. Raises ConfigError."""
        viewed = self._hub.find(kind, id, self.viewer_id)
        if viewed not in self:
            self.add(viewed)
        elif viewed.kind.counted:
            self._extra_subscriptions[viewed] = self._extra_subscriptions.get(viewed, 0) + 1

    def unsubscribe(self, kind: str, id: str) -> None:  # noqa: A002 (as it is called)
        """End one subscription. An unknown one changes nothing."""
        viewed = self._hub.find(kind, id, self.viewer_id)
        if self._extra_subscriptions.get(viewed):
            self._extra_subscriptions[viewed] -= 1
        elif viewed in self:
            self._drop(viewed)

    @property
    def subscribed(self) -> dict[tuple[str, str], int]:
        """Each subscribed kind and id, and how many times."""
        return {
            (viewed.kind.name, viewed.id): 1 + self._extra_subscriptions.get(viewed, 0)
            for viewed in self._last_sent
        }

    @property
    def size(self) -> int:
        """How many ids are subscribed."""
        return len(self._last_sent)

    def __contains__(self, viewed: "Viewed") -> bool:
        return viewed in self._last_sent

    def add(self, viewed: "Viewed") -> None:
        """Subscribe to one that is not subscribed yet."""
        self._check_open()
        if self.size >= self._hub.max_subscriptions:
            raise StillfreshError(
                f"this viewer has {self.size} subscriptions, the most allowed; end some first"
            )
        self._hub.add_subscriber(viewed)
        self._last_sent[viewed] = None
        if self.is_visible:
            self._hub.start_notifying(viewed, self)

    def read_present(self, viewed: "Viewed", since: float | None = None) -> None:
        """Read the present view. It is news unless it is fresh and the viewer's copy is of `since`.

        It loads nothing; a view that must be loaded is pushed when it arrives.
        """
        if viewed in self:
            self._last_sent[viewed] = since
            self._read([viewed])

    def set_visible(self, visible: bool) -> None:
        """Show or hide the page. Hidden, nothing is refreshed for this viewer.

        A viewer that returns receives what has changed.
        """
        self._check_open()
        if visible == self.is_visible:
            return
        self.is_visible = visible
        for viewed in self._last_sent:
            if visible:
                self._hub.start_notifying(viewed, self)
            else:
                self._hub.stop_notifying(viewed, self)
        if visible:
            self._read(self._last_sent)

    def see(self, token: str) -> None:
        """The viewer has seen these changes. All views on screen are read again."""
        self._check_open()
        self.token = merge_tokens(self.token, token)
        if self.is_visible:
            self._read(self._last_sent)

    def become(self, viewer_id: str | None) -> None:
        """Change the viewer, or sign out with None. Subscriptions that differ by viewer end."""
        if viewer_id != self.viewer_id:
            self.viewer_id = viewer_id
            for viewed in [viewed for viewed in self._last_sent if viewed.kind.per_viewer]:
                self._drop(viewed)

    def reset(self) -> None:
        """End all subscriptions, for another page."""
        for viewed in list(self._last_sent):
            self._drop(viewed)

    async def get(self, kind: str, id: str) -> Answer[Any]:  # noqa: A002 (as it is called)
        """Return the view of an item; load it if there is none. Raises LoadFailed."""
        self._check_open()
        viewed = self._hub.find(kind, id, self.viewer_id)
        answer = await self._hub.resource(kind).get(viewed.key)
        if viewed in self:
            self._last_sent[viewed] = without_cause(answer)
        return answer

    def take(self, limit: int) -> list[HubUpdate]:
        """Return up to `limit` updates that wait. `answer.error` says why a refresh failed."""
        news = list(islice(self.waiting.items(), limit))
        self.mark_sent(len(news))
        return [HubUpdate(viewed.kind.name, viewed.id, answer) for viewed, answer in news]

    def mark_sent(self, count: int) -> None:
        """The viewer gets the first so many that wait: they wait no longer."""
        if count == len(self.waiting):
            sent = self.waiting
            self.waiting = {}
            self.is_shared = False
        else:
            waiting = self._own()
            sent = {viewed: waiting.pop(viewed) for viewed in list(islice(waiting, count))}
        if self.is_open:
            self._last_sent.update(sent)

    def push_failure_or_absence(self, viewed: "Viewed", answer: Answer[Any]) -> bool:
        """Keep it until it is read, if it is news; True if nothing waited before.

        The listener is not called. A view that was not read yet stays, and the next failure is
        reported.
        """
        if answer.error is not None and viewed in self.waiting:
            return False
        if not is_news_when_pushed(self._newest_of(viewed), answer):
            return False
        is_first = not self.waiting
        self._own()[viewed] = answer
        return is_first

    def push_copies(self, copies: "dict[Viewed, Answer[Any]]", *, is_shared: bool) -> None:
        """Keep these new copies until they are read. Call the listener if anything waits.

        `is_shared`: many viewers have this one object. A viewer may have ended subscriptions since
        the copies were collected.
        """
        if self._last_sent.keys() >= copies.keys():
            if not self.waiting:
                self.waiting = copies
                self.is_shared = is_shared
            else:
                self._own().update(copies)
        else:
            self._own().update(
                (viewed, answer) for viewed, answer in copies.items() if viewed in self._last_sent
            )
        if self.waiting:
            self.call_listener()

    def _newest_of(self, viewed: "Viewed") -> LastSent:
        """What the viewer has of this id, or will have once it has read what waits."""
        return self.waiting.get(viewed) or self._last_sent[viewed]

    def _own(self) -> "dict[Viewed, Answer[Any]]":
        """`waiting`, as an object that may be changed."""
        if self.is_shared:
            self.waiting = dict(self.waiting)
            self.is_shared = False
        return self.waiting

    def call_listener(self) -> None:
        """Say that there is something to take, or that the connection has ended."""
        try:
            self._listener()
        except Exception:
            logger.exception("listener %r failed", self._listener)

    def close(self) -> None:
        """End the subscriptions: the viewer has left."""
        if self.is_open:
            for viewed in self._last_sent:
                self._let_go(viewed)
            self.end()
            self._hub.disconnect(self)

    def end(self) -> None:
        """Nothing more comes; an iteration still returns what waits."""
        self.is_open = False
        self._last_sent.clear()
        self._to_read.clear()
        self._to_load.clear()
        if self._reader is not None:
            self._reader.cancel()
        self.call_listener()

    def __enter__(self) -> Self:
        self._check_open()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __aiter__(self) -> AsyncIterator[HubUpdate]:
        return self

    async def __anext__(self) -> HubUpdate:
        """Failures are for callers of `take`."""
        if self._changed is None:
            raise StillfreshError(
                "this connection was made with tell=; call take() when that is called"
            )
        while self.is_open or self.waiting:
            for update in self.take(1):
                if update.answer.error is None:
                    return update
            if self.is_open and not self.waiting:
                self._changed.clear()
                await self._changed.wait()
        raise StopAsyncIteration

    def _drop(self, viewed: "Viewed") -> None:
        del self._last_sent[viewed]
        self._extra_subscriptions.pop(viewed, None)
        self._to_read.pop(viewed, None)
        self._to_load.pop(viewed, None)
        self._own().pop(viewed, None)
        self._let_go(viewed)

    def _let_go(self, viewed: "Viewed") -> None:
        if self.is_visible:
            self._hub.stop_notifying(viewed, self)
        self._hub.remove_subscriber(viewed)

    def _read(self, to_read: "Iterable[Viewed]") -> None:
        """Read these from memory or the store, and report news."""
        self._to_read.update((viewed, None) for viewed in to_read if viewed in self)
        if self._reader is None and self._to_read:
            self._reader = asyncio.get_running_loop().create_task(self._read_all())

    async def _read_all(self) -> None:
        try:
            while self._to_read or self._to_load:
                if self._to_read:
                    await self._read_some(*_batch_of(self._to_read))
                else:
                    await self._load_some(*_batch_of(self._to_load))
        except NotOpen:  # the cache closes, and this connection with it
            pass
        finally:
            self._reader = None
            self._to_read.clear()  # which frees its memory: deleting from it does not
            self._to_load.clear()

    async def _read_some(self, kind: str, batch: "list[Viewed]") -> None:
        """Ids that the store could not answer are read again after a pause."""
        keys = {viewed.key: viewed for viewed in batch}
        for viewed in batch:
            del self._to_read[viewed]
        known: dict[str, Answer[Any]] = {}
        unread: set[str] = set()
        token = self.token
        try:
            with self._hub.cache.at_least(token):
                if await self._hub.cache.outboxes.have_delivered(token):
                    known = await self._hub.resource(kind).known(keys, unread=unread)
                else:
                    unread.update(keys)
        except StoreError:
            unread.update(keys)
        if token and self.is_visible:  # a watch may hear of the change later than its viewer
            missing = [keys[key] for key in keys.keys() - known.keys() - unread]
            self._to_load.update((viewed, None) for viewed in missing if viewed in self)
        self._keep_news(known, keys)
        self._failures = self._failures + 1 if unread else 0
        if unread:
            pause = pause_after(self._failures, first=SHORTEST_PAUSE, longest=LONGEST_PAUSE)
            again = [keys[key] for key in unread]
            asyncio.get_running_loop().call_later(pause, self._read, again)

    async def _load_some(self, kind: str, batch: "list[Viewed]") -> None:
        """Views that must be loaded, because those that are there are older than a change."""
        keys = {viewed.key: viewed for viewed in batch}
        for viewed in batch:
            del self._to_load[viewed]
        try:
            resource = self._hub.resource(kind)
            answers = await resource.get_many(list(keys), at_least=self.token)
        except StoreError as exc:  # the watch goes on trying
            logger.warning("%s: %s", kind, exc)
        else:
            self._keep_news(answers, keys)

    def _keep_news(self, answers: "dict[str, Answer[Any]]", keys: "dict[str, Viewed]") -> None:
        """Keep those read answers that are news, and call the listener if there are any."""
        # A list, not a generator: each answer is looked at, also after the first that is news.
        is_news_of_each = [
            self._keep_if_news(keys[key], without_cause(answer)) for key, answer in answers.items()
        ]
        if any(is_news_of_each):
            self.call_listener()

    def _keep_if_news(self, viewed: "Viewed", answer: Answer[Any]) -> bool:
        """Keep a read answer until the viewer reads it; False if it is no news.

        A newer one that arrived meanwhile is pushed instead.
        """
        if viewed not in self or self._hub.is_coming(viewed, self):
            return False
        if is_news_when_read(self._newest_of(viewed), answer):
            self._own()[viewed] = answer
            return True
        if answer.error is None and viewed not in self.waiting:
            self._last_sent[viewed] = answer
        return False

    def _check_open(self) -> None:
        if not self.is_open:
            raise NotOpen("this connection is closed; make another one with connect()")


def _batch_of(viewed_ids: "dict[Viewed, None]") -> "tuple[str, list[Viewed]]":
    """The kind of the first of these, and some ids of that kind."""
    kind = next(iter(viewed_ids)).kind
    same = (viewed for viewed in viewed_ids if viewed.kind is kind)
    return kind.name, list(islice(same, READ))


def is_news_when_pushed(last_sent: LastSent, now: Answer[Any]) -> bool:
    """True unless it is one more failure, or absent as before. A new copy is always news."""
    return not (isinstance(last_sent, Answer) and is_repeated(last_sent, now))


def is_repeated(last_sent: Answer[Any], now: Answer[Any]) -> bool:
    """True if it failed before and now, or did not exist before and now."""
    if last_sent.error is not None:
        return now.error is not None
    return now.error is None and not (last_sent.found or now.found)


def is_news_when_read(last_sent: LastSent, now: Answer[Any]) -> bool:
    """True if it is another copy, or less fresh than the viewer may think.

    A failure that left no view is no news to a viewer that got an answer: it keeps that.
    """
    if not isinstance(last_sent, Answer):
        return (
            now.fetched_at != last_sent or now.error is not None or now.verdict is not Verdict.FRESH
        )
    if (now.error is not None and not now.found) or is_repeated(last_sent, now):
        return False
    if now.fetched_at == last_sent.fetched_at:
        return (last_sent.found, last_sent.value) != (now.found, now.value)
    return now.fetched_at > last_sent.fetched_at or last_sent.error is not None
