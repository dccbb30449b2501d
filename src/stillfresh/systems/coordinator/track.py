"""Refreshes the items of one kind for a coordinator, each for the viewer that is signed in.

A kind is a resource of the controller's cache. The engine leases, fetches and publishes. This
module decides what is in a request, for which viewer it is made, and when a row is stale.

A key holds its viewer's session, so the engine never mixes the loads of two viewers. The file knows
whose views it holds. Before a request is sent, `_load` checks that the file still belongs to the
session's viewer. At that time the engine holds the leases: if another viewer signs in after the
check, the sign-in deletes the leases, and the views that arrive later are not stored.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple, TypeAlias

from stillfresh.engine import Answer, Dropped, MsgpackCodec, Spec
from stillfresh.engine.loader import looked_at
from stillfresh.engine.rules import ABSENT, NOTHING, Absent, Terms, pause_of, results_of, stamped
from stillfresh.engine.watcher import Driver
from stillfresh.errors import LoadFailed, StillfreshError, error_text
from stillfresh.freshness import Policy, Verdict
from stillfresh.stores.contract import Record
from stillfresh.systems.coordinator.config import Kind
from stillfresh.systems.coordinator.database import KEPT_FOR
from stillfresh.systems.coordinator.rules import View, original_of, owner_of, stale_at

if TYPE_CHECKING:
    from stillfresh.systems.coordinator.controller import TtlController

LONGEST_COOLDOWN: Final = 300.0

Stored: TypeAlias = tuple[str, View]
"""A view and its owner; no other viewer sees it."""
Outcome: TypeAlias = Stored | Absent | LoadFailed | None
"""How a refresh ended; None: a newer change came first, or the viewer has left."""
Outcomes: TypeAlias = dict[str, Outcome]
Rows: TypeAlias = Mapping[str, Record]

logger = logging.getLogger(__name__)


class ViewerSession:
    """From a viewer's sign-in to the sign-out; the same viewer again is another session."""

    def __init__(self, viewer_id: str | None) -> None:
        self.viewer_id = viewer_id
        self.is_served = False
        """True if the file knows whose views it holds."""
        self.is_over = False
        self.waiting: set[asyncio.Future[None]] = set()
        """Futures of the requests that were sent for it."""

    def end(self) -> None:
        """Stop waiting for the requests of a viewer that left."""
        self.is_over = True
        self.drop()

    def drop(self) -> None:
        """Stop waiting for the requests in flight."""
        for wait in self.waiting:
            if not wait.done():
                wait.set_result(None)


class ViewKey(NamedTuple):
    """A key of the resource."""

    id: str
    session: ViewerSession

    def __repr__(self) -> str:
        return repr(self.id)


class Track(Driver[str]):
    """`controller` knows the signed-in viewer, and is told of new views."""

    def __init__(self, kind: Kind, controller: "TtlController", fetch_timeout: float) -> None:
        super().__init__(_terms(kind, 0.0), lambda: stamped(controller.clock()))
        self.kind = kind
        self.follows_reposts = False
        self.requests = self.requested = 0
        """Requests of ticks, and the ids in them."""
        self._controller = controller
        self._everybody = ViewerSession(None)
        spec: Spec[ViewKey, Stored] = Spec(
            kind=kind.name,
            load=self._load,
            codec=MsgpackCodec(tuple[str, View], kind.name),
            terms=_terms(kind, 0.0),
            tags=None,
            max_batch=kind.max_batch,
            concurrency=16,
            max_entries=100,  # decoded: the file is read on the spot
            load_timeout=fetch_timeout,
        )
        self.core = controller.cache.declare(
            spec, lambda key: key.id, lambda id_: ViewKey(id_, self.session)
        ).core

    @property
    def session(self) -> ViewerSession:
        """The session to fetch for: the signed-in viewer's, or everybody's."""
        return self._controller.session if self.kind.per_viewer else self._everybody

    def configure(self, kind: Kind, cooldown: float) -> None:
        """Change the settings. Every subscribed id is looked up again."""
        self.kind = kind
        self.core.spec.terms = _terms(kind, cooldown)
        self.core.spec.max_batch = kind.max_batch
        self.lane.cooldown = cooldown
        self.lane.recheck()

    def owner(self, session: ViewerSession) -> str:
        return owner_of(session.viewer_id, per_viewer=self.kind.per_viewer)

    def owns(self, session: ViewerSession) -> bool:
        """True if the file holds the views of this session's viewer."""
        return self._controller.database.owner(self.kind.name) == self.owner(session)

    def rows(self, ids: Sequence[str], session: ViewerSession) -> Rows:
        """The stored rows by id. If they cannot be read, there are none: each id is stale."""
        try:
            if not self.owns(session):
                return {}
            return self._controller.database.read_now(self.kind.name, ids)
        except StillfreshError as exc:
            logger.warning("%s: the rows could not be read: %s", self.kind.name, exc)
            return {}

    def view(self, id_: str) -> View | None:
        """The stored view, fresh or not, if it is for the signed-in viewer."""
        return self.views([id_]).get(id_)

    def views(self, ids: Sequence[str]) -> dict[str, View]:
        """The stored views of the signed-in viewer, by id, in the order of the ids."""
        rows = self.rows(ids, self.session)
        viewer = self.owner(self.session)
        views: dict[str, View] = {}
        for id_ in ids:
            stored = self._decode(rows.get(id_, NOTHING))
            if stored is not None and stored[0] == viewer:
                views[id_] = stored[1]
        return views

    def _decode(self, record: Record) -> Stored | None:
        """The view and its owner; None if there is none, or its bytes cannot be read."""
        copy = record.copy
        if copy is None or not isinstance(copy.value, bytes):
            return None
        try:
            return self.core.spec.codec.decode(copy.value)
        except Exception:  # noqa: BLE001 (bytes of anybody are a miss, not a crash)
            return None

    def times(self, ids: Collection[str], rows: Rows | None = None) -> dict[str, float]:
        """When each is stale. While nobody is signed in, nothing is refreshed."""
        if self._controller.session.viewer_id is None:
            return dict.fromkeys(ids, float("inf"))
        rows = self.rows([*ids], self.session) if rows is None else rows
        now = self.clock()
        longest = max(LONGEST_COOLDOWN, self.lane.cooldown)
        return {id_: stale_at(rows.get(id_, NOTHING), self.kind.ttl, longest, now) for id_ in ids}

    async def refresh_times(self, keys: Sequence[str]) -> dict[str, float]:
        return self.times(keys)

    async def renew(self, keys: Sequence[str]) -> AsyncGenerator[Outcomes]:
        """Load the ids in one request."""
        self.requests += 1
        self.requested += len(keys)
        try:
            outcomes, rows = await self.load(keys, self.session)
            self._stale_at |= self.times(rows, rows)  # so that they are not read once more
        except StillfreshError as exc:
            outcomes = dict.fromkeys(keys, LoadFailed(str(exc)))
        yield {id_: None if _is_dropped(outcome) else outcome for id_, outcome in outcomes.items()}
        # The screen may have closed meanwhile: only what is still subscribed queues its originals.
        self.refer({id_: outcome for id_, outcome in outcomes.items() if id_ in self.lane})

    def cool(self, failed: Mapping[str, LoadFailed], of: int, now: float) -> None:
        """Let failed ids cool down. If a whole batch failed, its ids are tried apart next time."""
        together = of if len(failed) == of else None
        for id_, error in failed.items():
            self.lane.failed(id_, now, pause_of(error.__cause__) or 0.0, together=together)

    async def load(self, ids: Sequence[str], session: ViewerSession) -> tuple[Outcomes, Rows]:
        """Refresh views; return how each refresh ended, and the rows as they are now.

        Ticks and forced refreshes both use this.
        """
        if session.viewer_id is None and not self.owns(session):
            return await self._load_for_guest(ids, session), {}
        answers = await self.core.answers([ViewKey(id_, session) for id_ in ids], anew=True)
        if session.is_over:
            return dict.fromkeys(ids), {}
        rows = self.rows(ids, session)
        outcomes = {
            key.id: self._outcome(answer, rows.get(key.id, NOTHING))
            for key, answer in answers.items()
        }
        self._controller.tell(self.kind.name, outcomes)
        if session.is_over:  # a listener signed another viewer in: the rows are not for that one
            return outcomes, {}
        return outcomes, rows

    def _outcome(self, answer: Answer[Stored] | LoadFailed, record: Record) -> Outcome:
        """How a load ended, by its answer and by what the file holds now.

        A view that could not be stored has failed. If the file holds a newer view, or an edit, the
        outcome is None.
        """
        copy = record.copy
        if isinstance(answer, LoadFailed):
            return answer
        if copy is None or copy.fetched_at < answer.fetched_at:
            if answer.verdict is Verdict.FRESH or answer.unverified:
                return LoadFailed(f"{self.kind.name}: what was fetched is not stored")
            return None
        value = self.core.spec.codec.encode(answer.value) if answer.found else None
        if copy.fetched_at > answer.fetched_at or copy.value != value:
            return None
        return answer.value if answer.found else ABSENT

    async def _load_for_guest(self, ids: Sequence[str], session: ViewerSession) -> Outcomes:
        """Fetch and do not store: the file still holds the views of the last viewer."""
        async with asyncio.timeout(self.core.spec.load_timeout):
            results = await self._results(list(ids), session)
        return {
            id_: LoadFailed(error_text(result)) if isinstance(result, BaseException) else result
            for id_, result in results.items()
        }

    def note_refreshed(self, ids: Sequence[str]) -> None:
        """Note ids that were refreshed by force or edited: their cooldown ends, and they are looked
        up again when they become stale.
        """
        now = self.clock()
        for id_, at in self.times(ids).items():
            self.lane.refreshed(id_, at, now)

    def refer(self, outcomes: Mapping[str, Outcome]) -> None:
        """With `follow_reposts`, the stale originals of reposts join the queue."""
        if not self.follows_reposts:
            return
        views = [outcome[1] for outcome in outcomes.values() if isinstance(outcome, tuple)]
        originals = [original_of(view) for view in views]
        now = self.clock()
        times = self.times([id_ for id_ in originals if id_ is not None])
        for id_, stale_time in times.items():
            if stale_time <= now:
                self.lane.refer(id_, now)

    async def _load(self, keys: list[ViewKey]) -> dict[ViewKey, object]:
        """The engine's loader: it sends one request for each viewer among the keys.

        A sign-in after these checks is safe: it deletes the leases, which are held by now.
        """
        loaded: dict[ViewKey, object] = {}
        for session in dict.fromkeys(key.session for key in keys):
            ids = [key.id for key in keys if key.session is session]
            if session.is_over:
                results: Mapping[str, object] = dict.fromkeys(ids, Dropped())
            elif not self.owns(session):
                error = LoadFailed("the file serves another viewer, who signed in last")
                results = dict.fromkeys(ids, error)
            else:
                results = await self._results(ids, session)
            loaded |= {ViewKey(id_, session): result for id_, result in results.items()}
        return loaded

    async def _results(
        self, ids: list[str], session: ViewerSession
    ) -> dict[str, Stored | BaseException]:
        """For each id that is not absent: its view with its owner, or the error."""
        try:
            results = results_of(self.kind.name, ids, await self._fetch(ids, session))
        except Exception as exc:  # noqa: BLE001 (a fetch may raise anything)
            return dict.fromkeys(ids, exc)
        owner = self.owner(session)
        return {
            id_: result if isinstance(result, BaseException) else (owner, result)
            for id_, result in results.items()
            if result is not ABSENT
        }

    async def _fetch(self, ids: list[str], session: ViewerSession) -> Mapping[str, object]:
        """The server's answer. Stops waiting for it when the viewer leaves."""
        viewer = (session.viewer_id,) if self.kind.per_viewer else ()
        request = asyncio.ensure_future(self.kind.fetch(list(ids), *viewer))
        viewer_left = asyncio.get_running_loop().create_future()
        session.waiting.add(viewer_left)
        try:
            await asyncio.wait([request, viewer_left], return_when=asyncio.FIRST_COMPLETED)
            if not request.done():
                raise Dropped
            if request.cancelled():
                raise LoadFailed("the fetch cancelled itself")
            return request.result()
        finally:
            session.waiting.discard(viewer_left)
            request.cancel()
            request.add_done_callback(looked_at)


def _terms(kind: Kind, cooldown: float) -> Terms:
    """A view is kept for ten years: the row and the current TTL decide what is fresh."""
    kept_for = KEPT_FOR - kind.ttl
    return Terms(Policy(kind.ttl, kept_for), kind.ttl, 0.0, kept_for, cooldown, LONGEST_COOLDOWN)


def _is_dropped(outcome: Outcome) -> bool:
    return isinstance(outcome, LoadFailed) and isinstance(outcome.__cause__, Dropped)
