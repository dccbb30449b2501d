"""Deliberate bugs of puts, in the fence of stamps and in the engine (E35, S8, S13, T7).

`mutants.py` lists them with the others.
"""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from msgspec.structs import replace

from stillfresh.engine import Changing, Stored
from stillfresh.engine.put import Known, Puts
from stillfresh.engine.update import Updates
from stillfresh.errors import StoreError
from stillfresh.stores import memory, rules
from stillfresh.stores.contract import PutOutcome, PutResult
from stillfresh.stores.memory import MemoryStore
from stillfresh.stores.memory_rows import MemoryRows
from stillfresh.tasks import looked_at
from stillfresh.testing import Promise
from stillfresh.testing.simulator import fence, nodes
from stillfresh.testing.simulator.server import FencedServer
from stillfresh.testing.simulator.wire import ServerLife, StoreRequest, StoreWire

Patch = Callable[[pytest.MonkeyPatch], None]

PUT_MUTANTS: dict[str, tuple[Promise, str, Patch]] = {}


def put_mutant(promise: Promise, scenario: str) -> Callable[[Patch], Patch]:
    def listed(patch: Patch) -> Patch:
        PUT_MUTANTS[patch.__name__] = (promise, scenario, patch)
        return patch

    return listed


@put_mutant(Promise.LATE, "of_late_puts")
def a_late_put_is_not_recognised(patch: pytest.MonkeyPatch) -> None:
    """No comparison with `as_of`."""
    patch.setattr(fence, "has_changed", lambda *_: False)


@put_mutant(Promise.LATE, "of_late_puts")
def a_deletion_leaves_no_trace(patch: pytest.MonkeyPatch) -> None:
    before = FencedServer.delete

    def delete(self: FencedServer, bucket: str, key: Any, sent: Any) -> bool:
        is_done = before(self, bucket, key, sent)
        if is_done:
            self._heads.pop(key, None)
        return is_done

    patch.setattr(FencedServer, "delete", delete)


@put_mutant(Promise.LATE, "of_late_puts")
def a_trace_is_forgotten_while_older_puts_are_accepted(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(fence, "TRACE", 1.0)
    patch.setattr(fence, "GOOD_FOR", 1_000.0)


@put_mutant(Promise.LATE, "of_late_puts")
def an_invalidation_is_never_late(patch: pytest.MonkeyPatch) -> None:
    """It carries no `as_of`, and voids a put that began after its end."""
    patch.setattr(FencedServer, "_is_late", lambda *_: False)


@put_mutant(Promise.LATE, "of_tagged_puts")
def a_put_does_not_ask_about_its_tags(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(fence, "was_tag_invalidated", lambda *_: False)


@put_mutant(Promise.LATE, "of_adds")
def an_add_that_was_refused_is_stored_when_the_copy_is_old(patch: pytest.MonkeyPatch) -> None:
    """A duplicate of it arrives, and by its age alone the copy no longer forbids it."""
    patch.setattr(fence, "may_be_refused_already", lambda *_: False)


@put_mutant(Promise.LATE, "of_puts_without_replicas")
def stamps_are_kept_for_the_next_server(patch: pytest.MonkeyPatch) -> None:
    """The replica does not have the newest ones, and gives the same numbers again."""
    before = StoreWire._disconnect
    heard: dict[tuple[StoreWire, int | None], dict[str, int]] = {}
    connected = StoreWire._connect

    def disconnect(self: StoreWire, request: StoreRequest[Any]) -> None:
        if request.link is not None:
            heard[self, request.node] = request.link.as_of
        before(self, request)

    async def connect(self: StoreWire, node: int | None) -> ServerLife:
        link = await connected(self, node)
        for bucket, stamp in heard.pop((self, node), {}).items():
            link.as_of[bucket] = max(stamp, link.as_of.get(bucket, 0))
        return link

    patch.setattr(StoreWire, "_disconnect", disconnect)
    patch.setattr(StoreWire, "_connect", connect)


@put_mutant(Promise.LATE, "of_puts_on_a_server_that_forgets")
def a_counter_begins_at_zero(patch: pytest.MonkeyPatch) -> None:
    """So stamps from before the loss are higher than those after it."""
    before = FencedServer._born

    def born(self: FencedServer, bucket: str) -> fence.Bucket:
        if bucket not in self._buckets:
            self._buckets[bucket] = fence.Bucket(1, 1)
        return before(self, bucket)

    patch.setattr(FencedServer, "_born", born)


@put_mutant(Promise.LATE, "of_puts_on_a_file")
def a_queued_step_outlives_its_caller(patch: pytest.MonkeyPatch) -> None:
    """S13: on a file nothing else stops it."""
    before = StoreWire._do

    def done(self: StoreWire, request: StoreRequest[Any], some: Any) -> Any:
        request.is_given_up = False
        return before(self, request, some)

    patch.setattr(StoreWire, "_do", done)


@put_mutant(Promise.LOST, "of_put_steps")
def a_put_keeps_the_lease(patch: pytest.MonkeyPatch) -> None:
    """The load that it should have voided publishes over it."""
    before = MemoryRows.put

    def put(self: MemoryRows, key: Any, *args: Any) -> None:
        lease = self.leases.get(key)
        before(self, key, *args)
        if lease is not None and self.get(key) is not None:
            self.leases[key] = lease

    patch.setattr(MemoryRows, "put", put)


@put_mutant(Promise.STORED, "of_late_puts")
def a_second_attempt_has_a_new_id(patch: pytest.MonkeyPatch) -> None:
    def repeated(self: StoreWire, request: StoreRequest[Any]) -> StoreRequest[Any]:
        if request.step != "put" or request.call is None:
            return request
        puts = {
            id_: replace(put, copy=replace(put.copy, generation=self.new_generation()))
            for id_, put in request.puts.items()
        }
        again = self._put_request(request.call, request.kind, puts)
        again.ids = request.ids
        again.node = request.node
        return again

    def settled(self: StoreWire, request: StoreRequest[Any], result: Any) -> Any:
        return result

    patch.setattr(StoreWire, "_repetition_of", repeated)
    patch.setattr(StoreWire, "_settle_repetition", settled)


@put_mutant(Promise.STORED, "of_late_puts")
def replaced_ids_are_not_kept(patch: pytest.MonkeyPatch) -> None:
    """A put whose answer was lost is stored again, over the next one."""
    patch.setattr(fence, "REPLACED_IDS", 0)


@put_mutant(Promise.STORED, "of_counters")
def an_add_is_a_put(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(rules, "_holds", lambda *_: True)


@put_mutant(Promise.ONCE, "of_counters")
def an_unsure_increment_begins_again(patch: pytest.MonkeyPatch) -> None:
    """Its first attempt was stored and replaced more often than the store remembers."""
    patch.setattr(fence, "REPLACED_IDS", 0)
    patch.setattr(StoreWire, "_settle_repetition", lambda _, __, result: result)


@put_mutant(Promise.STORED, "of_puts_over_a_cluster")
def a_put_is_confirmed_before_the_replica_has_it(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(nodes, "UNCONFIRMED", {"put"})


@put_mutant(Promise.GREATEST, "of_versions")
def a_smaller_version_replaces_a_greater_one(patch: pytest.MonkeyPatch) -> None:
    before = MemoryStore.put

    async def put(self: MemoryStore, kind: str, puts: Any) -> Any:
        results = await before(self, kind, puts)
        for id_, result in results.items():
            if result.outcome is PutOutcome.KEPT:
                self._rows.put((kind, id_), puts[id_].copy, puts[id_].tags, puts[id_].late)
                results[id_] = replace(result, outcome=PutOutcome.STORED)
        return results

    patch.setattr(MemoryStore, "put", put)


@put_mutant(Promise.GREATEST, "of_versions")
def a_put_without_a_version_takes_it_away(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(memory, "with_stored_parts", lambda copy, _: copy)


@put_mutant(Promise.STORED, "over_a_cluster")
def a_put_leaves_out_a_node_that_is_away(patch: pytest.MonkeyPatch) -> None:
    """S9: and says that it has put them all."""
    before = Puts._put_once

    async def put_once(self: Any, runtime: Any, puts: Any) -> Any:
        answers = await before(self, runtime, puts)
        return dict.fromkeys(puts, PutResult(PutOutcome.STORED)) | answers

    patch.setattr(Puts, "_put_once", put_once)


@put_mutant(Promise.STORED, "of_puts")
def a_put_that_must_come_again_is_acknowledged(patch: pytest.MonkeyPatch) -> None:
    before = Puts._put_once

    async def put_once(self: Any, runtime: Any, puts: Any) -> Any:
        answers = await before(self, runtime, puts)
        for id_, result in answers.items():
            if result.outcome is PutOutcome.AGAIN:
                answers[id_] = PutResult(PutOutcome.STORED)
        return answers

    patch.setattr(Puts, "_put_once", put_once)


@put_mutant(Promise.LATE, "of_puts")
def a_put_goes_on_after_its_caller_gave_up(patch: pytest.MonkeyPatch) -> None:
    """It is put again, with what the process has heard since."""

    before = Puts._put

    async def put(self: Any, runtime: Any, *args: Any, **options: Any) -> Any:
        step = runtime.step(before(self, runtime, *args, **options))
        step.add_done_callback(looked_at)
        return await asyncio.shield(step)

    patch.setattr(Puts, "_put", put)


@put_mutant(Promise.ONCE, "of_updates")
def an_update_without_an_answer_begins_again(patch: pytest.MonkeyPatch) -> None:
    """S2, E17: it may have been stored, and replaced since."""
    before = Updates._attempt

    async def attempt(self: Any, *args: Any) -> Any:
        try:
            return await before(self, *args)
        except StoreError:
            return False, None

    patch.setattr(Updates, "_attempt", attempt)


@put_mutant(Promise.ONCE, "of_updates")
def an_update_replaces_a_copy_that_it_has_not_seen(patch: pytest.MonkeyPatch) -> None:
    """E17: another change came between its read and its put."""
    before = Known.as_put
    patch.setattr(Known, "as_put", lambda self, *_: before(self))


@put_mutant(Promise.WRITTEN, "of_write_throughs")
def a_change_is_put_without_its_lease(patch: pytest.MonkeyPatch) -> None:
    """E36: the value is stored although somebody else has written since."""

    async def put(self: Changing[Any, Any], value: Any) -> Stored:
        results = await self._core.puts.put([(self._key, value)], {})
        return results[self._key]

    patch.setattr(Changing, "put", put)


@put_mutant(Promise.WRITTEN, "of_write_throughs")
def the_lease_of_a_change_is_taken_after_the_write(patch: pytest.MonkeyPatch) -> None:
    """E36: then it voids the lease of a later write."""
    publish = Changing.put

    async def put(self: Changing[Any, Any], value: Any) -> Stored:
        runtime = await self._core.ready()
        self._lease = await self._take_lease(runtime)
        return await publish(self, value)

    patch.setattr(Changing, "put", put)
