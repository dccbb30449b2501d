"""One kind's lane and what drives it: rows looked up, batches fetched and landed (C3-C5, C9, C10).

It holds no policy: the lane says what is next, the controller fetches and keeps.
"""

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final

from stillfresh.clock import Clock
from stillfresh.coordinator.controller import TtlController
from stillfresh.coordinator.model import Kind, Outcome
from stillfresh.coordinator.rules import MISSING_ROW, milliseconds, stale_at
from stillfresh.engine.lane import Lane
from stillfresh.engine.rules import pause_of
from stillfresh.errors import error_text

LONGEST_COOLDOWN: Final = 300_000
SLICE: Final = 500
"""Ids looked up in one query, so that the loop has a turn between two of them."""

logger = logging.getLogger(__name__)


class Track:
    """`name` is a kind of the controller's, whose terms may change meanwhile."""

    def __init__(
        self, name: str, controller: TtlController, clock: Clock, *, follow_reposts: bool
    ) -> None:
        self.lane: Lane[str] = Lane(cooldown=0, longest_cooldown=LONGEST_COOLDOWN)
        self.requests = 0
        self.requested = 0
        """Ids in those requests."""
        self._name = name
        self._controller = controller
        self._clock = clock
        self._follow_reposts = follow_reposts

    @property
    def kind(self) -> Kind:
        return self._controller.kinds[self._name]

    def now(self) -> int:
        return milliseconds(self._clock())

    def look_up(self, ids: Sequence[str]) -> None:
        """C3: the stale are queued, unless they are cooling; the fresh wait for their time."""
        kind, rows, now = self.kind, self._controller.rows(self.kind, ids), self.now()
        for id_ in ids:
            self.lane.looked_up(id_, stale_at(rows.get(id_), kind.ttl_ms, now), now)

    async def tick(self, batches: int, is_open: Callable[[], bool]) -> None:
        """C5: one look at what is due, then up to so many batches; nothing once it is shut."""
        while is_open() and (due := self.lane.due(self.now(), SLICE)):
            self.look_up(due)
            await asyncio.sleep(0)
        for _ in range(batches):
            if not is_open() or not (batch := self._take()):
                break
            await self._refresh(batch)

    def _take(self) -> list[str]:
        """C5: up to a batch of what is still stale: another writer may have refreshed some."""
        kind, batch = self.kind, list[str]()
        while taken := self.lane.take(kind.max_batch - len(batch), batch):
            now, rows = self.now(), self._controller.rows(kind, taken)
            for id_ in taken:
                until = stale_at(rows.get(id_), kind.ttl_ms, now)
                if until > now:
                    self._land([id_], {id_: until})
                else:
                    batch.append(id_)
        return batch

    async def _refresh(self, batch: list[str]) -> None:
        self.requests += 1
        self.requested += len(batch)
        try:
            outcome = await self._controller.refresh(self.kind, batch)
        except asyncio.CancelledError:
            self.lane.land(batch)
            raise
        except Exception as exc:
            logger.exception("%s: stillfresh itself failed", self._name)
            outcome = Outcome(failed=dict.fromkeys(batch, exc))
        self._fail(outcome.failed, len(batch))
        kind, now = self.kind, self.now()
        found = {id_: stale_at(row, kind.ttl_ms, now) for id_, row in outcome.rows.items()}
        self._land(batch, found | dict.fromkeys(outcome.failed, MISSING_ROW))
        # C8: nothing of a batch is queued again for a screen that has gone.
        self.refer([to for repost, to in outcome.originals.items() if repost in self.lane])

    def _fail(self, failed: Mapping[str, BaseException], of: int) -> None:
        """C9: each id on its own cooldown; one line for the batch."""
        now = self.now()
        for id_, error in failed.items():
            if (pause := pause_of(error)) is not None:
                self.lane.failed(id_, now, pause * 1000)
            else:
                self.lane.failed(id_, now, together=of if len(failed) == of else None)
        if failed:
            first = error_text(next(iter(failed.values())))
            logger.warning("%s: %d of %d failed; the first: %s", self._name, len(failed), of, first)

    def _land(self, ids: Iterable[str], found: Mapping[str, float]) -> None:
        """What is known of each by now; the others are due until they are looked up."""
        now = self.now()
        self.lane.land(ids)
        for id_, until in found.items():
            if until > now:
                self.lane.refreshed(id_, until, now)
            elif self._controller.session.viewer_id is not None:
                self.lane.looked_up(id_, until, now)

    def refreshed(self, rows: Mapping[str, int]) -> None:
        """By force, or touched by hand: looked at again when its time comes."""
        ttl, now = self.kind.ttl_ms, self.now()
        for id_, row in rows.items():
            self.lane.refreshed(id_, stale_at(row, ttl, now), now)

    def refer(self, ids: Sequence[str]) -> None:
        """C10, C17: with `follow_reposts`, the stale originals of reposts join the queue."""
        if not ids or not self._follow_reposts:
            return
        ttl, rows, now = self.kind.ttl_ms, self._controller.rows(self.kind, ids), self.now()
        for id_ in ids:
            if stale_at(rows.get(id_), ttl, now) <= now:
                self.lane.refer(id_, now)
