"""What a history of real processes must never show.

Pure: the events of a log in, sentences out. A step without a known end may have been done at any
time after it began, or never, so it proves no mistake.

A step has two times in the log: its beginning and its end. The store did it at some time between
them. So a check compares only what is certain: a read accuses the store of a lost invalidation
if the invalidation had ended before the read began, and the load had begun before the invalidation
began. `Latest` answers the question that all checks ask: of the steps that had ended by a moment,
when did the latest one begin?
"""

from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import accumulate, pairwise
from typing import Final, TypeAlias

from stillfresh.freshness import MAX_SKEW
from stillfresh.lab.prove.witness import Seen

NEVER: Final = float("inf")
USABLE: Final = ("fresh", "stale")
NAME_PARTS: Final = 3
GRAIN: Final = 0.001
"""Stores keep milliseconds."""


class ProofHistory:
    """The events, by what happened and by key."""

    def __init__(
        self,
        events: Iterable[Seen],
        fresh_for: float,
        lag: float = 0.0,
        *,
        may_forget: bool = False,
    ) -> None:
        """`lag`: seconds for which changes by others may be missed (`memory_for`).

        `may_forget`: a copy that is no longer in the store is only a miss.
        """
        self.fresh_for = fresh_for
        self.lag = lag
        self.may_forget = may_forget
        self._by: dict[str, dict[str, list[Seen]]] = defaultdict(lambda: defaultdict(list))
        for event in sorted(events, key=lambda event: event.at):
            self._by[event.what][event.key].append(event)
        self.loads = {event.load: event for event in self.all("load")}
        self._published = {event.lease: event for event in self.all("published")}
        self._publishing = {event.lease: event for event in self.all("publishing")}
        self._unstored = {event.lease for event in self.all("unstored")} | {""}
        self._moves = [event.at for event in self.all("moved")]

    def all(self, what: str) -> list[Seen]:
        return [event for events in self._by[what].values() for event in events]

    def of(self, what: str, key: str) -> list[Seen]:
        return self._by[what][key]

    def keys(self, what: str) -> list[str]:
        return sorted(self._by[what])

    def moved(self, began: float, ended: float) -> bool:
        """True if the clock was moved in between."""
        return bisect_left(self._moves, began) != bisect_right(self._moves, ended)

    def is_sighted(self, event: Seen) -> bool:
        """True if the process could ask the store, and the load had a lease and was stored.

        Only for the count: a read is judged whether the store could be asked or not.
        """
        load = self.loads.get(event.load)
        return not event.blind and load is not None and load.lease not in self._unstored

    def sighted(self) -> list[Seen]:
        return [event for event in self.all("served") if self.is_sighted(event)]

    def publication(self, token: str) -> tuple[float, float]:
        """The earliest and the latest time of a publication."""
        done = self._published.get(token)
        if done is not None:
            return done.at, done.ended
        begun = self._publishing.get(token)
        if begun is not None:
            return begun.at, NEVER
        return -NEVER, NEVER

    def ends(self, leased: Seen, before: float) -> bool:
        """True if its own holder or an invalidation may have ended this lease early."""
        own = [*self.of("publishing", leased.key), *self.of("releasing", leased.key)]
        if any(event.lease == leased.lease and event.at <= before for event in own):
            return True
        ends = {event.at: event.ended for event in self.of("invalidated", leased.key)}
        return any(
            event.at <= before and ends.get(event.at, NEVER) >= leased.at
            for event in self.of("invalidating", leased.key)
        )


class Latest:
    """The latest beginning among the steps that had ended before a moment."""

    def __init__(self, steps: Iterable[Seen]) -> None:
        done = sorted(steps, key=lambda step: step.ended)
        self._ends = [step.ended for step in done]
        self._begins = list(accumulate((step.at for step in done), max))

    def before(self, moment: float) -> float:
        count = bisect_left(self._ends, moment)
        return self._begins[count - 1] if count else -NEVER


def load_text(load: str) -> str:
    """A load in words; `LoadNames` names it by process, number and key."""
    parts = load.split("-", NAME_PARTS - 1)
    if len(parts) != NAME_PARTS:
        return f"load {load}"
    process, number, _ = parts
    return f"load {number} of process {process}"


def reads_after_invalidation(history: ProofHistory) -> Iterator[tuple[Seen, float]]:
    """Reads that were served, as fresh or stale, a copy from before an invalidation; with its time.

    All reads are looked at, also from processes that could not ask the store.
    """
    latest = {key: Latest(history.of("invalidated", key)) for key in history.keys("invalidated")}
    for event in history.all("served"):
        load = history.loads.get(event.load)  # None: `ages` accuses it
        if load is None or event.key not in latest or event.verdict not in USABLE:
            continue
        invalidated = latest[event.key].before(event.at - history.lag)
        if load.at < invalidated:
            yield event, invalidated


def is_excused(event: Seen) -> bool:
    """True if the answer itself said that it is stale, and that the store could not be asked."""
    return event.verdict == "stale" and event.unverified


def excused_reads(history: ProofHistory) -> Iterator[Seen]:
    """Reads that got a copy from before an invalidation, and said that they were not checked."""
    for event, _ in reads_after_invalidation(history):
        if is_excused(event):
            yield event


def uncertain_reads(history: ProofHistory) -> Iterator[Seen]:
    """Reads that got a copy from before an invalidation that nobody acknowledged.

    Its process was killed, or the store did not answer. It may have been done or not, and the read
    is right in one of the two cases: both are judged, and neither accuses it.
    """
    confirmed = {key: Latest(history.of("invalidated", key)) for key in history.keys("invalidated")}
    for key in history.keys("invalidating"):
        ends = {event.at for event in history.of("invalidated", key)}
        begun = [event.at for event in history.of("invalidating", key) if event.at not in ends]
        for event in history.of("served", key):
            load = history.loads.get(event.load)
            if load is None or event.verdict not in USABLE:
                continue
            latest = confirmed[key].before(event.at) if key in confirmed else -NEVER
            if any(load.at < at < event.ended and at > latest for at in begun):
                yield event


def unjudged_reads(history: ProofHistory) -> Counter[str]:
    """Reads on which no judgement is possible, by the reason."""
    reasons: Counter[str] = Counter()
    for event in history.all("served"):
        if event.load not in history.loads:
            reasons["nothing is known of the copy"] += 1
        elif event.verdict not in USABLE:
            reasons[f"the answer said that it was {event.verdict}"] += 1
    failed = len(history.all("failed"))
    if failed:
        reasons["the read failed, and gave no answer"] = failed
    return reasons


def wrong_reads(history: ProofHistory) -> int:
    """How many reads were wrong: what they called fresh, or stale, was invalidated before."""
    return sum(1 for event, _ in reads_after_invalidation(history) if not is_excused(event))


def lost_invalidations(history: ProofHistory) -> Iterator[str]:
    """Reads that got, as fresh, a copy that was invalidated before.

    Also as stale, unless the answer says that the store could not be asked.
    """
    first: dict[tuple[str, str, str], float] = {}
    for event, invalidated in reads_after_invalidation(history):
        if not is_excused(event):
            first.setdefault((event.key, event.load, event.verdict), event.at - invalidated)
    for (key, load, verdict), late in first.items():
        after = f"{late:.2g} s after it was invalidated"
        yield f"{key}: {load_text(load)} was served as {verdict}, {after}"


def reads_of_replaced_copies(history: ProofHistory) -> Iterator[str]:
    """Reads that got, as fresh, a copy that had been replaced before."""
    latest = {key: Latest(history.of("published", key)) for key in history.keys("published")}
    for event in history.all("served"):
        load = history.loads.get(event.load)
        if load is not None and event.key in latest and event.verdict == "fresh":
            _, published = history.publication(load.lease)
            if not load.lease:  # it was never stored, so it is as old as its load
                published = load.at
            if published < latest[event.key].before(event.at - history.lag):
                old = load_text(event.load)
                yield f"{event.key}: {old} was served after a newer copy was stored"


def wrong_ages(history: ProofHistory) -> Iterator[str]:
    """Reads of a copy that was called fresh for too long, or younger than it is."""
    for event in history.all("served"):
        load = history.loads.get(event.load)
        if load is None or load.key != event.key:
            yield f"{event.key}: was served {event.load!r}, which nobody loaded for it"
            continue
        old = event.wall - event.fetched_at >= history.fresh_for
        if event.verdict == "fresh" and old and not history.moved(event.at, event.ended):
            age = f"{event.wall - event.fetched_at:.2f} s"
            yield f"{event.key}: {load_text(event.load)} was served as fresh at the age of {age}"
        latest = event.wall + event.ended - event.at  # it may have waited for its load
        ahead = event.fetched_at - latest > MAX_SKEW
        if event.verdict == "fresh" and ahead and not history.moved(event.at - 1, event.ended):
            yield f"{event.key}: {load_text(event.load)} was fresh, from the future"
        if event.fetched_at > load.wall + GRAIN and not history.moved(load.at - 5, load.at):
            yield f"{event.key}: {load_text(event.load)} was said to be younger than it is"


def doubled_loads(history: ProofHistory) -> Iterator[str]:
    """Leases with which a key was loaded more than once."""
    counts = Counter((load.key, load.lease) for load in history.all("load") if load.lease)
    for (key, token), count in counts.items():
        if count > 1:
            yield f"{key}: {count} loads with the lease {token}"


def doubled_leases(history: ProofHistory) -> Iterator[str]:
    """Leases that were given while another holder had a live one for the same key."""
    for key in history.keys("leased"):
        for first, second in pairwise(history.of("leased", key)):
            overlaps = first.ended < second.at and second.wall < first.until
            was_moved = history.moved(first.at, second.ended)
            if overlaps and not was_moved and not history.ends(first, second.ended):
                yield f"{key}: {second.lease} was leased while {first.lease} was held"


def voided_publications(history: ProofHistory) -> Iterator[str]:
    """Publications with a lease that an invalidation had voided."""
    leased = {event.lease: event for event in history.all("leased")}
    for key in history.keys("published"):
        latest = Latest(history.of("invalidated", key))
        for event in history.of("published", key):
            lease = leased.get(event.lease)
            if lease is not None and latest.before(event.at) > lease.ended:
                yield f"{key}: {event.lease} was published after it was voided"


def lost_copies(history: ProofHistory) -> Iterator[str]:
    """Looks into the store that did not find the last published copy, or a later one."""
    for event in outdated_looks(history):
        if event.lease or not history.may_forget:
            copy = event.lease or "nothing"
            yield f"{event.key}: {copy} was found, and something newer had been published"


def outdated_looks(history: ProofHistory) -> Iterator[Seen]:
    """Looks into the store that found an older copy than the last published one, or none."""
    for key in history.keys("found"):
        latest = Latest(history.of("published", key))
        for event in history.of("found", key):
            ended = -NEVER
            if event.lease:
                _, ended = history.publication(event.lease)
            if ended < latest.before(event.at):
                yield event


def failed_reads(history: ProofHistory) -> Iterator[str]:
    """Reads that got no answer. Readers are answered, whatever happens to the store."""
    for event in history.all("failed"):
        yield f"{event.key}: a read failed: {event.text}"


def missed_recoveries(history: ProofHistory) -> Iterator[str]:
    """Faults after which not all processes worked again by themselves."""
    for event in history.all("stuck"):
        yield f"after {event.text}: not all worked again"


LOST: Final = (
    "A read after an invalidation is not served the older copy as fresh; as stale only if the "
    "answer says that it is unverified"
)
"""The promise that a lost invalidation breaks."""
REPLACED: Final = "A read after a newer copy was stored is not served the older copy as fresh"
DOUBLED: Final = ("A lease is used for one load", "A key has one lease holder at a time")
"""The promises that a lease given twice breaks."""
KEPT: Final = "A copy that the store has confirmed stays there until a newer one replaces it"
ANSWERED: Final = "Every read gets a value, also while the store is out of reach"
RECOVERED: Final = "After each fault, all processes work again by themselves within 60 seconds"
Checks: TypeAlias = Mapping[str, Callable[[ProofHistory], Iterator[str]]]
CHECKS: Final[Checks] = {
    LOST: lost_invalidations,
    REPLACED: reads_of_replaced_copies,
    "A copy is served as fresh no longer than `fresh_for`, and never says that it is younger "
    "than it is": wrong_ages,
    DOUBLED[0]: doubled_loads,
    DOUBLED[1]: doubled_leases,
    "A load whose lease was ended by an invalidation is not stored": voided_publications,
    KEPT: lost_copies,
    ANSWERED: failed_reads,
    RECOVERED: missed_recoveries,
}
"""Each promise, and the function that finds where a history breaks it."""
PEER_CHECKS: Final[Checks] = {promise: CHECKS[promise] for promise in (LOST, ANSWERED, RECOVERED)}
"""Checks that suit any cache: other libraries have no leases and state no freshness."""


def violations(history: ProofHistory, checks: Checks = CHECKS) -> dict[str, list[str]]:
    """The violations of each promise."""
    return {promise: list(dict.fromkeys(check(history))) for promise, check in checks.items()}


def ages_at_serving(history: ProofHistory) -> dict[str, float]:
    """The ages of served copies in seconds, at times when the clock was not moved."""
    served = [
        event for event in history.all("served") if not history.moved(event.at - 1, event.ended)
    ]
    in_order = sorted(max(0.0, event.wall - event.fetched_at) for event in served) or [0.0]
    return {
        "p50": in_order[len(in_order) // 2],
        "p99": in_order[len(in_order) * 99 // 100],
        "max": in_order[-1],
    }


def loads_together(history: ProofHistory) -> int:
    """Loads that began while another load of the same key was under way."""
    ends = {event.load: event.at for event in history.all("loaded")}
    count = 0
    for key in history.keys("load"):
        latest_end = -NEVER
        for load in history.of("load", key):
            if load.at < latest_end:
                count += 1
            latest_end = max(latest_end, ends.get(load.load, load.at))
    return count
