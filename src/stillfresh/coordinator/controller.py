"""TtlController: fetches whole views and keeps them, whoever asks for it (C10, C11; seed 000).

The one way a view is refreshed, by a tick or by force. Whose session it is decides what may be
kept: a refresh in flight for a viewer who left is dropped (C7).
"""

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Self

import msgspec

from stillfresh.clock import Clock, checked_clock
from stillfresh.coordinator.config import TtlConfig
from stillfresh.coordinator.database import Database
from stillfresh.coordinator.model import Absent, Kind, Refreshed, Updated
from stillfresh.coordinator.nexus_kinds import POST, USER, Nexus, checked_nexus, nexus_kinds
from stillfresh.coordinator.refresher import Refresher, Session
from stillfresh.coordinator.rules import View, milliseconds, owner_of
from stillfresh.durations import Duration, seconds
from stillfresh.engine.keys import checked_id
from stillfresh.errors import ConfigError, LoadFailed, StillfreshError, error_text, shown
from stillfresh.events import Events, Unsubscribe

logger = logging.getLogger(__name__)


class TtlController:
    """`async with TtlController(nexus=…, database=Database("app.db")) as controller:`"""

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
        if nexus is not None:
            checked_nexus(nexus)
        self.database = database
        self.clock = checked_clock(clock)
        self.kinds: dict[str, Kind] = {}
        self.refreshed: Events[Refreshed] = Events()
        self._nexus = nexus
        self._updated: Events[Updated] = Events()
        self._absent: Events[Absent] = Events()
        self._refresher = Refresher(
            database,
            clock,
            seconds(fetch_timeout, name="fetch_timeout", positive=True),
            prepare=self._prepare,
            tell=self._tell,
        )
        self.refresh = self._refresher.refresh
        self._is_coordinated = False
        self.configure(TtlConfig())
        self.declare(kinds)

    def declare(self, kinds: Iterable[Kind]) -> None:
        """More kinds, each of a name of its own."""
        if not isinstance(kinds, Iterable):
            raise ConfigError(f"kinds: takes [Kind(...), ...], not {shown(kinds)}")
        for kind in kinds:
            if not isinstance(kind, Kind):
                raise ConfigError(f"kinds: takes Kind(...), not {shown(kind)}")
            if self.kinds.setdefault(kind.name, kind) != kind:
                raise ConfigError(f"kind {kind.name!r}: declared already; use another name")
            self.session.is_served = False

    def configure(self, config: TtlConfig) -> None:
        """C1: the terms of posts and users."""
        if self._nexus is not None:
            self.kinds |= {kind.name: kind for kind in nexus_kinds(self._nexus, config)}

    def coordinate(self, kinds: Iterable[Kind], config: TtlConfig) -> None:
        """Who is signed in is the word of one coordinator, and so are the terms."""
        if self._is_coordinated:
            raise ConfigError(
                "controller: has a TtlCoordinator already; make a TtlController for each of them"
            )
        self.declare(kinds)
        self.configure(config)
        self._is_coordinated = True

    @property
    def session(self) -> Session:
        return self._refresher.session

    def begin_session(self, viewer_id: str | None) -> None:
        """C7: what is in flight for the one before is dropped."""
        self._refresher.begin(None if viewer_id is None else checked_id("viewer_id", viewer_id))

    def kind(self, name: str) -> Kind:
        if (kind := self.kinds.get(name)) is None:
            known = ", ".join(self.kinds) or "none"
            raise ConfigError(f"kind {shown(name)}: not declared; there are: {known}")
        return kind

    def owner(self, kind: Kind) -> str:
        return owner_of(self.session.viewer_id, per_viewer=kind.per_viewer)

    async def prepare(self) -> None:
        """The file is open, and holds nothing of another viewer.

        While nobody is signed in, the views of who was here last stay: they may come back.
        """
        await self._prepare(self.session)

    async def _prepare(self, session: Session) -> None:
        """For this session; if it is over by the time the file is open, for the one that is not."""
        was_open = self.database.is_open
        await self.database.open()
        if session.is_over:
            session = self.session
        if session.is_served and was_open:
            return
        viewer_id, kinds, declared = session.viewer_id, self.kinds.values(), len(self.kinds)
        served = [kind for kind in kinds if viewer_id is not None or not kind.per_viewer]
        await self.database.serve(
            {kind.name: owner_of(viewer_id, per_viewer=kind.per_viewer) for kind in served}
        )
        session.is_served = len(kinds) == declared

    def rows(self, kind: Kind, ids: Sequence[str]) -> dict[str, int]:
        """C3: a look-up that fails counts as stale."""
        try:
            return self.database.rows(kind.name, self.owner(kind), ids)
        except StillfreshError as exc:
            logger.warning("%s: the rows could not be read: %s", kind.name, exc)
            return {}

    async def get(self, kind: str, id: str) -> View | None:  # noqa: A002 (as it is called)
        """The stored view, fresh or not; None if there is none."""
        known = self.kind(kind)
        return await self.database.view(kind, self.owner(known), checked_id(kind, id))

    async def touch(self, kind: str, id: str, view: View | None = None) -> None:  # noqa: A002
        """C11: after a local edit; no refresh sent before it, or within one TTL, overwrites it.

        With `view`, the edited view is stored in the same transaction.
        """
        known, session = self.kind(kind), self.session
        checked_id(kind, id)
        data = None if view is None else _encoded(kind, view)
        owner = owner_of(session.viewer_id, per_viewer=known.per_viewer)
        with self._refresher.editing(kind, id):
            await self._prepare(session)
            _check_here(known, session)
            now = milliseconds(self.clock())
            if not await self.database.touch(kind, owner, id, now, data):
                raise StillfreshError(
                    f"{kind}: the edit of {id!r} is not stored: the file is kept for another viewer"
                )
        self._announce(known, session, {id: now})

    async def force_refresh_posts_by_ids(
        self, post_ids: Iterable[str], viewer_id: str | None
    ) -> dict[str, View]:
        """C10: whole views, fetched and stored now; LoadFailed, when all have ended, if one failed.

        An id that the server does not know is missing from the result.
        """
        return await self._force(POST, post_ids, viewer_id)

    async def force_refresh_users_by_ids(
        self, user_ids: Iterable[str], viewer_id: str | None = None
    ) -> dict[str, View]:
        """C10: the same for users; without a viewer, for whoever is signed in."""
        return await self._force(USER, user_ids, viewer_id)

    async def force_refresh(self, kind: str, ids: Iterable[str]) -> dict[str, View]:
        """C10: the same for any kind, for whoever is signed in."""
        return await self._force(kind, ids, None)

    def on_updated(self, listener: Callable[[str, list[str]], object]) -> Unsubscribe:
        """`listener(kind, ids)` whenever new views are stored."""
        return self._updated.subscribe(lambda event: listener(event.kind, list(event.ids)))

    def on_absent(self, listener: Callable[[str, list[str]], object]) -> Unsubscribe:
        """`listener(kind, ids)` whenever the server does not know them any more (C9)."""
        return self._absent.subscribe(lambda event: listener(event.kind, list(event.ids)))

    async def evict(self, older_than: Duration = "30d") -> int:
        """Drop what was not refreshed for so long; returns how many views and rows."""
        before = milliseconds(self.clock() - seconds(older_than, name="older_than"))
        return sum([await self.database.evict(kind, before) for kind in self.kinds])

    async def close(self) -> None:
        """The file is closed; it opens again by itself when it is needed."""
        self.session.is_served = False
        await self.database.close()

    async def __aenter__(self) -> Self:
        await self.prepare()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def _force(self, name: str, ids: Iterable[str], viewer_id: str | None) -> dict[str, View]:
        kind = self.kind(name)
        if isinstance(ids, str | bytes):
            raise ConfigError(f"{name}: takes many ids; write [{ids!r}]")
        if not isinstance(ids, Iterable):
            raise ConfigError(f"{name}: takes many ids, not {shown(ids)}")
        wanted = list(dict.fromkeys(checked_id(name, id_) for id_ in ids))
        with self._admitted(kind, viewer_id) as session:
            return await self._forced(kind, wanted, session)

    async def _forced(self, kind: Kind, wanted: list[str], session: Session) -> dict[str, View]:
        views: dict[str, View] = {}
        failed: dict[str, BaseException] = {}
        for start in range(0, len(wanted), kind.max_batch):
            outcome = await self.refresh(kind, wanted[start : start + kind.max_batch], session)
            _check_here(kind, session)
            originals = tuple(dict.fromkeys(outcome.originals.values()))
            self._announce(kind, session, outcome.rows, originals)
            views |= outcome.views
            failed |= outcome.failed
        if failed:
            id_, error = next(iter(failed.items()))
            raise LoadFailed(
                f"{kind.name}: {len(failed)} of {len(wanted)} failed; {id_!r}: {error_text(error)}"
            ) from error
        return views

    @contextmanager
    def _admitted(self, kind: Kind, viewer_id: str | None) -> Iterator[Session]:
        """One viewer at a time: who is here, or a visit while nobody is signed in.

        Without a coordinator there is no signing in: it is who was asked for last.
        """
        here = self.session.viewer_id
        if viewer_id is None or checked_id("viewer_id", viewer_id) == here or not kind.per_viewer:
            yield self.session
        elif not self._is_coordinated:
            self.begin_session(viewer_id)
            yield self.session
        elif here is None:
            with self._refresher.visit(viewer_id) as session:
                yield session
        else:
            raise ConfigError(f"viewer_id: {viewer_id!r} is not who is signed in ({here!r})")

    def _announce(
        self, kind: Kind, session: Session, rows: Mapping[str, int], originals: tuple[str, ...] = ()
    ) -> None:
        """To the coordinator, unless it is about the views of somebody who is not signed in."""
        if session is self.session or not kind.per_viewer:
            self.refreshed.emit(Refreshed(kind.name, rows, originals))

    def _tell(self, kind: str, updated: tuple[str, ...], absent: tuple[str, ...]) -> None:
        if updated:
            self._updated.emit(Updated(kind, updated))
        if absent:
            self._absent.emit(Absent(kind, absent))


def _check_here(kind: Kind, session: Session) -> None:
    """C7: what was asked for a viewer who left is not for who came."""
    if kind.per_viewer and session.is_over:
        raise LoadFailed(f"{kind.name}: the viewer left")


def _encoded(kind: str, view: View) -> bytes:
    try:
        return msgspec.msgpack.encode(view)
    except (TypeError, ValueError, OverflowError, RecursionError, msgspec.MsgspecError) as exc:
        raise ConfigError(f"{kind}: this view cannot be stored: {exc}") from exc
