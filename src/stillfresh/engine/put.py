"""Publish a value that the caller already knows: a load without a loader (E17).

Two steps of the store: take the lease over, then publish with its token. So the law covers a put as
it covers a load, and a late or repeated message of it undoes nothing (S8, decision 0110).
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Hashable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Final, Generic, TypeVar

from msgspec import Struct
from msgspec.structs import replace

from stillfresh.engine.core import Core
from stillfresh.engine.loader import Runtime, looked_at
from stillfresh.engine.model import Origin
from stillfresh.engine.rules import kept, stamped, watched_until
from stillfresh.engine.spec import Spec
from stillfresh.errors import ConfigError, StoreError, error_text
from stillfresh.stores.contract import Ask, Copy, Lease, Mark, Newer, Record

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")

SLICE: Final = 100
"""Keys that are put together in one step of the store."""
ATTEMPTS: Final = 10
"""Other publications that may come between a put's sight of the copy and its lease."""


class Known(Struct, Generic[K, V], frozen=True):
    """A caller's value for one key, ready to be published."""

    key: K
    id: str
    copy: Copy
    """Its generation is that of the lease, once there is one."""
    value: V
    tags: tuple[str, ...]


def _known(
    spec: Spec[K, V], key: K, id_: str, value: object, *, sent: float, dice: Callable[[], float]
) -> Known[K, V]:
    """ConfigError if the value cannot be stored: the caller's mistake, and no failed load."""
    try:
        copy, decoded = kept(value, spec.terms, spec.codec, ("", sent), dice)
    except Exception as exc:
        text = error_text(exc)
        raise ConfigError(f"{spec.kind} {key!r}: the value cannot be stored: {text}") from exc
    return Known(key, id_, copy, decoded, spec.tags_of(key))


async def put(
    core: Core[K, V], values: Iterable[tuple[K, object]], check: Callable[[], None] = lambda: None
) -> None:
    """Publish what the caller knows; nothing is published if one value cannot be stored.

    `check` is called while the leases are held; nothing is published if it raises.
    """
    runtime = await core.ready()
    sent, ready = stamped(runtime.clock()), list[Known[K, V]]()
    for key, value in values:
        id_ = core.text(key)
        ready.append(_known(core.spec, key, id_, value, sent=sent, dice=runtime.dice))
        if not len(ready) % SLICE:
            await asyncio.sleep(0)
    for start in range(0, len(ready), SLICE):
        step = runtime.step(_put(core, runtime, ready[start : start + SLICE], check))
        step.add_done_callback(looked_at)
        await asyncio.shield(step)


async def _put(
    core: Core[K, V], runtime: Runtime, values: Sequence[Known[K, V]], check: Callable[[], None]
) -> None:
    """E6: memory takes a value only if nothing overtook the put meanwhile."""
    keys, memory, entries = [it.key for it in values], core.memory, core.memory.entries
    try:
        async with _in_turn(core.loads.puts, keys):
            since = runtime.clock()
            seen = {it.id: entries[it.key].copy.generation for it in values if it.key in entries}
            with core.overtaking(keys) as step:
                stored = await _published(core.spec, runtime, values, seen, check)
    except StoreError:
        memory.counts.store_errors += 1
        raise
    memory.counts.puts += len(stored)
    memory.counts.superseded += len(values) - len(stored)
    memory.counts.mended(stored)
    for it in values if core.is_open(runtime) else ():
        if it.id in stored and it.key not in step.dirty:
            copy, value = stored[it.id], it.value
            outlook = memory.outlook(copy, memory.now())
            memory.keep(it.key, copy, value, outlook, since)
            answer = memory.made(copy, value, outlook.at_arrival, Origin.LOADED)
            until = watched_until(copy, core.spec.terms)
            core.watcher.landed(it.key, answer, until, outlook.now)


@asynccontextmanager
async def _in_turn(last: dict[K, "asyncio.Future[None]"], keys: Sequence[K]) -> AsyncIterator[None]:
    """One put of a key at a time, in the order of the calls: the last value stays."""
    done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    before = {last[key] for key in keys if key in last}
    last.update(dict.fromkeys(keys, done))
    try:
        if before:
            await asyncio.wait(before)
        yield
    finally:
        done.set_result(None)
        for key in keys:
            if last.get(key) is done:
                del last[key]


async def _published(
    spec: Spec[K, V],
    runtime: Runtime,
    values: Sequence[Known[K, V]],
    seen: Mapping[str, str],
    check: Callable[[], None],
) -> dict[str, Copy]:
    """The copies that stand now, by id; those that are left out were overtaken.

    `seen`: the generations that memory has. StoreError if the store did not confirm a step.
    """
    store, kind, sights = runtime.store, spec.kind, dict(seen)
    leases = await _taken_over(spec, runtime, values, sights)
    copies = {
        it.id: (leases[it.id], replace(it.copy, generation=leases[it.id].token)) for it in values
    }
    async with _given_back(spec, runtime, leases):
        check()
        superseded = await store.publish(kind, copies)
    if superseded:
        await _outdate(spec, runtime, superseded, sights)
    return {id_: copy for id_, (_, copy) in copies.items() if id_ not in superseded}


async def _taken_over(
    spec: Spec[K, V], runtime: Runtime, values: Sequence[Known[K, V]], seen: dict[str, str]
) -> dict[str, Lease]:
    """Asks again with the copy there is, where that is not the one seen; notes it in `seen`."""
    asks = {it.id: Ask(it.id, seen.get(it.id), it.tags, take_over=True) for it in values}
    leases: dict[str, Lease] = {}
    async with _given_back(spec, runtime, leases):
        for _ in range(ATTEMPTS):
            grants = await runtime.store.acquire(spec.kind, list(asks.values()), spec.lease_for)
            for id_, grant in grants.items():
                match grant:
                    case Lease():
                        leases[id_] = grant
                        del asks[id_]
                    case Newer(Record(copy=Copy(generation=generation))):
                        seen[id_] = generation
                        asks[id_] = replace(asks[id_], seen=generation)
            if not asks:
                return leases
        raise StoreError(f"{spec.kind}: {len(asks)} keys were published by others all the time")


@asynccontextmanager
async def _given_back(
    spec: Spec[K, V], runtime: Runtime, leases: Mapping[str, Lease]
) -> AsyncIterator[None]:
    """Others need not wait for the end of leases that a failed step left."""
    try:
        yield
    except BaseException:
        with suppress(StoreError):
            await runtime.store.release(spec.kind, list(leases.values()))
        raise


async def _outdate(
    spec: Spec[K, V], runtime: Runtime, ids: set[str], seen: Mapping[str, str]
) -> None:
    """Invalidate what was there before, unless an invalidation or a newer copy overtook the put.

    Then the lease had run out. To take it again would not be safe: it cannot be told from a lease
    that was voided.
    """
    records = await runtime.store.read(spec.kind, sorted(ids))
    copies = {id_: it.copy for id_, it in records.items() if it.copy is not None}
    old = [
        id_
        for id_, copy in copies.items()
        if copy.generation == seen.get(id_) and copy.mark is Mark.NONE
    ]
    if old:
        await runtime.store.invalidate(spec.kind, old)
