"""The simulated server: the memory store behind the fence of stamps.

Every step is atomic. `fence.py` decides whether a message may be late; the `MemoryStore` does the
rest. A step without `sent` comes from a process on the same machine, as on SQLite: nothing of it
can arrive late, and it is not asked.
"""

from collections.abc import Awaitable, Callable, Collection
from typing import NamedTuple, TypeVar

from msgspec.structs import replace

from stillfresh.clock import Clock
from stillfresh.stores import MemoryStore
from stillfresh.stores.contract import Copy, Put, PutOutcome, PutResult
from stillfresh.stores.memory_rows import Key
from stillfresh.testing.simulator import fence
from stillfresh.testing.simulator.fence import Bucket, Sent, StampedEntry

T = TypeVar("T")


def finished(work: Awaitable[T]) -> T:
    """The result of a coroutine that never waits, such as a step of the memory store."""
    try:
        next(work.__await__())
    except StopIteration as stop:
        return stop.value  # type: ignore[no-any-return]
    raise RuntimeError("a step of the simulated store waits for something")


class UndoneRow(NamedTuple):
    """The fence's state of one entry, for a failover that goes back to it."""

    head: StampedEntry | None
    bucket: Bucket | None


class FencedServer:
    """The steps that carry `as_of`. `clock` is the server's own."""

    def __init__(self, store: MemoryStore, clock: Clock) -> None:
        self._store = store
        self._clock = clock
        self._heads: dict[Key, StampedEntry] = {}
        self._buckets: dict[str, Bucket] = {}

    @property
    def buckets(self) -> list[str]:
        """The names of all buckets whose counter has begun."""
        return sorted(self._buckets)

    def counter(self, bucket: str) -> int:
        """Return the newest stamp of a bucket; 0 if its counter has not begun."""
        known = self._buckets.get(bucket)
        return 0 if known is None else known.counter

    def changed(self, key: Key) -> int:
        """Return the stamp of the last change of an entry; 0 if it is not known."""
        head = self._head(key)
        return 0 if head is None else head.changed

    def copy(self, key: Key) -> Copy | None:
        """Return the stored copy."""
        kind, id_ = key
        record = self._store.read_now(kind, [id_]).get(id_)
        return None if record is None else record.copy

    def put(self, bucket: str, key: Key, put: Put, sent: Sent | None) -> PutResult:
        """Store a copy without a lease, unless the put may be late."""
        kind, id_ = key
        head = self._head(key)
        stored = self.copy(key)
        generation = None if stored is None else stored.generation
        is_late = self._is_late_put(bucket, head, put, stored, sent)
        outcome = fence.put_outcome(put.copy.generation, generation, head, is_late=is_late)
        if outcome is not None:
            version = b"" if stored is None else stored.version
            return PutResult(outcome, version, self._born(bucket).counter)
        result = finished(self._store.put(kind, {id_: put}))[id_]
        if result.outcome is PutOutcome.STORED:
            stamp = self._stamp(bucket, key, generation)
            return replace(result, stamp=stamp)
        return result

    def _is_late_put(
        self,
        bucket: str,
        head: StampedEntry | None,
        put: Put,
        stored: Copy | None,
        sent: Sent | None,
    ) -> bool:
        if sent is None:
            return False
        as_of = sent.stamp(bucket, put.when)
        known = self._born(bucket)
        tags = (put.tags or ()) + (put.late or ())
        took = self._clock() - (sent.good_until - fence.GOOD_FOR)
        # Copies may be judged by the caller's clock, which may jump meanwhile.
        clocks = (self._clock(), self._store._clock())  # noqa: SLF001 (a part of this server)
        return (
            fence.has_changed(head, as_of)
            or fence.is_forgotten(head, known, as_of, sent, self._clock())
            or fence.was_tag_invalidated(known, tags, as_of)
            or any(fence.may_be_refused_already(put, stored, took, now) for now in clocks)
        )

    def invalidate(self, bucket: str, key: Key, sent: Sent | None, *, soft: bool) -> bool:
        """Mark the copy and void the lease; False: the message may be late."""
        if self._is_late(bucket, key, sent):
            return False
        kind, id_ = key
        finished(self._store.invalidate(kind, [id_], soft=soft))
        self._stamp(bucket, key, None)
        return True

    def delete(self, bucket: str, key: Key, sent: Sent | None) -> bool:
        """Delete the entry, and leave a trace; False: the message may be late."""
        if self._is_late(bucket, key, sent):
            return False
        kind, id_ = key
        stored = self.copy(key)
        finished(self._store.delete(kind, [id_]))
        self._stamp(bucket, key, None if stored is None else stored.generation)
        return True

    def invalidate_tag(
        self,
        buckets: Collection[str],
        bucket_of: Callable[[str], str],
        tag: str,
        sent: Sent | None,
        *,
        soft: bool,
    ) -> dict[Key, bool]:
        """Invalidate the entries with a tag in these buckets; False: that entry must wait.

        Puts with the tag that were sent before are refused from now on, and so are loads.
        """
        for bucket in sorted(buckets):
            known = self._born(bucket)
            stamp = known.counter + 1
            self._buckets[bucket] = Bucket(stamp, known.birth, {**known.tags, tag: stamp})
        keys = self._store._rows.begin_epoch(tag)  # noqa: SLF001 (a part of this server)
        here = [key for key in keys if bucket_of(key[1]) in buckets]
        return {key: self.invalidate(bucket_of(key[1]), key, sent, soft=soft) for key in here}

    def published(self, bucket: str, key: Key, old: str | None) -> None:
        """A load has replaced the generation `old`; its lease was its fence."""
        self._stamp(bucket, key, old)

    def lose_everything(self) -> None:
        """The server starts empty, or is flushed."""
        rows = self._store._rows  # noqa: SLF001 (a part of this server)
        for key, _ in list(rows.items()):
            rows.drop(key)
        self._heads.clear()
        self._buckets.clear()

    def snapshot(self, bucket: str, key: Key) -> UndoneRow:
        """Return the fence's state of an entry."""
        return UndoneRow(self._heads.get(key), self._buckets.get(bucket))

    def restore(self, bucket: str, key: Key, snapshot: UndoneRow) -> None:
        """Go back to that state."""
        self._heads.pop(key, None)
        self._buckets.pop(bucket, None)
        if snapshot.head is not None:
            self._heads[key] = snapshot.head
        if snapshot.bucket is not None:
            self._buckets[bucket] = snapshot.bucket

    def _is_late(self, bucket: str, key: Key, sent: Sent | None) -> bool:
        return sent is not None and fence.has_changed(self._head(key), sent.stamp(bucket))

    def _head(self, key: Key) -> StampedEntry | None:
        """A trace is forgotten after a while; an entry with a copy is not."""
        head = self._heads.get(key)
        if head is None or self.copy(key) is not None or self._clock() < head.kept_until:
            return head
        del self._heads[key]
        return None

    def _born(self, bucket: str) -> Bucket:
        known = self._buckets.get(bucket)
        if known is None:
            birth = int(self._clock() * 1_000_000)
            known = Bucket(birth, birth)
            self._buckets[bucket] = known
        return known

    def _stamp(self, bucket: str, key: Key, old: str | None) -> int:
        known = self._born(bucket)
        stamp = known.counter + 1
        self._buckets[bucket] = replace(known, counter=stamp)
        head = fence.after_change(self._head(key), stamp, old, self._clock())
        self._heads[key] = head
        return stamp
