"""Cache: a store, a clock, and the resources that share them; opened once, closed cleanly.

A cache is declared first and opened later: `cached` and `batched` may run at import, when there is
no event loop. What needs one (connections, tasks, leases) is the cache's `Runtime`, which
`Lifecycle` makes at the first read and ends at `close`. What stays from one opening to the next are
the declarations, by name. A name that is declared again in the same place replaces the resource
that had it, as notebooks and reloading servers do; the objects of the old one pass their calls on.
A name that is declared in another place is a mistake.
"""

import asyncio
import inspect
import random
import sys
import time
from collections.abc import (
    Awaitable,
    Callable,
    Hashable,
    Iterable,
    Iterator,
    Sequence,
)
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import replace
from functools import partial
from inspect import Parameter
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple, Never, ParamSpec, Self, TypeVar, cast

from stillfresh.bounded import SLICE
from stillfresh.clock import Clock, checked_clock
from stillfresh.durations import Duration, seconds
from stillfresh.engine.at_least import InvalidatedEntries, reading
from stillfresh.engine.blocks import Override, is_past, past
from stillfresh.engine.calls import Call, Signature
from stillfresh.engine.codec_makers import codec_of
from stillfresh.engine.codecs import codec_for
from stillfresh.engine.core import Core, overtake_all
from stillfresh.engine.coroutine_names import class_named_after, name_of
from stillfresh.engine.counts import CacheStats
from stillfresh.engine.explain import Listed, listed
from stillfresh.engine.face import Face
from stillfresh.engine.function import CachedDecorator, Function
from stillfresh.engine.keys import (
    NOT_OF_A_CACHE,
    Raises,
    Spec,
    batch_types,
    check_options,
    checked_kind,
    checks_options,
    is_def,
    place_of,
    shown_name,
    terms_of,
    versioned,
)
from stillfresh.engine.lifecycle import Lifecycle
from stillfresh.engine.memory import Memory
from stillfresh.engine.model import Codec, CodecMaker, Hook, checked_tags
from stillfresh.engine.recorded import RecordingBlock
from stillfresh.engine.recordings import Recording
from stillfresh.engine.resource import BatchLoader, Resource, like_function, text_of
from stillfresh.engine.rules_truth import CALLS, Objectives
from stillfresh.engine.runtime import Runtime
from stillfresh.engine.shared_values import CheckedCodec
from stillfresh.engine.spans import checked_hooks
from stillfresh.engine.unshared import BytesCodec, UnsharedFunction, UnsharedResource
from stillfresh.errors import ConfigError, MissingMethod, StoreError, unconfirmed
from stillfresh.stores import store_for
from stillfresh.stores.contract import Store

K = TypeVar("K", bound=str | int)
H = TypeVar("H", bound=Hashable)
V = TypeVar("V")
P = ParamSpec("P")


class Declaration(NamedTuple):
    """Where a resource was declared, its public objects, and those that they replaced."""

    place: tuple[str, str] | None
    objects: list[Face[Any, Any]]
    replaced: list[Face[Any, Any]]


class Cache(Lifecycle):
    """A store and the resources that share it: `async with Cache("sqlite:///prices.db") as cache:`.

    Without `async with`, the first read opens it. Raises ConfigError for a store address or an
    option that cannot be used.

    Args:
        store: An address (`memory://`, `sqlite:///file.db`, `redis://…`, …), or a store object.
        clock: Returns seconds since 1970.
        sleep: Called to wait. Tests replace it.
        dice: Returns numbers from 0 to 1, for jitter. Tests replace it.
        grace: How long `close` waits for work under way.
        hooks: Called around each load, store step and render.
    """

    def __init__(
        self,
        store: str | Store,
        *,
        clock: Clock = time.time,
        sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
        dice: Callable[[], float] = random.random,
        grace: Duration = 5.0,
        hooks: Sequence[Hook] = (),
    ) -> None:
        clock = checked_clock(clock)
        self.resources: dict[str, Resource[Any, Any]] = {}
        """The declared resources, by name; of a cached function, the resource of its calls."""
        self._declared: dict[str, Declaration] = {}
        within = seconds(grace, name="grace")
        new_runtime = partial(Runtime, clock=clock, sleep=sleep, dice=dice, grace=within)
        super().__init__(
            store_for(store, clock),
            new_runtime,
            checked_hooks(hooks),
            clock=clock,
            is_private=_is_private(store),
        )

    @checks_options
    def batched(
        self,
        name: str,
        *,
        fresh_for: Duration,
        stale_for: Duration = 0,
        error_for: Duration = 0,
        absent_for: Duration | None = None,
        max_batch: int = 100,
        concurrency: int = 4,
        max_entries: int = 10_000,
        max_bytes: int | str | None = None,
        memory_for: Duration = 0,
        jitter: float = 0.0,
        tags: Callable[[Any], Sequence[str]] | Sequence[str] | None = None,
        codec: Codec[Any] | CodecMaker | None = None,
        version: str | None = None,
        lease_for: Duration = "5s",
        load_timeout: Duration = "30s",
        objective: Objectives = None,
        raises: Raises = (),
        share: bool = True,
        patience: Duration | None = None,
        check: float = 0.0,
        true_within: Duration | None = None,
        check_calls: float = CALLS,
        **unknown: Never,
    ) -> Callable[[BatchLoader[K, V]], Resource[K, V]]:
        """Declare a resource. The decorated loader takes a list of keys and returns a mapping.

        The loader is an async function, or a `def`, which runs in a thread. A key that the mapping
        lacks is absent; a key mapped to an exception failed. Returns a decorator that makes a
        `Resource`. Raises ConfigError for an option, a name or an annotation that cannot be used.

        Args:
            name: Names the resource in the store, in statistics and in errors. Once in a cache.
            fresh_for: How long a copy is served without a refresh.
            stale_for: How long after that it is served while it is refreshed.
            error_for: How long after `fresh_for` it is served if its refresh fails.
            absent_for: How long absence is remembered; None: a tenth of `fresh_for`, at least 1 s.
            max_batch: The most keys in one call of the loader.
            concurrency: The most calls of the loader at once.
            max_entries: The most values in memory.
            max_bytes: The most bytes of values in memory: a number, or text such as "64MB".
            memory_for: How long memory is believed without asking a shared store.
            jitter: The largest share, below 1, by which `fresh_for` is shortened at random.
            tags: A list of tags, or a function of the key that returns them, for `invalidate_tag`.
            codec: Turns values into bytes; None: chosen by the loader's annotation.
            version: Part of the stored name. Change it when the form of the values changes.
            lease_for: How long a load whose process died blocks other processes.
            load_timeout: How long a load may take; after that it has failed.
            objective: The freshness objective, the objective of truth, or both, which statistics
                count.
            raises: Exceptions of the loader that callers get as they are. They are no failures.
            share: True: all callers get the same object, and must not change it. False: each caller
                gets a value of its own, which costs one decoding for each read.
            patience: How long callers wait for a load. Then they get the old copy, if it may be
                served on an error, or else LoadTimeout. None: they wait until the load ends.
            check: The share of reads that is compared in the background with what the loader gives.
            true_within: How late a copy may be, in those checks; None: `fresh_for`.
            check_calls: The most calls of the loader a second that checks make.
        """
        check_options("batched", unknown)
        kind = self._kind(name, version)

        def decorate(loader: BatchLoader[K, V]) -> Resource[K, V]:
            key_type, value_type = batch_types(kind, loader)
            self._replace(kind, loader)
            spec: Spec[K, V] = Spec(
                kind,
                loader,
                codec_of(codec, partial(codec_for, value_type, kind), kind),
                tags,
                terms_of(kind, fresh_for, stale_for, error_for, absent_for, jitter),
                max_batch=max_batch,
                concurrency=concurrency,
                max_entries=max_entries,
                max_bytes=max_bytes,
                memory_for=memory_for,
                lease_for=lease_for,
                load_timeout=load_timeout,
                objective=objective,
                raises=raises,
                share=share,
                patience=patience,
                function=loader,
                check=check,
                true_within=true_within,
                check_calls=check_calls,
                in_thread=is_def(loader),
            )

            resource = self.declare(
                spec, text_of(kind, key_type), cast("Callable[[str], K]", key_type)
            )
            parameter = Parameter("key", Parameter.POSITIONAL_OR_KEYWORD, annotation=key_type)
            like_function(
                resource, loader, inspect.Signature([parameter], return_annotation=value_type)
            )
            resource.__annotations__ = {"key": key_type, "return": value_type}
            self.publish_objects(resource)
            return resource

        return decorate

    @checks_options
    def cached(
        self,
        name: str,
        *,
        fresh_for: Duration,
        stale_for: Duration = 0,
        error_for: Duration = 0,
        concurrency: int = 16,
        max_entries: int = 10_000,
        max_bytes: int | str | None = None,
        memory_for: Duration = 0,
        jitter: float = 0.0,
        tags: Callable[..., Sequence[str]] | Sequence[str] | None = None,
        codec: Codec[Any] | CodecMaker | None = None,
        key: Callable[..., object] | None = None,
        ignore: Iterable[str] = (),
        version: str | None = None,
        lease_for: Duration = "5s",
        load_timeout: Duration = "30s",
        objective: Objectives = None,
        raises: Raises = (),
        share: bool = True,
        patience: Duration | None = None,
        check: float = 0.0,
        true_within: Duration | None = None,
        check_calls: float = CALLS,
        **unknown: Never,
    ) -> CachedDecorator:
        """Declare a resource. Each call of the decorated function, by its arguments, is an entry.

        Returns a decorator that makes a `Function`. `key` is called with the arguments and returns
        what the entry is known by; without it, all arguments count but those that `ignore` names.
        `tags` is a list, or is called with the arguments. The other options are those of `batched`.
        """
        check_options("cached", unknown)
        kind = self._kind(name, version)

        def decorate(function: Callable[P, Any]) -> Function[P, Any]:
            signature = Signature(kind, function, key, ignore)
            if check and not signature.is_whole:
                raise ConfigError(
                    f"{kind}: check calls the function again, so all arguments must be in the key; "
                    f"leave out key and ignore, or check"
                )
            self._replace(kind, function)

            async def load(calls: list[Call[P]]) -> dict[Call[P], Any]:
                (call,) = calls
                return {call: await function(*call.args, **call.kwargs)}

            def load_now(calls: list[Call[P]]) -> dict[Call[P], Any]:
                (call,) = calls
                return {call: function(*call.args, **call.kwargs)}

            def tagged(call: Call[P]) -> Sequence[str]:
                return tags(*call.args, **call.kwargs) if callable(tags) else ()

            in_thread = is_def(function)
            spec: Spec[Call[P], Any] = Spec(
                kind,
                load_now if in_thread else load,
                codec_of(codec, partial(codec_for, signature.value_type, kind), kind),
                tagged if callable(tags) else tags,
                terms_of(kind, fresh_for, stale_for, error_for, 0, jitter),
                concurrency=concurrency,
                max_entries=max_entries,
                max_bytes=max_bytes,
                memory_for=memory_for,
                lease_for=lease_for,
                load_timeout=load_timeout,
                objective=objective,
                raises=raises,
                share=share,
                patience=patience,
                function=function,
                check=check,
                true_within=true_within,
                check_calls=check_calls,
                by_id=False,
                in_thread=in_thread,
                held=None if signature.is_whole else Call.bare,
            )
            resource = self.declare(spec, str.__str__, lambda id_: Call[P](id_, (), {}))
            function_of: type[Function[P, Any]] = Function if share else UnsharedFunction
            named_class = class_named_after(function_of, name_of(function))
            cached_function = named_class(resource, signature, function)
            self.publish_objects(resource, cached_function)
            return cached_function

        return decorate

    async def invalidate_tag(self, tag: str, *, soft: bool = False) -> InvalidatedEntries:
        """Invalidate every entry that has this tag, and every load of one that is under way.

        `soft`: the old copies are still served while they are refreshed. Returns the name of the
        resource and the id of each entry that the store knew, with the `token` of this change.
        Raises StoreError.
        """
        checked_tags("invalidate_tag", (tag,))
        runtime = await self.runtime()
        tagged, most = await self._invalidate_tag_once(runtime, tag, soft=soft)
        if runtime.can.process is not None and most >= SLICE:
            # A store in this process is done in slices, and so is the memory before it. In between
            # a value may be made of an entry that is still to come, and be stored. Other stores
            # look after that themselves, and a loader reads what they have.
            more, _ = await self._invalidate_tag_once(runtime, tag, soft=soft)
            tagged = list(dict.fromkeys(tagged + more))
        if self.recording_to is not None:
            for kind, id_ in tagged:
                self.note_invalid(kind, [id_], soft=soft)
        return InvalidatedEntries(tagged, self.changed())

    async def _invalidate_tag_once(
        self, runtime: Runtime, tag: str, *, soft: bool
    ) -> tuple[list[tuple[str, str]], int]:
        """Invalidate what has the tag, in the store and in memory.

        Returns what the store knew, and the most keys that were gone through in one step.
        """
        tagged: list[tuple[str, str]] = []
        before = await overtake_all(self._keys_with_tag(tag))
        try:
            with unconfirmed():
                tagged = await runtime.store.invalidate_tag(tag, soft=soft)
        finally:
            after = await overtake_all(self._keys_with_tag(tag, tagged))
        return tagged, max(before, len(tagged), after)

    async def invalidate_all(self, *, soft: bool = False) -> int:
        """Invalidate every entry of the store and every load under way; return how many entries.

        On DynamoDB, loads in other processes are reached if their key has a copy or tags. `soft`
        and StoreError are those of `invalidate_tag`.
        """
        runtime = await self.runtime()
        store = runtime.store
        listing = runtime.can.require_listing()
        count = 0
        kind_of = attrgetter("kind")
        await overtake_all(self._known())
        try:
            for core in tuple(self.cores.values()):  # DynamoDB does not list what has only a lease
                await core.invalidate(core.under_way(), soft=soft)
            async for page in listing.walk(None):
                for kind, entries in groupby(sorted(page, key=kind_of), kind_of):
                    ids = [entry.id for entry in entries]
                    with unconfirmed():
                        await store.invalidate(kind, ids, soft=soft)
                    self.note_invalid(kind, ids, soft=soft)
                count += len(page)
        finally:
            await overtake_all(self._known())
        self.changed()
        return count

    def _known(self) -> Iterator[tuple[Core[Any, Any], Any]]:
        """The keys of all cores that are in memory, core by core."""
        for core in tuple(self.cores.values()):
            core.fence.void_all()
            keys = core.memory.keys()
            yield from ((core, key) for key in keys)

    def _keys_with_tag(
        self, tag: str, named: Iterable[tuple[str, str]] = ()
    ) -> Iterator[tuple[Core[Any, Any], Any]]:
        """The keys in memory that have the tag, and those that the store named.

        The store knows tags that came with a value which another process has loaded.
        """
        self.fence_clock.void_tag(tag)
        for core in tuple(self.cores.values()):
            yield from ((core, key) for key in core.memory.tagged(tag))
        for kind, id_ in named:
            named_core = self.cores.get(kind)
            if named_core is not None:
                yield named_core, named_core.names.key(id_)

    @contextmanager
    def checked_values(self) -> Iterator[list[str]]:
        """Inside `with`, look for values that callers change although they share them.

        The list says after the block what was changed. `stillfresh.testing.unchanged_values` uses
        it. Resources that are declared inside the block are not looked at.
        """
        problems: list[str] = []
        with ExitStack() as stack:
            codecs = [stack.enter_context(core.checked_values()) for core in self.cores.values()]
            yield problems
            for codec in codecs:
                if codec is not None:
                    problems.extend(codec.changed())

    def pass_on(self, is_answer: Callable[[BaseException], bool]) -> None:
        """Give callers of every resource the exceptions for which `is_answer` returns True.

        It does what `raises=` does for one resource. Integrations of web frameworks call it.
        """
        if is_answer not in self.passing_on:
            self.passing_on.append(is_answer)

    async def store(self) -> Store:
        """Return the open store, for programs that list or repair it; open it if it is not open.

        Memory and running loads do not notice what you change there. Raises StoreError.
        """
        return (await self.runtime()).store

    async def evict(self) -> int:
        """Delete entries from the store that can never be served again; return how many."""
        runtime = await self.runtime()
        return await runtime.can.require_eviction().evict(self.clock())

    async def stats(self) -> CacheStats:
        """Return the counts of every resource, and the store's own.

        These are None if the store failed, or does not count.
        """
        runtime = await self.runtime()
        store_stats = None
        if runtime.can.statistics is not None:
            with suppress(StoreError):
                store_stats = await runtime.can.statistics.stats()
        return replace(self.counted(), store=store_stats)

    async def entries(
        self,
        kind: str | None = None,
        search: str = "",
        after: tuple[str, str] | None = None,
        limit: int = 100,
    ) -> list[Listed]:
        """List at most `limit` entries of the store (up to 10,000), sorted if the store can sort.

        `kind`: only entries of this resource. `search`: only ids that contain this text. `after`:
        the kind and id of the last entry of the page before.
        """
        runtime = await self.runtime()
        entries = await runtime.can.require_listing().entries(kind, search, after, limit)
        return listed(entries, self.clock())

    def bypassed(self) -> AbstractContextManager[None]:
        """Inside `with`, reads of this task, and of tasks it starts, load and store nothing."""
        return past(self)

    def at_least(self, token: str) -> AbstractContextManager[None]:
        """Inside `with`, reads of this task, and of tasks it starts, have `at_least=token`."""
        return reading(self, token)

    def is_bypassed(self) -> bool:
        """Return True if this code runs inside `bypassed()`."""
        return is_past(self)

    def override(self, store: str | Store) -> Override:
        """Inside `async with` (or `with`, if no event loop runs), the cache uses this store."""
        return Override(self, store_for(store, self.clock), is_private=_is_private(store))

    def recording(self, recording: str | Path | Recording) -> RecordingBlock:
        """Inside `async with` (or `with`), record reads to a file, for `stillfresh plan`."""
        return RecordingBlock(self, recording)

    @property
    def is_recording(self) -> bool:
        """True while a block of `recording` is open."""
        return self.recording_to is not None

    async def __aenter__(self) -> Self:
        await self.open()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def _kind(self, name: str, version: str | None) -> str:
        """The name of a resource in the store. If it is taken, only the same place may have it."""
        kind = checked_kind(versioned(checked_kind(name), version))
        declaration = self._declared.get(kind)
        if kind in self.cores and (declaration is None or declaration.place is None):
            raise self._taken(kind)
        return kind

    def _taken(self, kind: str) -> ConfigError:
        function = self.cores[kind].spec.function
        owner = "" if function is None else f", by {function.__module__}.{shown_name(function)}"
        return ConfigError(
            f"resource name {kind!r}: taken already in this cache{owner}; choose another name"
        )

    def _replace(self, kind: str, function: Callable[..., object]) -> None:
        """Make room for a resource that the same place declares again. Raises ConfigError."""
        place = place_of(function)
        before = self._declared.get(kind)
        core = self.cores.get(kind)
        if core is not None:
            if before is None or place is None or before.place != place:
                raise self._taken(kind)
            del self.cores[kind]
            core.retire()
        old_objects = [] if before is None else before.objects
        self._declared[kind] = Declaration(place, [], old_objects)

    def publish_objects(self, resource: Resource[Any, Any], *others: Face[Any, Any]) -> None:
        """Note the public objects of a declaration, for packages of stillfresh.

        Objects of the declaration that this one replaced pass their calls on to them.
        """
        declaration = self._declared[resource.core.spec.kind]
        for new in (resource, *others):
            if any(new is known for known in declaration.objects):
                continue
            declaration.objects.append(new)
            at = len(declaration.objects) - 1
            if at < len(declaration.replaced):
                declaration.replaced[at].pass_on_to(new)

    def declare(
        self,
        spec: Spec[H, V],
        text: Callable[[H], str],
        key: Callable[[str], H],
        private: bool = False,
    ) -> Resource[H, V]:
        """Declare a resource with keys of any type, for packages of stillfresh.

        `text` returns the id of a key in the store; it raises ConfigError for a key that cannot be
        used. `key` returns the key of an id. `private`: no other cache uses the store.
        """
        resource_of = Resource
        if not spec.share:
            resource_of = UnsharedResource
            spec.codec = cast("Codec[V]", BytesCodec(spec.codec))
        elif sys.flags.dev_mode:
            spec.codec = CheckedCodec(spec.codec, spec.kind)
        if spec.by_id and spec.function is not None:
            resource_of = class_named_after(resource_of, name_of(spec.function))
        if checked_kind(spec.kind) in self.cores:
            raise self._taken(spec.kind)
        memory: Memory[H, V] = Memory(spec, self.clock, private=self.is_private or private)
        core = Core(spec, self, memory, text=text, key=key)
        self.cores[spec.kind] = core
        if self.opened is not None:
            core.open(self.opened)
        resource = resource_of(core)
        self.resources[spec.kind] = resource
        return resource


for _method, _text in NOT_OF_A_CACHE.items():
    setattr(Cache, _method, MissingMethod(f"{{0}}.{_method}: {_text}"))


def _is_private(store: str | Store) -> bool:
    return isinstance(store, str) and store.startswith("memory:")
