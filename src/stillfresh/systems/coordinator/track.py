"""Refreshes the items of one kind for a coordinator, each for the viewer that is signed in.

A kind is a resource of the controller's cache. The engine leases, fetches and publishes. This
module decides what is in a request, for which viewer it is made, and when a row is stale.

A key holds its viewer's session, so the engine never mixes the loads of two viewers. The file knows
whose views it holds. Before a request is sent, `_load_for_viewers` checks that the file still
belongs to the session's viewer. At that time the engine holds the leases: if another viewer signs
in after the check, the sign-in deletes the leases, and the views that arrive later are not stored.

The result of a refresh says what was stored, and so when an id is stale again. A row is read again
only if the result does not say it: if another change came first.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Final, NamedTuple, TypeAlias

from stillfresh.engine import (
    Answer,
    Dropped,
    MsgpackCodec,
    Origin,
    Refreshed,
    RefreshEnd,
    Resource,
    Spec,
)
from stillfresh.engine.rules import ABSENT, NOTHING, Absent, Terms, pause_of, results_of, stamped
from stillfresh.engine.watcher import Driver
from stillfresh.errors import LoadFailed, StillfreshError, error_text
from stillfresh.freshness import Policy, Verdict
from stillfresh.stores.contract import Record
from stillfresh.systems.coordinator.config import Kind
from stillfresh.systems.coordinator.database import KEPT_FOR
from stillfresh.systems.coordinator.rules import (
    View,
    cools_until,
    fresh_until,
    original_of,
    owner_of,
    stale_at,
)
from stillfresh.tasks import looked_at

if TYPE_CHECKING:
    from stillfresh.systems.coordinator.controller import TtlController

LONGEST_COOLDOWN: Final = 300.0
SERVES_ANOTHER: Final = "the file serves another viewer, who signed in last"

OwnedView: TypeAlias = tuple[str, View]
"""The owner of a view, and the view; no other viewer sees it."""
Outcome: TypeAlias = OwnedView | Absent | LoadFailed | None
"""How a refresh ended; None: a newer change came first, or the viewer has left."""
Outcomes: TypeAlias = dict[str, Outcome]
Rows: TypeAlias = Mapping[str, Record]
NO_BATCH: Final = 0
"""For ids that failed in several requests: none of them is tried apart."""
NOT_KNOWN: Final[Mapping[str, float]] = MappingProxyType({})

logger = logging.getLogger(__name__)


class ViewerSession:
    """From a viewer's sign-in to the sign-out; the same viewer again is another session."""

    def __init__(self, viewer_id: str | None) -> None:
        self.viewer_id = viewer_id
        self.file_is_prepared = False
        """True if the file has an owner for each kind: this session's viewer, or, while nobody is
        signed in, the last one."""
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
    """The items of one kind: their resource, and the lane of those that are subscribed.

    `controller` knows the signed-in viewer, and is told of new views.
    """

    def __init__(self, kind: Kind, controller: "TtlController", fetch_timeout: float) -> None:
        super().__init__(_terms(kind, 0.0), lambda: stamped(controller.clock()))
        self.kind = kind
        self.follows_reposts = False
        self.requests = self.requested = 0
        """Requests of ticks, and the ids in them."""
        self._controller = controller
        self._everybody = ViewerSession(None)
        self._fetch_timeout = fetch_timeout
        self._codec: MsgpackCodec[OwnedView] = MsgpackCodec(tuple[str, View], kind.name)
        self._spec: Spec[ViewKey, OwnedView] = Spec(
            kind=kind.name,
            load=self._load_for_viewers,
            codec=self._codec,
            terms=_terms(kind, 0.0),
            tags=None,
            max_batch=kind.max_batch,
            concurrency=16,
            max_entries=100,  # decoded: the file is read on the spot
            load_timeout=fetch_timeout,
        )
        self._views: Resource[ViewKey, OwnedView] = controller.cache.declare(
            self._spec, lambda key: key.id, lambda id_: ViewKey(id_, self.session)
        )

    @property
    def session(self) -> ViewerSession:
        """The session to fetch for: the signed-in viewer's, or everybody's."""
        return self._controller.session if self.kind.per_viewer else self._everybody

    def configure(self, kind: Kind, cooldown: float) -> None:
        """Change the settings. Every subscribed id is looked up again."""
        self.kind = kind
        self._spec.terms = _terms(kind, cooldown)
        self._spec.max_batch = kind.max_batch
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

    def _decode(self, record: Record) -> OwnedView | None:
        """The view and its owner; None if there is none, or its bytes cannot be read."""
        copy = record.copy
        if copy is None or not isinstance(copy.value, bytes):
            return None
        try:
            return self._codec.decode(copy.value)
        except Exception:  # noqa: BLE001 (bytes of anybody are a miss, not a crash)
            return None

    def times(self, ids: Sequence[str], known: Mapping[str, float] = NOT_KNOWN) -> dict[str, float]:
        """When each is stale: its time in `known`, or by its row.

        While nobody is signed in, nothing is refreshed.
        """
        if self._controller.session.viewer_id is None:
            return dict.fromkeys(ids, float("inf"))
        others = [id_ for id_ in ids if id_ not in known]
        rows = self.rows(others, self.session) if others else {}
        now = self.clock()
        ttl = self.kind.ttl
        longest = self._longest_cooldown
        times = {id_: known[id_] for id_ in ids if id_ in known}
        for id_ in others:
            times[id_] = stale_at(rows.get(id_, NOTHING), ttl, longest, now)
        return times

    @property
    def _longest_cooldown(self) -> float:
        return max(LONGEST_COOLDOWN, self.lane.cooldown)

    async def refresh_times(self, keys: Sequence[str]) -> dict[str, float]:
        return self.times(keys)

    async def renew(self, keys: Sequence[str]) -> AsyncGenerator[Outcomes]:
        """Load the ids in one request."""
        self.requests += 1
        self.requested += len(keys)
        try:
            outcomes, times = await self.load(keys, self.session)
            self.plan(times)
        except StillfreshError as exc:
            outcomes = dict.fromkeys(keys, LoadFailed(str(exc)))
        yield {id_: None if _is_dropped(outcome) else outcome for id_, outcome in outcomes.items()}
        # The screen may have closed meanwhile: only what is still subscribed queues its originals.
        self.refer({id_: outcome for id_, outcome in outcomes.items() if id_ in self.lane})

    def cool(self, failed: Mapping[str, LoadFailed], of: int, now: float) -> None:
        """Let failed ids cool down. If a whole batch failed, its ids are tried apart next time.

        `of`: how many ids the batch had, or NO_BATCH.
        """
        together = of if len(failed) == of else None
        for id_, error in failed.items():
            self.lane.failed(id_, now, pause_of(error.__cause__) or 0.0, together=together)

    async def load(
        self, ids: Sequence[str], session: ViewerSession
    ) -> tuple[Outcomes, dict[str, float]]:
        """Refresh views; return how each refresh ended, and when ids are stale again.

        The time of an id whose refresh does not tell it is left out: its row does. Ticks and forced
        refreshes both use this.
        """
        if session.viewer_id is None and not self.owns(session):
            return await self._load_for_guest(ids, session), {}
        results = await self._views.refresh_many([ViewKey(id_, session) for id_ in ids])
        if session.is_over:
            return dict.fromkeys(ids), {}
        outcomes = {key.id: self._outcome(result, session) for key, result in results.items()}
        times = self._times_of(results, outcomes)
        self._controller.tell(self.kind.name, outcomes)
        if session.is_over:  # a listener signed another viewer in: the times are not for that one
            return outcomes, {}
        return outcomes, times

    def _outcome(self, result: Refreshed[OwnedView], session: ViewerSession) -> Outcome:
        """How a refresh ended. A view that could not be stored is not shown: it has failed."""
        answer = result.answer
        match result.end:
            case RefreshEnd.STORED:
                if not self._is_for(answer, session):
                    return LoadFailed(f"{self.kind.name}: {SERVES_ANOTHER}")
                return answer.value if answer.found else ABSENT
            case RefreshEnd.SUPERSEDED:
                return None
            case RefreshEnd.UNSTORED:
                return LoadFailed(f"{self.kind.name}: what was fetched is not stored")
            case RefreshEnd.FAILED:
                return answer.error

    def _is_for(self, answer: Answer[OwnedView], session: ViewerSession) -> bool:
        """False if another process fetched it for another viewer, who has signed in meanwhile."""
        if answer.found:
            return answer.value[0] == self.owner(session)
        return answer.origin is not Origin.ANOTHER or self.owns(session)

    def _times_of(
        self, results: Mapping[ViewKey, Refreshed[OwnedView]], outcomes: Outcomes
    ) -> dict[str, float]:
        """When ids are stale again, by how their refreshes ended."""
        now = self.clock()
        times: dict[str, float] = {}
        for key, result in results.items():
            outcome = outcomes[key.id]
            if isinstance(outcome, LoadFailed):
                times[key.id] = cools_until(outcome.retry_at, self._longest_cooldown, now)
            elif outcome is not None and result.answer.verdict is Verdict.FRESH:
                times[key.id] = fresh_until(result.answer.fetched_at, self.kind.ttl, now)
        # All times are known. `times` turns them into "never" while nobody is signed in.
        return self.times([*times], times)

    async def edit(self, id_: str, session: ViewerSession, view: View | None) -> None:
        """Store an edited view, or the stored one as if it were new, for the session's viewer."""
        owner = self.owner(session)

        def edited(present: Answer[OwnedView] | None) -> OwnedView:
            # Called just before it is stored: another viewer may have signed in meanwhile.
            if not self.owns(session):
                raise StillfreshError(
                    f"{self.kind.name}: the edit of {id_!r} is not stored: "
                    "the file belongs to another viewer"
                )
            if view is not None or present is None or not present.found:
                return owner, view
            stored_owner, stored_view = present.value
            return owner, stored_view if stored_owner == owner else None

        answer = await self._views.update(ViewKey(id_, session), edited)
        times: dict[str, float] = {}
        if answer is not None:
            times[id_] = fresh_until(answer.fetched_at, self.kind.ttl, self.clock())
        self.note_refreshed([id_], times)

    async def _load_for_guest(self, ids: Sequence[str], session: ViewerSession) -> Outcomes:
        """Fetch and do not store: the file still holds the views of the last viewer."""
        async with asyncio.timeout(self._fetch_timeout):
            results = await self._results(list(ids), session)
        return {
            id_: LoadFailed(error_text(result)) if isinstance(result, BaseException) else result
            for id_, result in results.items()
        }

    def note_refreshed(self, ids: Sequence[str], known: Mapping[str, float]) -> None:
        """Note ids that were refreshed by force or edited: their cooldown ends, and they are looked
        up again when they become stale. `known`: when that is, as far as it is known.
        """
        times = self.times(ids, known)
        now = self.clock()
        for id_ in ids:
            self.lane.refreshed(id_, times[id_], now)

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

    async def _load_for_viewers(self, keys: list[ViewKey]) -> dict[ViewKey, object]:
        """The engine's loader: it sends one request for each viewer among the keys.

        A sign-in after these checks is safe: it deletes the leases, which are held by now.
        """
        loaded: dict[ViewKey, object] = {}
        for session in dict.fromkeys(key.session for key in keys):
            ids = [key.id for key in keys if key.session is session]
            if session.is_over:
                results: Mapping[str, object] = dict.fromkeys(ids, Dropped())
            elif not self.owns(session):
                results = dict.fromkeys(ids, LoadFailed(SERVES_ANOTHER))
            else:
                results = await self._results(ids, session)
            loaded |= {ViewKey(id_, session): result for id_, result in results.items()}
        return loaded

    async def _results(
        self, ids: list[str], session: ViewerSession
    ) -> dict[str, OwnedView | BaseException]:
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
