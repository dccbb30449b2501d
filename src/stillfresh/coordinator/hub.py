"""Hub: the subscriptions of many viewers over one cache (C14).

Each kind is a resource of the engine, watched by whoever is connected: an id that any number of
viewers look at is refreshed once, and once for all processes that share the store (E5). A kind that
is per viewer is keyed by viewer and id, and is never shown to another.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Final, Self

from stillfresh.coordinator.hub_kinds import by_name, key_of, parts, resource_for
from stillfresh.coordinator.model import Kind
from stillfresh.engine import Answer, Cache, Resource, Update, Watch
from stillfresh.engine.keys import checked_id, checked_text
from stillfresh.errors import ConfigError, NotOpen, StillfreshError, shown

__all__ = ["Connection", "Hub", "HubUpdate"]

SLICE: Final = 50
"""Views read at once for who looks again."""


@dataclass(frozen=True, slots=True)
class HubUpdate:
    """A new view of something that this viewer looks at."""

    kind: str
    id: str
    answer: Answer[Any]
    """`value` is the view; `found` is False if it does not exist (any more)."""


class Hub:
    """`Hub(cache, kinds=[Kind("price", fetch=…, fresh_for="30s")])`, one for a process."""

    def __init__(
        self, cache: Cache, *, kinds: Iterable[Kind], max_subscriptions: int = 1_000
    ) -> None:
        if not isinstance(max_subscriptions, int) or max_subscriptions < 1:
            raise ConfigError(
                f"max_subscriptions: a whole number of 1 or more, not {shown(max_subscriptions)}"
            )
        self.max_subscriptions = max_subscriptions
        self._kinds = by_name(kinds)
        self._resources = {name: resource_for(cache, kind) for name, kind in self._kinds.items()}
        self._connections: set[Connection] = set()

    def connect(self, viewer_id: str | None = None, *, visible: bool = True) -> "Connection":
        """A viewer has come, or a guest; `with hub.connect("ann") as connection:`"""
        if viewer_id is not None:
            viewer_id = checked_text("viewer_id", viewer_id, str)
        connection = Connection(self, viewer_id, visible=visible, closed=self._connections.discard)
        self._connections.add(connection)
        return connection

    def __len__(self) -> int:
        """How many are connected."""
        return len(self._connections)

    @property
    def kinds(self) -> tuple[str, ...]:
        return tuple(self._kinds)

    def kind(self, name: str, viewer_id: str | None) -> Kind:
        """Refuses what this viewer may not look at."""
        if not isinstance(name, str) or (kind := self._kinds.get(name)) is None:
            known = ", ".join(self._kinds) or "none"
            raise ConfigError(f"kind {shown(name)}: not declared; there are: {known}")
        if kind.per_viewer and viewer_id is None:
            raise ConfigError(f"kind {name!r}: differs by viewer, and a guest is none; sign in")
        return kind

    def named(self, kind: str, id_: object, viewer_id: str | None) -> tuple[Kind, str, str]:
        """The kind, the id and its key, all checked: what is refused leaves no trace."""
        known, text = self.kind(kind, viewer_id), checked_text(kind, id_, str)
        return known, text, checked_id(kind, key_of(known, text, viewer_id))

    def resource(self, name: str) -> Resource[str, Any]:
        return self._resources[name]

    async def get(self, kind: str, id: str, viewer_id: str | None = None) -> Answer[Any]:  # noqa: A002 (as it is called)
        """One view, as this viewer sees it, without a connection; loaded if there is none."""
        _, _, key = self.named(kind, id, viewer_id)
        return await self._resources[kind].get(key)

    async def get_many(
        self, kind: str, ids: Iterable[str], viewer_id: str | None = None
    ) -> dict[str, Answer[Any]]:
        """Many of one kind; one whose load failed has `error`."""
        keys = {self.named(kind, id_, viewer_id)[2]: id_ for id_ in ids}
        self.kind(kind, viewer_id)
        answers = await self._resources[kind].get_many(list(keys))
        return {keys[key]: answer for key, answer in answers.items()}


class Connection:
    """What one viewer looks at; iterate to see each new view, the newest of each id only."""

    def __init__(
        self,
        hub: Hub,
        viewer_id: str | None,
        *,
        visible: bool,
        closed: Callable[["Connection"], object],
    ) -> None:
        self.viewer_id = viewer_id
        self._hub = hub
        self._is_visible = visible
        self._closed = closed
        self._counts: dict[tuple[str, str], int] = {}
        self._news: dict[tuple[str, str], HubUpdate] = {}
        self._seen: dict[tuple[str, str], Answer[Any]] = {}
        """The last that was told, or got, of what is subscribed."""
        self._catching_up: list[asyncio.Task[None]] = []
        self._changed = asyncio.Event()
        self._is_open = True
        self._watches = {kind: self._watched(kind) for kind in hub.kinds}

    def subscribe(self, kind: str, id: str) -> None:  # noqa: A002 (as it is called)
        """On this viewer's screen from now on; counted if the kind is."""
        self._check_open()
        known, id_, key = self._named(kind, id)
        count = self._counts.get((kind, id_), 0)
        if not count and len(self._counts) >= self._hub.max_subscriptions:
            raise StillfreshError(
                f"this viewer has {len(self._counts)} subscriptions, the most that are allowed"
            )
        if not count and self._is_visible:
            self._watches[kind].add(key)
        self._counts[kind, id_] = count + 1 if known.counted else 1

    def unsubscribe(self, kind: str, id: str) -> None:  # noqa: A002 (as it is called)
        """Known or not, once or often."""
        _, id_, key = self._named(kind, id)
        count = self._counts.get((kind, id_), 0)
        if count > 1:
            self._counts[kind, id_] = count - 1
        elif count:
            del self._counts[kind, id_]
            self._news.pop((kind, id_), None)
            self._seen.pop((kind, id_), None)
            self._watches[kind].discard(key)

    @property
    def subscribed(self) -> dict[tuple[str, str], int]:
        """Each kind and id, and how often."""
        return dict(self._counts)

    def set_visible(self, visible: bool) -> None:
        """Hidden, nothing is refreshed for this viewer; the subscriptions stay.

        Who looks again is told what has changed since.
        """
        self._check_open()
        if visible == self._is_visible:
            return
        self._stop_catching_up()
        for kind, ids in self._ids_by_key().items():
            watch = self._watches[kind]
            if visible:
                watch.add(*ids)
                catching_up = self._catch_up(kind, ids)
                self._catching_up.append(asyncio.get_running_loop().create_task(catching_up))
            else:
                watch.discard(*ids)
        self._is_visible = visible

    def reset(self) -> None:
        """Another route: nothing is subscribed any more."""
        self._stop_catching_up()
        self._counts.clear()
        self._news.clear()
        self._seen.clear()
        for watch in self._watches.values():
            watch.discard(*watch.keys)

    async def get(self, kind: str, id: str) -> Answer[Any]:  # noqa: A002 (as it is called)
        """The view as it is now, loaded if there is none."""
        self._check_open()
        _, id_, key = self._named(kind, id)
        answer = await self._hub.resource(kind).get(key)
        if (kind, id_) in self._counts:
            self._seen[kind, id_] = answer
        return answer

    def close(self) -> None:
        """The viewer has gone, and their subscriptions with them."""
        if not self._is_open:
            return
        self._is_open = False
        self._stop_catching_up()
        self._counts.clear()
        self._seen.clear()
        for watch in self._watches.values():
            watch.close()
        self._closed(self)
        self._changed.set()

    def __enter__(self) -> Self:
        self._check_open()
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def __aiter__(self) -> AsyncIterator[HubUpdate]:
        return self

    async def __anext__(self) -> HubUpdate:
        while not self._news:
            if not self._is_open:
                raise StopAsyncIteration
            self._changed.clear()
            await self._changed.wait()
        return self._news.pop(next(iter(self._news)))

    def _watched(self, kind: str) -> Watch[str, Any]:
        """Also of what nothing is subscribed of yet: it ends with the cache."""

        def tell(update: Update[str, Any]) -> None:
            self._tell(kind, update)

        return self._hub.resource(kind).watch(tell=tell, end=self.close).__enter__()

    def _tell(self, kind: str, update: Update[str, Any]) -> None:
        is_own = self._hub.kind(kind, self.viewer_id).per_viewer
        self._note(kind, parts(update.key)[1] if is_own else update.key, update.answer)

    def _note(self, kind: str, id_: str, answer: Answer[Any]) -> None:
        self._seen[kind, id_] = answer
        self._news[kind, id_] = HubUpdate(kind, id_, answer)
        self._changed.set()

    async def _catch_up(self, kind: str, ids: dict[str, str]) -> None:
        """From memory or the store; what has to be loaded is told by the watch when it lands."""
        for keys in _slices(list(ids)):
            before = {key: self._seen.get((kind, ids[key])) for key in keys}
            try:
                answers = await self._hub.resource(kind).get_many(keys)
            except NotOpen:  # the cache closes, and this connection with it
                return
            for key, answer in answers.items():
                it = (kind, ids[key])
                is_untold = it in self._counts and self._seen.get(it) is before[key]
                if is_untold and _is_news(before[key], answer):
                    self._note(*it, answer)

    def _stop_catching_up(self) -> None:
        for task in self._catching_up:
            task.cancel()
        self._catching_up.clear()

    def _ids_by_key(self) -> dict[str, dict[str, str]]:
        """Of each kind that something is subscribed of."""
        found: dict[str, dict[str, str]] = {}
        for kind, id_ in self._counts:
            key = key_of(self._hub.kind(kind, self.viewer_id), id_, self.viewer_id)
            found.setdefault(kind, {})[key] = id_
        return found

    def _named(self, kind: str, id_: object) -> tuple[Kind, str, str]:
        return self._hub.named(kind, id_, self.viewer_id)

    def _check_open(self) -> None:
        if not self._is_open:
            raise NotOpen("this connection is closed")


def _slices(keys: list[str]) -> Iterator[list[str]]:
    for begin in range(0, len(keys), SLICE):
        yield keys[begin : begin + SLICE]


def _is_news(before: Answer[Any] | None, now: Answer[Any]) -> bool:
    """Another copy; that nobody could say is none."""
    if now.error is not None and not now.found:
        return False
    return before is None or (before.fetched_at, before.found, before.value) != (
        now.fetched_at,
        now.found,
        now.value,
    )
