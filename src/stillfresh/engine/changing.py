"""A write-through that never stores a value older than somebody else's write.

`changing` takes the key's lease *before* its caller writes to the database. A later change of the
key voids the lease, so a value that was written earlier cannot be stored later:

1. Mark the copy STALE, and take the lease over. A process that dies from here on leaves nothing
   fresh. Both are repeated if somebody else stored a copy in between: the lease is granted only for
   the copy that was marked.
2. The caller writes to its database. The lease is renewed meanwhile, for `load_timeout` at most.
3. `put` publishes the value under the lease. If the lease was lost, nothing is stored.
4. Without a stored value, or with an exception, the key is invalidated at the end.
"""

import asyncio
from collections.abc import Hashable
from types import TracebackType
from typing import TYPE_CHECKING, Final, Generic, Self, TypeVar, Unpack

from msgspec.structs import replace

from stillfresh.backoff import pause_after, spread
from stillfresh.engine.loader import RENEWALS
from stillfresh.engine.loads import OPEN_CHANGES
from stillfresh.engine.model import Loaded, OwnTerms, Stored
from stillfresh.engine.rules import NOTHING
from stillfresh.engine.runtime import Runtime
from stillfresh.errors import StillfreshError, StoreError, refuse_with
from stillfresh.stores.contract import Ask, Lease, PutOutcome, PutResult
from stillfresh.stores.versions import Version, unpacked_version
from stillfresh.tasks import looked_at
from stillfresh.turns import THIS_THREAD

if TYPE_CHECKING:
    from stillfresh.engine.core import Core

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")

MOST_ATTEMPTS: Final = 100
FIRST_PAUSE: Final = 0.0005
LONGEST_PAUSE: Final = 0.05  # seconds between two attempts to take the lease


class Changing(Generic[K, V]):
    """Returned by `changing(key)`; used with `async with`. `put` stores the value you wrote."""

    def __init__(self, core: "Core[K, V]", key: K) -> None:
        self._core = core
        self._key = key
        self._id = core.names.text(key)
        self._lease: Lease | None = None
        self._renewing: asyncio.Task[None] | None = None
        self._was_entered = False
        self._is_given_up = False
        """The caller was cancelled, or its thread interrupted, while the lease was taken."""
        self._is_stored = False
        self.token = ""
        """The token of the change, when the value is stored or the block has ended."""

    async def __aenter__(self) -> Self:
        if self._was_entered:
            raise StillfreshError("this change was entered already; call changing() again")
        self._was_entered = True
        runtime = await self._core.ready()
        lease = await self._begin(runtime)
        if self._is_given_up:
            await self._core.loads.loader.release([lease], {})
            raise asyncio.CancelledError
        self._lease = lease
        self._core.loads.changed_by[self._key] = self
        self.note_inside()
        self._renewing = runtime.spawn(self._renew(runtime, lease))
        return self

    async def give_up(self) -> None:
        """Release the lease: the thread was interrupted before it came into the block."""
        self._is_given_up = True
        lease = self._lease
        if lease is None:
            return
        self._end_lease()
        self.note_outside()
        if self._renewing is not None:
            self._renewing.cancel()
        await self._core.loads.loader.release([lease], {})

    async def _begin(self, runtime: Runtime) -> Lease:
        """Take the lease. If the caller gives up meanwhile, the lease is released again.

        A request that was sent may take the lease although nobody waits for it. Then all readers
        would wait until the lease ends.
        """
        if THIS_THREAD.has_turn:  # nobody can cancel a thread
            return await self._take_lease(runtime)
        taking: asyncio.Task[Lease] = runtime.step(self._take_lease(runtime))
        taking.add_done_callback(looked_at)
        try:
            return await asyncio.shield(taking)
        except asyncio.CancelledError:
            self._is_given_up = True
            giving_back: asyncio.Task[None] = runtime.step(self._give_back(taking))
            giving_back.add_done_callback(looked_at)  # the cache may be closed by then
            raise

    async def _give_back(self, taking: asyncio.Task[Lease]) -> None:
        """Release the lease that nobody waits for any more."""
        await asyncio.wait([taking])
        if not taking.cancelled() and taking.exception() is None:
            await self._core.loads.loader.release([taking.result()], {})

    def note_inside(self) -> None:
        """Note that a load of the key, from here on, would wait for this block itself.

        That holds for the code in the block and for the tasks that it starts.
        """
        OPEN_CHANGES.set((*OPEN_CHANGES.get(), self))

    def note_outside(self) -> None:
        """Note that the block is over."""
        OPEN_CHANGES.set(tuple(other for other in OPEN_CHANGES.get() if other is not self))

    async def _take_lease(self, runtime: Runtime) -> Lease:
        """Mark the copy STALE and take its lease over, until no other change comes in between."""
        core = self._core
        kind = core.spec.kind
        for attempt in range(1, MOST_ATTEMPTS + 1):
            await core.invalidate([self._key], soft=True)
            records = await runtime.store.read(kind, [self._id])
            copy = records.get(self._id, NOTHING).copy
            seen = None if copy is None else copy.generation
            ask = Ask(self._id, seen, core.spec.tags_of(self._key), take_over=True)
            grants = await runtime.store.acquire(kind, [ask], core.spec.lease_for)
            grant = grants.get(self._id)
            if isinstance(grant, Lease):
                return grant
            if grant is None:
                raise StoreError(f"{kind}: the server that holds {self._key!r} does not answer")
            if self._is_given_up:
                break
            pause = pause_after(attempt, first=FIRST_PAUSE, longest=LONGEST_PAUSE)
            await runtime.sleep(spread(pause, runtime.dice))
        raise StoreError(f"{kind} {self._key!r}: other changes keep coming first; try again")

    async def _renew(self, runtime: Runtime, lease: Lease) -> None:
        """Renew the lease until it is lost, or `load_timeout` is over."""
        spec = self._core.spec
        interval = spec.lease_for / RENEWALS
        left = spec.load_timeout
        while left > interval:
            await runtime.sleep(interval)
            left -= interval
            lost = await self._core.loads.loader.ask_store(
                "renew a lease", runtime.store.renew(spec.kind, [lease], spec.lease_for)
            )
            if lost:
                return

    async def put(
        self, value: V | Loaded[V], *, version: Version | None = None, **terms: Unpack[OwnTerms]
    ) -> Stored:
        """Store the value that you have written, unless somebody changed the key since `changing`.

        Then nothing is stored, the key is invalidated, and the result says so. Raises ConfigError
        if the value cannot be stored, and StoreError if the store did not confirm it.
        """
        lease = self._lease
        if lease is None:
            raise StillfreshError("put: call it once, inside the block of changing()")
        core = self._core
        runtime = await core.ready()
        known = core.puts.prepare_one(runtime, self._key, value, terms, version)
        known = replace(known, copy=replace(known.copy, generation=lease.token))
        if core.is_bypassed():
            return Stored(stored=False)
        self._end_lease()
        late = None if known.late is None else {self._id: known.late}
        asked = core.memory.asked_now()
        with core.changes.overtaking([self._key], voids=False) as step:
            superseded = await runtime.store.publish(
                core.spec.kind, {self._id: (lease, known.copy)}, late
            )
        if self._id in superseded:
            core.memory.counts.superseded += 1
            self.token = await core.invalidate([self._key], soft=False)
            return Stored(stored=False)
        self._is_stored = True
        result = PutResult(PutOutcome.STORED, known.copy.version)
        core.puts.note_stored(runtime, known, result, step, asked)
        self.token = core.owner.changed()
        return Stored(stored=True, version=unpacked_version(known.copy.version), token=self.token)

    def _end_lease(self) -> None:
        """It is given to the store, or of no use any more: reads in the block may load again."""
        self._lease = None
        changed_by = self._core.loads.changed_by
        if changed_by.get(self._key) is self:  # and not another one, which has taken the lease
            del changed_by[self._key]

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._end_lease()
        self.note_outside()
        if self._renewing is not None:
            self._renewing.cancel()
        if self._is_stored and error is None:
            return
        runtime = await self._core.ready()
        # To its end, even if the caller is cancelled: nobody else knows that the value is wrong.
        step: asyncio.Task[str] = runtime.step(self._core.invalidate([self._key], soft=False))
        step.add_done_callback(looked_at)  # a caller that was cancelled does not see its error
        self.token = await asyncio.shield(step)


refuse_with(Changing, "this is a change in async code; write `async with`")
