"""One resource behind its public object: its parts, and how it is opened and closed.

Each part does one job and is held, not inherited:

- `names`: keys and their names in the store.
- `memory`: the entries that this process knows.
- `fence` and `changes`: what this process changed, and what that makes too old.
- `store_reads` and `reads`: the read path.
- `loads`: loads that are queued or run. They belong to one opening of the cache.
- `puts` and `updates`: values that callers store.
- `watcher` and `renewals`: keys that are kept fresh while somebody watches them.
- `truth`: checks of a sample of the reads, if the resource declares that.

Invalidating, deleting, explaining and counting are short enough to stand here.
"""

import asyncio
import sys
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from stillfresh.bounded import SLICE, sliced
from stillfresh.engine.blocks import is_past
from stillfresh.engine.changes import KeyChanges
from stillfresh.engine.counts import ResourceStats
from stillfresh.engine.explain import Explanation, explain
from stillfresh.engine.face import Face
from stillfresh.engine.fence import Fence
from stillfresh.engine.keys import KeyNames, Spec
from stillfresh.engine.lifecycle import Lifecycle
from stillfresh.engine.loads import Loads
from stillfresh.engine.memory import Memory
from stillfresh.engine.news import Notices
from stillfresh.engine.put import Puts
from stillfresh.engine.read import Reads, StoreReads
from stillfresh.engine.renewals import Renewals
from stillfresh.engine.rules import NOTHING
from stillfresh.engine.runtime import Runtime
from stillfresh.engine.shared_values import MOST_VALUES, CheckedCodec
from stillfresh.engine.sources import compare_source
from stillfresh.engine.truth import Sampler, Truth
from stillfresh.engine.update import Updates
from stillfresh.engine.watcher import Watcher
from stillfresh.errors import NotOpen, StillfreshError, StoreError

if TYPE_CHECKING:
    from stillfresh.engine.recorded import RecordingBlock

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class Core(Generic[K, V]):
    """One resource: its parts, and its state from one opening of the cache to the next."""

    def __init__(
        self,
        spec: Spec[K, V],
        owner: Lifecycle,
        memory: Memory[K, V],
        *,
        text: Callable[[K], str],
        key: Callable[[str], K],
    ) -> None:
        self.spec = spec
        self.owner = owner
        self.memory = memory
        self.names = KeyNames(text, key)
        self.runtime: Runtime | None = None
        """What the open cache shares; None while it is closed."""
        self.faces: list[Face[K, V]] = []
        self.is_apart = False  # True for a resource that exists for one read inside `bypassed()`
        self.loads: Loads[K, V]
        self.watcher: Watcher[K, V] = Watcher(self, memory.now)
        self.renewals: Renewals[K, V] = Renewals(self)
        self.fence: Fence[K] = Fence(
            owner.fence_clock, spec.possible_tags, lambda: bool(self.loads.under_way)
        )
        self.changes = KeyChanges(spec, self.fence, memory, self.watcher)
        self.store_reads: StoreReads[K, V] = StoreReads(self)
        self.reads: Reads[K, V] = Reads(self)
        self.puts: Puts[K, V] = Puts(self)
        self.updates: Updates[K, V] = Updates(self)
        if spec.check is not None and memory.counts.truth is None:
            truth: Truth[K, V] = Truth(self, spec.check)
            memory.counts.check_reads(truth, partial(Sampler, truth))
        self.begin_anew()
        memory.on_clear = self._show_memory

    @property
    def memory_may_lag(self) -> bool:
        """True if memory answers without the store, which other processes may have changed."""
        return self.spec.memory_for > 0 and not self.memory.is_private

    # Opening and closing.

    def begin_anew(self, runtime: Runtime | None = None) -> None:
        """Forget running steps and loads: they belong to a life of the cache that has ended."""
        self.runtime = runtime
        self.store_reads.begin_anew()
        self.changes.begin_anew()
        self.loads = Loads(self, runtime)

    def open(self, runtime: Runtime) -> None:
        memory = self.memory
        memory.notices = Notices(runtime.news) if runtime.news is not None else None
        if runtime.news is not None and self.spec.memory_for:
            runtime.news.want()
        self.begin_anew(runtime)
        self._show_memory()  # loaders may have begun and ended while the cache was closed
        if memory.counts.truth is not None and not self.is_apart:
            memory.counts.truth.open(runtime)
        if memory.is_private:
            memory.room.limit(self.spec.max_bytes or runtime.can.max_bytes)
            if runtime.can.process is not None:
                key_of = self.names.key
                runtime.can.process.before_evicting(
                    self.spec.kind, lambda id_: memory.keeps(key_of(id_))
                )
        if sys.flags.dev_mode and not self.is_apart:
            # A resource may be declared in another thread while the cache is open.
            runtime.loop.call_soon_threadsafe(self._look_at_source, runtime)

    def _look_at_source(self, runtime: Runtime) -> None:
        spec = self.spec
        if self.runtime is runtime and spec.function is not None:
            runtime.spawn(compare_source(spec.kind, spec.function, runtime.store, runtime.clock))

    def close(self) -> None:
        """Stop answering from memory, and let all waiting callers fail."""
        self.runtime = None
        if self.memory.counts.truth is not None and not self.is_apart:
            self.memory.counts.truth.close()
        if isinstance(self.spec.codec, CheckedCodec):
            self.spec.codec.report()
        self.memory.clear()
        self.loads.close()
        self.watcher.close()

    def retire(self) -> None:
        """The resource is declared again. Its watches end; callers that wait for a load fail."""
        runtime = self.runtime
        self.faces = []
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            loop = None
        if runtime is None or runtime.loop is loop:
            self.close()
        else:
            runtime.loop.call_soon_threadsafe(self.close)

    def leave(self) -> None:
        """The event loop was closed, or is the parent process's: no caller waits here."""
        self.memory.clear()
        for _ in self.memory.freed():
            pass
        self.watcher.begin_anew()
        if self.memory.counts.truth is not None:
            self.memory.counts.truth.close()
        self.begin_anew()

    async def ready(self) -> Runtime:
        """The parts of the open cache. A cache belongs to the loop that opened it."""
        runtime = self.runtime
        if runtime is None or runtime.loop is not asyncio.get_running_loop():
            runtime = await self.owner.runtime()
            self.check_open(runtime)
        return runtime

    def check_open(self, runtime: Runtime) -> None:
        """Raise if the cache was closed meanwhile: what this call has read is outdated."""
        if self.runtime is not runtime:
            raise NotOpen(f"{self.spec.kind}: the cache is closed; open it again")

    def _show_memory(self) -> None:
        for face in self.faces:
            face.stand_back()

    # Blocks.

    def is_bypassed(self) -> bool:
        """True if the code that asks runs inside `bypassed()`."""
        return not self.is_apart and self.owner.blocks > 0 and is_past(self.owner)

    def apart(self, runtime: Runtime) -> "Core[K, V]":
        """A second resource with the same declaration, open, with a memory of its own.

        Its reads count for this one. It is not recorded.
        """
        memory: Memory[K, V] = Memory(self.spec, self.memory.now, private=True)
        memory.counts = self.memory.counts
        other = Core(self.spec, self.owner, memory, text=self.names.text, key=self.names.key)
        other.is_apart = True
        other.open(runtime)
        return other

    @property
    def recording(self) -> "RecordingBlock | None":
        """The open recording, if any."""
        return None if self.is_apart else self.owner.recording_to

    # Invalidating and deleting.

    async def look_for_missing(self, keys: Sequence[K]) -> None:
        """Log it once if keys are to be invalidated, and neither a copy nor a load is there."""
        await self.ready()
        texts = {
            key: id_
            for key, id_ in self.names.texts(keys[:SLICE]).items()
            if key not in self.loads.under_way
        }
        records = await self.loads.loader.read(list(texts.values()))
        if records is None:
            return
        missing = [key for key, id_ in texts.items() if records.get(id_, NOTHING).copy is None]
        if missing:
            self.spec.mistakes.note_missing(missing)

    async def invalidate(self, keys: Sequence[K], *, soft: bool) -> str:
        """No step that began before this ended puts its result into memory. Returns the token."""
        runtime = await self.ready()
        async for batch in sliced(keys):
            ids = list(self.names.texts(batch).values())
            with self.changes.overtaking(batch):
                await runtime.store.invalidate(self.spec.kind, ids, soft=soft)
            self.owner.note(self, batch, "soft" if soft else "invalidate")
        return self.owner.changed()

    async def invalidate_all(self, *, soft: bool) -> int:
        """Invalidate every entry of this resource; return how many the store has."""
        runtime = await self.ready()
        listing = runtime.can.require_listing()
        count = 0
        self.fence.void_all()
        await self.invalidate([*self.under_way(), *self.memory.keys()], soft=soft)
        async for page in listing.walk(self.spec.kind):
            await self.invalidate([self.names.key(entry.id) for entry in page], soft=soft)
            count += len(page)
        self.fence.void_all()
        return count

    async def delete(self, keys: Sequence[K]) -> str:
        runtime = await self.ready()
        async for batch in sliced(keys):
            ids = list(self.names.texts(batch).values())
            with self.changes.overtaking(batch):
                await runtime.store.delete(self.spec.kind, ids)
            self.owner.note(self, batch, "delete")
            self.memory.counts.mended(ids)
            for key in batch:
                self.memory.causes.forget(key)
        return self.owner.changed()

    async def clear(self) -> None:
        """Forget every entry of this resource."""
        runtime = await self.ready()
        listing = runtime.can.require_listing()
        self.fence.void_all()
        await self.delete([*self.under_way(), *self.memory.keys()])  # a walk may miss them
        async for page in listing.walk(self.spec.kind):
            await self.delete([self.names.key(entry.id) for entry in page])
        self.fence.void_all()

    # Values that callers share.

    @contextmanager
    def checked_values(self) -> Iterator[CheckedCodec[V] | None]:
        """Inside the block, notice values that callers change. None: nobody shares them."""
        if not self.spec.share:
            yield None
            return
        before = self.spec.codec
        plain = before.inner if isinstance(before, CheckedCodec) else before
        checked = CheckedCodec(plain, self.spec.kind)
        for entry in islice(self.memory.entries.values(), MOST_VALUES):
            if entry.answer.found:
                checked.note(entry.answer.value)
        self.spec.codec = checked
        try:
            yield checked
        finally:
            self.spec.codec = before

    # Questions.

    def tagged(self, tag: str) -> list[K]:
        """Keys in memory or being loaded that have this tag, or may have it."""
        if self.spec.tags is None:
            return self.memory.tagged(tag)
        tags_of = self.spec.possible_tags
        wanted = {tag, None}
        loading = [key for key in self.under_way() if not wanted.isdisjoint(tags_of(key))]
        return loading + self.memory.tagged(tag)

    def under_way(self) -> list[K]:
        """The keys that are loaded or asked for now, each once, in the order of their beginning."""
        return list(dict.fromkeys([*self.loads.under_way, *self.changes.keys_in_steps()]))

    def is_full(self, key: K) -> bool:
        """True if the limit of simultaneous loads is reached, and this key is not among them."""
        under_way = self.loads.under_way
        return len(under_way) >= self.spec.concurrency and key not in under_way

    async def is_live(self, key: K) -> bool:
        """A load is under way, and nothing has invalidated the key since it began."""
        runtime = await self.ready()
        lease = self.loads.lease_of(key)
        if lease is None:
            return False
        try:
            return not await runtime.store.renew(self.spec.kind, [lease], self.spec.lease_for)
        except StoreError:
            return False

    def passes_on(self, error: BaseException) -> bool:
        """True for an exception of the loader that callers get as it is.

        Never for those of stillfresh, such as `RetryAfter`: they are for the cache.
        """
        if isinstance(error, StillfreshError):
            return False
        if isinstance(error, self.spec.raises):
            return True
        return any(passes_on(error) for passes_on in self.owner.passing_on)

    async def settled(self, within: float) -> bool:
        """Wait until no load runs. False if one still runs after that many seconds."""
        return self.runtime is None or await self.loads.settled(within)

    async def explain(self, key: K) -> Explanation:
        runtime = await self.ready()
        id_ = self.names.text(key)
        records = await runtime.store.read(self.spec.kind, [id_])
        return explain(
            self.spec.kind,
            key,
            self.memory.readable({key: id_}, records)[key],
            runtime.clock(),
            loading_here=self.loads.is_loading(key),
            in_memory=key in self.memory.entries,
            lease_for=self.spec.lease_for,
        )

    async def stats(self) -> ResourceStats:
        return self.counted()

    def counted(self) -> ResourceStats:
        """The counts so far, and the figures of now."""
        return self.memory.counts.stats(
            self.memory.now(),
            entries=len(self.memory.entries),
            bytes=self.memory.room.held,
            loading=len(self.loads.under_way),
            queued=self.loads.not_begun(),
            watched=len(self.watcher.watched),
            max_batch=self.spec.max_batch,
        )


async def overtake_all(keys: Iterable[tuple[Core[Any, Any], Any]]) -> int:
    """Mark all keys in slices; return how many.

    If this is cancelled, mark the rest at once: none may be missed.
    """
    left = iter(keys)
    count = 0
    try:
        async for batch in sliced(left):
            count += len(batch)
            for core, key in batch:
                core.changes.overtake([key])
    finally:
        for core, key in left:
            core.changes.overtake([key])
    return count
