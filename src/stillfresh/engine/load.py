"""One load: a batch of keys, from the request for leases to the answer of every caller.

`Load.run` is the story, from top to bottom:

1. Ask the store for leases. Another process may have published meanwhile: its copy is the answer.
   Another process may be loading: its keys go to a load of their own, which follows it.
2. Call the loader for the other keys. A guard renews the leases meanwhile, and ends a load that
   takes too long.
3. Publish the values, and release the leases of keys that failed.
4. Tell the callers, and keep the values in memory.

A load is a task of its own, whose first step runs at once: a load that waits for nothing is over
when `Loads` has started it. It asks the store and the loader through `Loader`. Closing the cache
cancels it only while its loader runs. A request to the store that has begun goes on to its end; a
request for leases gets one more second.

Whatever was changed in this process since the load began is asked of the fence when a key ends, in
one place for each way to end. `load_states.py` has the table of what each end means.

If the store is unavailable, the keys are loaded without a lease: callers get their values, and
nobody is promised more than the store could confirm.
"""

import asyncio
import logging
from collections.abc import Container, Hashable, Iterable, Mapping
from contextvars import Context
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar, cast

from msgspec import Struct

from stillfresh.clock import monotonic as ticks
from stillfresh.engine import rules
from stillfresh.engine.entry import NEVER
from stillfresh.engine.load_states import (
    ASKING,
    LOADED,
    LOADING,
    NEXT,
    SUPERSEDED,
    End,
    LoadEvent,
    LoadState,
)
from stillfresh.engine.loader import LoadGuard, LoadResult
from stillfresh.engine.model import Answer, Origin, Outcome, RefreshEnd, Span
from stillfresh.engine.news import Asked
from stillfresh.engine.rules import NOTHING, Fail, MustLoad, Outlook, Serve
from stillfresh.engine.spans import load_span, noted
from stillfresh.engine.threads import note_interruption
from stillfresh.engine.work import NOT_SENT, Waiter, Work
from stillfresh.errors import LoadFailed, RaisedByLoader
from stillfresh.freshness import Verdict
from stillfresh.stores.contract import Copy, Failure, Held, Lease, Newer, Record
from stillfresh.tasks import EagerTask, forget_cancellations, hide_from_run, show_to_run

if TYPE_CHECKING:
    from stillfresh.engine.loads import Loads

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")
T = TypeVar("T")

SHORTEST_PAUSE: Final = 0.1
LONGEST_PAUSE: Final = 1.0  # seconds between two looks at another process's load
BY_THIS_CALL: Final = Origin.LOADED  # global names, as in `rules.FRESH`
BY_ANOTHER: Final = Origin.ANOTHER

logger = logging.getLogger(__name__)


class Load(Struct, Generic[K, V], eq=False):
    """The load of a batch of keys."""

    loads: "Loads[K, V]"
    works: list[Work[K, V]]
    takes_place: bool = False  # of the `concurrency` places
    state: LoadState = ASKING
    leases: dict[str, Lease] = {}
    sent: int = NOT_SENT  # the fence's number when its copies were sent to the store
    span: Span | None = None  # for hooks
    task: EagerTask | None = None
    """Its task, if it did not end in its first step."""
    guard: LoadGuard | None = None
    is_over: bool = False  # it took too long, and whatever its loader still does is ignored
    is_stopped: bool = False  # the cache closes
    has_unverified_parts: bool = False
    """Its loader read copies that the store could not confirm, or values that were made of such
    copies: what it returns is not stored."""
    is_shown: bool = False  # to `asyncio.run`, which may cancel its task
    is_in_thread: bool = False  # a thread runs its loader in the middle of its task's step
    called_at: float = NEVER  # when the loader was called
    interruption: BaseException | None = None
    """What the loader raised to end the program: KeyboardInterrupt, SystemExit."""
    waiting_for: dict[Waiter[Any, Any], "list[tuple[Loads[Any, Any], Any]]"] = {}
    """The keys of other loads that its loader waits for, by the call that does."""
    threads: "dict[object, Load[Any, Any]]" = {}
    """Loads that run on the stack of its loader's thread: it can end only after them."""

    @property
    def has_token(self) -> bool:
        """True if it loads for a caller with a token, or for the loader of such a load."""
        return any(work.has_token for work in self.works)

    @property
    def is_loading(self) -> bool:
        """True while its loader may run. A task that the loader has started may be here later."""
        return self.state is LOADING and not self.is_over

    def awaited_loads(self) -> "list[Load[Any, Any] | None]":
        """The loads that must end before this one can."""
        awaited: list[Load[Any, Any] | None] = list(self.threads.values())
        for waiter, keys in tuple(self.waiting_for.items()):
            for loads, key in keys:
                work = loads.under_way.get(key)
                if work is not None and waiter in work.waiters:
                    awaited.append(work.load)
        return awaited

    async def run(self) -> None:
        """Ask for leases, call the loader, publish, tell the callers. However it ends, all learn.

        It raises only what the loader raised to end the program.
        """
        kind = self.loads.spec.kind
        hooks = self.loads.loader.runtime.hooks
        try:
            if hooks:
                with load_span(hooks, kind, self):
                    await self._load()
            else:
                await self._load()
        except asyncio.CancelledError:
            if not self.is_over:
                self._fail("the cache was closed")
        except Exception:
            logger.exception("%s: internal error of stillfresh", kind)
            self._fail("internal error of stillfresh; see the log")
        except GeneratorExit:  # its loop is gone: nobody waits, and nothing can begin there
            self.loads.is_closed = True
            raise
        except BaseException as exc:  # a signal handler may raise here
            self._fail("the load was interrupted")
            if not note_interruption(exc):
                raise
        finally:
            self.loads.finish(self)
            if self.task is not None:
                self.loads.loader.runtime.stop_awaiting(self.task)
                self.task = None
            if not self.is_over:  # or `end_late` still tells its callers
                self._forget()
        if self.interruption is not None:
            raise self.interruption

    async def _load(self) -> None:
        """The story without its ends."""
        if self.loads.storing_ids:
            await self.loads.wait_for_puts(self.works)
        await self._ask_for_leases()
        if self.works:
            results = await self._call_loader()
            if not self.is_over:
                await self._publish(results)

    def _forget(self) -> None:
        """Leave what leads back to this load: the garbage collector shall have nothing to free."""
        self.works = []
        self.guard = None

    def waits_in_thread(self) -> None:
        """The thread that runs it waits for its loader now."""
        self.is_in_thread = True
        task = cast("EagerTask", asyncio.current_task(self.loads.loader.runtime.loop))
        hide_from_run(task)  # the end of the loop would wait for it
        self.is_shown = False
        if self.task is None:
            self.task = task
            self.guard = LoadGuard(self.loads.loader, self)
            self.loads.note_running(self, task)

    def has_waited(self, task: EagerTask) -> None:
        """It waits for something."""
        if self.task is not None:
            return
        self.task = task
        if self.state is LOADING:
            self.guard_loader(task)
        else:
            hide_from_run(task)

    def guard_loader(self, task: EagerTask) -> None:
        """The loader waits: from now on it may be cancelled, and must be guarded."""
        show_to_run(task)
        self.is_shown = True
        self.guard = LoadGuard(self.loads.loader, self)

    def end_guard(self) -> None:
        """The loader has ended. What follows is not cut off."""
        if self.is_shown and self.task is not None:
            hide_from_run(self.task)
            self.is_shown = False
        if self.guard is not None:
            self.guard.end()

    async def end_late(self) -> None:
        """It has taken too long: tell the callers, and stop the loader."""
        self.is_over = True
        if self.task is not None:
            self.task.cancel()
        results = self.loads.loader.timed_out(self.works)
        self._record(results)
        await self._publish(results)
        self.loads.finish(self)
        self._forget()

    def is_ended(self, task: EagerTask) -> bool:
        """True if a cancellation of its task ends it: its time, the cache or the loop is over."""
        return self.is_over or self.is_stopped or task.is_ended_by_loop

    def stop(self, parting: float) -> None:
        """The cache closes. Cancel the loader; a request for leases gets so many seconds to end."""
        if self.task is None or self.is_over:
            return
        self.is_stopped = True
        if self.is_in_thread:  # nobody can cancel it, and closing does not wait for it
            if self.guard is not None:
                self.guard.end()
            leases = self.leases
            self.leases = {}
            runtime = self.loads.loader.runtime
            runtime.child(self.loads.loader.release(list(leases.values()), {}), Context())
        elif self.state is LOADING:
            self.task.cancel()
        elif self.state is ASKING:
            self.loads.loader.runtime.loop.call_later(parting, self._stop_asking)

    def _stop_asking(self) -> None:
        if self.task is not None and self.state is ASKING:
            self.task.cancel()

    def _fail(self, why: str) -> None:
        failed = LoadResult[V](error=LoadFailed(f"{self.loads.spec.kind}: {why}"))
        self._end(self.works, {work.id: failed for work in self.works})
        self.loads.flush_soon()

    def begin(self, works: Iterable[Work[K, V]]) -> None:
        """Draw the line: callers up to now are EARLY, and changes up to now are in the result.

        The fence advances, so that callers that join later have a greater number. A load that
        follows another process begins anew at each look.
        """
        clock = self.loads.fence.clock
        began = clock.now
        for work in works:
            work.load = self
            work.began = began
        clock.advance()

    def _step(self, event: LoadEvent) -> None:
        self.state = NEXT[self.state][event]

    # 1. The leases.

    async def _ask_for_leases(self) -> None:
        """Ask for the leases. If the store is unavailable, load all keys without one."""
        asks, failed = self.loads.loader.asks(self.works)
        if failed:
            self._end([work for work in self.works if work.id in failed], failed)
            self.works = [work for work in self.works if work.id not in failed]
        asked = self.loads.memory.asked_now()
        grants = None
        if asks:
            grants = await self.loads.loader.acquire(asks)
        grants = grants or {}
        if self.loads.is_closed:  # callers have been told; nobody wants these leases
            granted = [grant for grant in grants.values() if isinstance(grant, Lease)]
            await self.loads.loader.release(granted, {})
            self.works = []
            return
        leases = self.leases
        mine: list[Work[K, V]] = []
        held: list[Work[K, V]] = []
        for work in self.works:
            grant = grants.get(work.id)
            if type(grant) is Lease:  # `isinstance` and `match` take longer, for a struct
                leases[work.id] = grant
                mine.append(work)
            elif type(grant) is Newer:
                self._look(work, grant.record, asked)
            elif type(grant) is Held:
                held.append(work)
            elif work.leased and not work.waiters:
                self.loads.drop(work)  # a refresh that is of no use without a lease
            else:
                work.is_blind = True
                self.begin([work])  # the loader is called only now
                mine.append(work)
        if held:
            self.loads.follow(self._follower_of(held))
        self.works = mine
        self._step(LoadEvent.GRANT)
        if not self.loads.core.is_apart:
            counts = self.loads.memory.counts
            counts.leases_won += len(leases)
            counts.leases_denied += len(grants) - len(leases)

    def _follower_of(self, works: list[Work[K, V]]) -> "Load[K, V]":
        """A load that follows another process, which loads these keys."""
        follower = Load(self.loads, works)
        for work in works:
            work.load = follower
        follower._step(LoadEvent.DENY)
        return follower

    async def follow(self) -> None:
        """Another process loads these keys: look at intervals that grow and vary."""
        pause = SHORTEST_PAUSE
        self._drop_unwaited()
        try:
            with load_span(self.loads.loader.runtime.hooks, self.loads.spec.kind, self):
                while self.works:
                    await self._pause(pause * (1 + 0.5 * self.loads.loader.runtime.dice()))
                    pause = min(LONGEST_PAUSE, pause * 1.5)
                    await self._look_around()
                    self._drop_unwaited()
        except asyncio.CancelledError:
            self._fail("the cache was closed")
            raise
        except Exception:
            logger.exception("%s: internal error of stillfresh", self.loads.spec.kind)
            self._fail("internal error of stillfresh; see the log")
        except GeneratorExit:  # as in `run`
            raise
        except BaseException:  # a signal handler may raise here; the task keeps the exception
            self._fail("the load was interrupted")
            raise

    def _drop_unwaited(self) -> None:
        """Drop keys that another process loads and for which no caller waits here."""
        for work in self.works:
            if not work.waiters:
                self.loads.drop(work)
        self.works = [work for work in self.works if work.waiters]

    async def _pause(self, seconds: float) -> None:
        """Wait, but end early if a put of this process, which may hold the lease, has ended."""
        running = self.loads.puts
        puts = [running[work.key].future() for work in self.works if work.key in running]
        if not puts:
            await self.loads.loader.runtime.sleep(seconds)
            return
        pause: asyncio.Future[Any] = asyncio.ensure_future(self.loads.loader.runtime.sleep(seconds))
        try:
            await asyncio.wait([pause, *puts], return_when=asyncio.FIRST_COMPLETED)
        finally:
            if not self.loads.loader.runtime.loop.is_closed():  # as in `Watcher`
                pause.cancel()

    async def _look_around(self) -> None:
        """Look at all keys; those that must wait longer stay."""
        self._step(LoadEvent.LOOK)
        # What the store says now is new enough for all callers that wait now, and for all changes
        # that this process has made until now.
        self.begin(self.works)
        asked = self.loads.memory.asked_now()
        # If this fails: ask for the lease again, and load without one if that fails too.
        records = await self.loads.loader.read([work.id for work in self.works]) or {}
        left: list[Work[K, V]] = []
        for work in self.works:
            if not self._is_under_way(work):
                continue
            if not self._look(work, records.get(work.id, NOTHING), asked, waited=True):
                left.append(work)
        self.works = left
        self._step(LoadEvent.WAIT)

    def _is_under_way(self, work: Work[K, V]) -> bool:
        """False if the cache was closed meanwhile: then its callers have been told."""
        return self.loads.under_way.get(work.key) is work

    def _look(
        self, work: Work[K, V], record: Record, asked: Asked, *, waited: bool = False
    ) -> bool:
        """Another process has published, failed or died: answer from that, or ask again.

        `waited`: this load follows the other process, which may still be loading. Returns False if
        it is; then nothing has changed.

        `work.seen` names the copy that a load is to replace. It decides what the next request for
        the lease gets: if the store has another copy, it answers with that (`Newer`); if it has
        this one, it grants the lease. So normally the record is noted as seen, and the next load
        gets the lease. Where this copy may be right for the callers that are left, the earlier
        `seen` is put back: their load is told of the copy, and calls no loader.
        """
        memory = self.loads.memory
        key = work.key
        seen = work.seen
        now = memory.now()
        lease_for = self.loads.spec.lease_for
        if waited:
            plan = rules.plan_wait(record, seen, now, lease_for, at_least=work.at_least)
        else:
            plan = rules.plan_read(record, now, lease_for, at_least=work.at_least)
        if plan is None:
            return False
        work.saw(record)
        # The change may be a put of this process, whose value this is.
        is_changed = self.loads.fence.is_changed(key, work.began) and not memory.has(
            key, record.copy
        )
        keeps_cooldown = not is_changed and not work.forced
        is_put = is_changed and self.loads.fence.is_put(key, work.began)
        if is_put:
            # The copy may be the put's: with the lease, the loader's value would be stored over it.
            work.seen = seen
        match plan:
            case Serve(copy) if (
                not is_changed
                and work.is_new_enough(copy, seen)
                and (answer := memory.serve(key, plan, now, asked, Origin.ANOTHER))
            ):
                how = End.FOUND_STALE if plan.refresh else End.FOUND
                if not plan.refresh and not work.forced and not work.outgrown:
                    work.seen = seen  # callers that joined later find this copy, and load nothing
                ended = self.loads.end(work, how, is_changed=False)
                _settle(key, ended.told, answer)
                noted(self.span, plan.verdict)
                if plan.verdict is Verdict.FRESH:  # otherwise the next load tells the watches
                    until = rules.watched_until(copy, self.loads.spec.terms)
                    self.loads.core.watcher.landed(key, answer, until, now)
            case Serve(copy) if (
                is_put
                and plan.verdict is not Verdict.EXPIRED
                and work.is_new_enough(copy, seen)
                and (answer := memory.overtaken_answer(key, plan, now)) is not None
            ):
                # Puts of this process came meanwhile. Callers that asked before may get a copy from
                # before the last of them, or puts that follow one another would let them wait.
                how = End.FOUND_STALE if plan.refresh else End.FOUND
                ended = self.loads.end(work, how, is_changed=True)
                _settle(key, ended.told, answer)
                noted(self.span, Verdict.STALE)
            case Fail(failure):
                self._tell_failure(work, End.COOLING, memory.failure_error(key, failure, now))
            case Serve() if keeps_cooldown and (pause := rules.cooling(record.failure, now)):
                self.loads.give_fallback(key, plan.copy, work.waiters)  # if it can be read
                self._tell_failure(work, End.COOLING, memory.failure_error(key, pause, now))
            case plan:
                if isinstance(plan, MustLoad) and plan.fallback is not None:
                    self.loads.give_fallback(key, plan.fallback, work.waiters)
                self.loads.end(work, End.GIVEN_UP, is_changed=is_changed)
        self.loads.flush_soon()
        return True

    # 2. The loader.

    async def _call_loader(self) -> dict[str, LoadResult[V]]:
        """The result of each key. If the cache closes meanwhile, release the leases."""
        loader = self.loads.loader
        self.called_at = loader.runtime.clock()
        loader.count_call(self.works)
        owner = self.loads.core.owner
        began = ticks()
        try:
            owner.running_loaders.begin(id(self))
            values = await loader.call(self)
            results = loader.results(self, values, ticks() - began)
        except (asyncio.CancelledError, Exception):
            leases = self.leases
            self.leases = {}
            if not self.is_over:
                await self.loads.loader.release(list(leases.values()), {})
            raise
        finally:
            owner.running_loaders.end(id(self))
        if owner.recording_to is not None:
            self._record(results)
        return results

    def _record(self, results: dict[str, LoadResult[V]]) -> None:
        recording = self.loads.core.recording
        if recording is not None:
            recording.loaded(self.loads.spec, results, self.called_at)

    # 3. The publication.

    async def _publish(self, results: dict[str, LoadResult[V]]) -> None:
        """Publish the values, release the leases of failed keys, and answer the callers."""
        self._step(LoadEvent.SEND)
        self.sent = self.loads.fence.clock.now
        self.loads.fence.clock.advance()  # callers that join from now on may know of later changes
        leases = self.leases
        self.leases = {}
        copies: dict[str, tuple[Lease, Copy]] = {}
        late: dict[str, tuple[str, ...]] = {}
        for id_, lease in leases.items():
            result = results[id_]
            if result.copy is not None and result.is_kept and not self.has_unverified_parts:
                copies[id_] = lease, result.copy
                if result.tags is not None:
                    late[id_] = result.tags
        asked = self.loads.memory.asked_now()
        try:
            superseded = await self.loads.loader.publish(copies, late)
        except asyncio.CancelledError:
            task = cast("EagerTask", asyncio.current_task())
            if self.is_ended(task):
                raise
            # The loader has left something that cancels its task, which is this one. The load goes
            # on: the values count as not stored, and the leases are released.
            await forget_cancellations(task)
            superseded = None
        answered_for: Container[str] = copies if superseded is not None else ()
        if superseded is None or len(copies) < len(leases):  # some leases are left
            refused = [
                work for work in self.works if isinstance(results[work.id].error, RaisedByLoader)
            ]
            if refused:
                await self._expire(refused, leases)
            failures = {
                id_: result.failure for id_, result in results.items() if result.failure is not None
            }
            leases_left = [lease for id_, lease in leases.items() if id_ not in answered_for]
            # Begins the cooldown of each failed key, for all processes.
            await self.loads.loader.release(leases_left, failures)
        self._end(self.works, results, answered_for, superseded or (), asked)

    async def _expire(self, works: list[Work[K, V]], leases: Mapping[str, Lease]) -> None:
        """The loader raised what `raises=` names: the copies of these keys are EXPIRED.

        Not those that somebody changed since the load began: they may be newer than its answer.
        """
        expiring = [
            work
            for work in works
            if work.seen is not None
            and work.id in leases
            and not self.loads.fence.is_changed(work.key, work.began)
        ]
        if not expiring:
            return
        keys = [work.key for work in expiring]
        with self.loads.core.changes.overtaking(keys, voids=False) as step:
            await self.loads.loader.expire([leases[work.id] for work in expiring])
        for work in expiring:
            if work.key not in step.changed:  # but by this load itself
                work.began = self.loads.fence.clock.now

    # 4. The callers.

    def _end(
        self,
        works: Iterable[Work[K, V]],
        results: Mapping[str, LoadResult[V]],
        answered_for: Container[str] = (),  # the store has taken or refused their copies
        superseded: Container[str] = (),
        asked: Asked | None = None,  # when the store was asked to keep them
    ) -> None:
        """End each key as its result says; all at once, before the next loads begin."""
        now = self.loads.memory.now()
        outlook: Outlook | None = None
        have_failed = self.loads.memory.has_failures  # most loads have no failure to forget
        under_way = self.loads.under_way
        for work in works:
            if under_way.get(work.key) is not work:
                continue  # the cache was closed
            id_ = work.id
            result = results[id_]
            if work.by is not None:
                work.by.private = result.private
            if result.error is not None:
                self._remember(work, result.failure, result.error)
                self.loads.memory.has_failed(work.key, result.failure)
                self._tell_failure(work, End.FAILED, result.error)
            elif (copy := result.copy) is not None:
                if have_failed:
                    self.loads.memory.forget_failure(work.key)
                how = SUPERSEDED if id_ in superseded else LOADED
                if outlook is None or copy.policy is not outlook.policy:
                    outlook = rules.outlook_of(copy, now)
                    if self.span is not None:
                        noted(self.span, outlook.at_arrival)
                confirmed = asked if id_ in answered_for else None
                self._tell_value(work, how, copy, result, outlook, confirmed)

    def _remember(self, work: Work[K, V], failure: Failure | None, error: LoadFailed) -> None:
        """Keep the error with its cause for later callers of this process."""
        if failure is None:
            return
        if work.by is not None and work.by.load is not None:
            # The cause may hold a response that was meant for the caller with this loader alone.
            error = type(error)()
        self.loads.memory.remember(work.key, failure, error)
        self.loads.forget_causes_soon()

    def _tell_value(  # noqa: PLR0917 (called for each key that is loaded)
        self,
        work: Work[K, V],
        how: End,
        copy: Copy,
        result: LoadResult[V],
        outlook: Outlook,
        asked: Asked | None,
    ) -> None:
        """`asked` is None if the store does not have the value."""
        key = work.key
        value = result.value
        memory = self.loads.memory
        fence = self.loads.fence
        is_changed = False
        if fence.clock.last_change > work.began:
            is_changed = fence.is_changed(key, work.began, result.tags or ())
        ended = self.loads.end(work, how, is_changed=is_changed)
        verdict = Verdict.STALE if ended.is_overtaken else outlook.at_arrival
        found = copy.value is not None
        at = copy.fetched_at
        clock = memory.now
        origin = BY_THIS_CALL
        not_stored: RefreshEnd | None = None
        if ended.is_overtaken:
            not_stored = RefreshEnd.SUPERSEDED
        elif asked is None:
            not_stored = RefreshEnd.UNSTORED
        for waiter in ended.told:  # the first caller started the load, the others share it
            # A caller that came after the load began may know of an invalidation that the store,
            # which did not confirm the value, could not tell us.
            unverified = asked is None and work.waiters[waiter] > work.began
            given = rules.without_store(verdict) if unverified else verdict
            answer = Answer(
                value, found, given, at, origin, clock, None, unverified, copy.policy, copy.mark
            )
            if not_stored is not None:
                waiter.notes.not_stored[key] = not_stored
            if self.has_unverified_parts and waiter.outer is not None:
                waiter.outer.has_unverified_parts = True
            waiter.settle(key, answer)  # type: ignore[arg-type]
            origin = BY_ANOTHER
        if ended.is_overtaken:
            noted(self.span, Verdict.STALE)
            return
        if asked is None:
            memory.keep_unstored(
                key,
                copy,
                value,
                outlook,
                work.seen,
                is_of_unverified_parts=self.has_unverified_parts,
            )
        else:
            memory.keep(key, copy, value, outlook, asked)
        if result.tags is not None:
            memory.retag(key, copy.generation, result.tags)
        watcher = self.loads.core.watcher
        if key in watcher.watches or watcher.late:
            watcher.tell(key, copy, value, outlook, unverified=asked is None)

    def _tell_failure(self, work: Work[K, V], how: End, error: LoadFailed) -> None:
        is_changed = self.loads.fence.is_changed(work.key, work.began)
        if isinstance(error, RaisedByLoader):
            noted(self.span, Verdict.GONE)
            if not is_changed:  # else it says nothing of what is there now
                self.loads.memory.note_refusal(work.key, self.loads.memory.now())
        else:
            noted(self.span, Verdict.GONE, error.__cause__ or error)
        ended = self.loads.end(work, how, is_changed=is_changed)
        _settle(work.key, ended.told, error)
        if work.key in self.loads.core.watcher.watches:
            self.loads.core.watcher.look_again([work.key])


def _settle(key: K, waiters: Iterable[Waiter[K, V]], outcome: Outcome[V]) -> None:
    for waiter in waiters:
        waiter.settle(key, outcome)
