"""TtlController: fetches and stores whole views for the signed-in viewer.

Each kind is a resource of one cache, whose store is the `Database`. A forced refresh is its
`refresh_many`, a local edit its `update`; the sign-in of another viewer empties the file.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Self

from stillfresh.bounded import sliced
from stillfresh.clock import Clock, checked_clock
from stillfresh.durations import Duration, seconds
from stillfresh.engine import Cache
from stillfresh.engine.keys import checked_id
from stillfresh.engine.rules import ABSENT
from stillfresh.errors import ConfigError, LoadFailed, error_text, shown
from stillfresh.events import Events, Unsubscribe
from stillfresh.systems.coordinator.config import (
    POST,
    USER,
    Kind,
    Nexus,
    TtlConfig,
    checked_kinds,
    nexus_kinds,
)
from stillfresh.systems.coordinator.database import KEPT_FOR, Database
from stillfresh.systems.coordinator.rules import View, check_post_id
from stillfresh.systems.coordinator.track import NO_BATCH, Outcome, Track, ViewerSession


class TtlController:
    """Fetches and stores views: `async with TtlController(nexus=…, database=Database("app.db")):`.

    With `nexus`, it knows posts and users; `kinds` adds more. A fetch fails after `fetch_timeout`.
    """

    def __init__(
        self,
        *,
        database: Database,
        nexus: Nexus | None = None,
        kinds: Iterable[Kind] = (),
        clock: Clock = time.time,
        fetch_timeout: Duration = "30s",
    ) -> None:
        if not isinstance(database, Database):
            raise ConfigError(f'database: takes Database("app.db"), not {shown(database)}')
        self.database = database
        self.clock = checked_clock(clock)
        self.session = ViewerSession(None)
        self.tracks: dict[str, Track] = {}
        database.set_clock(clock)
        self.cache = Cache(database, clock=clock, dice=lambda: 0.0)
        self._fetch_timeout = seconds(fetch_timeout, name="fetch_timeout", positive=True)
        self._nexus = nexus
        self._visits: set[ViewerSession] = set()
        self._updated: Events[tuple[str, list[str]]] = Events()
        self._absent: Events[tuple[str, list[str]]] = Events()
        self._is_coordinated = False
        self.configure(TtlConfig())
        self.declare(kinds)

    @property
    def kinds(self) -> dict[str, Kind]:
        """The kinds by name."""
        return {name: track.kind for name, track in self.tracks.items()}

    def declare(self, kinds: Iterable[Kind]) -> None:
        """Declare more kinds, each under its own name."""
        for name, kind in checked_kinds(kinds).items():
            if self.kinds.get(name, kind) != kind:
                raise ConfigError(f"kind {name!r}: declared already; use another name")
            self._add_or_configure(kind)

    def configure(self, config: TtlConfig) -> None:
        """Set the times of posts and users, and the cooldown of all kinds."""
        self._cooldown = config.cooldown_ms / 1000
        kinds = self.kinds
        if self._nexus is not None:
            kinds |= {kind.name: kind for kind in nexus_kinds(self._nexus, config)}
        for kind in kinds.values():
            self._add_or_configure(kind)

    def _add_or_configure(self, kind: Kind) -> None:
        if kind.name not in self.tracks:
            self.tracks[kind.name] = Track(kind, self, self._fetch_timeout)
            self.session.file_is_prepared = False
        self.tracks[kind.name].configure(kind, self._cooldown)

    def coordinate(self, kinds: Iterable[Kind], config: TtlConfig, clock: Clock) -> None:
        """Only one coordinator says who is signed in, and sets the times and the clock."""
        if self._is_coordinated:
            raise ConfigError(
                "controller: has a TtlCoordinator already; make a TtlController for each of them"
            )
        self.declare(kinds)
        self.configure(config)
        self.clock = clock
        self._is_coordinated = True

    def begin_session(self, viewer_id: str | None) -> None:
        """Drop requests in flight for the viewer before, and for visits of other viewers."""
        previous = self.session
        self.session = ViewerSession(viewer_id)
        previous.end()
        for visit in self._visits:
            if visit.viewer_id != viewer_id:
                visit.end()

    def track(self, kind: str) -> Track:
        if (track := self.tracks.get(kind)) is None:
            known = ", ".join(self.tracks) or "none"
            raise ConfigError(f"kind {shown(kind)}: not declared; there are: {known}")
        return track

    def checked_item(self, kind: str, id: str) -> str:  # noqa: A002 (as it is called)
        """Return the id, if an item of this kind can have it."""
        checked_id(kind, id)
        if kind == POST and self._nexus is not None:
            check_post_id(id)
        return id

    def _checked_items(self, kind: str, ids: Iterable[str]) -> list[str]:
        """Return each id once, in the order in which they came."""
        if isinstance(ids, str | bytes) or not isinstance(ids, Iterable):
            raise ConfigError(f"{kind}: takes many ids; write [{shown(ids)}]")
        return list(dict.fromkeys(self.checked_item(kind, id_) for id_ in ids))

    async def prepare(self, session: ViewerSession | None = None) -> None:
        """Open the file for a session, or the current one, without views of another viewer.

        While nobody is signed in, the views of the last viewer stay, because that viewer may come
        back.
        """
        session = session or self.session
        await self.cache.open()
        if session.is_over:
            session = self.session
        tracks = list(self.tracks.values())
        if session.file_is_prepared and all(
            self.database.owner(track.kind.name) for track in tracks
        ):
            return
        owners = {track.kind.name: track.owner(session) for track in tracks}
        keep_other_owner: set[str] = set()
        if session.file_is_prepared or session.viewer_id is None:
            keep_other_owner = {track.kind.name for track in tracks if track.kind.per_viewer}
        await self.database.serve(owners, keep_other_owner=keep_other_owner)
        # The file is not prepared for a kind that was declared while we waited.
        session.file_is_prepared = len(tracks) == len(self.tracks)

    async def get(self, kind: str, id: str) -> View | None:  # noqa: A002 (as it is called)
        """Return the stored view, fresh or not, or None."""
        track = self.track(kind)
        self.checked_item(kind, id)
        await self.cache.open()
        return track.view(id)

    async def get_many(self, kind: str, ids: Iterable[str]) -> dict[str, View]:
        """Return the stored views by id, fresh or not. An id without a view is left out.

        Raises LoadFailed if the viewer signs out meanwhile.
        """
        track = self.track(kind)
        wanted = self._checked_items(kind, ids)
        session = track.session
        await self.cache.open()
        views: dict[str, View] = {}
        async for chunk in sliced(wanted):
            # Other tasks run between two slices: one of them may sign another viewer in.
            _check_here(track, session)
            views |= track.views(chunk)
        return views

    async def touch(self, kind: str, id: str, view: View | None = None) -> None:  # noqa: A002
        """Record a local edit: for one TTL, no refresh overwrites it, whenever it was sent.

        With `view`, the edited view is stored in the same transaction.
        """
        track = self.track(kind)
        session = track.session
        self.checked_item(kind, id)
        await self.prepare(session)
        _check_here(track, session)
        await track.edit(id, session, view)

    async def force_refresh_posts_by_ids(
        self, post_ids: Iterable[str], viewer_id: str | None
    ) -> dict[str, View]:
        """Fetch and store posts now; return the views of those that the server knows.

        Raises LoadFailed, after all have ended, if one failed.
        """
        return await self._force(POST, post_ids, viewer_id)

    async def force_refresh_users_by_ids(
        self, user_ids: Iterable[str], viewer_id: str | None = None
    ) -> dict[str, View]:
        """Fetch and store users now, as for posts; without a viewer, for the one signed in."""
        return await self._force(USER, user_ids, viewer_id)

    async def force_refresh(self, kind: str, ids: Iterable[str]) -> dict[str, View]:
        """Fetch and store items of any kind now, as for posts."""
        return await self._force(kind, ids, None)

    def on_updated(self, listener: Callable[[str, list[str]], object]) -> Unsubscribe:
        """Call `listener(kind, ids)` for new views. Returns a function that ends it."""
        return self._updated.subscribe(lambda event: listener(*event))

    def on_absent(self, listener: Callable[[str, list[str]], object]) -> Unsubscribe:
        """Call `listener(kind, ids)` for items gone upstream. Returns a function that ends it."""
        return self._absent.subscribe(lambda event: listener(*event))

    async def evict(self, older_than: Duration = "30d") -> int:
        """Delete what was not refreshed for this long; return how many views and rows."""
        before = self.clock() - seconds(older_than, name="older_than")
        await self.cache.open()
        return await self.database.evict(before + KEPT_FOR)

    async def close(self) -> None:
        """Close the file. The next use opens it again."""
        self.session.file_is_prepared = False
        await self.cache.close()

    async def __aenter__(self) -> Self:
        await self.prepare()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def _force(self, name: str, ids: Iterable[str], viewer_id: str | None) -> dict[str, View]:
        track = self.track(name)
        wanted = self._checked_items(name, ids)
        size = track.kind.max_batch
        outcomes: dict[str, Outcome] = {}
        times: dict[str, float] = {}
        with self._session_for(track, viewer_id) as session:
            for start in range(0, len(wanted), size):
                await self.prepare(session)
                loaded, stale_at = await track.load(wanted[start : start + size], session)
                outcomes |= loaded
                times |= stale_at
                _check_here(track, session)
            failed = {
                id_: outcome for id_, outcome in outcomes.items() if isinstance(outcome, LoadFailed)
            }
            if session is track.session:
                track.note_refreshed([id_ for id_ in outcomes if id_ not in failed], times)
                track.cool(failed, NO_BATCH, track.clock())
                # Another process's cooldown may have been longer: the new one counts.
                track.note({id_: times[id_] for id_ in failed if id_ in times})
                track.refer(outcomes)
        for id_, error in failed.items():
            raise LoadFailed(
                f"{name}: {len(failed)} of {len(wanted)} failed; {id_!r}: {error_text(error)}"
            ) from error.__cause__
        return {id_: outcome[1] for id_, outcome in outcomes.items() if isinstance(outcome, tuple)}

    @contextmanager
    def _session_for(self, track: Track, viewer_id: str | None) -> Iterator[ViewerSession]:
        """One viewer at a time: the signed-in one, or a visit while nobody is signed in.

        Without a coordinator nobody signs in. Then the viewer of the last call counts as signed in.
        """
        here = self.session.viewer_id
        is_current = viewer_id is None or checked_id("viewer_id", viewer_id) == here
        if is_current or not track.kind.per_viewer:
            yield track.session
        elif not self._is_coordinated:
            self.begin_session(viewer_id)
            yield self.session
        elif here is None:
            visit = ViewerSession(viewer_id)
            self._visits.add(visit)
            try:
                yield visit
            finally:
                self._visits.discard(visit)
        else:
            raise ConfigError(
                f"viewer_id: {viewer_id!r} is not the viewer that is signed in ({here!r}); "
                "sign that viewer in first"
            )

    def tell(self, kind: str, outcomes: Mapping[str, Outcome]) -> None:
        """Tell the listeners which views are new, and which are absent."""
        updated = [id_ for id_, outcome in outcomes.items() if isinstance(outcome, tuple)]
        if updated:
            self._updated.emit((kind, updated))
        absent = [id_ for id_, outcome in outcomes.items() if outcome is ABSENT]
        if absent:
            self._absent.emit((kind, absent))


def _check_here(track: Track, session: ViewerSession) -> None:
    """Raise LoadFailed if the viewer left: the views fetched for it are not for the next one."""
    if session.is_over:
        raise LoadFailed(f"{track.kind.name}: the viewer signed out meanwhile; ask again")
