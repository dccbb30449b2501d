"""Values that callers make from the stored copy (E17): a put that loses no other change.

An update reads the copy, asks its caller for the new value, takes the lease, and reads the copy
again while it holds the lease. It begins again if another change voids the lease.
"""

import asyncio
from collections.abc import Awaitable, Callable, Hashable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from inspect import isawaitable
from typing import Final, TypeVar

from msgspec.structs import replace

from stillfresh.backoff import pause_after, spread
from stillfresh.engine import rules
from stillfresh.engine.loader import looked_at
from stillfresh.engine.model import LEAVE, Answer, Origin
from stillfresh.engine.put import Known, Puts
from stillfresh.engine.rules import NOTHING
from stillfresh.engine.runtime import Runtime
from stillfresh.engine.store_reads import InTurn, PutStep
from stillfresh.errors import StoreError
from stillfresh.freshness import Verdict
from stillfresh.stores.contract import Ask, Copy, Lease, Mark, Superseded

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")

UPDATES: Final = 100  # how often an update begins again because another change came first
PATIENCE: Final = 12  # how often it waits for another's lease before it takes the lease over
FIRST_PAUSE, LONGEST_PAUSE = 0.001, 0.05  # seconds between two attempts

Change = Callable[[Answer[V] | None], object | Awaitable[object]]
"""The argument of `update`: takes the present answer or None, returns the value to store."""


class Updates(Puts[K, V]):
    """Changes of one resource that are made from what is stored."""

    async def update(self, key: K, change: Change[V]) -> Answer[V] | None:
        """Put the value that `change` makes of the stored copy, if that copy is still current.

        Returns the answer that is stored afterwards, or None.
        """
        runtime, gone = await self.ready(), asyncio.Event()
        step = runtime.step(self._update(runtime, key, change, gone))
        step.add_done_callback(looked_at)
        try:
            there: Answer[V] | None = await asyncio.shield(step)
        except asyncio.CancelledError:
            gone.set()
            raise
        return there

    async def _update(
        self, runtime: Runtime, key: K, change: Change[V], gone: asyncio.Event
    ) -> Answer[V] | None:
        """One at a time in this process; repeated while other processes change the key.

        `gone`: the caller gave up. What it does next must come later: nothing more is published.
        """
        try:
            async with InTurn(self.loads.puts, [key]):
                for attempt in range(1, UPDATES + 1):
                    with self._putting(key) as began:
                        seen, answer = await self._at_hand(runtime, key)
                        if gone.is_set() or (said := await self._said(change, answer)) is LEAVE:
                            return answer
                        since, is_loading = runtime.clock(), self.queue.is_loading(key)
                        generation = None if seen is None else seen.generation
                        ask = Ask(self.text(key), generation, self.spec.tags_of(key))
                        ask = replace(ask, take_over=is_loading or attempt > PATIENCE)
                        with self.overtaking([key], voids=False) as step:
                            made = seen, said, partial(_is_void, gone, began)
                            known = await self._replaced(runtime, key, ask, made, change)
                    if known is not None:
                        self._has_put(runtime, known, known.copy, step, since)
                        return self._shown(key, known.copy, runtime.clock())
                    pause = pause_after(attempt, first=FIRST_PAUSE, longest=LONGEST_PAUSE)
                    await runtime.sleep(spread(pause, runtime.dice))
        except StoreError:
            self.memory.counts.store_errors += 1
            raise
        raise StoreError(f"{self.spec.kind} {key!r}: other changes keep coming first; try again")

    async def _replaced(
        self,
        runtime: Runtime,
        key: K,
        ask: Ask,
        made: tuple[Copy | None, object, Callable[[Known[K, V]], bool]],
        change: Change[V],
    ) -> Known[K, V] | None:
        """Publish; None if another change came first.

        To invalidate the copy, to delete it and to put another one all void the lease. So the copy
        that is read while the lease is held is the one that is replaced. `made`: the copy seen, the
        new value, and whether that was voided before there was a lease.
        """
        store, kind, (seen, said, is_void) = runtime.store, self.spec.kind, made
        lease = (await store.acquire(kind, [ask], self.spec.lease_for))[ask.id]
        if not isinstance(lease, Lease):
            return None
        known, superseded = None, {ask.id}
        try:
            copy, answer = await self._at_hand(runtime, key)
            if _edition(copy) != _edition(seen):
                said = await self._said(change, answer)
            if said is not LEAVE:
                sent = rules.stamped(runtime.clock())
                known = self._known(runtime, key, said, sent, copy)
            if known is not None and not is_void(known):
                known = replace(known, copy=replace(known.copy, generation=lease.token))
                late = None if known.late is None else {ask.id: known.late}
                superseded = await store.publish(kind, {ask.id: (lease, known.copy)}, late)
                if isinstance(superseded, Superseded) and superseded.unsure:
                    why = "the store did not confirm the update; it may have been done"
                    raise StoreError(f"{kind} {key!r}: {why}")
        finally:
            if superseded:
                with suppress(StoreError):
                    await store.release(kind, [lease])
        return None if superseded else known

    @contextmanager
    def _putting(self, key: K) -> Iterator[PutStep[K]]:
        """Note what this process invalidates, until the lease is taken and published."""
        began = PutStep(frozenset([key]))
        self._puts.add(began)
        try:
            yield began
        finally:
            self._puts.discard(began)

    async def _at_hand(self, runtime: Runtime, key: K) -> tuple[Copy | None, Answer[V] | None]:
        """The stored copy, and the answer that `change` is given."""
        id_ = self.text(key)
        copy = (await runtime.store.read(self.spec.kind, [id_])).get(id_, NOTHING).copy
        return copy, None if copy is None else self._shown(key, copy, runtime.clock())

    def _shown(self, key: K, copy: Copy, now: float) -> Answer[V] | None:
        """The answer, however old; None if the copy is GONE or cannot be decoded."""
        verdict, (is_readable, value) = rules.verdict_of(copy, now), self.memory.value_of(key, copy)
        if verdict is Verdict.GONE or not is_readable:
            return None
        return self.memory.made(copy, value, verdict, Origin.STORE)

    async def _said(self, change: Change[V], answer: Answer[V] | None) -> object:
        """Call `change`, which may be async; it ends within `load_timeout` (E3)."""
        if not isawaitable(said := change(answer)):
            return said
        limit = asyncio.timeout(longest := self.spec.load_timeout)
        try:
            async with limit:
                return await said
        except TimeoutError as exc:
            if not limit.expired():
                raise
            why = f"took longer than {longest:g} s (load_timeout); it may not put its own key"
            raise TimeoutError(f"{self.spec.kind}: the change of an update {why}") from exc


def _is_void(gone: asyncio.Event, began: PutStep[K], it: Known[K, V]) -> bool:
    return gone.is_set() or began.is_void(it.key, it.every_tag)


def _edition(copy: Copy | None) -> tuple[str, Mark] | None:
    """Changes whenever the copy is replaced or invalidated."""
    return None if copy is None else (copy.generation, copy.mark)
