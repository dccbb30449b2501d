"""From copies to answers, and what memory keeps of them (E2, E6, E9, E11)."""

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Final, Generic, TypeVar

from msgspec.structs import replace

from stillfresh.clock import Clock
from stillfresh.engine.codec import Codec
from stillfresh.engine.front import NEVER, Front
from stillfresh.engine.metrics import Meter
from stillfresh.engine.model import Answer, Origin
from stillfresh.engine.rules import (
    Outlook,
    Serve,
    age_bucket,
    outlook_of,
    verdict_of,
)
from stillfresh.errors import LoadFailed
from stillfresh.freshness import Verdict, age_of
from stillfresh.stores.contract import UNREAD, Copy, Failure, Record

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")

FRESH: Final = Verdict.FRESH
UNSTORED_FOR: Final = 1.0
"""S5: while the store is away, a loaded value is served from memory for so long, if fresh."""


class Answers(Generic[K, V]):
    """Decodes, counts, and keeps in memory; decides nothing about loads."""

    def __init__(
        self,
        kind: str,
        codec: Codec[V],
        clock: Clock,
        *,
        max_entries: int,
        memory_for: float,
        private: bool,
        tags_of: Callable[[K], Sequence[str | None]] | None = None,
    ) -> None:
        self.meter = Meter()
        self.front: Front[K, V] = Front(max_entries, self.meter, tags_of)
        self._kind = kind
        self._codec = codec
        self._clock = clock
        self._memory_for = float("inf") if private else memory_for
        """E9: nobody else can change a private store, so memory need not ask it."""
        self._from_store = Origin.MEMORY if private else Origin.STORE
        self._kept_origin = Origin.MEMORY if self._memory_for else Origin.STORE
        """Without `memory_for`, what is kept is given only after the store was asked."""
        self._outlook: Outlook | None = None

    def now(self) -> float:
        return self._clock()

    def hit(self, key: K, now: float) -> Answer[V] | None:
        """What memory can answer without asking the store."""
        entry = self.front.entries.get(key)
        if entry is None or now >= entry.until:
            return None
        entry.hits += 1
        return entry.answer

    def peek(self, key: K) -> Answer[V] | None:
        """What memory holds, judged now, counted nowhere."""
        if (entry := self.front.entries.get(key)) is None:
            return None
        now = self._clock()
        if now < entry.until:
            return entry.answer
        verdict = verdict_of(entry.copy, now)
        if verdict is Verdict.GONE:
            return None
        return self.made(entry.copy, entry.answer.value, verdict, Origin.MEMORY)

    def serve(
        self,
        key: K,
        plan: Serve,
        now: float,
        origin: Origin | None = None,
        since: float | None = None,
        *,
        unverified: bool = False,
    ) -> Answer[V] | None:
        """An answer from the plan's copy, kept in memory; None if the copy cannot be read.

        `unverified`: the copy is memory's own, since the store could not be asked (E26).
        """
        copy, verdict = plan.copy, plan.verdict
        readable, value = self._value(key, copy)
        if not readable:
            return None
        failure, outlook = plan.failure, self.outlook(copy, now)
        error = None if failure is None else self.cooling(key, failure, now)
        since = now if since is None else since
        origin = origin or self._from_store
        if verdict is Verdict.EXPIRED is not outlook.verdict:  # E18: too old for this call alone
            return self.made(copy, value, verdict, origin, error, unverified=unverified)
        if unverified:
            return self._keep_unverified(key, copy, value, outlook)
        kept = self.keep(key, copy, value, outlook, since, failure=failure, error=error)
        return kept if origin is kept.origin else self.made(copy, value, verdict, origin, error)

    def outlook(self, copy: Copy, now: float) -> Outlook:
        """What was loaded, or is read, together is judged once; it shares its terms."""
        last = self._outlook
        if (
            last is None
            or last.policy is not copy.policy
            or last.fetched_at != copy.fetched_at
            or last.mark is not copy.mark
            or last.now != now
        ):
            last = self._outlook = outlook_of(copy, now)
        return last

    def keep(
        self,
        key: K,
        copy: Copy,
        value: V | None,
        outlook: Outlook,
        since: float,
        *,
        failure: Failure | None = None,
        error: LoadFailed | None = None,
    ) -> Answer[V]:
        """E9: until when memory may give this answer, by itself or if the store agrees.

        The store was asked at `since`: what others did while it was slow to answer is not known.
        """
        stands = until = NEVER
        if failure is not None:
            until = min(outlook.until, failure.retry_at)
        elif outlook.verdict is FRESH:
            stands = until = outlook.until
        if not self._memory_for:
            until = NEVER
        elif (limit := since + self._memory_for) < until:
            until = limit
        kept = self.made(copy, value, outlook.verdict, self._kept_origin, error)
        bucket = outlook.bucket
        self.front.put(key, _light(copy), kept, until=until, stands=stands, bucket=bucket)
        return kept

    def keep_unstored(self, key: K, copy: Copy, value: V | None, outlook: Outlook) -> None:
        """What was loaded and could not be published: for a moment, while it is fresh."""
        self._keep_unverified(key, copy, value, outlook, UNSTORED_FOR)

    def _keep_unverified(
        self,
        key: K,
        copy: Copy,
        value: V | None,
        outlook: Outlook,
        lag: float | None = None,
    ) -> Answer[V]:
        """E26: the store did not confirm it; given for `lag` (`memory_for`) if it is fresh."""
        lag = self._memory_for if lag is None else lag
        kept = self.made(copy, value, outlook.verdict, Origin.MEMORY, unverified=True)
        until = min(outlook.now + lag, outlook.until) if outlook.verdict is FRESH and lag else NEVER
        self.front.put(key, _light(copy), kept, until=until, bucket=outlook.bucket)
        return kept

    def fallback(
        self, key: K, copy: Copy, *, unverified: bool = False
    ) -> Callable[[LoadFailed], Answer[V]] | None:
        """E2: what an EXPIRED copy is still good for, if the load fails; decoded once."""
        readable, value = self._value(key, copy)
        if not readable:
            return None
        kept = self.made(copy, value, Verdict.EXPIRED, Origin.MEMORY)
        self.front.put(key, _light(copy), kept)
        origin = Origin.MEMORY if unverified else self._from_store
        return lambda error: self.made(
            copy, value, Verdict.EXPIRED, origin, error, unverified=unverified
        )

    def count(self, outcomes: Iterable[Answer[V] | LoadFailed], now: float) -> None:
        """E12: one more read for each, by what it was given; what came together is of one age."""
        reads, ages = self.meter.reads, self.meter.ages
        fetched_at, bucket = now, age_bucket(0.0)
        for outcome in outcomes:
            if isinstance(outcome, LoadFailed):
                reads[Origin.LOADED][Verdict.GONE] += 1
                continue
            if outcome.fetched_at != fetched_at:
                fetched_at = outcome.fetched_at
                bucket = age_bucket(age_of(fetched_at, now))
            reads[outcome.origin][outcome.verdict] += 1
            ages[bucket] += 1

    def cooling(self, key: K, failure: Failure, now: float) -> LoadFailed:
        """E7: what is remembered of the last failure."""
        error = LoadFailed(
            f"{self._kind} {key!r}: not tried again for {failure.retry_at - now:.1f} s, "
            f"since loading failed: {failure.error}"
        )
        error.retry_at = failure.retry_at
        return error

    def made(
        self,
        copy: Copy,
        value: V | None,
        verdict: Verdict,
        origin: Origin,
        error: LoadFailed | None = None,
        *,
        unverified: bool = False,
    ) -> Answer[V]:
        found = copy.value is not None
        at, clock = copy.fetched_at, self._clock
        return Answer(value, found, verdict, at, origin, clock, error, unverified)  # type: ignore[arg-type]

    def readable(self, texts: Mapping[K, str], records: Mapping[str, Record]) -> dict[str, Record]:
        """The same records; a copy that cannot be read is none."""
        found = {id_: (key, records[id_]) for key, id_ in texts.items() if id_ in records}
        return {
            id_: it if it.copy is None or self._value(key, it.copy)[0] else replace(it, copy=None)
            for id_, (key, it) in found.items()
        }

    def _value(self, key: K, copy: Copy) -> tuple[bool, V | None]:
        """Decoded, or as memory has it; a value of another shape is a miss, not a crash (E11)."""
        if copy.value is None:
            return True, None
        entry = self.front.entries.get(key)
        if entry is not None and entry.copy.generation == copy.generation:
            return True, entry.answer.value
        if copy.value is UNREAD:
            return False, None
        try:
            return True, self._codec.decode(copy.value)
        except Exception:  # noqa: BLE001 (a codec may raise anything)
            return False, None


def _light(copy: Copy) -> Copy:
    """Memory holds the decoded value; the bytes stay in the store."""
    if copy.value is UNREAD or copy.value is None:
        return copy
    return Copy(copy.generation, copy.fetched_at, copy.policy, UNREAD, copy.mark)
