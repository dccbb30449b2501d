"""Spans: each load, store step and render, timed and passed to the hooks.

A hook is given a `Span` and returns a context manager. Its block is entered when the work begins
and left when the work has ended, in the same task. Times are counted with or without hooks; a store
that never waits is timed only with hooks. Hits are neither timed nor passed on.
"""

import logging
from asyncio import CancelledError
from bisect import bisect_left
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import Context, ContextVar, copy_context
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Final, TypeAlias, cast

from stillfresh.clock import monotonic as ticks
from stillfresh.engine.model import Hook, Origin, Span
from stillfresh.errors import ConfigError, shown
from stillfresh.freshness import Verdict
from stillfresh.stores import ReadsInline, ReadsInThreads, WrappedStore
from stillfresh.stores.contract import Generations, Record, Store

if TYPE_CHECKING:
    from stillfresh.engine.load import Load
    from stillfresh.engine.work import Waiter

Step: TypeAlias = Callable[..., Awaitable[object]]

CALLERS: ContextVar[tuple[Context, ...]] = ContextVar("stillfresh_callers", default=())
"""The contexts of the callers of a store step that runs in none of them."""
TIME_BUCKETS: Final = (
    *(0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03),
    *(0.1, 0.3, 1, 3, 10, 30),
)
"""Upper bounds in seconds: from an inline SQLite read to a load that takes too long."""
WORST: Final = {verdict: rank for rank, verdict in enumerate(Verdict)}
STEPS: Final = (
    *("read", "acquire", "publish", "put", "renew", "release"),
    *("invalidate", "invalidate_tag", "delete", "evict"),
)
HOOK_FAILED: Final = (Exception, CancelledError)  # a hook awaits nothing: nobody cancelled it
UNTOLD: Final[AbstractContextManager[None]] = nullcontext()

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Timing:
    """A histogram of seconds, by `TIME_BUCKETS`."""

    bounds: ClassVar[tuple[float, ...]] = TIME_BUCKETS
    """The upper bounds of the buckets, in seconds."""
    counts: tuple[int, ...]
    """Bucket by bucket; the last counts everything above all bounds."""
    seconds: float
    """The sum of all of them."""

    def __add__(self, other: "Timing") -> "Timing":
        counts = zip(self.counts, other.counts, strict=True)
        return Timing(tuple(map(sum, counts)), self.seconds + other.seconds)


class Stopwatch:
    """The running counts of one `Timing`."""

    __slots__ = ("_counts", "_seconds")

    def __init__(self) -> None:
        self._counts = [0] * (len(TIME_BUCKETS) + 1)
        self._seconds = 0.0

    def note(self, seconds: float) -> None:
        self._counts[bisect_left(TIME_BUCKETS, seconds)] += 1
        self._seconds += seconds

    def timing(self) -> Timing:
        return Timing(tuple(self._counts), self._seconds)


def checked_hooks(hooks: Sequence[Hook]) -> tuple[Hook, ...]:
    if isinstance(hooks, str | Mapping) or callable(hooks):
        raise ConfigError(f"hooks: a list of hooks, not {shown(hooks)}; write hooks=[hook]")
    for hook in hooks:
        if not callable(hook):
            raise ConfigError(
                f"hooks: a hook is called with each Span, and {shown(hook)} cannot be"
            )
    return tuple(hooks)


@contextmanager
def inside_hooks(hooks: Sequence[Hook], span: Span) -> Iterator[None]:
    """Enter the blocks of the hooks, and leave them in turn. An error of a hook is logged."""
    entered: list[tuple[Hook, AbstractContextManager[object]]] = []
    for hook in hooks:
        try:
            block = hook(span)
            block.__enter__()
            entered.append((hook, block))
        except HOOK_FAILED:
            logger.exception("hook %r failed as a %s of %r began", hook, span.what, span.kind)
    began = ticks()
    try:
        yield
    except BaseException as exc:
        if span.verdict is None:  # else it had ended, and the cache is closed
            span.error = exc
        raise
    finally:
        span.seconds = span.seconds or ticks() - began
        for hook, block in reversed(entered):
            try:
                block.__exit__(None, None, None)
            except HOOK_FAILED:
                logger.exception("hook %r failed as a %s of %r ended", hook, span.what, span.kind)


def apart(hooks: Sequence[Hook]) -> Context:
    """For work that runs in no caller's context; hooks get the context of this caller."""
    context = Context()
    if hooks:
        context.run(CALLERS.set, (copy_context(),))
    return context


def noted(span: Span | None, verdict: Verdict, error: BaseException | None = None) -> None:
    """Note how a load ended for one of its keys."""
    if span is None:
        return
    if span.verdict is None or WORST[verdict] > WORST[span.verdict]:
        span.verdict = verdict
    span.error = error or span.error


def load_span(
    hooks: Sequence[Hook], kind: str, load: "Load[Any, Any]"
) -> AbstractContextManager[None]:
    """From the lease to the publication, here or in a process that this one waits for."""
    if not hooks or not load.works:
        return UNTOLD
    works = load.works
    waiters: list[Waiter[Any, Any]] = [waiter for work in works for waiter in work.waiters]
    is_waited = any(not waiter.each for waiter in waiters)
    loading_for = waiters or [work.by for work in works if work.by is not None]
    callers = tuple(waiter.context for waiter in dict.fromkeys(loading_for) if not waiter.each)
    keys = [work.key for work in works]
    span = Span("load", kind, keys, "", callers, is_waited)
    load.span = span
    span.origin = Origin.ANOTHER
    return inside_hooks(hooks, span)


class TimedStore(WrappedStore):
    """A store whose steps are timed and passed to the hooks.

    Inline reads of hits are neither: they ask the inner store.
    """

    def __init__(self, inner: Store, hooks: Sequence[Hook], times: dict[str, Stopwatch]) -> None:
        super().__init__(inner)
        self._inline = cast("ReadsInline", inner)  # used only if it reads inline
        self._threads = cast("ReadsInThreads", inner)  # used only if it reads in threads
        self._hooks = hooks
        self._times = times
        for name in STEPS:
            times.setdefault(name, Stopwatch())
            setattr(self, name, self._timed_step(name))

    def _timed_step(self, name: str) -> Step:
        inner = self.inner
        note = self._times[name].note

        async def timed(*args: Any, **options: Any) -> object:  # noqa: ANN401
            began = ticks()
            try:
                return await getattr(inner, name)(*args, **options)
            finally:
                note(ticks() - began)

        async def spanned(*args: Any, **options: Any) -> object:  # noqa: ANN401
            with self._span(name, *args):
                return await getattr(inner, name)(*args, **options)

        return spanned if self._hooks else timed

    @contextmanager
    def _span(self, name: str, *args: Any) -> Iterator[None]:  # noqa: ANN401
        """The keys of a step: from a tag, a time, a kind and its ids, or objects that have them."""
        kind, objects = args[:2] if len(args) > 1 else ("", ())
        ids = [getattr(each, "id", each) for each in objects]
        span = Span("store", kind, ids, name, CALLERS.get(), is_waited=True)
        try:
            with inside_hooks(self._hooks, span):
                yield
        finally:
            self._times[name].note(span.seconds)

    def read_now(
        self, kind: str, ids: Sequence[str], known: Generations = None
    ) -> dict[str, Record]:
        if self._hooks:
            with self._span("read", kind, ids):
                return self._inline.read_now(kind, ids, known)
        began = ticks()
        try:
            return self._inline.read_now(kind, ids, known)
        finally:
            self._times["read"].note(ticks() - began)

    def read_in_thread(
        self, kind: str, ids: Sequence[str], known: Generations = None
    ) -> dict[str, Record]:
        """Timed. Hooks are not told: several threads may read at once."""
        began = ticks()
        try:
            return self._threads.read_in_thread(kind, ids, known)
        finally:
            self._times["read"].note(ticks() - began)
