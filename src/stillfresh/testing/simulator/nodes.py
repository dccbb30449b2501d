"""A simulated cluster: three nodes with a part of the keys each, and their replicas.

A step on keys of several nodes is one request to each; reads and leases may be answered in part. A
change is confirmed when the node's replica has it. If a node fails, its replica takes over, without
the changes that it does not have yet.

The slot of an id may move to another node. A process learns that from the old node, which does its
part of the request and refuses the rest. Each slot has its own counter of stamps, which moves
along; for a moment after that, the new node does not have all of it, and puts must come again.
"""

import asyncio
from collections import defaultdict
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Final, TypeVar

from stillfresh.errors import StoreError
from stillfresh.stores.contract import AWAY, Lease, PutOutcome, PutResult
from stillfresh.stores.memory_rows import Key, MemoryRow, MemoryRows, RowTags
from stillfresh.testing.simulator.faults import NODES
from stillfresh.testing.simulator.wire import READS, NoAnswer, StoreRequest, StoreWire

T = TypeVar("T")

LONGEST_LAG: Final = 0.5
"""Seconds that a replica is behind, at most."""
PARTLY: Final = frozenset({"read", "acquire", "take over", "put"})
SPLIT: Final = frozenset({"put", "invalidate", "delete"})
"""Steps that need the counter of the slot as well, which may be on the way to another node."""
UNCONFIRMED: Final = frozenset({"renew", "release"})
"""Answered at once: if a failover undoes them, a load is lost at worst."""


def first_node(id_: str) -> int:
    """The node of an id until its slot moves."""
    return sum(id_.encode()) % NODES


class Moved(StoreError):
    """A node has done a request for some ids; the slots of the others are on other nodes."""

    def __init__(self, result: Any, ids: Sequence[str]) -> None:  # noqa: ANN401 (of any step)
        super().__init__(f"{','.join(ids)} moved")
        self.result = result
        self.ids = ids


@dataclass(slots=True)
class Node:
    """Changes on a node that its replica does not have yet."""

    caught_up_at: float = 0.0
    """When the replica will have all changes so far."""
    steps: list[tuple[float, Callable[[], None]]] = field(default_factory=list)
    failovers: int = 0
    """How often its replica took over: a connection to the old server is broken then."""

    def add_step(self, now: float, lag: float, undo: Callable[[], None]) -> float:
        """Note one more step; return when the replica has it."""
        self.caught_up_at = max(self.caught_up_at, now + lag)
        self.steps = [
            (confirmed_at, undo_step)
            for confirmed_at, undo_step in self.steps
            if confirmed_at > now
        ]
        self.steps.append((self.caught_up_at, undo))
        return self.caught_up_at

    def fail(self, now: float) -> None:
        """The replica takes over."""
        steps = self.steps
        self.steps = []
        self.failovers += 1
        for confirmed_at, undo in reversed(steps):
            if confirmed_at > now:
                undo()


class ClusterWire(StoreWire):
    """A cluster, as one process sees it."""

    waits = True
    """False: changes are acknowledged before a replica has them, as without `wait_replicas`."""

    def bucket_of(self, id_: str) -> str:
        """Each id is a slot of its own."""
        return id_

    def _all_buckets(self) -> list[str]:
        rows = self._store._rows  # noqa: SLF001 (all of it)
        ids = {id_ for (_, id_), _ in rows.items()}
        return sorted(ids.union(self._server.buckets))

    def _present_stamps(self, node: int | None) -> dict[str, int]:
        here = [id_ for id_ in self._server.buckets if self._world.node_of(id_) == node]
        return {id_: self._server.counter(id_) for id_ in here}

    @cached_property
    def _route(self) -> dict[str, int]:
        """The nodes of ids whose slots have moved, as far as this process was told."""
        return {}

    async def _exchange(self, request: StoreRequest[T]) -> T:
        """Send each node its part, and put the answers together."""
        ids_by_node = defaultdict[int, list[str]](list)
        for id_ in request.ids:
            ids_by_node[self._route.get(id_, first_node(id_))].append(id_)
        parts = [replace(request, ids=ids, node=node) for node, ids in ids_by_node.items()]
        exchanges = map(super()._exchange, parts or [request])
        results = await asyncio.gather(*exchanges, return_exceptions=True)
        errors = [result for result in results if isinstance(result, BaseException)]
        if errors and not (len(errors) < len(results) and request.step in PARTLY):
            raise errors[0]
        whole = _combine([result for result in results if not isinstance(result, BaseException)])
        if request.step == "read":
            for part, result in zip(parts, results, strict=True):
                if isinstance(result, BaseException):
                    whole |= dict.fromkeys(part.ids, AWAY)
        return whole  # type: ignore[no-any-return]

    async def _attempt(self, request: StoreRequest[T]) -> T:
        """Send it; ask the node to which a refused part has moved."""
        try:
            return await super()._attempt(request)
        except Moved as moved:
            self._route.update((id_, self._world.node_of(id_)) for id_ in moved.ids)
            moved_result = await self._exchange(replace(request, ids=moved.ids))
            return _combine([moved.result, moved_result])  # type: ignore[no-any-return]

    def _do(self, request: StoreRequest[T], ids: Sequence[str]) -> T:
        """Do the part of the ids that this node has."""
        here = self._ids_of_node(request, ids)
        settled = [id_ for id_ in here if not self._is_split(request, id_)]
        result = super()._do(request, settled)
        for id_ in here:
            if id_ not in settled:
                result = _combine([_come_again(request, id_), result])
        if len(here) < len(ids):
            raise Moved(result, [id_ for id_ in ids if id_ not in here])
        return result

    def _is_split(self, request: StoreRequest[Any], id_: str) -> bool:
        """True if the counter of a fenced step is on the way to this node."""
        return request.step in SPLIT and self._world.is_moving(id_)

    def _ids_of_node(self, request: StoreRequest[Any], ids: Sequence[str]) -> Sequence[str]:
        return [id_ for id_ in ids if self._world.node_of(id_) == request.node]

    def _undo_of(
        self,
        request: StoreRequest[Any],
        ids: Sequence[str],
        answer: "asyncio.Future[Any] | None",
    ) -> Callable[[], None] | None:
        if request.node is None or request.step in READS:
            return None
        rows = self._store._rows  # noqa: SLF001 (all of it)
        server = self._server
        ledger = self._ledger
        here = self._ids_of_node(request, ids)
        if request.step == "invalidate_tag":
            tag = request.kind
            keys = [key for key, _ in rows.items() if key[1] in here]
            keys += [ledger.changes.tag_key(tag, id_) for id_ in here]
        else:
            keys = [(request.kind, id_) for id_ in here]
        before = [
            (
                key,
                copy(rows.get(key)),
                rows.leases.get(key),
                server.snapshot(key[1], key),
                ledger.snapshot(key),
            )
            for key in keys
        ]

        def undo() -> None:
            for key, row, lease, fence_snapshot, ledger_snapshot in before:
                _restore(rows, key, row, lease)
                server.restore(key[1], key, fence_snapshot)
                ledger.restore(key, ledger_snapshot, waits=self.waits)
            if answer is not None:
                self._unsent.add(answer)  # its process may be paused, and would find both
                self._settle(0.0, answer, NoAnswer("the node failed before it answered"))

        return undo

    def _confirmation_delay(
        self, request: StoreRequest[Any], result: object, undo: Callable[[], None] | None
    ) -> float:
        if undo is None or request.node is None or _is_undone(result):
            return 0.0
        world = self._world
        lag = world.weather.dice.uniform(0, world.longest_lag)
        confirmed_at = world.nodes[request.node].add_step(world.time(), lag, undo)
        is_answered_at_once = request.step in UNCONFIRMED or not self.waits
        return 0.0 if is_answered_at_once else confirmed_at - world.time()


def _come_again(request: StoreRequest[Any], id_: str) -> Any:  # noqa: ANN401 (of any step)
    """What a fenced step is told whose counter is on the way to this node."""
    return {id_: PutResult(PutOutcome.AGAIN)} if request.step == "put" else {id_}


def _is_undone(result: object) -> bool:
    """True if nothing was done, so that there is nothing to confirm."""
    if isinstance(result, dict):
        outcomes = [part.outcome for part in result.values() if isinstance(part, PutResult)]
        return bool(outcomes) and all(outcome is PutOutcome.AGAIN for outcome in outcomes)
    return isinstance(result, StoreError) and not isinstance(result, Moved)


def _combine(results: Sequence[Any]) -> Any:  # noqa: ANN401 (of any step)
    """The results of the parts of one request."""
    whole, *others = results
    for other in others:
        whole = whole | other if whole else other
    return whole


def _restore(rows: MemoryRows, key: Key, row: MemoryRow | None, lease: Lease | None) -> None:
    rows.drop(key)
    if row is None:
        return
    tags = row.tags or RowTags(key)
    rows.lease(key, lease or Lease(key[1], "", 0.0), tags.leased)
    if row.copy is not None:
        rows.put(key, row.copy, None, tags.late)
    if lease is None:
        rows.end_lease(key)
    else:
        rows.lease(key, lease, tags.leased)
    rows.part(key)[key].failure = row.failure
