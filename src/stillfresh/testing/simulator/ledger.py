"""The ledger: who holds which lease, what was loaded under it, what was invalidated when.

It compares the store's steps with the answers of callers, and trusts neither. The upstream is here
too: a version for each key, raised by every change, so that "old" is a comparison of numbers.

Methods in the past tense note an event: `acquired`, `published` and `voided` are called by the
wire in the moment in which the store does the step, `granted`, `unread` and `unstored` when a
process learns of it, or gives up. The two differ, because answers get lost.

How an answer is judged (`served`). A value is a `Version`: the upstream's number, and which load
asked for it. An invalidation notes the upstream's number when it began. An answer is too old if its
number is smaller than that of an invalidation which had ended before the caller asked. A put makes
this less sharp: it is not known whether an invalidation that ran beside it came first, so such an
invalidation proves nothing (`KeyLoad.put_until`). A stale answer may also be excused: its process
could not ask the store, and the answer claims nothing.

How a lease is judged. Each lease is a permit for one load by the process that got it (`_permits`);
a load without a permit breaks a promise, unless the store did not answer. The holder of each key is
noted as the store grants, renews and ends leases. A publication by another one breaks a promise.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from copy import copy
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, TypeAlias

from msgspec import Struct

from stillfresh.freshness import Verdict, is_lease_over, is_over
from stillfresh.stores.contract import Copy, Grant, Lease
from stillfresh.testing.simulator.changes import ChangeJudge
from stillfresh.testing.simulator.promises import BrokenPromise, Promise
from stillfresh.testing.simulator.record import STORE, RunRecorder

Key: TypeAlias = tuple[str, str]
"""Kind and id."""
LOSS: Final = -1
"""Among the stored loads and puts of a key: the server has lost everything."""


class Version(Struct, frozen=True):
    """What the upstream answers: how often the key was changed, and which load asked."""

    number: int
    load: int


@dataclass(slots=True)
class KeyLoad:
    """A load or a put of one key, by a simulated process, and how it ended."""

    process: int
    key: Key
    token: str | None
    """None if the store did not answer the request for a lease."""
    is_published: bool = False
    is_refused: bool = False
    is_unstored: bool = False
    """The store did not confirm it: only its own process may serve it, as STALE."""
    put_until: float = float("-inf")
    """When a put was stored; an invalidation that began before may come before the put."""
    ended_at: float = float("inf")
    """When the caller of a put had its answer, or gave up."""
    update: object = None
    """Which update made it, if one did, and of which load or put."""
    made_of: int | None = None


@dataclass(slots=True)
class Holder:
    """The process that has the lease of a key, and until when."""

    token: str
    process: int
    until: float


class KeySnapshot(NamedTuple):
    """What the ledger knows of a key, for a failover that goes back to it."""

    holder: Holder | None
    stored: tuple[int, ...]
    changes: int


class Invalidation(NamedTuple):
    """An invalidation that has ended: loads from before it are older than `version`."""

    began: float
    ended: float
    process: int
    version: int
    soft: bool


class Reading(NamedTuple):
    """A read of a caller."""

    process: int
    key: Key
    asked_at: float
    lag: float


class Ledger:
    """Times are the world's; `now` in a store's step is the clock that the store read.

    `fail` is called with each broken promise.
    """

    def __init__(
        self, fail: Callable[[BrokenPromise], object], recorder: RunRecorder | None = None
    ) -> None:
        self._fail = fail
        self._recorder = recorder
        self.wrong = 0
        """Promises that were seen to be broken."""
        self.upstream: Counter[Key] = Counter()
        self._writes: defaultdict[Key, list[tuple[int, float]]] = defaultdict(list)
        self.loads: list[KeyLoad] = []
        self.loaded_at: defaultdict[Key, float] = defaultdict(lambda: float("-inf"))
        """When each key was last loaded from the upstream."""
        self._by_lease: dict[tuple[Key, str], KeyLoad] = {}
        """By key and token: keys that are leased together may share a token."""
        self._holders: dict[Key, Holder] = {}
        self._stored: defaultdict[Key, tuple[int, ...]] = defaultdict(tuple)
        """The loads and puts whose values were stored, in order."""
        self._permits: dict[tuple[int, Key], str | None] = {}
        """The token of the lease with which a process may load a key; None: without a lease."""
        self._ended: defaultdict[Key, list[Invalidation]] = defaultdict(list)
        """The invalidations that have ended."""
        self._unread: dict[tuple[int, Key], float] = {}
        """When a process could last not read a key from the store."""
        self.reads = 0
        """Answers that were judged."""
        self.excused: Counter[str] = Counter()
        """Of these, old ones that broke no promise, by the reason."""
        self.unjudged: Counter[str] = Counter()
        """Answers that could not be judged, by the reason."""
        self.changes = ChangeJudge(self._broken)
        """The judge of puts, invalidations and deletions."""

    def _broken(self, promise: Promise, what: str) -> None:
        self.wrong += 1
        self._fail(BrokenPromise(promise, what))

    def change(self, key: Key) -> int:
        self.upstream[key] += 1
        return self.upstream[key]

    def load(self, process: int, key: Key, *, leased: bool, now: float) -> Version:
        self.loaded_at[key] = now
        token = self._permit(process, key) if leased else None
        load = KeyLoad(process, key, token, is_unstored=token is None)
        self.loads.append(load)
        if token is not None:
            self._by_lease[key, token] = load
        return Version(self.upstream[key], len(self.loads) - 1)

    def put(self, process: int, key: Key, **how: Any) -> Version:  # noqa: ANN401 (of KeyLoad)
        """A process begins to put the upstream's version."""
        self.loads.append(KeyLoad(process, key, None, put_until=float("inf"), **how))
        return Version(self.upstream[key], len(self.loads) - 1)

    def has_put(self, values: Iterable[Version], now: float) -> None:
        """The caller has its answer, or gave up: what its process does from now on comes later."""
        for value in values:
            self.loads[value.load].ended_at = now

    def acknowledged(self, values: Iterable[Version], now: float) -> None:
        """The caller of a put was told that it is done: what is not stored by now never is."""
        for value in values:
            put = self.loads[value.load]
            put.is_refused = put.put_until > now
            put.put_until = min(put.put_until, now)

    def stored(self, key: Key, value: Version, now: float) -> None:
        """The store has the value now. That of an update replaces the one that it was made of."""
        put = self.loads[value.load]
        before = self._stored[key]
        if put.put_until > float("-inf"):
            put.put_until = now  # the last time: a failover may have undone the first one
        if put.made_of is not None and before[-1:] != (put.made_of,):
            self._broken(Promise.ONCE, f"an update of {_name(key)} replaced what it had not seen")
        since_loss = set(before[_last_index(before, LOSS) + 1 :])
        if put.update is not None and any(
            self.loads[load].update is put.update for load in since_loss
        ):
            self._broken(Promise.ONCE, f"an update of {_name(key)} was stored twice")
        self._stored[key] = (*before, value.load)

    def written(self, key: Key, number: int, began: float) -> None:
        """A write-through that began then has written this version upstream."""
        self._writes[key].append((number, began))

    def has_later_write(self, key: Key, number: int, entered: float) -> bool:
        """True if another write-through, which began after that time, has written since."""
        return any(other > number and began > entered for other, began in self._writes[key])

    def written_through(self, key: Key, value: Version, *, is_stored: bool, is_old: bool) -> None:
        """A write-through was told this. `is_old`: another write had come when it put its value."""
        if is_stored and is_old:
            self._broken(
                Promise.WRITTEN,
                f"version {value.number} of {_name(key)} was stored after a later write",
            )
        if not is_stored:
            self.loads[value.load].is_refused = True

    def has_updated(self, key: Key, value: Version) -> None:
        if value.load not in self._stored[key]:
            self._broken(Promise.ONCE, f"an acknowledged update of {_name(key)} is not stored")

    def _permit(self, process: int, key: Key) -> str | None:
        if (process, key) not in self._permits:
            self._broken(Promise.LOAD, f"process {process} loads {_name(key)} without a lease")
        return self._permits.pop((process, key), None)

    def acquired(self, process: int, kind: str, grants: Mapping[str, Grant], now: float) -> None:
        for id_, grant in grants.items():
            if isinstance(grant, Lease):
                self._grant(process, (kind, id_), grant, now)

    def _grant(self, process: int, key: Key, lease: Lease, now: float) -> None:
        holder = self._holders.get(key)
        lease_for = lease.expires_at - now
        if holder is not None and not is_lease_over(holder.until, now, lease_for):
            self._broken(
                Promise.HOLDER,
                f"{_name(key)} was given to process {process} while process {holder.process} "
                "has it",
            )
        self._holders[key] = Holder(lease.token, process, lease.expires_at)
        if self._recorder is not None:
            until = self._recorder.time() + lease_for
            text = f"process {process} has the lease on {_name(key)}"
            self._recorder.begun(process, "lease", text, _lease_name(key, lease.token), until)

    def renewed(self, kind: str, leases: Sequence[Lease], lost: Set[str], until: float) -> None:
        for lease in leases:
            holder = self._holder_of(kind, lease)
            if lease.id not in lost and holder is not None:
                holder.until = until

    def published(
        self, kind: str, copies: Mapping[str, tuple[Lease, Copy]], superseded: Set[str], now: float
    ) -> None:
        for id_, (lease, _) in copies.items():
            load = self._by_lease.get(((kind, id_), lease.token))
            if id_ in superseded:
                if load is not None:
                    load.is_refused = True
                self._record_law(
                    process_of(load),
                    f"the store refuses {_name((kind, id_))}: its lease is not live any more, so "
                    f"this value is not stored",
                )
                continue
            holder = self._holder_of(kind, lease)
            if holder is None or is_over(holder.until, now):
                self._record_law(
                    process_of(load),
                    f"the store takes {_name((kind, id_))} although its lease is not live any "
                    f"more: an old value is back",
                    is_right=False,
                )
                self._broken(
                    Promise.LOST,
                    f"{_name((kind, id_))} was published by one who has no lease for it",
                )
            self._holders.pop((kind, id_), None)
            self._record_end((kind, id_), lease.token, "published")
            if load is not None:
                load.is_published = True

    def released(self, kind: str, leases: Iterable[Lease]) -> None:
        for lease in leases:
            if self._holder_of(kind, lease) is not None:
                del self._holders[kind, lease.id]
                self._record_end((kind, lease.id), lease.token, "released")

    def voided(self, kind: str, ids: Iterable[str]) -> None:
        for id_ in ids:
            holder = self._holders.pop((kind, id_), None)
            if holder is not None:
                self._record_end((kind, id_), holder.token, "voided")

    def _record_end(self, key: Key, token: str, how: str) -> None:
        if self._recorder is not None:
            self._recorder.lease_ended(_lease_name(key, token), how)

    def _record_law(self, process: int, text: str, *, is_right: bool = True) -> None:
        """The moment of the law: a publication without a live lease reaches the store."""
        if self._recorder is not None:
            lane = STORE
            by = f" (from process {process})" if process else ""
            self._recorder.happened(lane, "law", f"{text}{by}", is_right=is_right)

    def holds(self, kind: str, lease: Lease, now: float) -> bool:
        holder = self._holder_of(kind, lease)
        return holder is not None and not is_over(holder.until, now)

    def _holder_of(self, kind: str, lease: Lease) -> Holder | None:
        """The holder of the key, if this lease is the one that it holds."""
        holder = self._holders.get((kind, lease.id))
        if holder is None or holder.token != lease.token:
            return None
        return holder

    def snapshot(self, key: Key) -> KeySnapshot:
        holder = copy(self._holders.get(key))
        return KeySnapshot(holder, self._stored[key], self.changes.count(key))

    def restore(self, key: Key, snapshot: KeySnapshot, *, waits: bool = True) -> None:
        """A failover has undone later changes of its lease and value.

        `waits`: changes were acknowledged only when a replica had them.
        """
        self._holders.pop(key, None)
        self._stored[key] = snapshot.stored
        if snapshot.holder is not None:
            self._holders[key] = snapshot.holder
        self.changes.restore(key, snapshot.changes, waits=waits)

    def lost(self) -> None:
        """The server has lost everything: leases, copies and updates."""
        self._holders.clear()
        for key, before in self._stored.items():
            self._stored[key] = (*before, LOSS)
        self.changes.lost()

    def granted(self, process: int, kind: str, grants: Mapping[str, Grant]) -> None:
        for id_, grant in grants.items():
            self._permits.pop((process, (kind, id_)), None)
            if isinstance(grant, Lease):
                self._permits[process, (kind, id_)] = grant.token

    def unleased(self, process: int, kind: str, ids: Iterable[str]) -> None:
        """Ids whose lease request got no answer are loaded without a lease."""
        self._permits |= {(process, (kind, id_)): None for id_ in ids}

    def unread(self, process: int, kind: str, ids: Iterable[str], now: float) -> None:
        """Ids that the store could not read are answered from memory."""
        self._unread |= {(process, (kind, id_)): now for id_ in ids}

    def unstored(self, kind: str, leases: Iterable[Lease]) -> None:
        """Copies that the store did not confirm are served as STALE by their loader."""
        for lease in leases:
            load = self._by_lease.get(((kind, lease.id), lease.token))
            if load is not None:
                load.is_unstored = True

    def invalidated(
        self,
        process: int,
        versions: Mapping[Key, int],
        *,
        soft: bool,
        ended: float,
        began: float | None = None,
    ) -> None:
        """`versions`: the upstream's versions when the invalidation began."""
        if began is None:
            began = ended
        for key, version in versions.items():
            self._ended[key].append(Invalidation(began, ended, process, version, soft))

    def served(
        self, reading: Reading, value: Version, verdict: Verdict, *, failed: bool, now: float
    ) -> None:
        """Judge an answer that a caller got now."""
        self.reads += 1
        load = self.loads[value.load]
        is_fresh = verdict is Verdict.FRESH
        if is_fresh and load.is_refused and not (load.is_published or load.is_unstored):
            self._broken(
                Promise.LOST,
                f"process {reading.process} was served {_name(reading.key)} "
                "by a load whose publication was refused",
            )
        reasons: set[str] = set()
        for invalidation in self._ended[reading.key]:
            if invalidation.version <= value.number:
                continue
            if not self._is_before(invalidation, reading, load):
                continue
            if not is_fresh:
                if invalidation.soft or failed:  # then a stale answer is what was promised
                    continue
                reason = self._excuse(invalidation, reading, load)
                if reason is not None:
                    reasons.add(reason)
                    continue
            self._broken(
                Promise.FRESH,
                f"process {reading.process} asked for {_name(reading.key)} at "
                f"{reading.asked_at:.3f} and was served version {value.number} as {verdict} at "
                f"{now:.3f}; version {invalidation.version} was announced by process "
                f"{invalidation.process} until {invalidation.ended:.3f}",
            )
        self.excused.update(reasons)

    def _is_before(self, invalidation: Invalidation, reading: Reading, load: KeyLoad) -> bool:
        """True if it had ended when the caller asked, and came after the load or put."""
        is_next = invalidation.process == load.process and invalidation.began >= load.ended_at
        if invalidation.began <= load.put_until and not is_next:
            return False
        if invalidation.process == reading.process:
            return invalidation.ended <= reading.asked_at
        return invalidation.ended <= reading.asked_at - reading.lag

    def _excuse(self, invalidation: Invalidation, reading: Reading, load: KeyLoad) -> str | None:
        """Why the caller's process could not know of the invalidation; None: it could.

        Only for an answer that says that it is STALE, so it claims nothing that is wrong.
        """
        if invalidation.process == reading.process:
            return None
        if load.is_unstored and load.process == reading.process:
            return "stale, and it could not be stored"
        unread = self._unread.get((reading.process, reading.key), float("-inf"))
        if unread >= reading.asked_at - reading.lag:
            return "stale, and the store was away"
        return None


def _last_index(numbers: Sequence[int], number: int) -> int:
    """Where the number is for the last time; -1 if it is not there."""
    return max((at for at, each in enumerate(numbers) if each == number), default=-1)


def process_of(load: KeyLoad | None) -> int:
    """The process of a load, or 0."""
    return 0 if load is None else load.process


def _lease_name(key: Key, token: str) -> str:
    return f"{token} {_name(key)}"


def _name(key: Key) -> str:
    return f"{key[0]} {key[1]!r}"
