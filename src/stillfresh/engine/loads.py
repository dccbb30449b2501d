"""The loads of one resource: keys under way, callers that wait for them, and what is next.

A read that needs a key joins its `Work`, or makes one at the end of the queue. When the turn of the
event loop is over, the queue is cut into batches, and each becomes a `Load` (`load.py`), as far as
`concurrency` allows. On `memory://` a load of one key does not wait for that: `begin` says why. A
load that a loader waits for takes no place of its own: the outer load may
hold the only one. When the load of a key ends, callers for whom the result is not new enough are
queued again before anybody is told.
"""

import asyncio
from collections import deque
from collections.abc import Collection, Hashable, Iterable, Mapping
from contextlib import suppress
from contextvars import ContextVar
from functools import partial
from threading import local
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar

from msgspec import Struct, field

from stillfresh.engine.load import Load
from stillfresh.engine.load_states import LOADING, PUBLISHING, End, Ended
from stillfresh.engine.loader import Loader
from stillfresh.engine.rules import FOR_EVER, NOTHING
from stillfresh.engine.runtime import Runtime
from stillfresh.engine.threads import is_interrupted, note_awaited
from stillfresh.engine.work import CURRENT, Waiter, Work
from stillfresh.errors import LoadFailed, LoadTimeout, NotOpen
from stillfresh.stores.contract import Copy, Lease, Record
from stillfresh.tasks import EagerTask, Ending
from stillfresh.turns import THIS_THREAD

if TYPE_CHECKING:
    from stillfresh.engine.core import Core

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")

MAX_BEHIND: Final = 10_000  # background refreshes that may queue
MOST_STARTS: Final = 100  # loads that begin until the loop must have a turn
MOST_SECONDS: Final = 0.004  # that their first steps may take together
MOST_NESTED: Final = 8  # loads inside loads that begin on one stack; deeper ones get a turn
PARTING: Final = 1.0  # seconds, within `grace`, that closing waits for a lease request to end
FORGET_EVERY: Final = 60.0  # seconds between two looks for exceptions that are kept for too long


class Stack(local):
    """Loads whose first step runs now, in this thread: a loader may read, and begin another."""

    starts = 0


STACK: Final = Stack()
OPEN_CHANGES: ContextVar[tuple[object, ...]] = ContextVar("stillfresh_changes", default=())
"""The `changing` blocks around this code, or around the code that started its task."""


class Loads(Generic[K, V]):
    """The loads of one resource, from one opening of its cache to the next."""

    def __init__(self, core: "Core[K, V]", runtime: Runtime | None) -> None:
        """`runtime`: None while the cache is closed. Then nothing is loaded."""
        self.core = core
        self.spec = core.spec
        self.memory = core.memory
        self.fence = core.fence
        self.under_way: dict[K, Work[K, V]] = {}
        self.puts: dict[K, Ending] = {}  # running, by key
        self.changed_by: dict[K, object] = {}
        """The open `changing` of a key, which holds its lease."""
        self._pending: deque[Work[K, V]] = deque()
        self._urgent: deque[Work[K, V]] = deque()
        self._places = 0  # of `concurrency` that are taken
        self._runtime = runtime
        self.is_closed = False
        self._is_flush_planned = False
        self._is_starting = False  # loads are being started, up the stack
        self._begins_at_once = runtime is not None and runtime.can.process is not None
        self._starts = 0  # loads that began since the loop was last given a turn
        self._seconds = 0.0  # and how long their first steps took
        self.storing_ids: dict[str, Ending] = {}
        """Puts of this process that are on their way to the store, by id."""
        self._running: dict[Load[K, V], EagerTask] = {}
        self._followers: set[asyncio.Task[Any]] = set()
        if runtime is not None:
            self.loader: Loader[K, V] = Loader(
                core.spec, runtime, core.memory.counts, core.passes_on
            )
        self._forgetting: asyncio.TimerHandle | None = None
        if runtime is not None and core.spec.in_thread:
            runtime.threads.allow(core.spec.concurrency)

    @property
    def runtime(self) -> Runtime:
        if self._runtime is None:
            raise NotOpen(f"{self.spec.kind}: the cache is closed; open it again")
        return self._runtime

    # Callers join and leave.

    def join(
        self, key: K, id_: str, record: Record, waiter: Waiter[K, V], *, forced: bool = False
    ) -> None:
        """Wait for the load of this key: the running one, or a new one."""
        if key in self.changed_by and self.changed_by[key] in OPEN_CHANGES.get():
            waiter.outcomes[key] = LoadFailed(
                f"{self.spec.kind} {key!r}: it cannot be loaded inside its own changing(), which "
                f"holds its lease; read it before the block, or read your database inside"
            )
            return
        running = self.under_way.get(key)
        if running is not None:
            self.memory.counts.coalesced += 1
            if waiter.outer is not None and _waits_for(running, waiter.outer):
                waiter.outcomes[key] = LoadFailed(
                    f"{self.spec.kind} {key!r}: its loader waits, in a circle, for itself"
                )
                return
        work = self._add(key, id_, record, waiter)
        waiter.wait_for(self, key)
        work.forced |= forced
        work.outgrown |= waiter.max_age < FOR_EVER
        work.join(waiter, self.fence.clock.now, knows=key not in waiter.notes.unread)
        waiter.missing += 1

    def join_missing(self, texts: Mapping[K, str], waiter: Waiter[K, V]) -> None:
        """The same for many keys that the store does not have."""
        if (
            waiter.load
            or self.changed_by
            or waiter.outer is not None
            or not self.under_way.keys().isdisjoint(texts)
        ):
            for key, id_ in texts.items():
                self.join(key, id_, NOTHING, waiter)
            return
        now = self.fence.clock.now
        at_least = waiter.at_least is not None
        has_token = at_least and waiter.has_token
        for key, id_ in texts.items():
            work = Work(key, id_, {waiter: now}, now, at_least=at_least, has_token=has_token)
            self.under_way[key] = work
            self._pending.append(work)
        waiter.missing += len(texts)

    def want(
        self, key: K, id_: str, record: Record, by: Waiter[K, V], *, leased: bool = False
    ) -> None:
        """Refresh in the background, if there is room. `leased`: only if a lease is granted."""
        if len(self._pending) < MAX_BEHIND and not self.memory.is_refused(key):
            is_new = key not in self.under_way
            work = self._add(key, id_, record, by)
            work.wanted = True
            work.leased = leased and (is_new or work.leased)

    def leave(self, waiter: Waiter[K, V], keys: Iterable[K]) -> None:
        """The caller leaves. If it was the last, a load that has not begun is dropped."""
        for key in keys:
            work = self.under_way.get(key)
            if work is not None:
                work.waiters.pop(waiter, None)

    async def wait(self, waiter: Waiter[K, V], keys: Iterable[K] = ()) -> None:
        """Wait until the joined loads have ended, or the caller's patience.

        `keys`: those that the caller asked for; needed if it has a `patience`.
        """
        if not waiter.missing or (waiter.each and waiter.outcomes):
            return
        woken = self.runtime.loop.create_future()
        waiter.wake = partial(_wake, woken)
        if waiter.patience is None:
            await woken
            return
        pause: asyncio.Future[Any] = asyncio.ensure_future(self.runtime.sleep(waiter.patience))
        try:
            await asyncio.wait([woken, pause], return_when=asyncio.FIRST_COMPLETED)
        finally:
            if not self.runtime.loop.is_closed():  # as in `Watcher`
                pause.cancel()
        if not woken.done():
            self._stop_waiting(waiter, keys, waiter.patience)

    def _stop_waiting(self, waiter: Waiter[K, V], keys: Iterable[K], patience: float) -> None:
        """The caller's patience is over: it gets the old copies. The loads go on without it."""
        now = self.memory.now()
        for key in keys:
            work = self.under_way.get(key)
            if work is None or waiter not in work.waiters:
                continue
            del work.waiters[waiter]
            work.wanted = True
            error: LoadFailed = LoadTimeout(
                f"{self.spec.kind} {key!r}: its load takes longer than {patience:g} s (patience); "
                f"it goes on"
            )
            if work.failure is not None and key in waiter.notes.fallbacks:
                error = self.memory.failure_error(key, work.failure, now)
            waiter.settle(key, error)

    def give_fallback(
        self, key: K, copy: Copy, waiters: Iterable[Waiter[K, V]], *, unverified: bool = False
    ) -> None:
        """An EXPIRED copy is served if the load fails."""
        old = self.memory.fallback(key, copy, unverified=unverified)
        if old is not None:
            for waiter in waiters:
                waiter.notes.fallbacks[key] = old

    def _add(self, key: K, id_: str, record: Record, by: Waiter[K, V]) -> Work[K, V]:
        """The work of this key: an existing one, or a new one at the end of the queue."""
        work = self.under_way.get(key)
        if work is None:
            work = Work(key, id_, by=by)
            self.under_way[key] = work
            self._pending.append(work)
        if record is not NOTHING and work.load is None:
            work.saw(record)
        if CURRENT.get() is not None:
            self._hurry(work)
        return work

    def _hurry(self, work: Work[K, V]) -> None:
        """Move a load forward that a loader waits for: that loader may hold the only place."""
        if not work.urgent:
            work.urgent = True
            if work.load is None:
                self._urgent.append(work)

    # Loads begin.

    def begin(self) -> None:
        """Keys have joined. Those of one turn of the loop go into one batch, when it is over.

        Loads of one key need not wait for others: they begin now, inside the reader's call. But not
        on a store that other processes use. There the load may find another process's copy, which
        is given only to callers that asked before the load began; so all callers of this turn
        shall have asked by then. A thread that runs the engine itself is alone in its turn.
        """
        if THIS_THREAD.has_turn:
            self._flush_in_thread()
        elif self._begins_at_once and self.spec.max_batch == 1:
            self._flush()
        else:
            self.flush_soon()

    def flush_soon(self) -> None:
        """Start queued loads, if there are any, when this turn of the loop is over."""
        if self.is_closed:  # its loop may be closed, too
            return
        if not self._is_flush_planned and (self._pending or self._urgent):
            self._is_flush_planned = True
            self.runtime.loop.call_soon(self._flush_planned)

    def _flush_planned(self) -> None:
        self._is_flush_planned = False
        self._starts = 0
        self._seconds = 0.0
        self._flush()

    def _flush(self) -> None:
        """Start as many loads as `concurrency` allows, and no more than a turn of the loop may.

        The others begin when the loop has had a turn.

        A load that ends in its first step, or whose loader asks for more, comes here again: then
        the call up the stack goes on with the queue.
        """
        if self._is_starting:
            return
        self._is_starting = True
        loop = self.runtime.loop
        try:
            while self._pending or self._urgent:
                if self._starts >= MOST_STARTS or self._seconds >= MOST_SECONDS:
                    break
                load = self._next_load()
                if load is None:
                    return
                self._starts += 1
                began = loop.time()
                self._start(load)
                self._seconds += loop.time() - began
        finally:
            self._is_starting = False
        self.flush_soon()

    def _flush_in_thread(self) -> None:
        """Start loads in a thread that waits for them; it holds up no loop.

        While it waits for a server or a loader, it has given its turn away. So it does not look at
        `_is_starting`: others begin loads meanwhile, and so does its own loader.
        """
        with self.runtime.waited_for() as awaited:
            note_awaited(awaited)
            while not is_interrupted():
                load = self._next_load()
                if load is None:
                    return
                self._start(load)
        self.flush_soon()  # others may wait for what is queued

    def _start(self, load: Load[K, V]) -> None:
        """Run the first step of the load, here and now."""
        runtime = self.runtime
        above = STACK.starts
        STACK.starts = above + 1
        try:
            task = runtime.begin(load.run(), runtime.load_context(), waits=above >= MOST_NESTED)
        finally:
            STACK.starts = above
        if task is not None:
            self.note_running(load, task)

    def note_running(self, load: Load[K, V], task: EagerTask) -> None:
        """The load waits: it did not end in its first step, or this step waits in a thread."""
        self._running[load] = task
        load.has_waited(task)

    def _next_load(self) -> Load[K, V] | None:
        """The next batch. A load inside a load takes no place."""
        if self._urgent:
            batch = self._take(self._urgent)
            if batch:
                return self._new_load(batch, takes_place=False)
        if self._pending and self._places < self.spec.concurrency:
            batch = self._take(self._pending)
            if batch:
                self._places += 1
                return self._new_load(batch, takes_place=True)
        return None

    def _new_load(self, batch: list[Work[K, V]], *, takes_place: bool) -> Load[K, V]:
        load = Load(self, batch, takes_place)
        load.begin(batch)
        return load

    def _take(self, queue: deque[Work[K, V]]) -> list[Work[K, V]]:
        taken: list[Work[K, V]] = []
        if self.is_closed:
            return taken
        under_way = self.under_way
        most = self.spec.max_batch
        while queue and len(taken) < most:
            work = queue.popleft()
            if work.load is not None or under_way.get(work.key) is not work:
                continue  # it was urgent, and in both queues
            if work.wanted or work.waiters:
                taken.append(work)
            else:  # its last caller left
                self.drop(work)
        return taken

    def follow(self, load: Load[K, V]) -> None:
        """Wait for a load of another process."""
        task = self.runtime.spawn(load.follow(), self.runtime.load_context())
        self._followers.add(task)
        task.add_done_callback(self._followers.discard)

    def finish(self, load: Load[K, V]) -> None:
        """A load has ended: the next one may begin. It may have ended before, by a time-out."""
        self._running.pop(load, None)
        if load.takes_place:
            load.takes_place = False
            self._places -= 1
        if self._pending or self._urgent:
            self.flush_soon()  # after the callers, which may join what is queued

    # Loads end.

    def end(self, work: Work[K, V], how: End, *, is_changed: bool) -> Ended[Waiter[K, V]]:
        """End the work of a key. A following load is queued first, so that callers may join it."""
        ended = work.end(how, is_changed=is_changed)
        self.under_way.pop(work.key, None)
        if ended.again:
            first = next(iter(ended.left), work.by)
            trailing: Work[K, V] = Work(
                work.key,
                work.id,
                dict.fromkeys(ended.left, 0),  # they asked before the next load begins
                seen=work.seen,
                failure=work.failure,
                wanted=work.wanted,
                forced=work.forced,
                outgrown=work.outgrown,
                at_least=any(waiter.at_least is not None for waiter in ended.left),
                has_token=any(waiter.has_token for waiter in ended.left),
                rounds=work.rounds + 1,
                by=first if first is not None and first.load is not None else work.by,
            )
            self.under_way[work.key] = trailing
            self._pending.append(trailing)
            if work.urgent:
                self._hurry(trailing)
        return ended

    def drop(self, work: Work[K, V]) -> None:
        """Nobody needs it any more."""
        if self.under_way.get(work.key) is work:
            del self.under_way[work.key]

    def forget_causes_soon(self) -> None:
        """Let go of old exceptions after some time, although nobody asks for their keys."""
        if self._forgetting is None:
            self._forgetting = self.runtime.loop.call_later(FORGET_EVERY, self._forget_causes)

    def _forget_causes(self) -> None:
        self._forgetting = None
        causes = self.memory.causes
        causes.forget_old(self.memory.now())
        if causes.seen:
            self.forget_causes_soon()

    def close(self) -> None:
        """Start nothing more, and let all waiting callers fail."""
        self.is_closed = True
        if self._forgetting is not None:
            self._forgetting.cancel()
        closed = LoadFailed(f"{self.spec.kind}: the cache was closed")
        ended = list(self.under_way.values())
        self.under_way.clear()
        for work in ended:
            for waiter in work.waiters:
                waiter.settle(work.key, closed)
        for load in tuple(self._running):
            load.stop(min(PARTING, self.runtime.grace / 2))

    async def settled(self, within: float) -> bool:
        """Wait until nothing is loading or about to; False if something still is."""
        with suppress(TimeoutError):
            async with asyncio.timeout(within):
                while self._is_busy:
                    await asyncio.sleep(0)
                    tasks: list[asyncio.Future[Any]] = [*self._running.values()]
                    tasks += self._followers
                    if tasks:
                        await asyncio.wait(tasks)
        return not self._is_busy

    @property
    def _is_busy(self) -> bool:
        return bool(self._running or self._followers or self._is_flush_planned)

    # Puts of this process, which loads wait for.

    def storing(self, ids: Collection[str]) -> "StoringBlock":
        """Inside the block a put of these ids is on its way to the store."""
        return StoringBlock(self.storing_ids, ids)

    async def wait_for_puts(self, works: Iterable[Work[K, V]]) -> None:
        """Wait for puts of this process: their values are the answer, and a load would be void."""
        puts = {self.storing_ids[work.id] for work in works if work.id in self.storing_ids}
        if puts:
            await asyncio.wait([put.future() for put in puts])

    # Questions.

    def not_begun(self) -> int:
        return sum(work.load is None for work in self.under_way.values())

    def is_loading(self, key: K) -> bool:
        """True if this process loads it; False if another one holds the lease."""
        work = self.under_way.get(key)
        return work is not None and work.state in {LOADING, PUBLISHING}

    def lease_of(self, key: K) -> Lease | None:
        """The lease of the load that runs, if it has one and nothing changed the key since."""
        work = self.under_way.get(key)
        if work is None or work.load is None or self.fence.is_changed(key, work.began):
            return None
        return work.load.leases.get(work.id)


class StoringBlock(Struct, eq=False):
    """The block of `Loads.storing`."""

    _storing_ids: dict[str, Ending]
    _ids: Collection[str]
    _end: Ending = field(default_factory=Ending)

    def __enter__(self) -> None:
        for id_ in self._ids:
            self._storing_ids[id_] = self._end

    def __exit__(self, *_: object) -> None:
        self._end.note()
        for id_ in self._ids:
            if self._storing_ids.get(id_) is self._end:
                del self._storing_ids[id_]


def _wake(woken: asyncio.Future[None]) -> None:
    if not woken.done():  # its caller may have been cancelled
        woken.set_result(None)


def _waits_for(work: Work[Any, Any], load: Load[Any, Any]) -> bool:
    """True if this work can end only after `load` does."""
    seen: set[int] = set()
    stack = [work.load]
    while stack:
        other = stack.pop()
        if other is load:
            return True
        if other is not None and id(other) not in seen:
            seen.add(id(other))
            stack += other.awaited_loads()
    return False
