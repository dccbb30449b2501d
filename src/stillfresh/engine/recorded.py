"""What a cache writes to a recording: reads, changes, loads and watches.

While a recording is open, every read goes to its core, which records it. Otherwise nothing here is
called.
"""

import asyncio
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stillfresh.clock import monotonic, wall
from stillfresh.engine.blocks import standing_back
from stillfresh.engine.keys import Spec
from stillfresh.engine.loader import LoadResult
from stillfresh.engine.recordings import RecordedKind, RecordedLoad, RecordedUse, Recording, What
from stillfresh.errors import StillfreshError

if TYPE_CHECKING:
    from stillfresh.engine.cache import Cache
    from stillfresh.engine.core import Core


class RecordingBlock:
    """Returned by `cache.recording(...)`; used with `async with` or `with`."""

    def __init__(self, cache: "Cache", recording: str | Path | Recording) -> None:
        self._cache = cache
        to = recording if isinstance(recording, Recording) else Recording(recording)
        self._recording = to
        self._clock = monotonic if cache.clock is wall else cache.clock
        self._stack = ExitStack()

    async def __aenter__(self) -> Recording:
        await asyncio.to_thread(self._recording.open, self._clock())
        return self._begin()

    async def __aexit__(self, *_: object) -> None:
        self._end()
        await asyncio.to_thread(self._recording.close)

    def __enter__(self) -> Recording:
        self._recording.open(self._clock())
        return self._begin()

    def __exit__(self, *_: object) -> None:
        self._end()
        self._recording.close()

    def _begin(self) -> Recording:
        if self._cache.recording_to is not None:
            self._recording.close()
            raise StillfreshError("this cache is being recorded already; end that block first")
        self._cache.recording_to = self
        self._stack.enter_context(standing_back(self._cache))
        for core in self._cache.cores.values():
            self.note(core, core.watcher.watches, "watch")
        return self._recording

    def _end(self) -> None:
        self._cache.recording_to = None
        self._stack.close()

    def note(self, core: "Core[Any, Any]", keys: Iterable[Any], what: What) -> None:
        """Record an action on these keys; one read is one line."""
        now = self._clock()
        if ids := self._chosen(core.spec, map(core.names.text, keys)):
            line = RecordedUse(self._recording.since(now), core.spec.kind, ids, what)
            self._recording.note(line, now)

    def loaded(
        self, spec: Spec[Any, Any], results: Mapping[str, LoadResult[Any]], began: float
    ) -> None:
        """Record a call of the loader; no longer than its timeout, even if the clock was set."""
        now = self._clock()
        took = min(max(0.0, self._cache.clock() - began), spec.load_timeout)
        since = self._recording.since(now - took)
        names = {name: id_ for id_ in results for name in self._chosen(spec, [id_])}
        if not names:
            return
        copies = {name: copy for name, id_ in names.items() if (copy := results[id_].copy)}
        absent = tuple(name for name, copy in copies.items() if copy.value is None)
        with_value = [copy for copy in copies.values() if isinstance(copy.value, bytes)]
        own = None
        if with_value and with_value[0].policy is not spec.terms.policy:
            own = with_value[0].policy
        line = RecordedLoad(since, spec.kind, tuple(names), round(took, 3), len(results))
        line.size = sum(len(copy.value) for copy in with_value if isinstance(copy.value, bytes))
        line.failed = tuple(name for name in names if name not in copies)
        line.absent = absent
        if own is not None:
            line.terms = own.fresh_for, own.stale_for, own.error_for
        self._recording.note(line, now)

    def _chosen(self, spec: Spec[Any, Any], texts: Iterable[str]) -> tuple[str, ...]:
        """The keys' names in the recording; writes the terms of a new kind first."""
        recording = self._recording
        kind = spec.kind
        if recording.is_over:
            return ()
        if kind not in recording.kinds:
            recording.kinds.add(kind)
            policy = spec.terms.policy
            line = RecordedKind(
                kind,
                policy.fresh_for,
                policy.stale_for,
                policy.error_for,
                spec.terms.absent_for,
                spec.max_batch,
                spec.concurrency,
                spec.load_timeout,
            )
            recording.note(line, 0.0)
        return recording.chosen(kind, texts)
