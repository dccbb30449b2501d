"""Connection: what one viewer of a hub looks at, and the news of it (C14).

Of several new views of an id that nobody has looked at yet, the newest is kept: what waits for a
slow reader never grows past what it looks at.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any, Protocol, Self

from stillfresh.coordinator.hub_kinds import key_of, parts
from stillfresh.coordinator.model import Kind
from stillfresh.coordinator.news import HubUpdate, News, is_as_had, is_news, is_still_absent, slices
from stillfresh.coordinator.unread import Unread
from stillfresh.engine import Answer, Resource, Update, Watch
from stillfresh.errors import NotOpen, StillfreshError


class Watchable(Protocol):
    """What a connection asks of its hub."""

    max_subscriptions: int

    @property
    def kinds(self) -> tuple[str, ...]:
        """By name."""

    def kind(self, name: str, viewer_id: str | None) -> Kind:
        """Refuses what this viewer may not look at."""

    def named(self, kind: str, id_: object, viewer_id: str | None) -> tuple[Kind, str, str]:
        """The kind, the id and its key, all checked."""

    def is_per_viewer(self, name: str) -> bool:
        """Whether its views differ by viewer."""

    def resource(self, name: str) -> Resource[str, Any]:
        """Where its views are."""


class Connection:
    """What one viewer looks at; iterate to see each new view, the newest of each id only."""

    def __init__(
        self,
        hub: Watchable,
        viewer_id: str | None,
        *,
        visible: bool,
        tell: Callable[[], object] | None = None,
        closed: Callable[["Connection"], object],
    ) -> None:
        self.viewer_id = viewer_id
        self._hub = hub
        self._is_visible = visible
        self._closed = closed
        self._counts: dict[str, dict[str, int]] = {kind: {} for kind in hub.kinds}
        self._total = 0
        self._news = News(hub.kinds)
        self._seen: dict[str, dict[str, Answer[Any]]] = {kind: {} for kind in hub.kinds}
        """The last that was told, or got, of what is subscribed."""
        self._catching_up: list[asyncio.Task[None]] = []
        self._unread = Unread(self._catch_up)
        self._changed = asyncio.Event()
        self._tell_owner = tell or self._changed.set
        self._is_open = True
        self._watches = {kind: self._watched(kind) for kind in hub.kinds}

    def subscribe(self, kind: str, id: str) -> None:  # noqa: A002 (as it is called)
        """On this viewer's screen from now on; counted if the kind is."""
        self._check_open()
        known, id_, key = self._named(kind, id)
        counts = self._counts[kind]
        count = counts.get(id_, 0)
        if not count and self._total >= self._hub.max_subscriptions:
            raise StillfreshError(
                f"this viewer has {self._total} subscriptions, the most that are allowed"
            )
        if not count:
            if self._is_visible:
                self._watches[kind].add(key)
            self._total += 1
        counts[id_] = count + 1 if known.counted else 1

    def unsubscribe(self, kind: str, id: str) -> None:  # noqa: A002 (as it is called)
        """Known or not, once or often."""
        _, id_, key = self._named(kind, id)
        counts = self._counts[kind]
        count = counts.get(id_, 0)
        if count > 1:
            counts[id_] = count - 1
        elif count:
            del counts[id_]
            self._total -= 1
            self._news.forget(kind, id_)
            self._seen[kind].pop(id_, None)
            self._watches[kind].discard(key)

    @property
    def subscribed(self) -> dict[tuple[str, str], int]:
        """Each kind and id, and how often."""
        return {(kind, id_): n for kind, ids in self._counts.items() for id_, n in ids.items()}

    @property
    def sizes(self) -> dict[str, int]:
        """How many ids of each kind are subscribed."""
        return {kind: len(ids) for kind, ids in self._counts.items()}

    def has(self, kind: str, id_: str) -> bool:
        """It is subscribed."""
        return id_ in self._counts[kind]

    @property
    def size(self) -> int:
        """How many ids are subscribed."""
        return self._total

    @property
    def is_visible(self) -> bool:
        return self._is_visible

    def set_visible(self, visible: bool) -> None:
        """Hidden, nothing is refreshed for this viewer; the subscriptions stay.

        Who looks again is told what has changed since.
        """
        self._check_open()
        if visible == self._is_visible:
            return
        self._stop_catching_up()
        self._is_visible = visible
        by_kind = self._ids_by_key()
        for kind, ids in by_kind.items():
            watch = self._watches[kind]
            (watch.add if visible else watch.discard)(*ids)
        if visible:
            self._begin_catching_up(by_kind)

    def reset(self) -> None:
        """Another route: nothing is subscribed any more."""
        self._stop_catching_up()
        self._clear()
        self._news.clear()
        for watch in self._watches.values():
            watch.discard(*watch.keys)

    async def get(self, kind: str, id: str) -> Answer[Any]:  # noqa: A002 (as it is called)
        """The view as it is now, loaded if there is none."""
        self._check_open()
        _, id_, key = self._named(kind, id)
        answer = await self._hub.resource(kind).get(key)
        if id_ in self._counts[kind]:
            self._seen[kind][id_] = answer
        return answer

    async def show(self, kind: str, ids: Mapping[str, float | None]) -> None:
        """Tell the view that there is of each of these, unless a newer one was told meanwhile.

        Each with the `fetched_at` that the viewer has: the same copy, still fresh, is not told
        again. What has to be loaded is told by the watch when it lands.
        """
        known = self._hub.kind(kind, self.viewer_id)
        keys = {self._key(known, id_): id_ for id_ in ids if id_ in self._counts[kind]}
        await self._tell_known(kind, keys, lambda id_, answer: not is_as_had(answer, ids[id_]))

    def take(self, limit: int) -> list[HubUpdate]:
        """Up to so many news, and failures to refresh: there `answer.error` says why."""
        return self._news.take(limit)

    def apart(self, news: list[HubUpdate]) -> tuple[list[HubUpdate], list[HubUpdate]]:
        """News that are the same for every viewer, and news that only this viewer may see."""
        if self.viewer_id is None:
            return news, []
        shared = [it for it in news if not self._hub.is_per_viewer(it.kind)]
        return shared, [it for it in news if self._hub.is_per_viewer(it.kind)]

    def take_over(self, other: "Connection") -> None:
        """What another connection is subscribed to, of what is the same for every viewer."""
        for kind, counts in other._counts.items():  # noqa: SLF001 (one of its own)
            if not self._hub.is_per_viewer(kind):
                self._counts[kind] |= counts
                self._total += len(counts)
                self._seen[kind] |= other._seen[kind]  # noqa: SLF001
                if self._is_visible:
                    self._watches[kind].add(*counts)
                self._news.fresh[kind] |= other._news.fresh[kind]  # noqa: SLF001
                self._news.failed[kind] |= other._news.failed[kind]  # noqa: SLF001
        if other._unread or any(not task.done() for task in other._catching_up):  # noqa: SLF001
            self._begin_catching_up(self._ids_by_key())

    def close(self) -> None:
        """The viewer has gone, and their subscriptions with them."""
        if not self._is_open:
            return
        self._is_open = False
        self._stop_catching_up()
        self._clear()  # but for the news: who iterates may still see it
        for watch in self._watches.values():
            watch.close()
        self._closed(self)
        self._changed.set()
        self._tell_owner()

    @property
    def is_open(self) -> bool:
        return self._is_open

    def __enter__(self) -> Self:
        self._check_open()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __aiter__(self) -> AsyncIterator[HubUpdate]:
        return self

    async def __anext__(self) -> HubUpdate:
        while (news := self._news.next()) is None:
            if not self._is_open:
                raise StopAsyncIteration
            self._changed.clear()
            await self._changed.wait()
        return news

    def _watched(self, kind: str) -> Watch[str, Any]:
        """Also of what nothing is subscribed of yet: it ends with the cache."""
        resource = self._hub.resource(kind)
        is_own = self._hub.is_per_viewer(kind)
        seen, fresh, failed = self._seen[kind], self._news.fresh[kind], self._news.failed[kind]
        told = self._tell_owner

        def tell(update: Update[str, Any]) -> None:
            """Run for each viewer of each new copy: as short as can be."""
            id_ = parts(update.key)[1] if is_own else update.key
            answer = update.answer
            if not answer.found and is_still_absent(seen.get(id_), answer):
                return
            seen[id_] = fresh[id_] = answer
            if failed:
                failed.pop(id_, None)
            told()

        def fail(update: Update[str, Any]) -> None:
            self._note_failure(kind, parts(update.key)[1] if is_own else update.key, update.answer)

        return resource.watch(tell=tell, fail=fail, end=self.close).__enter__()

    def _note(self, kind: str, id_: str, answer: Answer[Any]) -> None:
        self._seen[kind][id_] = answer
        self._news.fresh[kind][id_] = answer
        self._news.failed[kind].pop(id_, None)
        self._tell_owner()

    def _note_failure(self, kind: str, id_: str, answer: Answer[Any]) -> None:
        """The first of a row of failures is news, the others are not."""
        before = self._seen[kind].get(id_)
        if before is not None and before.error is not None:
            return
        self._seen[kind][id_] = answer
        self._news.failed[kind][id_] = answer
        self._tell_owner()

    async def _catch_up(self, kind: str, ids: dict[str, str]) -> None:
        seen = self._seen[kind]
        try:
            await self._tell_known(kind, ids, lambda id_, now: is_news(seen.get(id_), now))
        except NotOpen:  # the cache closes, and this connection with it
            return

    async def _tell_known(
        self, kind: str, ids: Mapping[str, str], is_told: Callable[[str, Answer[Any]], bool]
    ) -> None:
        """From memory or the store; what has to be loaded is told by the watch when it lands."""
        seen = self._seen[kind]
        for keys in slices(list(ids)):
            before, unread = {key: seen.get(ids[key]) for key in keys}, set[str]()
            known = await self._hub.resource(kind).known(keys, unread=unread)
            if unread:
                self._unread.add(kind, {key: ids[key] for key in unread})
            for key, answer in known.items():
                id_ = ids[key]
                if id_ not in self._counts[kind] or seen.get(id_) is not before[key]:
                    continue
                if is_told(id_, answer):
                    self._note(kind, id_, answer)
                elif answer.error is None:
                    seen[id_] = answer

    def _begin_catching_up(self, by_kind: Mapping[str, dict[str, str]]) -> None:
        loop = asyncio.get_running_loop()
        for kind, ids in by_kind.items():
            self._catching_up.append(loop.create_task(self._catch_up(kind, ids)))

    def _stop_catching_up(self) -> None:
        for task in self._catching_up:
            task.cancel()
        self._catching_up.clear()
        self._unread.stop()

    def _clear(self) -> None:
        self._total = 0
        for kind in self._counts:
            self._counts[kind].clear()
            self._seen[kind].clear()

    def _ids_by_key(self) -> dict[str, dict[str, str]]:
        """Of each kind that something is subscribed of."""
        found: dict[str, dict[str, str]] = {}
        for kind, ids in self._counts.items():
            if ids:
                known = self._hub.kind(kind, self.viewer_id)
                found[kind] = {self._key(known, id_): id_ for id_ in ids}
        return found

    def _named(self, kind: str, id_: object) -> tuple[Kind, str, str]:
        return self._hub.named(kind, id_, self.viewer_id)

    def _key(self, kind: Kind, id_: str) -> str:
        return key_of(kind, id_, self.viewer_id)

    def _check_open(self) -> None:
        if not self._is_open:
            raise NotOpen("this connection is closed")
