"""Values that callers make from the stored copy: a put that loses no other change.

An update reads the copy, asks its caller for the new value, and puts it on the condition that the
copy is still the one that was read. If another change came first, it begins again.
"""

import asyncio
from collections.abc import Awaitable, Callable, Hashable
from inspect import isawaitable
from typing import TYPE_CHECKING, Final, Generic, TypeVar

from stillfresh.backoff import pause_after, spread
from stillfresh.engine import rules
from stillfresh.engine.model import DELETE, LEAVE, Answer, Origin
from stillfresh.engine.put import InTurn
from stillfresh.engine.rules import NOTHING
from stillfresh.engine.runtime import Runtime
from stillfresh.errors import StoreError
from stillfresh.freshness import Verdict
from stillfresh.stores.contract import Copy, PutOutcome, PutResult, When
from stillfresh.turns import THIS_THREAD

if TYPE_CHECKING:
    from stillfresh.engine.core import Core

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")

UPDATES: Final = 100  # how often an update begins again because another change came first
FIRST_PAUSE: Final = 0.001
LONGEST_PAUSE: Final = 0.05  # seconds between two attempts

Change = Callable[[Answer[V] | None], object | Awaitable[object]]
"""The argument of `update`: takes the present answer or None, returns the value to store."""


class Updates(Generic[K, V]):
    """Changes of one resource that are made from what is stored."""

    def __init__(self, core: "Core[K, V]") -> None:
        self._core = core
        self._spec = core.spec
        self._memory = core.memory
        self._puts = core.puts

    async def update(self, key: K, change: Change[V]) -> Answer[V] | None:
        """Put the value that `change` makes of the stored copy, if that copy is still current.

        Returns the answer that is stored afterwards, or None.
        """
        runtime = await self._core.ready()
        with runtime.waited_for():
            return await self._update(runtime, key, change)

    async def _update(self, runtime: Runtime, key: K, change: Change[V]) -> Answer[V] | None:
        """One at a time in this process; repeated while other processes change the key."""
        try:
            async with InTurn(self._core.loads.puts, [key]):
                for attempt in range(1, UPDATES + 1):
                    is_done, answer = await self._attempt(runtime, key, change)
                    if is_done:
                        return answer
                    pause = pause_after(attempt, first=FIRST_PAUSE, longest=LONGEST_PAUSE)
                    await runtime.sleep(spread(pause, runtime.dice))
        except StoreError:
            self._memory.counts.store_errors += 1
            raise
        raise StoreError(f"{self._spec.kind} {key!r}: other changes keep coming first; try again")

    async def remove(self, key: K) -> bool:
        """Delete a key; return True if it had a fresh value.

        Of many callers at once, one gets True. Like a deletion, it voids the load that another
        caller or process has begun. Where a put that is refused says that nothing is stored, one
        step is enough; elsewhere the store is read first, so that a key of which it has nothing is
        not written.
        """
        runtime = await self._core.ready()
        with runtime.waited_for():
            return await self._remove(runtime, key)

    async def _remove(self, runtime: Runtime, key: K) -> bool:
        async with InTurn(self._core.loads.puts, [key]):
            is_loading = key in self._core.loads.under_way
            if not is_loading and not runtime.can.tells_emptiness:
                id_ = self._core.names.text(key)
                if id_ not in await runtime.store.read(self._spec.kind, [id_]):
                    return False
            result = await self._put_nothing_over_a_live_copy(runtime, key)
        if result.is_stored:
            return True
        if is_loading or not result.is_empty:
            await self._core.delete([key])
        return False

    async def _put_nothing_over_a_live_copy(self, runtime: Runtime, key: K) -> PutResult:
        """The first step of a removal, which says whether it found a live copy."""
        sent = rules.stamped(runtime.clock())
        known = self._puts.prepare(runtime, key, DELETE, sent)
        put = known.as_put(When.LIVE_COPY)
        asked = self._core.memory.asked_now()
        with self._core.changes.overtaking([key]) as step:
            results = await self._puts.settle(runtime, {known.id: put}, lambda _: False)
        result = results[known.id]
        if result.is_stored:
            self._puts.note_stored(runtime, known, result, step, asked)
            self._core.owner.changed()
        return result

    async def _attempt(
        self, runtime: Runtime, key: K, change: Change[V]
    ) -> tuple[bool, Answer[V] | None]:
        """Read, make the value, put it. Returns whether that settled it, and the answer then."""
        with self._core.fence.starting() as start:
            seen, answer = await self._read_now(runtime, key)
            value = await self._call_change(change, answer)
            if value is LEAVE:
                return True, answer
            sent = rules.stamped(runtime.clock())
            known = self._puts.prepare(runtime, key, value, sent, old=seen)
            put = known.as_put(When.UNCHANGED, seen)

            def is_void(_: str) -> bool:
                return start.is_void(key, known.every_tag)

            asked = self._core.memory.asked_now()
            with self._core.changes.overtaking([key], voids=False) as step:
                results = await self._puts.settle(runtime, {known.id: put}, is_void)
        result = results.get(known.id, PutResult(PutOutcome.REFUSED))
        match result.outcome:
            case PutOutcome.STORED | PutOutcome.REPLACED:
                self._puts.note_stored(runtime, known, result, step, asked)
                self._core.owner.changed()
                return True, self._answer_of(key, known.copy, runtime.clock())
            case PutOutcome.KEPT:
                return True, (await self._read_now(runtime, key))[1]
            case PutOutcome.MIXED:
                raise self._puts.mixed_error(known, result)
        return False, None

    async def _read_now(self, runtime: Runtime, key: K) -> tuple[Copy | None, Answer[V] | None]:
        """The stored copy, and the answer that `change` is given."""
        id_ = self._core.names.text(key)
        copy = (await runtime.store.read(self._spec.kind, [id_])).get(id_, NOTHING).copy
        return copy, None if copy is None else self._answer_of(key, copy, runtime.clock())

    def _answer_of(self, key: K, copy: Copy, now: float) -> Answer[V] | None:
        """The answer, however old; None if the copy is GONE or cannot be decoded."""
        verdict = rules.verdict_of(copy, now)
        is_readable, value = self._memory.value_of(key, copy)
        if verdict is Verdict.GONE or not is_readable:
            return None
        return self._memory.new_answer(copy, value, verdict, Origin.STORE)

    async def _call_change(self, change: Change[V], answer: Answer[V] | None) -> object:
        """Call `change`, which may be async; it ends within `load_timeout`."""
        value = change(answer)
        if not isawaitable(value):
            return value
        longest = self._spec.load_timeout
        why = f"took longer than {longest:g} s (load_timeout); it may not put its own key"
        late = TimeoutError(f"{self._spec.kind}: the change of an update {why}")
        if THIS_THREAD.has_turn:  # it runs in this thread, and cannot be cut off
            clock = asyncio.get_running_loop().time
            began = clock()
            result = await value
            if clock() - began > longest:
                raise late
            return result
        limit = asyncio.timeout(longest)
        try:
            async with limit:
                return await value
        except TimeoutError as exc:
            if not limit.expired():
                raise
            raise late from exc
