"""Replays recorded reads on other terms: the engine itself, in virtual time.

The cache is a real one on `memory://`. Its loader takes as long as the recorded loads took at that
time, and fails where they failed. Nothing here knows when a copy is fresh.

The virtual loop's clock begins at 0 with the first recorded event. `run` moves it to the time of
each event, which lets the refreshes that are due before it happen first, and then does what was
recorded. After the last event it runs on for the longest recorded load, so that no read that
waits is left out of the figures.
"""

import asyncio
import logging
from array import array
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from functools import partial
from typing import Any, Final, NamedTuple

from stillfresh.bounded import BESIDE
from stillfresh.engine import HITS, Answer, Cache, Loaded, Resource, Update
from stillfresh.engine.recordings import RecordedUse
from stillfresh.errors import LoadFailed
from stillfresh.freshness import Verdict
from stillfresh.lab.plan.rules import Candidate, Choice, Figures, Limit, choose, search
from stillfresh.lab.plan.traffic import Traffic
from stillfresh.logs import quietly
from stillfresh.virtual_loop import VirtualLoop

LOOKS: Final = 20
"""How often memory is measured."""
CLOSING: Final = 60.0
"""Virtual seconds."""
STEP: Final = 1_000
"""Events between two reports of progress."""


class Planned(NamedTuple):
    """What was recorded and tried for each kind, and the proposal."""

    kinds: Mapping[str, Traffic]
    recorded: Mapping[str, Figures]
    tried: Mapping[str, Sequence[Figures]]
    limits: Sequence[Limit]
    budget: float | None
    choice: Choice | None
    """None without an objective and a budget."""


def planned(
    kinds: Mapping[str, Traffic],
    limits: Sequence[Limit],
    budget: float | None,
    advance: Callable[[int], None] = lambda _: None,
) -> Planned:
    """Try times for each kind, and choose; `advance` is called with the number of reads."""
    recorded = {name: replayed(traffic, None, advance) for name, traffic in kinds.items()}
    tried = {
        name: _try_terms(traffic, recorded[name], limits, advance)
        for name, traffic in kinds.items()
    }
    choice = None
    if limits or budget is not None:
        waiting_today = {name: figures.waited for name, figures in recorded.items()}
        choice = choose(tried, limits, budget, waiting_today)
    return Planned(kinds, recorded, tried, limits, budget, choice)


def _try_terms(
    traffic: Traffic, recorded: Figures, limits: Sequence[Limit], advance: Callable[[int], None]
) -> list[Figures]:
    """The figures of all tries, and of the recorded times: to change nothing is a proposal, too."""
    replay = partial(replayed, traffic, advance=advance)
    figures = search(traffic.seconds, limits, replay, recorded.waited)
    return figures if recorded in figures else [*figures, recorded]


def replayed(
    traffic: Traffic, terms: Candidate | None, advance: Callable[[int], None] = lambda _: None
) -> Figures:
    """The figures of these times; None: the recorded ones."""
    with closing(VirtualLoop(None)) as loop, quietly(logging.CRITICAL):
        return Replaying(traffic, terms, loop).run(advance)


class Replaying:
    """One run: a loop, a cache with one resource, and what its readers saw."""

    def __init__(self, traffic: Traffic, terms: Candidate | None, loop: VirtualLoop) -> None:
        kind = traffic.kind
        self._traffic = traffic
        self._terms = terms or Candidate(*traffic.recorded_terms)
        self._is_as_recorded = terms is None
        self._loop = loop
        self._cache = Cache("memory://", clock=loop.time, dice=lambda: 0.5)
        declare = self._cache.batched(
            kind.kind,
            fresh_for=kind.fresh_for if terms is None else terms.fresh_for,
            stale_for=kind.stale_for if terms is None else terms.stale_for,
            error_for=kind.error_for,
            absent_for=kind.absent_for,
            max_batch=kind.max_batch,
            concurrency=kind.concurrency,
            max_entries=10_000_000,
            load_timeout=kind.load_timeout,
        )
        self._resource: Resource[str, int] = declare(self._load)
        self._ages = array("d")
        """The age of each copy when it was served."""
        self._reads = 0
        self._stale = 0
        self._waited = 0
        self._failed = 0
        self._requests = 0
        self._loaded = 0
        self._copies = 0
        self._viewers: Counter[str] = Counter()
        """How many viewers each key has now."""
        self._seen: dict[str, float] = {}
        """When the copy that a watched key's viewers see was fetched."""

    def run(self, advance: Callable[[int], None]) -> Figures:
        loop = self._loop
        events = self._traffic.events
        began = events[0].at
        lasts = events[-1].at - began
        with loop.running():
            loop.create_task(self._cache.open())
            self._watch = self._resource.watch(tell=self._note_update).__enter__()
            for look in range(1, LOOKS + 1):
                loop.call_at(lasts * look / LOOKS, lambda: loop.create_task(self._count_copies()))
            for done, event in enumerate(events, 1):
                at = event.at - began
                if at > loop.time():
                    loop.advance(at)
                self._do(event)
                if done % STEP == 0:
                    advance(STEP)
            longest_load = max((load.took for load in self._traffic.loads), default=0.0)
            loop.advance(lasts + longest_load)
            loop.create_task(self._cache.close())
            loop.advance(loop.time() + CLOSING)
        loop.end()
        return self._figures()

    def _do(self, event: RecordedUse) -> None:
        if event.what == "read":
            self._read(event.ids)
        elif event.what in {"watch", "unwatch"}:
            self._change_viewers(event.ids, is_new=event.what == "watch")
        else:
            self._loop.create_task(self._change(event))

    def _read(self, ids: Sequence[str]) -> None:
        """A hit in memory needs no task, as in the engine."""
        now = self._loop.time()
        missing: list[str] = []
        self._reads += len(ids)
        for id_ in ids:
            answer = self._resource.get_nowait(id_)
            if answer is None:
                missing.append(id_)
            else:
                self._count(answer, now)
        if missing:
            self._loop.create_task(self._wait(missing))

    async def _wait(self, ids: list[str]) -> None:
        answers = await self._resource.get_many(ids)
        for answer in answers.values():
            self._waited += answer.origin not in HITS
            if answer.error is not None and not answer.found:
                self._failed += 1
            else:
                self._count(answer, self._loop.time())

    def _count(self, answer: Answer[int], now: float) -> None:
        self._ages.append(now - answer.fetched_at)
        self._stale += answer.verdict is not Verdict.FRESH

    async def _change(self, event: RecordedUse) -> None:
        if event.what == "put":
            await self._resource.put_many(dict.fromkeys(event.ids, 0))
        elif event.what == "delete":
            await self._resource.delete(*event.ids)
        else:
            await self._resource.invalidate(*event.ids, soft=event.what == "soft")

    def _change_viewers(self, ids: Sequence[str], *, is_new: bool) -> None:
        """Viewers of these keys come or leave."""
        self._viewers.update(dict.fromkeys(ids, 1 if is_new else -1))
        self._watch.add(*(id_ for id_ in ids if self._viewers[id_] > 0))
        self._watch.discard(*(id_ for id_ in ids if self._viewers[id_] <= 0))

    def _note_update(self, update: Update[str, int]) -> None:
        """A watched key counts at each refresh, with the age that its viewers saw before."""
        before = self._seen.get(update.key)
        if before is not None:
            self._ages.append(self._loop.time() - before)
        self._seen[update.key] = update.answer.fetched_at

    async def _load(self, ids: list[str]) -> dict[str, Any]:
        """The loader: as slow as the recorded load at this time, with the same failures."""
        traffic = self._traffic
        at = self._loop.time() + traffic.events[0].at
        self._requests += 1
        self._loaded += len(ids)
        load = traffic.load_at(at)
        if load is not None and load.took > 0:
            await asyncio.sleep(load.took)
        if load is not None and len(load.failed) == len(load.ids):
            raise LoadFailed("as recorded")
        values = {id_: self._value(id_, at) for id_ in ids}
        return {id_: value for id_, value in values.items() if value is not None}

    def _value(self, id_: str, at: float) -> int | Loaded[int] | LoadFailed | None:
        """The value of one key as it was recorded; None if it was absent."""
        load = self._traffic.load_at(at, id_)
        if load is None:
            return 0
        if id_ in load.failed:
            return LoadFailed("as recorded")
        if load.terms is not None and self._is_as_recorded:
            fresh_for, stale_for, error_for = load.terms
            return Loaded(0, fresh_for=fresh_for, stale_for=stale_for, error_for=error_for)
        return None if id_ in load.absent else 0

    async def _count_copies(self) -> None:
        """Note how many copies can be served now, if that is the most so far."""
        await self._cache.evict()
        stats = await self._cache.stats()
        if stats.store is not None:
            self._copies = max(self._copies, stats.store.copies)

    def _figures(self) -> Figures:
        traffic = self._traffic
        share = traffic.share
        ages = sorted(self._ages)
        served = len(ages) + self._failed
        requests: float = self._requests
        if share != 1:
            # A replayed load has only the sampled keys, fewer than a real one. So the loaded keys
            # are counted, and divided by the keys that a recorded load had.
            requests = self._loaded / traffic.keys_per_load / share
        copies = round(self._copies / share)
        return Figures(
            self._terms,
            requests / traffic.seconds,
            _quantile(ages, 0.5),
            _quantile(ages, 0.99),
            self._stale / max(1, served),
            self._waited / max(1, self._reads),
            self._failed / max(1, served),
            copies,
            round(copies * (BESIDE + traffic.value_size)),
        )


def _quantile(ages: Sequence[float], share: float) -> float:
    if not ages:
        return 0.0
    return ages[min(len(ages) - 1, int(len(ages) * share))]
