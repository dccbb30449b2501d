"""Hub: the ids that many viewers look at, over one cache.

Each kind is a resource of the engine, with one watch. An id that any number of viewers look at is
one key of that watch: it is refreshed once, and once for all processes that share the store. The
views of a kind that is per viewer are keyed by viewer and id, and never shown to another viewer.

Towards an item, a connection is in one of three states, and each keeps something else:

visible: It subscribes, and is one of `Viewed.viewers`. The watch has the item's key, so the item is
refreshed, and the connection is notified of each new copy, and of failures and absences that are
news.

hidden: It subscribes, and `set_visible(False)` was called. It still counts in `Viewed.holders`, so
the `Viewed` stays, with the text of its last view. The connection keeps what was sent last and what
was not read yet, and is not notified. If no connection is visible, the watch drops the key: nothing
refreshes the item, and the hub forgets that it was absent, since it may come back and nobody would
say so. The watch itself stays open. A connection that becomes visible again reads what has changed.

gone: It was closed, or has unsubscribed. The hub keeps nothing of it. The `Viewed` goes with the
last connection that subscribes to it, the watches close with the last connection of all. Hidden
ones count for both.

A new copy waits in `_coming`. The task `_spread` takes all that wait as one moment, collects the
news of each viewer, and notifies them in short turns of the loop, so that each viewer gets the news
of a moment at once. Copies that arrive meanwhile belong to the next moment. News are collected from
the viewers of each new copy. So a moment costs as much as there are copies to send, however many
viewers and ids there are besides. If all its copies have the same viewers, they share one dict of
news, and with it one frame.
"""

import asyncio
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Final

from stillfresh.bounded import sliced
from stillfresh.checks import checked_whole
from stillfresh.engine import Answer, Cache, Resource, Update, Watch
from stillfresh.engine.keys import checked_id, checked_text
from stillfresh.engine.rules import without_cause
from stillfresh.errors import ConfigError, StillfreshError, shown
from stillfresh.gateway.live.connection import Connection
from stillfresh.gateway.live.resources import resource_for, viewer_key
from stillfresh.systems.coordinator import Kind, checked_kinds

if TYPE_CHECKING:
    from stillfresh.gateway.live.outbox import ViewText

FOUND: Final = 20_000
"""Viewers of new copies that are found in one turn of the loop: a millisecond or two."""
COMPARED: Final = 250_000
"""Viewers of new copies that are compared in one turn, to find out whether all copies have the same
ones: about ten milliseconds. With more, each viewer's news are collected instead."""
TOLD: Final = 50
"""Viewers that are notified in one turn of the loop: each then sends a frame."""
GATHERED: Final = 0.01
"""Seconds in which copies are collected, if more than `TOLD` viewers are connected."""


class Viewed:
    """One id that viewers look at, and what they share."""

    __slots__ = ("absent", "holders", "id", "key", "kind", "text", "viewers")

    def __init__(self, kind: Kind, id_: str, key: str) -> None:
        self.kind = kind
        self.id = id_
        self.key = key
        self.holders = 0
        """Connections that subscribe to it, visible or not."""
        self.viewers: dict[Connection, None] = {}
        """The visible ones, which are notified."""
        self.absent: Answer[Any] | None = None
        """The last answer, if the item does not exist: viewers that come later get it.

        Only while there are visible viewers: without them, nobody would say that it exists again.
        """
        self.text: ViewText | None = None
        """The newest view that was sent, as text."""


class Hub:
    """Keeps items fresh for many viewers: `Hub(cache, kinds=[Kind("price", …)])`.

    One for a process. A viewer has at most `max_subscriptions`.
    """

    def __init__(
        self, cache: Cache, *, kinds: Iterable[Kind], max_subscriptions: int = 1_000
    ) -> None:
        self.max_subscriptions = checked_whole("max_subscriptions", max_subscriptions)
        self._kinds = checked_kinds(kinds)
        self.cache = cache
        self._resources = {name: resource_for(cache, kind) for name, kind in self._kinds.items()}
        self._connections: dict[Connection, None] = {}
        self._viewed: dict[str, dict[str, Viewed]] = {name: {} for name in self._kinds}
        """All subscribed ids, by key."""
        self._watches: dict[str, Watch[str, Any]] = {}
        """One for each kind, open while somebody is connected, visible or hidden."""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._coming: dict[Viewed, Answer[Any]] = {}
        self._moment: dict[Viewed, Answer[Any]] = {}
        """Copies that are passed on now, and whose viewers were not found yet."""
        self._untold: dict[Connection, dict[Viewed, Answer[Any]]] = {}
        """Viewers of found copies that were not notified yet, each with its news."""
        self._spreading: asyncio.Task[None] | None = None
        self.subscriptions = dict.fromkeys(self._kinds, 0)
        """How many there are of each kind, over all viewers."""

    def connect(
        self,
        viewer_id: str | None = None,
        *,
        visible: bool = True,
        tell: Callable[[], object] | None = None,
    ) -> Connection:
        """Connect a viewer, or a guest: `with hub.connect("ann") as connection:`.

        `tell` is called when there is something to `take`.
        """
        if viewer_id is not None:
            viewer_id = checked_text("viewer_id", viewer_id, str)
        self._begin()
        connection = Connection(self, viewer_id, visible=visible, tell=tell)
        self._connections[connection] = None
        return connection

    def __len__(self) -> int:
        """Count the connections."""
        return len(self._connections)

    @property
    def kinds(self) -> tuple[str, ...]:
        """The names of the kinds."""
        return tuple(self._kinds)

    def kind(self, name: str, viewer_id: str | None) -> Kind:
        """The kind. ConfigError if it does not exist, or this viewer may not look at it."""
        if not isinstance(name, str) or (kind := self._kinds.get(name)) is None:
            known = ", ".join(self._kinds) or "none"
            raise ConfigError(f"kind {shown(name)}: not declared; there are: {known}")
        if kind.per_viewer and viewer_id is None:
            raise ConfigError(f"kind {name!r}: its views differ by viewer; sign in first")
        return kind

    def is_per_viewer(self, name: str) -> bool:
        """True if its views differ by viewer."""
        return self._kinds[name].per_viewer

    def named(self, kind: str, id_: object, viewer_id: str | None) -> tuple[Kind, str, str]:
        """Return the kind, the id and the key, all checked."""
        known = self.kind(kind, viewer_id)
        text = checked_text(kind, id_, str)
        key = viewer_key(str(viewer_id), text) if known.per_viewer else text
        return known, text, checked_id(kind, key)

    def resource(self, name: str) -> Resource[str, Any]:
        return self._resources[name]

    async def get(self, kind: str, id: str, viewer_id: str | None = None) -> Answer[Any]:  # noqa: A002 (as it is called)
        """Return one view, as this viewer sees it; load it if there is none. Raises LoadFailed."""
        _, _, key = self.named(kind, id, viewer_id)
        return await self._resources[kind].get(key)

    async def get_many(
        self, kind: str, ids: Iterable[str], viewer_id: str | None = None
    ) -> dict[str, Answer[Any]]:
        """Return many views of one kind by id. The answer of a failed load has `error`."""
        keys = {self.named(kind, id_, viewer_id)[2]: id_ for id_ in ids}
        self.kind(kind, viewer_id)
        answers = await self._resources[kind].get_many(list(keys))
        return {keys[key]: answer for key, answer in answers.items()}

    def find(self, kind: str, id_: object, viewer_id: str | None) -> Viewed:
        """Return what the viewers of this id share; a new one if nobody has subscribed to it."""
        known, text, key = self.named(kind, id_, viewer_id)
        return self._viewed[kind].get(key) or Viewed(known, text, key)

    def add_subscriber(self, viewed: Viewed) -> None:
        """Count one more connection that subscribes to this item, visible or not."""
        viewed.holders += 1
        self._viewed[viewed.kind.name][viewed.key] = viewed
        self.subscriptions[viewed.kind.name] += 1

    def remove_subscriber(self, viewed: Viewed) -> None:
        """Count one connection less; the last one takes the `Viewed` along."""
        viewed.holders -= 1
        self.subscriptions[viewed.kind.name] -= 1
        if not viewed.holders:
            self._viewed[viewed.kind.name].pop(viewed.key, None)

    def start_notifying(self, viewed: Viewed, connection: Connection) -> None:
        """Keep the item fresh, and notify this connection of new copies."""
        if not viewed.viewers:
            self._watches[viewed.kind.name].add(viewed.key)
        viewed.viewers[connection] = None
        absent = viewed.absent
        if absent is not None and connection.push_failure_or_absence(viewed, absent):
            connection.call_listener()

    def stop_notifying(self, viewed: Viewed, connection: Connection) -> None:
        """Stop notifying this connection: it hides, or ends its subscription.

        An item without a visible viewer is not watched. Its `Viewed` stays while a hidden
        connection subscribes to it.
        """
        viewed.viewers.pop(connection, None)
        if not viewed.viewers:
            self._watches[viewed.kind.name].discard(viewed.key)
            viewed.absent = None

    def disconnect(self, connection: Connection) -> None:
        """Forget a connection that was closed; with the last one, the watches close."""
        self._connections.pop(connection, None)
        self._untold.pop(connection, None)
        if not self._connections:
            self._end()

    def _begin(self) -> None:
        """Watch each kind, when the first viewer connects.

        StillfreshError without a running loop, or if other viewers are on another one.
        """
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            raise StillfreshError("connect inside a running event loop") from None
        if self._connections and self._loop is not loop:
            if self._loop is not None and not self._loop.is_closed():
                raise StillfreshError("viewers are connected on another event loop; connect there")
            for connection in self._connections:  # no viewer of that loop can be notified
                connection.is_open = False
            self._forget()
        if not self._connections:
            self._watches = {name: self._watch(name) for name in self._kinds}
            self._loop = loop

    def _watch(self, name: str) -> Watch[str, Any]:
        def note(update: Update[str, Any]) -> None:
            self._note_arrival(self._viewed[name][update.key], update.answer)

        return self._resources[name].watch(tell=note, fail=note, end=self._end).__enter__()

    def _end(self) -> None:
        """The cache closes, or the last viewer has gone."""
        watches = self._watches
        connections = self._connections
        spreading = self._spreading
        self._forget()
        if spreading is not None:
            spreading.cancel()
        for watch in watches.values():
            watch.close()
        for connection in connections:
            connection.end()

    def _forget(self) -> None:
        self._watches = {}
        self._connections = {}
        self._spreading = None
        self._coming = {}
        self._moment = {}
        self._untold = {}
        self._viewed = {name: {} for name in self._kinds}
        self.subscriptions = dict.fromkeys(self._kinds, 0)

    def is_coming(self, viewed: Viewed, connection: Connection) -> bool:
        """True if the newest copy is here, and this connection will be notified."""
        if viewed in self._coming or viewed in self._moment:
            return True
        return viewed in self._untold.get(connection, {})

    def _note_arrival(self, viewed: Viewed, answer: Answer[Any]) -> None:
        """A copy has arrived, or a refresh has failed: `answer.error` says why.

        Viewers keep the answer for as long as they are connected, so it has no `__cause__`.
        """
        answer = without_cause(answer)
        if answer.error is None:
            viewed.absent = None if answer.found else answer
        elif viewed in self._coming:  # a view counts more; the next failure is reported
            return
        self._coming[viewed] = answer
        if (self._spreading is None or self._spreading.done()) and self._loop is not None:
            self._spreading = self._loop.create_task(self._spread())

    async def _spread(self) -> None:
        """Pass on what arrived, in short turns of the loop."""
        while self._coming:
            if len(self._connections) > TOLD:  # a frame for each costs more than the wait
                await asyncio.sleep(GATHERED)
            self._moment = self._coming
            self._coming = {}
            shared = await self._collect_news()
            async for connections in sliced(tuple(self._untold), TOLD):
                for connection in connections:
                    news = self._untold.pop(connection, None)
                    if news is not None:  # else it has left meanwhile
                        connection.push_copies(news, is_shared=news is shared)

    async def _collect_news(self) -> dict[Viewed, Answer[Any]] | None:
        """Find the viewers of these copies. Returns the news that all of them share, if they do.

        Failures and absences are pushed one by one: a viewer may know of them already.
        """
        copies = {
            viewed: answer
            for viewed, answer in self._moment.items()
            if answer.found and answer.error is None
        }
        if len(copies) == len(self._moment) and have_same_viewers(copies):
            self._moment = {}
            self._untold = dict.fromkeys(next(iter(copies)).viewers, copies)
            return copies
        viewer_count = 0
        for viewed, answer in tuple(self._moment.items()):
            del self._moment[viewed]
            viewer_count += len(viewed.viewers)
            if viewed in copies:
                for viewer in viewed.viewers:
                    self._untold.setdefault(viewer, {})[viewed] = answer
            else:
                for viewer in viewed.viewers:
                    if viewer.push_failure_or_absence(viewed, answer):
                        self._untold.setdefault(viewer, {})  # so that its listener is called
            if viewer_count >= FOUND:
                viewer_count = 0
                await asyncio.sleep(0)
        return None


def have_same_viewers(copies: Iterable[Viewed]) -> bool:
    """True if each of them has the same viewers, and they are not too many to compare."""
    first, *others = copies
    if len(first.viewers) * len(others) > COMPARED:
        return False
    return all(viewed.viewers.keys() == first.viewers.keys() for viewed in others)
