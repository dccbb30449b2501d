"""Why an entry is as it is: what `explain` and a listing of entries say."""

from collections.abc import Iterable
from dataclasses import dataclass

from msgspec.structs import replace

from stillfresh.engine import rules
from stillfresh.engine.rules import FOR_EVER
from stillfresh.freshness import Verdict, age_of
from stillfresh.stores.contract import Mark, Record, StoredEntry

PAGE = "page"
"""The kind of pages. Their explanations differ, because RFC 9111 has rules of its own."""

READS = {
    Verdict.FRESH: "a read is served and nothing else happens",
    Verdict.STALE: "a read is served at once, and one refresh begins behind it",
    Verdict.EXPIRED: "a read waits for a load, and gets this copy only if that fails",
    Verdict.GONE: "a read waits for a load, and fails if that fails",
}

RETRYING = {
    **READS,
    Verdict.STALE: "a read is served at once, with the error, and one refresh begins behind it",
}
"""For an entry whose last load failed, and whose cooldown is over."""

COOLING = {
    **READS,
    Verdict.STALE: "a read is served at once, with the error",
    Verdict.EXPIRED: "a read is served at once, with the error",
    Verdict.GONE: "a read fails at once",
}


@dataclass(frozen=True, kw_only=True)
class EntryState:
    """The state of an entry, from its record."""

    verdict: Verdict
    """Also GONE if there is no copy: there never was one, or it is being loaded."""
    age: float | None
    fresh_until: float | None
    invalidated: bool
    held_until: float | None
    """A process is loading it, until then at the latest."""
    failures: int
    retry_at: float | None
    error: str | None


@dataclass(frozen=True, kw_only=True)
class Explanation(EntryState):
    """The state of one entry: why it is served, who refreshes it, and when."""

    resource: str
    key: object
    loading_here: bool
    in_memory: bool
    text: str
    """The state in one or two sentences."""

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True, kw_only=True)
class Listed(EntryState):
    """One entry of a store, as `Cache.entries` lists it."""

    kind: str
    id: str
    fetched_at: float | None
    size: int | None
    """Bytes of the stored value; None if there is none, or the store does not say."""
    absent: bool
    """True if the upstream does not have the key."""


def explain(
    resource: str,
    key: object,
    record: Record,
    now: float,
    *,
    loading_here: bool,
    in_memory: bool,
    lease_for: float = FOR_EVER,
) -> Explanation:
    """Everything known about one entry."""
    state = _state(record, now, lease_for)
    record = replace(record, held_until=state.held_until)
    return Explanation(
        **vars(state),
        resource=resource,
        key=key,
        loading_here=loading_here,
        in_memory=in_memory,
        text=_text(resource, key, record, now, state.verdict, loading_here=loading_here),
    )


def _text(
    resource: str, key: object, record: Record, now: float, verdict: Verdict, *, loading_here: bool
) -> str:
    pause = rules.cooling(record.failure, now)
    reads = READS if record.failure is None else RETRYING
    if pause is not None:
        reads = COOLING
    is_page = resource == PAGE
    then = _of_page(record, now, verdict) if is_page else None
    what = _what(record, now, verdict, is_page=is_page)
    parts = [f"{resource} {key!r}: {what}; {then or reads[verdict]}."]
    if loading_here:
        parts.append("It is being loaded by this process.")
    elif record.held_until is not None:
        parts.append(
            f"Another process is loading it, until {record.held_until - now:.1f} s from now."
        )
    if (failure := record.failure) is not None:
        loads = "load" if failure.count == 1 else f"{failure.count} loads"
        left = f"; no load begins for another {failure.retry_at - now:.1f} s" if pause else ""
        parts.append(f"The last {loads} failed ({failure.error}){left}.")
    return " ".join(parts)


def _of_page(record: Record, now: float, verdict: Verdict) -> str | None:
    """RFC 9111 §4.4: the sentence for invalidated pages, which differ from other entries."""
    copy = record.copy
    if copy is None or verdict is Verdict.GONE:
        return None
    if copy.value is None:
        return "each caller is sent a response of its own"
    if copy.mark is not Mark.HARD:
        return None
    if rules.cooling(record.failure, now):
        return "it must be validated before it is served, so a read fails at once"
    return "it must be validated before it is served: a read waits for that, and fails if it fails"


def _what(record: Record, now: float, verdict: Verdict, *, is_page: bool) -> str:
    if (copy := record.copy) is None:
        return "there is no copy"
    absent = "not shared" if is_page else "known to be absent"
    article = "an" if verdict is Verdict.EXPIRED else "a"
    what = absent if copy.value is None else f"{article} {verdict} copy"
    if copy.mark is not Mark.NONE:
        return f"{what}, {age_of(copy.fetched_at, now):.1f} s old, invalidated"
    over = now - rules.fresh_until(copy)
    when = f"fresh until {over:.1f} s ago" if over >= 0 else f"fresh for {-over:.1f} s more"
    return f"{what}, {age_of(copy.fetched_at, now):.1f} s old, {when}"


def listed(entries: Iterable[StoredEntry], now: float) -> list[Listed]:
    return [
        Listed(
            **vars(_state(entry.record, now)),
            kind=entry.kind,
            id=entry.id,
            fetched_at=None if (copy := entry.record.copy) is None else copy.fetched_at,
            size=entry.size,
            absent=copy is not None and copy.value is None,
        )
        for entry in entries
    ]


def _state(record: Record, now: float, lease_for: float = FOR_EVER) -> EntryState:
    copy = record.copy
    failure = record.failure
    return EntryState(
        verdict=Verdict.GONE if copy is None else rules.verdict_of(copy, now),
        age=None if copy is None else age_of(copy.fetched_at, now),
        fresh_until=None if copy is None else rules.fresh_until(copy),
        invalidated=copy is not None and copy.mark is not Mark.NONE,
        held_until=record.held_until if rules.is_held(record, now, lease_for) else None,
        failures=0 if failure is None else failure.count,
        retry_at=None if failure is None else failure.retry_at,
        error=None if failure is None else failure.error,
    )
