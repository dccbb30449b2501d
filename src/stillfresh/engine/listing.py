"""One entry of a listing, judged: what a person who looks into a store wants to see (E12).

Pure: an entry and the time in, its verdict and times out.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from stillfresh.engine.rules import fresh_until, is_held, verdict_of
from stillfresh.freshness import Verdict, age_of
from stillfresh.stores.contract import Entry, Mark


@dataclass(frozen=True, slots=True)
class Listed:
    """What `explain` says of one entry, as far as its row tells."""

    kind: str
    id: str
    verdict: Verdict
    """GONE as well where there is no copy: one that is being loaded, or failed to."""
    age: float | None
    fetched_at: float | None
    fresh_until: float | None
    size: int | None
    """Bytes of the value as it is stored; None where there is none, or the store cannot tell."""
    absent: bool
    """Upstream says that there is no such thing."""
    invalidated: bool
    held_until: float | None
    """Somebody is loading it, until then at the latest."""
    failures: int
    retry_at: float | None
    error: str | None


def listed(entries: Iterable[Entry], now: float) -> list[Listed]:
    return [_listed(entry, now) for entry in entries]


def _listed(entry: Entry, now: float) -> Listed:
    copy, failure = entry.record.copy, entry.record.failure
    return Listed(
        kind=entry.kind,
        id=entry.id,
        verdict=Verdict.GONE if copy is None else verdict_of(copy, now),
        age=None if copy is None else age_of(copy.fetched_at, now),
        fetched_at=None if copy is None else copy.fetched_at,
        fresh_until=None if copy is None else fresh_until(copy),
        size=entry.size,
        absent=copy is not None and copy.value is None,
        invalidated=copy is not None and copy.mark is not Mark.NONE,
        held_until=entry.record.held_until if is_held(entry.record, now) else None,
        failures=0 if failure is None else failure.count,
        retry_at=None if failure is None else failure.retry_at,
        error=None if failure is None else failure.error,
    )
