"""Checks of reads in production: a sample of them is compared with what the loader gives.

A `Sampler` chooses the reads. The hot paths know nothing of it: they count hits down to the next
one that is looked at, and the sampler only says which one that is. So a resource without `check=`
pays nothing, and one with it pays for the reads of the sample.

`Truth` checks them, in tasks of the cache that closing cancels. A check asks the loader again,
without a lease and without storing anything, and waits `true_within` if it gives another value.
`rules_truth.py` judges. All of it is bounded: the calls a second, the calls at once, the reads that
wait for their second look, the stories, and the changes that are remembered for the stories. Reads
beyond that are skipped before their first look, so what is judged stays a fair sample.
"""

import asyncio
import logging
import random
from collections import deque
from collections.abc import Callable, Hashable, Iterable
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar

from msgspec import Struct

from stillfresh.bounded import BoundedDict
from stillfresh.engine import rules
from stillfresh.engine.model import HITS, Answer, Loaded, Outcome, Private
from stillfresh.engine.rules import ABSENT
from stillfresh.engine.rules_truth import (
    MOST_STORIES,
    Budget,
    CachedLook,
    CheckTerms,
    Look,
    TruthStats,
    WrongRead,
    gap_of,
    is_wrong,
)
from stillfresh.engine.unshared import BytesCodec, own_answer
from stillfresh.errors import StillfreshError, shown
from stillfresh.tasks import is_cancelled

if TYPE_CHECKING:
    from stillfresh.engine.core import Core
    from stillfresh.engine.entry import Entry
    from stillfresh.engine.runtime import Runtime

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")

MOST_OFFERED: Final = 64
"""Reads of the sample that wait for the event loop to take them."""
MOST_PENDING: Final = 100
"""Reads that are checked at once; most of them wait for their second look."""
MOST_LOOKS: Final = 4
"""Calls of the loader at once. Of a plain function, one, in a thread that loads do not use."""
MOST_CHANGES: Final = 1_000
"""Keys whose last change is remembered."""

logger = logging.getLogger(__name__)


class Served(Struct, Generic[K, V], frozen=True):
    """A read of the sample."""

    key: K
    answer: Answer[V]
    at: float


class Sampler:
    """Chooses the reads of one thread that are checked, each with the same probability."""

    __slots__ = ("_dice", "_gap", "_period", "_share", "_truth")

    def __init__(self, truth: "Truth[Any, Any]", dice: Callable[[], float] = random.random) -> None:
        self._truth = truth
        self._dice = dice
        self._share = truth.terms.share
        self._gap = gap_of(self._share, dice())
        """Hits until the next one that is checked."""
        self._period = 1  # hits since the last look, as `ReadCounts.unsampled` counts them

    def next_look(
        self, entry: "Entry[Any, Any]", answer: Answer[Any], now: float, longest: int
    ) -> int:
        """A hit is looked at: check it if it is chosen. Return the hits until the next look."""
        self._gap -= self._period
        if self._gap == 0:
            self._truth.offer(entry.key, answer, now)
            self._gap = gap_of(self._share, self._dice())
        self._period = min(self._gap, longest)
        return self._period

    def note(self, key: object, outcome: Outcome[Any], now: float) -> None:
        """A read left memory. One that was answered by a load is no copy, and not checked."""
        if isinstance(outcome, Answer) and outcome.origin in HITS and self._dice() < self._share:
            self._truth.offer(key, outcome, now)


class Truth(Generic[K, V]):
    """The checks of one resource."""

    def __init__(self, core: "Core[K, V]", terms: CheckTerms) -> None:
        self.terms = terms
        self._core = core
        self._budget = Budget(terms.calls)
        self._runtime: Runtime | None = None
        self._places: asyncio.Semaphore
        self._offered: deque[Served[K, V]] = deque()
        self._is_planned = False
        self._pending = 0
        self._true = self._late = self._wrong = self._failed = self._skipped = 0
        self._stories: deque[WrongRead] = deque(maxlen=MOST_STORIES)
        self._changes: BoundedDict[K, tuple[float, str]] = BoundedDict(MOST_CHANGES)

    def open(self, runtime: "Runtime") -> None:
        """The cache is open: from now on reads are checked."""
        in_thread = self._core.spec.in_thread
        if in_thread:
            runtime.threads.allow(1)
        self._places = asyncio.Semaphore(1 if in_thread else MOST_LOOKS)
        self._pending = 0
        self._is_planned = False
        self._runtime = runtime

    def close(self) -> None:
        """The cache closes, and cancels the checks that run."""
        self._runtime = None
        self._offered.clear()

    def stats(self) -> TruthStats:
        return TruthStats(
            true=self._true,
            late=self._late,
            wrong=self._wrong,
            failed=self._failed,
            skipped=self._skipped,
            pending=self._pending,
            true_within=self.terms.true_within,
            objective=self.terms.objective,
            wrong_reads=tuple(self._stories),
        )

    def note_change(self, keys: Iterable[K], change: str) -> None:
        """This process changed keys, or was told of a change. Stories mention it."""
        now = self._core.memory.now()
        for key in keys:
            self._changes.note(key, (now, change))

    def offer(self, key: K, answer: Answer[V], now: float) -> None:
        """Check this read. Any thread may call it; the check begins on the event loop."""
        runtime = self._runtime
        if runtime is None:
            return
        if len(self._offered) >= MOST_OFFERED:
            self._skipped += 1
            return
        self._offered.append(Served(key, answer, now))
        if not self._is_planned:
            self._is_planned = True
            with suppress(RuntimeError):  # the loop is closed
                runtime.loop.call_soon_threadsafe(self._begin_offered)

    def _begin_offered(self) -> None:
        """On the loop: begin the checks that the budget allows."""
        self._is_planned = False
        runtime = self._runtime
        while self._offered:
            served = self._offered.popleft()
            if runtime is None:
                continue
            is_full = self._pending >= MOST_PENDING or self._places.locked()
            if is_full or not self._budget.take(runtime.clock()):
                self._skipped += 1
                continue
            self._pending += 1
            runtime.spawn(self._check(served, runtime))

    async def _check(self, served: Served[K, V], runtime: "Runtime") -> None:
        """One check: a look of the loader, and if it gives another value, a second one later."""
        try:
            looked_at = runtime.clock()
            first = await self._look(served.key, runtime)
            if first is None:
                self._failed += 1
                return
            if self._is_same(self._look_of(served.answer), first):
                self._true += 1
                return
            await runtime.sleep(self.terms.true_within)
            cached = await self._cached(served.key, runtime)
            self._budget.spend()
            second = await self._look(served.key, runtime)
            if second is None:
                self._failed += 1
                return
            looks = (first, second)
            fetched_at = served.answer.fetched_at
            if not is_wrong(fetched_at, looked_at, cached, looks, self._is_same):
                self._late += 1
                return
            story = await self._story(served, runtime)
            self._wrong += 1
            self._stories.append(story)
            logger.warning("%s: a read was wrong: %s", self._core.spec.kind, story)
        except StillfreshError:  # the cache was closed meanwhile
            self._failed += 1
        finally:
            if self._runtime is runtime:
                self._pending -= 1

    async def _look(self, key: K, runtime: "Runtime") -> Look[V] | None:
        """What the loader gives now; None if it failed, or took longer than a load may."""
        spec = self._core.spec
        try:
            async with asyncio.timeout(spec.load_timeout), self._places:
                if spec.in_thread:
                    loaded = await runtime.threads.run(partial(spec.load, [key]))
                else:
                    loaded = await spec.load([key])
            result = rules.results_of(spec.kind, [key], loaded)[key]
        except asyncio.CancelledError:
            if is_cancelled():
                raise
            return None  # the loader cancelled itself
        except Exception as exc:  # noqa: BLE001 (a loader may raise anything)
            result = exc
        if isinstance(result, BaseException):
            is_answer = self._core.passes_on(result)
            return Look(found=False, error=type(result).__name__) if is_answer else None
        if result is ABSENT:
            return Look(found=False)
        if isinstance(result, Private):
            return None
        value: Any = result.value if isinstance(result, Loaded) else result
        return Look(found=True, value=value) if self._is_readable(value) else None

    async def _cached(self, key: K, runtime: "Runtime") -> CachedLook[V] | None:
        """What a read would get now without a load. It is not counted as a read."""
        memory = self._core.memory
        entry = memory.entries.get(key)
        now = runtime.clock()
        answer: Answer[V] | None
        if entry is not None and (now < entry.until or memory.is_trusted(entry, now)):
            answer = entry.answer
        else:
            answer = await self._core.reads.stored(key)
        if answer is None or answer.unverified:
            return None
        return CachedLook(self._look_of(answer), answer.verdict, answer.fetched_at)

    def _look_of(self, answer: Answer[V]) -> Look[V]:
        if not answer.found:
            return Look(found=False)
        return Look(found=True, value=own_answer(self._core.spec.codec, answer).value)

    def _is_readable(self, value: V) -> bool:
        """Whether the cache could store this value. If not, nothing can be compared with it."""
        try:
            self._core.spec.codec.encode(value)
        except Exception:  # noqa: BLE001 (a codec may raise anything)
            return False
        return True

    def _is_same(self, one: Look[V], other: Look[V]) -> bool:
        """Compare values in the form that the store has. Equal bytes are equal values.

        Other bytes may be, as those of sets and of encrypted values are: then they are decoded.
        """
        if not one.found or not other.found:
            return one.found == other.found and one.error == other.error
        codec: Any = self._core.spec.codec
        if isinstance(codec, BytesCodec):
            codec = codec.inner
        try:
            first = codec.encode(one.value)
            second = codec.encode(other.value)
            return bool(first == second or codec.decode(first) == codec.decode(second))
        except Exception:  # noqa: BLE001 (a codec, or the value's own comparison)
            return False

    async def _story(self, served: Served[K, V], runtime: "Runtime") -> WrongRead:
        core = self._core
        answer = served.answer
        key = served.key
        entry = core.memory.entries.get(key)
        generation = None
        if entry is not None and entry.copy.fetched_at == answer.fetched_at:
            generation = entry.copy.generation
        id_ = core.names.text(key)
        records = await core.loads.loader.read([id_]) or {}
        changed_at, change = self._changes.get(key, (None, None))
        return WrongRead(
            key=shown(id_),
            served_at=served.at,
            age=max(0.0, served.at - answer.fetched_at),
            verdict=answer.verdict.name,
            origin=str(answer.origin),
            fetched_at=answer.fetched_at,
            fresh_for=answer.policy.fresh_for,
            generation=generation,
            judged_at=runtime.clock(),
            lease_until=records[id_].held_until if id_ in records else None,
            changed_at=changed_at,
            change=change,
        )
