"""One refresh: the request, its answer, and what is kept of it (C7, C9-C11).

The one way from ids to stored views, for a tick and for a forced refresh alike.
"""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import msgspec

from stillfresh.clock import Clock
from stillfresh.coordinator.database import Database, decoded
from stillfresh.coordinator.model import Kind, Outcome
from stillfresh.coordinator.nexus_kinds import POST
from stillfresh.coordinator.rules import milliseconds, original_of, owner_of
from stillfresh.engine.rules import ABSENT, results_of
from stillfresh.errors import LoadFailed, StillfreshError


class Session:
    """From a viewer's coming to their leaving; the same viewer again is another session."""

    __slots__ = ("fetches", "is_over", "is_served", "viewer_id")

    def __init__(self, viewer_id: str | None) -> None:
        self.viewer_id = viewer_id
        self.fetches: set[asyncio.Future[Mapping[str, object]]] = set()
        """Those for this viewer alone, of no use to another."""
        self.is_served = False
        """The file has been told whose views it holds."""
        self.is_over = False

    def end(self) -> None:
        """C7: nobody waits for what is in flight for who left."""
        self.is_over = True
        for fetch in self.fetches:
            fetch.cancel()


class Flight:
    """A request under way, for whom, and which of its ids were edited here since (C11)."""

    __slots__ = ("edited", "ids", "kind", "session")

    def __init__(self, kind: str, ids: Sequence[str], session: Session, edited: set[str]) -> None:
        self.kind = kind
        self.ids = list(ids)
        self.session = session
        self.edited = edited


class Refresher:
    """`prepare` makes the file ready for a session; `tell(kind, updated, absent)` what came."""

    def __init__(
        self,
        database: Database,
        clock: Clock,
        fetch_timeout: float,
        *,
        prepare: Callable[[Session], Awaitable[None]],
        tell: Callable[[str, tuple[str, ...], tuple[str, ...]], None],
    ) -> None:
        self.session = Session(None)
        self._database = database
        self._clock = clock
        self._timeout = fetch_timeout
        self._prepare = prepare
        self._tell = tell
        self._flights: set[Flight] = set()
        self._visits: set[Session] = set()
        self._editing: Counter[tuple[str, str]] = Counter()

    def begin(self, viewer_id: str | None) -> None:
        """C7: the one before is over, and so are the visits of anybody else."""
        over, self.session = self.session, Session(viewer_id)
        over.end()
        for visit in self._visits:
            if visit.viewer_id != viewer_id:
                visit.end()

    @contextmanager
    def visit(self, viewer_id: str) -> Iterator[Session]:
        """A session for what is done in the block, while nobody is signed in."""
        session = Session(viewer_id)
        self._visits.add(session)
        try:
            yield session
        finally:
            self._visits.discard(session)

    @contextmanager
    def editing(self, kind: str, id_: str) -> Iterator[None]:
        """C11: no request that was sent before the edit is stored overwrites it."""
        self._editing[kind, id_] += 1
        for flight in self._flights:
            if flight.kind == kind and id_ in flight.ids:
                flight.edited.add(id_)
        try:
            yield
        finally:
            self._editing[kind, id_] -= 1
            if not self._editing[kind, id_]:
                del self._editing[kind, id_]

    async def refresh(
        self, kind: Kind, ids: Sequence[str], session: Session | None = None
    ) -> Outcome:
        """One request, and what it said, stored; the caller tells `refreshed`."""
        edited = {id_ for id_ in ids if (kind.name, id_) in self._editing}
        flight = Flight(kind.name, ids, session or self.session, edited)
        self._flights.add(flight)
        try:
            results, sent = await self._fetched(kind, flight)
            return await self._kept(kind, flight, results, sent)
        finally:
            self._flights.discard(flight)

    async def _fetched(self, kind: Kind, flight: Flight) -> tuple[dict[str, object], int]:
        """What was said of each id, and when it was asked for."""
        sent = milliseconds(self._clock())
        try:
            await self._prepare(flight.session)
            if _is_over(kind, flight):
                return {}, sent
            sent = milliseconds(self._clock())
            async with asyncio.timeout(self._timeout):
                answer = await self._begun(kind, flight)
        except asyncio.CancelledError as exc:
            if is_cancelled():
                raise
            return dict.fromkeys(flight.ids, exc), sent
        except TimeoutError:
            error = LoadFailed(f"no answer within {self._timeout:g} s (fetch_timeout)")
            return dict.fromkeys(flight.ids, error), sent
        except Exception as exc:  # noqa: BLE001 (a fetch may raise anything)
            return dict.fromkeys(flight.ids, exc), sent
        return results_of(kind.name, flight.ids, answer), sent

    def _begun(self, kind: Kind, flight: Flight) -> asyncio.Future[Mapping[str, object]]:
        if not kind.per_viewer:
            return asyncio.ensure_future(kind.fetch(list(flight.ids)))
        session = flight.session
        fetch = asyncio.ensure_future(kind.fetch(list(flight.ids), session.viewer_id))
        session.fetches.add(fetch)
        fetch.add_done_callback(session.fetches.discard)
        return fetch

    async def _kept(
        self, kind: Kind, flight: Flight, results: Mapping[str, object], sent: int
    ) -> Outcome:
        data, failed = _encoded(results)
        if _is_over(kind, flight):
            return Outcome()
        try:
            rows = await self._persisted(kind, flight, data, sent)
        except StillfreshError as exc:
            return Outcome(failed={**failed, **dict.fromkeys(data, exc)})
        if _is_over(kind, flight):
            return Outcome()
        if rows is None:
            found = {id_: decoded(it) for id_, it in data.items() if it is not None}
            return Outcome(found, failed=failed)
        written = [id_ for id_ in data if rows.get(id_) == sent]
        views = {id_: decoded(data[id_]) for id_ in written if data[id_] is not None}
        absent = tuple(id_ for id_ in written if data[id_] is None)
        self._tell(kind.name, tuple(views), absent)
        posts = views if kind.name == POST else {}
        originals = {id_: it for id_, view in posts.items() if (it := original_of(view))}
        return Outcome(views, absent, failed, rows, originals)

    async def _persisted(
        self, kind: Kind, flight: Flight, data: Mapping[str, bytes | None], sent: int
    ) -> dict[str, int] | None:
        """None: nothing is stored of what a guest sees in a file that is kept for a viewer."""
        if not data:
            return {}
        session = flight.session
        rows = await self._database.persist(
            kind.name,
            owner_of(session.viewer_id, per_viewer=kind.per_viewer),
            data,
            sent=sent,
            now=milliseconds(self._clock()),
            edited=flight.edited,
        )
        if rows is None and session.viewer_id is not None and not _is_over(kind, flight):
            raise StillfreshError("the file serves another viewer, who signed in last")
        return rows


def _is_over(kind: Kind, flight: Flight) -> bool:
    """C7: it was for a viewer who left."""
    return kind.per_viewer and flight.session.is_over


def is_cancelled() -> bool:
    """By somebody, not by what was awaited: a fetch that raises CancelledError has failed."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def _encoded(
    results: Mapping[str, object],
) -> tuple[dict[str, bytes | None], dict[str, BaseException]]:
    """What is to be stored (None: absent), and what failed."""
    data: dict[str, bytes | None] = {}
    failed: dict[str, BaseException] = {}
    for id_, result in results.items():
        try:
            if isinstance(result, BaseException):
                failed[id_] = result
            else:
                data[id_] = None if result is ABSENT else msgspec.msgpack.encode(result)
        except Exception as exc:  # noqa: BLE001 (an encoder meets anything)
            failed[id_] = exc
    return data, failed
