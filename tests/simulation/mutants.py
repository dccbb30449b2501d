"""Deliberate bugs, each of which breaks a promise of T2: what the simulator is shown to catch."""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest

from stillfresh.engine import Cache, loads, memory
from stillfresh.engine import rules as engine_rules
from stillfresh.engine.at_least import AtLeast
from stillfresh.engine.changes import KeyChanges
from stillfresh.engine.fence import Fence, FenceClock
from stillfresh.engine.lane import Lane
from stillfresh.engine.load import Load
from stillfresh.engine.load_states import ENDINGS, Told
from stillfresh.engine.loader import Loader
from stillfresh.engine.loads import Loads
from stillfresh.engine.memory import Memory
from stillfresh.engine.news import News, Notices
from stillfresh.engine.read import Reads
from stillfresh.engine.running_loaders import RunningLoaders
from stillfresh.engine.threads import Job
from stillfresh.engine.watcher import Watcher
from stillfresh.engine.work import Work
from stillfresh.errors import unconfirmed
from stillfresh.gateway.live import Connection
from stillfresh.pages import asgi, render
from stillfresh.stores import contract
from stillfresh.stores.contract import Lease
from stillfresh.stores.memory import MemoryStore
from stillfresh.stores.memory_rows import MemoryRows
from stillfresh.systems.feed.rows import Writes
from stillfresh.systems.waiting import rules
from stillfresh.tasks import SharedResult, Tasks
from stillfresh.testing import Promise
from stillfresh.testing.simulator import nodes
from stillfresh.testing.simulator.process import Process
from stillfresh.testing.simulator.server import FencedServer
from stillfresh.testing.simulator.simulate import Scenario
from stillfresh.testing.simulator.wire import LeaseRequest
from tests.simulation.put_mutants import PUT_MUTANTS
from tests.simulation.scenarios import SCENARIOS

Patch = Callable[[pytest.MonkeyPatch], None]


@dataclass(frozen=True)
class Mutant:
    """A bug, the promise that it breaks, and the scenario in which it shows."""

    promise: Promise
    scenario: Scenario
    patch: Patch


MUTANTS: dict[str, Mutant] = {
    name: Mutant(promise, SCENARIOS[scenario], patch)
    for name, (promise, scenario, patch) in PUT_MUTANTS.items()
}


def mutant(promise: Promise, scenario: str) -> Callable[[Patch], Patch]:
    def kept(patch: Patch) -> Patch:
        MUTANTS[patch.__name__] = Mutant(promise, SCENARIOS[scenario], patch)
        return patch

    return kept


@mutant(Promise.FRESH, "over_a_network")
def an_invalidation_leaves_the_copy_as_it_is(patch: pytest.MonkeyPatch) -> None:
    def invalidate(self: MemoryStore, keys: Any, *, soft: bool) -> None:
        for key in keys:
            self._rows.end_lease(key)

    patch.setattr(MemoryStore, "_invalidate", invalidate)


@mutant(Promise.FRESH, "from_memory")
def memory_does_not_hear_of_invalidations(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(KeyChanges, "overtake", lambda *_, **__: None)


@mutant(Promise.FRESH, "over_a_network")
def who_comes_late_is_given_the_overtaken_value(patch: pytest.MonkeyPatch) -> None:
    """The oldest bug of the field: fill after invalidate."""

    def join(self: Work[Any, Any], waiter: Any, asked_at: int, *, knows: bool = True) -> None:
        del asked_at, knows
        self.waiters[waiter] = 0

    patch.setattr(Work, "join", join)


@mutant(Promise.FRESH, "on_slow_answers")
def the_fence_does_not_note_invalidations(patch: pytest.MonkeyPatch) -> None:
    """E6: a load that has no lease does not learn that its key was invalidated."""
    patch.setattr(Fence, "void", lambda *_: None)


@mutant(Promise.FRESH, "on_slow_answers")
def the_fence_does_not_note_puts(patch: pytest.MonkeyPatch) -> None:
    """E6: a read that began before the put fills memory after it."""
    patch.setattr(Fence, "change", lambda *_: None)


@mutant(Promise.FRESH, "on_late_requests")
def the_fence_does_not_advance_when_a_load_begins(patch: pytest.MonkeyPatch) -> None:
    """E6: a caller that asks after another process's invalidation counts as one from before it."""

    def begin(self: Load[Any, Any], works: Any) -> None:
        for work in works:
            work.load = self
            work.began = self.loads.fence.clock.now

    patch.setattr(Load, "begin", begin)


@mutant(Promise.FRESH, "on_slow_answers")
def the_fence_does_not_note_tags(patch: pytest.MonkeyPatch) -> None:
    """E6, E8: a load that has no lease does not learn that its tag was invalidated."""
    patch.setattr(FenceClock, "void_tag", lambda *_: None)


@mutant(Promise.FRESH, "on_slow_answers")
def the_fence_does_not_note_that_all_was_invalidated(patch: pytest.MonkeyPatch) -> None:
    """E6: a read that began before the end of the invalidation fills memory after it."""
    patch.setattr(Fence, "void_all", lambda *_: None)


@mutant(Promise.FRESH, "on_slow_answers")
def the_fence_does_not_advance_when_a_copy_is_sent(patch: pytest.MonkeyPatch) -> None:
    """E6: a caller that joins during the publication may know of a later change."""
    in_time = {
        how: rule._replace(told=Told.ALL)
        for how, rule in ENDINGS.items()
        if rule.told is Told.IN_TIME
    }
    for how, rule in in_time.items():
        patch.setitem(ENDINGS, how, rule)


@mutant(Promise.FRESH, "on_slow_answers")
def the_fence_is_not_asked_after_a_read(patch: pytest.MonkeyPatch) -> None:
    """E6: a read that began before the end of a change fills memory after it."""
    patch.setattr(Fence, "changed_keys", lambda *_: set())


@mutant(Promise.FRESH, "on_slow_answers")
def the_fence_does_not_note_the_end_of_a_change(patch: pytest.MonkeyPatch) -> None:
    """E6: a read that began during the change, before the store's step, is kept."""

    @contextmanager
    def overtaking(self: Any, keys: Any, *, voids: bool = True) -> Iterator[Any]:
        self.overtake(keys, voids=voids)
        with self.step(keys) as step, unconfirmed():
            yield step

    patch.setattr(KeyChanges, "overtaking", overtaking)


@mutant(Promise.FRESH, "cut_off")
def an_unverified_answer_is_called_fresh(patch: pytest.MonkeyPatch) -> None:
    """E29: another process has invalidated it, and the store could not be asked."""
    patch.setattr(memory, "without_store", lambda verdict: verdict)


@mutant(Promise.FRESH, "cut_off")
def who_joined_a_load_without_the_store_calls_it_fresh(patch: pytest.MonkeyPatch) -> None:
    """E29: the key may have been invalidated between the load's begin and their question."""
    patch.setattr(engine_rules, "without_store", lambda verdict: verdict)


@mutant(Promise.FRESH, "by_tags")
def a_tag_reaches_nothing_that_is_under_way(patch: pytest.MonkeyPatch) -> None:
    def invalidate_tag(
        self: FencedServer,
        buckets: Any,
        bucket_of: Callable[[str], str],
        tag: str,
        sent: Any,
        *,
        soft: bool,
    ) -> dict[tuple[str, str], bool]:
        rows = self._store._rows
        idle = [key for key in rows.tagged.keys(tag) if key not in rows.leases]
        here = [key for key in idle if bucket_of(key[1]) in buckets]
        return {key: self.invalidate(bucket_of(key[1]), key, sent, soft=soft) for key in here}

    patch.setattr(FencedServer, "invalidate_tag", invalidate_tag)


@mutant(Promise.FRESH, "by_late_tags")
def a_tag_that_a_load_tells_is_not_asked_about(patch: pytest.MonkeyPatch) -> None:
    """I26: it was invalidated while the load ran."""
    patch.setattr(MemoryRows, "is_past", lambda *_: False)


@mutant(Promise.FRESH, "inside_another")
def what_is_made_of_an_old_part_is_kept(patch: pytest.MonkeyPatch) -> None:
    """I26: the part was changed while the load that used it ran."""
    patch.setattr(MemoryRows, "is_past", lambda *_: False)


@mutant(Promise.STORED, "over_a_cluster")
def a_change_is_confirmed_before_the_replica_has_it(patch: pytest.MonkeyPatch) -> None:
    """S9: as Redis does without `wait_replicas`."""
    patch.setattr(nodes, "UNCONFIRMED", {"publish", "put", "invalidate", "delete", "take over"})


@mutant(Promise.FRESH, "while_slots_move")
def an_invalidation_leaves_out_what_has_moved(patch: pytest.MonkeyPatch) -> None:
    """S9: the old node has refused it, and nobody asks the new one."""
    before = nodes.ClusterWire._do

    def done(self: Any, request: Any, some: Any) -> Any:
        try:
            return before(self, request, some)
        except nodes.Moved as moved:
            if request.step != "invalidate":
                raise
            return moved.result

    patch.setattr(nodes.ClusterWire, "_do", done)


@mutant(Promise.FRESH, "on_late_requests")
def a_retry_reuses_its_token(patch: pytest.MonkeyPatch) -> None:
    """S8, T7: so did the Redis and the DynamoDB store: a late request revives a voided lease."""
    before = LeaseRequest._acquire

    def acquired(self: LeaseRequest, some: Any) -> Any:
        grants = before(self, some)
        for id_, lease in grants.items():
            if isinstance(lease, Lease) and (first := self.leases.get(id_)) is not None:
                again = Lease(id_, first.token, lease.expires_at)
                self.process.world.store._rows.leases[self.kind, id_] = again
                grants[id_] = again
        return grants

    patch.setattr(LeaseRequest, "_acquire", acquired)


@mutant(Promise.FRESH, "of_pages")
def a_page_is_purged_here_only(patch: pytest.MonkeyPatch) -> None:
    async def nothing(self: MemoryStore, *_: Any, **__: Any) -> list[tuple[str, str]]:
        return []

    patch.setattr(MemoryStore, "invalidate_tag", nothing)
    patch.setattr(MemoryStore, "invalidate", nothing)
    patch.setattr(MemoryStore, "delete", nothing)


@mutant(Promise.FRESH, "of_a_feed")
def news_of_a_comment_changes_nothing(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Writes, "forget", lambda *_: None)


@mutant(Promise.FRESH, "of_games")
def a_move_leaves_the_game_in_the_pool(patch: pytest.MonkeyPatch) -> None:
    before = rules.step

    def step(state: Any, event: Any) -> Any:
        return (state, ()) if type(event).__name__ == "MoveSent" else before(state, event)

    patch.setattr(rules, "step", step)


@mutant(Promise.HOLDER, "over_a_network")
def a_lease_is_given_while_it_is_held(patch: pytest.MonkeyPatch) -> None:
    async def acquire(self: MemoryStore, kind: str, asks: Any, lease_for: float) -> Any:
        grants = {}
        for ask in asks:
            lease = Lease(ask.id, self._new_token(), self._clock() + lease_for)
            self._rows.lease((kind, ask.id), lease, ask.tags)
            grants[ask.id] = lease
        return grants

    patch.setattr(MemoryStore, "acquire", acquire)


@mutant(Promise.LOAD, "over_a_network")
def a_failed_load_is_tried_again_under_its_lease(patch: pytest.MonkeyPatch) -> None:
    before = Loader.call

    async def call(self: Loader[Any, Any], load: Any) -> Any:
        results = await before(self, load)
        if any(isinstance(result, Exception) for result in results.values()):
            results = await before(self, load)
        return results

    patch.setattr(Loader, "call", call)


@mutant(Promise.LOAD, "on_a_file")
def who_is_denied_the_lease_loads_all_the_same(patch: pytest.MonkeyPatch) -> None:
    before = Load._ask_for_leases

    async def ask_for_leases(self: Load[Any, Any]) -> None:
        works = list(self.works)
        await before(self)
        self.works = [work for work in works if self.loads.under_way.get(work.key) is work]
        for work in self.works:
            work.load = self

    patch.setattr(Load, "_ask_for_leases", ask_for_leases)


@mutant(Promise.LOST, "over_a_network")
def a_publication_is_not_fenced(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(MemoryRows, "holds", lambda *_: True)


@mutant(Promise.LOST, "on_a_file")
def a_refused_publication_is_taken_for_done(patch: pytest.MonkeyPatch) -> None:
    before = Loader.publish

    async def publish(self: Loader[Any, Any], copies: Any, tags: Any) -> Any:
        return None if await before(self, copies, tags) is None else set()

    patch.setattr(Loader, "publish", publish)


@mutant(Promise.COUNTS, "of_a_hub")
def a_viewer_who_hides_is_watched_for_still(patch: pytest.MonkeyPatch) -> None:
    def set_visible(self: Connection, visible: bool) -> None:
        self.is_visible = visible

    patch.setattr(Connection, "set_visible", set_visible)


@mutant(Promise.COUNTS, "of_a_coordinator")
def the_first_to_leave_takes_all_along(patch: pytest.MonkeyPatch) -> None:
    before = Lane.unsubscribe

    def unsubscribe(self: Lane[Any], key: Any) -> bool:
        while not before(self, key):
            pass
        return True

    patch.setattr(Lane, "unsubscribe", unsubscribe)


@mutant(Promise.ASKED, "of_a_coordinator")
def what_failed_is_never_asked_for_again(patch: pytest.MonkeyPatch) -> None:
    before = Lane.take

    def take(self: Lane[Any], limit: int, beside: Any = ()) -> list[Any]:
        failed = [key for key in self._queue if key in self._cooldowns]
        kept = {key: self._queue.pop(key) for key in failed}
        taken = before(self, limit, beside)
        self._queue.update(kept)
        return taken

    patch.setattr(Lane, "take", take)


@mutant(Promise.ASKED, "of_a_hub")
def the_watcher_sleeps_through(patch: pytest.MonkeyPatch) -> None:
    async def pause(self: Watcher[Any, Any], _: Any) -> None:
        await self._changed.wait()

    patch.setattr(Watcher, "_pause", pause)


@mutant(Promise.ASKED, "of_a_watch")
def a_watcher_sleeps_on_after_a_load_landed(patch: pytest.MonkeyPatch) -> None:
    """E24: it re-plans the lane, and the driver sleeps until the time that was planned before."""
    before = Watcher.landed

    def landed(self: Watcher[Any, Any], *args: Any) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        before(self, *args)
        self._changed = changed

    patch.setattr(Watcher, "landed", landed)


@mutant(Promise.FRESH, "on_a_store_that_tells")
def a_silent_channel_is_trusted(patch: pytest.MonkeyPatch) -> None:
    """S10: however long ago its last beat was."""

    def trusted_until(self: Notices[Any], since: float, _: float) -> float:
        return float("inf") if since >= self._news.since else float("-inf")

    patch.setattr(Notices, "trusted_until", trusted_until)


@mutant(Promise.FRESH, "on_a_store_that_tells")
def memory_is_trusted_again_after_a_pause(patch: pytest.MonkeyPatch) -> None:
    """S10: without a look at what it missed."""

    def trusted_until(self: Notices[Any], since: float, memory_for: float) -> float:
        return self._news.proved_at + memory_for if since > float("-inf") else since

    patch.setattr(Notices, "trusted_until", trusted_until)


@mutant(Promise.FRESH, "on_a_store_that_tells")
def an_answer_that_news_overtook_is_trusted(patch: pytest.MonkeyPatch) -> None:
    """S10: the store was read before the change, and its answer came after the news of it."""
    patch.setattr(Notices, "is_known", lambda *_: True)


@mutant(Promise.ASKED, "on_a_store_that_tells")
def a_watch_does_not_hear_of_anothers_change(patch: pytest.MonkeyPatch) -> None:
    """S10: memory does."""
    before = News._doubt

    def doubt(self: News, core: Any, key: Any, generation: Any) -> None:
        watches, core.watcher.watches = core.watcher.watches, {}
        before(self, core, key, generation)
        core.watcher.watches = watches

    patch.setattr(News, "_doubt", doubt)


@mutant(Promise.BOUND, "from_memory")
def memory_forgets_its_limit(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Memory, "_drop_one", lambda _: None)


@mutant(Promise.BOUND, "over_a_network")
def closing_leaves_tasks_behind(patch: pytest.MonkeyPatch) -> None:
    async def end(self: Tasks, _: float) -> None:
        await asyncio.sleep(0)

    patch.setattr(Tasks, "end", end)


@mutant(Promise.OWN, "of_own_writes")
def a_token_is_not_looked_at(patch: pytest.MonkeyPatch) -> None:
    """E37: memory answers, although it lags."""
    patch.setattr(AtLeast, "is_only_by", lambda *_: True)


@mutant(Promise.OWN, "of_own_writes")
def a_token_trusts_the_news(patch: pytest.MonkeyPatch) -> None:
    """E37: memory answers where the store tells of changes, although news may be late or cut."""
    take_own = Reads._take_own

    def take(self: Reads[Any, Any], keys: Any, now: float, taken: Any, waiter: Any) -> Any:
        if self._memory.notices is None:
            return take_own(self, keys, now, taken, waiter)
        return self._take_from_memory(keys, now, taken, waiter.max_age)

    patch.setattr(Reads, "_take_own", take)


@mutant(Promise.OWN, "of_own_writes")
def a_token_takes_an_invalidated_copy(patch: pytest.MonkeyPatch) -> None:
    """E37: while it is refreshed, or if loading fails."""
    plan_read = engine_rules.plan_read

    def plan(*args: Any, at_least: bool = False) -> Any:
        del at_least
        return plan_read(*args)

    patch.setattr(engine_rules, "plan_read", plan)


@mutant(Promise.OWN, "of_own_writes")
def a_token_takes_the_value_of_a_load_that_ran_before(patch: pytest.MonkeyPatch) -> None:
    """E37: the store did not confirm that value, so nobody said that it is too old."""
    join = Work.join

    def join_as_anybody(
        self: Work[Any, Any], waiter: Any, asked_at: int, *, knows: bool = True
    ) -> None:
        at_least = waiter.at_least
        waiter.at_least = None
        join(self, waiter, asked_at, knows=knows)
        waiter.at_least = at_least

    patch.setattr(Work, "join", join_as_anybody)


@mutant(Promise.OWN, "of_own_menus")
def a_value_is_made_of_a_part_in_memory(patch: pytest.MonkeyPatch) -> None:
    """E37: what a loader reads may lag, or is being refreshed; then the value is stored."""
    patch.setattr(Load, "is_loading", False)


@mutant(Promise.OWN, "of_own_menus")
def a_value_is_made_of_what_another_cache_has_in_memory(patch: pytest.MonkeyPatch) -> None:
    """E37: a cache learns only of its own loaders, not of those of the other caches."""
    make = Process.cache

    def make_alone(self: Process, **how: bool) -> Cache:
        cache = make(self, **how)
        cache.running_loaders = RunningLoaders()
        return cache

    patch.setattr(Process, "cache", make_alone)


@mutant(Promise.OWN, "of_own_pages")
def a_token_is_not_looked_at_by_pages(patch: pytest.MonkeyPatch) -> None:
    """E37: a page in memory is served, although it may lag."""
    patch.setattr(asgi, "token_in", lambda _: "")


@mutant(Promise.OWN, "of_own_pages")
def a_page_is_made_of_data_in_memory(patch: pytest.MonkeyPatch) -> None:
    """E37: for another visitor, after the change; then it is stored."""
    patch.setattr(render, "with_token", lambda fields, _: fields)


@mutant(Promise.ALIVE, "over_a_network")
def who_comes_late_is_forgotten(patch: pytest.MonkeyPatch) -> None:
    def join(self: Work[Any, Any], waiter: Any, asked_at: int, *, knows: bool = True) -> None:
        del knows
        if self.load is None:
            self.waiters[waiter] = asked_at

    patch.setattr(Work, "join", join)


@mutant(Promise.ALIVE, "inside_another")
def a_load_inside_a_load_takes_a_place(patch: pytest.MonkeyPatch) -> None:
    """E4: the only one, which the outer load has."""
    patch.setattr(Loads, "_hurry", lambda *_: None)


@mutant(Promise.ALIVE, "inside_another")
def nobody_notices_a_circle(patch: pytest.MonkeyPatch) -> None:
    """E3: two loads wait for each other."""
    patch.setattr(loads, "_waits_for", lambda *_: False)


@mutant(Promise.ALIVE, "of_threads")
def an_interrupted_load_tells_nobody(patch: pytest.MonkeyPatch) -> None:
    """E20: the thread that ran it has left, and others wait for it."""
    patch.setattr(Job, "drop", lambda *_: None)


@mutant(Promise.ALIVE, "on_a_file")
def the_lease_of_the_dead_never_ends(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(contract, "is_lease_over", lambda *_: False)
    patch.setattr(
        engine_rules, "plan_wait", lambda record, *_, **__: None if record.held_until else 0
    )


@mutant(Promise.ALIVE, "set_back")
def a_lease_is_believed_however_far_its_end_is(patch: pytest.MonkeyPatch) -> None:
    """The clock was set back: the lease of the dead lasts for an hour more."""
    for module in (contract, engine_rules):
        patch.setattr(module, "is_lease_over", lambda until, now, _: now >= until)


@mutant(Promise.WHOLE, "over_a_network")
def a_read_fails_and_nobody_is_told(patch: pytest.MonkeyPatch) -> None:
    """Found by the simulator: whoever asked had given up when the store failed."""
    note_end = SharedResult.note_end

    def note_end_to_callers_that_are_left(self: Any, task: Any) -> None:
        if not all(caller.done() for caller in self._callers):
            note_end(self, task)

    patch.setattr(SharedResult, "note_end", note_end_to_callers_that_are_left)
