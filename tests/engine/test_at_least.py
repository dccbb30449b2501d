"""E37: read your writes: a read with a token is no older than the change that the token names."""

import asyncio
import gc
import logging
import threading
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stillfresh import (
    Answer,
    Cache,
    ConfigError,
    LoadFailed,
    LoadTimeout,
    Origin,
    Verdict,
    merge_tokens,
    noted_changes,
)
from stillfresh.engine.at_least import ANYTHING, MOST_LETTERS, AtLeast, at_least_of
from stillfresh.engine.calls import Call, Signature
from stillfresh.engine.face import OPENS_AFTER
from stillfresh.stores.memory import MemoryStore
from stillfresh.testing import ManualClock
from tests.kit.engine import (
    Price,
    Prices,
    Sleeper,
    Upstream,
    declare,
    turns,
    until,
    version,
)
from tests.kit.held_store import SteppedStore, cache_on

LAGGING = {"memory_for": "10m", "fresh_for": "1h", "tags": lambda key: [f"shop:{key}"]}

Change = Callable[[Cache, Prices], Awaitable[str]]


async def put(_: Cache, prices: Prices) -> str:
    return (await prices.put("a", Price("a", 2))).token


async def put_many(_: Cache, prices: Prices) -> str:
    return (await prices.put_many({"a": Price("a", 2)}))["a"].token


async def invalidate(_: Cache, prices: Prices) -> str:
    return await prices.invalidate("a")


async def invalidate_softly(_: Cache, prices: Prices) -> str:
    return await prices.invalidate("a", soft=True)


async def invalidate_tag(cache: Cache, _: Prices) -> str:
    return (await cache.invalidate_tag("shop:a")).token


async def invalidate_all(cache: Cache, _: Prices) -> str:
    with noted_changes() as changes:
        await cache.invalidate_all()
    return changes.token


async def delete(_: Cache, prices: Prices) -> str:
    return await prices.delete("a")


async def update(_: Cache, prices: Prices) -> str:
    with noted_changes() as changes:
        await prices.update("a", lambda _: Price("a", 2))
    return changes.token


async def remove(_: Cache, prices: Prices) -> str:
    with noted_changes() as changes:
        await prices.remove("a")
    return changes.token


async def change_and_put(_: Cache, prices: Prices) -> str:
    async with prices.changing("a") as change:
        await change.put(Price("a", 2))
    return change.token


async def change_without_put(_: Cache, prices: Prices) -> str:
    async with prices.changing("a") as change:
        pass
    return change.token


CHANGES: list[Change] = [
    put,
    put_many,
    invalidate,
    invalidate_softly,
    invalidate_tag,
    invalidate_all,
    delete,
    update,
    remove,
    change_and_put,
    change_without_put,
]


@pytest.fixture
def mine(here: Cache, upstream: Upstream) -> Prices:
    """The resource of the process that writes; its memory may lag ten minutes behind."""
    return declare(here, upstream, **LAGGING)


@pytest.fixture
def others(there: Cache, upstream: Upstream) -> Prices:
    """The resource of another process."""
    return declare(there, upstream, **LAGGING)


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
async def test_a_read_with_the_token_of_a_change_in_another_process_sees_it(
    change: Change, here: Cache, mine: Prices, others: Prices, upstream: Upstream
) -> None:
    """Other reads of that process still get the copy in its memory (E37)."""
    await others.get("a")
    upstream.version = 2
    token = await change(here, mine)
    assert version(await others.get("a")) == 1
    assert version(await others.get("a", at_least=token)) == 2


async def test_the_handle_and_get_many_take_a_token_too(
    mine: Prices, others: Prices, upstream: Upstream
) -> None:
    """(E37)."""
    await others.get_many(["a", "b"])
    upstream.version = 2
    token = await mine.invalidate("a", "b")
    answers = await others.get_many(["a", "b"], at_least=token)
    assert {version(answer) for answer in answers.values()} == {2}
    token = merge_tokens(token, await mine.invalidate("a"))
    upstream.version = 3
    assert version(await others.of("a").get(at_least=token)) == 3


async def test_a_read_with_a_token_repairs_memory_for_later_reads(
    mine: Prices, others: Prices, upstream: Upstream
) -> None:
    """(E37)."""
    await others.get("a")
    token = (await mine.put("a", Price("a", 2))).token
    await others.get("a", at_least=token)
    answer = await others.get("a")
    assert version(answer) == 2
    assert answer.origin is Origin.MEMORY


async def test_memory_answers_a_token_of_its_own_cache(
    here: Cache, mine: Prices, store: SteppedStore, upstream: Upstream
) -> None:
    """A process that reads what it wrote itself need not ask the store (E37)."""
    token = (await mine.put("a", Price("a", 1))).token
    store.calls.clear()
    assert (await mine.get("a", at_least=token)).origin is Origin.MEMORY
    with here.at_least(token):
        assert await mine("a") == Price("a", 1)
        assert (await mine.get_many(["a"]))["a"].origin is Origin.MEMORY
    assert store.calls == []


async def test_memory_does_not_answer_a_token_of_two_caches(
    mine: Prices, others: Prices, store: SteppedStore
) -> None:
    """(E37)."""
    own = (await mine.put("a", Price("a", 1))).token
    token = merge_tokens(own, (await others.put("a", Price("a", 2))).token)
    assert version(await mine.get("a", at_least=token)) == 2
    assert store.calls.count("read") == 1


async def test_all_reads_inside_a_block_have_its_token(
    there: Cache, mine: Prices, others: Prices, upstream: Upstream
) -> None:
    """Reads of other tasks still get the copy in memory, at once (E37)."""
    await others.get("a")
    token = (await mine.put("a", Price("a", 2))).token
    is_open = asyncio.Event()
    may_close = asyncio.Event()

    async def visit() -> int:
        with there.at_least(token):
            is_open.set()
            await may_close.wait()
            assert others.get_nowait("a") is None
            return (await others("a")).version

    visiting = asyncio.create_task(visit())
    await is_open.wait()
    entry = others.get_nowait("a")
    assert entry is not None
    assert version(entry) == 1
    assert (await others("a")).version == 1
    may_close.set()
    assert await visiting == 2


async def test_a_peek_with_the_token_of_another_process_says_that_nobody_has_confirmed_it(
    here: Cache, there: Cache, mine: Prices, others: Prices
) -> None:
    """E37, E29: it may not wait for the store. Memory vouches for the changes of its own cache."""
    await others.get("a")
    token = await mine.invalidate("a")
    with there.at_least(token):
        answer = others.peek("a")
    assert answer is not None
    assert (answer.verdict, answer.unverified) == (Verdict.STALE, True)
    await others.put("b", Price("b", 1))
    with there.at_least((await others.put("c", Price("c", 1))).token):
        answer = others.peek("b")
    assert answer is not None
    assert (answer.verdict, answer.unverified) == (Verdict.FRESH, False)


async def test_a_cached_function_inside_a_block_reads_with_the_token(
    here: Cache, there: Cache
) -> None:
    """Also one whose arguments it remembers from calls outside, before and meanwhile (E37)."""
    stock = {"a": 1}

    def declared(cache: Cache) -> Any:
        @cache.cached("stock", fresh_for="1h", memory_for="10m")
        async def of(sku: str) -> int:
            return stock[sku]

        return of

    mine = declared(here)
    others = declared(there)
    for _ in range(3):
        assert await others("a") == 1
    stock["a"] = 2
    token = await mine.of("a").invalidate()
    is_open = asyncio.Event()
    may_read = asyncio.Event()

    async def visit() -> int:
        with there.at_least(token):
            is_open.set()
            await may_read.wait()
            result: int = await others("a")
            return result

    visiting = asyncio.create_task(visit())
    await is_open.wait()
    for _ in range(3):
        assert await others("a") == 1
    may_read.set()
    assert await visiting == 2


async def test_calls_outside_of_a_block_find_their_entry_by_their_arguments(
    monkeypatch: pytest.MonkeyPatch, here: Cache
) -> None:
    """A client that keeps a request with a token open slows no other reader down (E37)."""
    bound: list[object] = []
    bind = Signature.call

    def bind_noting(self: Signature[Any], *args: Any) -> Call[Any]:
        bound.append(args)
        return bind(self, *args)

    monkeypatch.setattr(Signature, "call", bind_noting)

    @here.cached("stock", fresh_for="1h", memory_for="10m")
    async def of(sku: str) -> str:
        return sku

    for _ in range(3):
        assert await of("a") == "a"
    bound.clear()
    may_close = asyncio.Event()

    async def visit() -> None:
        with here.at_least("1~c.*"):
            await may_close.wait()

    visiting = asyncio.create_task(visit())
    await turns()
    assert await of("a") == "a"
    may_close.set()
    await visiting
    assert await of("a") == "a"
    assert not bound


def declare_parts(cache: Cache, stock: dict[str, int]) -> tuple[Any, Any]:
    """A value that is made of another one. One tag invalidates both."""

    @cache.cached("part", fresh_for="1h", stale_for="1h", memory_for="10m", tags=["stock"])
    async def part(sku: str) -> int:
        await asyncio.sleep(0)
        return stock[sku]

    @cache.cached("whole", fresh_for="1h", stale_for="1h", memory_for="10m", tags=["stock"])
    async def whole(sku: str) -> str:
        return f"{await part(sku)} left"

    return part, whole


async def test_what_a_loader_reads_for_a_reader_with_a_token_is_no_older_either(
    here: Cache, there: Cache
) -> None:
    """A page that is made of other entries is not made of their old copies (E37)."""
    stock = {"a": 1}

    def declared(cache: Cache) -> tuple[Any, Any]:
        @cache.cached("part", fresh_for="1h", memory_for="10m", tags=["part"])
        async def part(sku: str) -> int:
            return stock[sku]

        @cache.cached("page", fresh_for="1h", memory_for="10m", tags=["page"])
        async def page(sku: str) -> str:
            return f"{await part(sku)} left"

        return part, page

    part, page = declared(here)
    _, their_page = declared(there)
    assert await their_page("a") == "1 left"
    stock["a"] = 2
    token = merge_tokens(await part.of("a").invalidate(), await page.of("a").invalidate())
    answer: Answer[str] = await their_page.of("a").get(at_least=token)
    assert answer.value == "2 left"


async def test_what_another_reader_had_loaded_after_the_change_is_no_older_than_the_token(
    here: Cache, there: Cache
) -> None:
    """A value that others had made is not made of a part that memory kept too long (E37, E29)."""
    stock = {"a": 1}
    part, _ = declare_parts(here, stock)
    their_part, their_whole = declare_parts(there, stock)
    await part("a")
    await their_part("a")
    stock["a"] = 2
    token = (await here.invalidate_tag("stock")).token
    assert await their_part("a") == 1
    assert await their_whole("a") == "2 left"
    answer: Answer[str] = await their_whole.of("a").get(at_least=token)
    assert answer.value == "2 left"


@pytest.mark.parametrize("is_nested", [False, True], ids=["its loader", "a loader between"])
async def test_a_value_that_is_made_of_an_unconfirmed_part_is_not_stored(
    here: Cache, there: Cache, store: SteppedStore, *, is_nested: bool
) -> None:
    """E29, E37: the store cannot be asked for the part, and can be written again afterwards.

    Its own loader reads the part, or the loader of a value between them.
    """
    stock = {"a": 1}
    part, whole = declare_parts(here, stock)
    declare_parts(there, stock)

    @here.cached("page", fresh_for="1h", stale_for="1h", tags=["stock"])
    async def page(sku: str) -> str:
        text: str = await whole(sku)
        return text

    value = page if is_nested else whole
    await part("a")
    stock["a"] = 2
    token = (await there.invalidate_tag("stock")).token
    store.broken.add("read")
    assert await value("a") == "1 left"
    store.broken.clear()
    answer: Answer[str] = await value.of("a").get(at_least=token)
    assert answer.value == "2 left"
    assert await value("a") == "2 left"


async def test_what_a_loader_reads_of_another_cache_is_no_older_than_the_last_change(
    here: Cache, there: Cache, clock: ManualClock
) -> None:
    """E37, E29: a process has two caches; the memory of one lags, and the other's value stays."""
    stock = {"a": 1}
    part, _ = declare_parts(here, stock)
    declare_parts(there, stock)
    async with Cache("memory://", clock=clock) as pages:

        @pages.cached("page", fresh_for="1h", tags=["stock"])
        async def page(sku: str) -> str:
            return f"{await part(sku)} left"

        assert await page("a") == "1 left"
        stock["a"] = 2
        await there.invalidate_tag("stock")
        await pages.invalidate_tag("stock")
        assert await part("a") == 1
        assert await page("a") == "2 left"
        answer: Answer[str] = await page.of("a").get()
        assert (answer.value, answer.verdict) == ("2 left", Verdict.FRESH)


@pytest.mark.parametrize("memory_for", [0, "10m"])
@pytest.mark.parametrize("is_private", [True, False])
async def test_an_outage_of_the_store_of_parts_costs_one_load_of_another_caches_value(
    here: Cache, store: SteppedStore, clock: ManualClock, memory_for: Any, *, is_private: bool
) -> None:
    """E29: for each `fresh_for` of the value. It is not stored: its part could not be checked."""
    loaded: list[str] = []
    own_store = "memory://" if is_private else SteppedStore(MemoryStore(clock=clock))

    @here.cached("part", fresh_for="1d", memory_for=memory_for)
    async def part(sku: str) -> int:
        return 1

    async with Cache(own_store, clock=clock) as pages:

        @pages.cached("page", fresh_for="10m", stale_for="1h")
        async def page(sku: str) -> str:
            loaded.append(sku)
            return f"{await part(sku)} left"

        async def read() -> Answer[str]:
            answer: Answer[str] = await page.of("a").get()
            await turns()
            return answer

        await part("a")
        store.broken |= {"read", "acquire", "publish", "release"}
        await read()
        for _ in range(20):
            clock.advance(1)
            answer = await read()
            assert (answer.value, answer.verdict) == ("1 left", Verdict.STALE)
            assert answer.unverified
        assert await pages.entries() == []
        assert loaded == ["a"]

        clock.advance(600)
        assert (await read()).verdict is Verdict.STALE
        assert loaded == ["a", "a"]
        assert (await read()).unverified
        assert loaded == ["a", "a"]

        store.broken.clear()
        clock.advance(601)
        await read()
        assert (await read()).verdict is Verdict.FRESH
        assert loaded == ["a", "a", "a"]


async def test_a_value_of_unverified_parts_stands_over_the_stored_one_until_it_is_stale(
    here: Cache, store: SteppedStore, clock: ManualClock, sleeper: Sleeper
) -> None:
    """E29: the stored copy is the one before it; what another process stores counts more."""
    stock = {"a": 1}
    loaded: list[str] = []

    @here.cached("part", fresh_for="1m", stale_for="1d")
    async def part(sku: str) -> int:
        return stock[sku]

    own_store = SteppedStore(MemoryStore(clock=clock))
    async with cache_on(own_store, clock, sleeper) as pages:

        @pages.cached("page", fresh_for="10m", stale_for="1h")
        async def page(sku: str) -> str:
            loaded.append(sku)
            return f"{await part(sku)} left"

        assert await page("a") == "1 left"
        stock["a"] = 2
        await part.of("a").refresh()
        store.broken |= {"read", "acquire", "publish", "release"}
        clock.advance(601)
        assert await page("a") == "1 left"
        await turns()
        for _ in range(10):
            clock.advance(1)
            answer: Answer[str] = await page.of("a").get()
            await turns()
            assert (answer.value, answer.verdict) == ("2 left", Verdict.STALE)
        assert loaded == ["a", "a"]
        elsewhere = cache_on(own_store, clock, sleeper)

        @elsewhere.cached("page", fresh_for="10m", stale_for="1h")
        async def same_page(sku: str) -> str:
            return ""

        await same_page.of("a").put("3 left")
        clock.advance(2)
        answer = await page.of("a").get()
        assert (answer.value, answer.verdict) == ("3 left", Verdict.FRESH)


async def test_a_cache_that_opens_while_a_loader_of_another_runs_asks_its_store_for_it(
    here: Cache, there: Cache, store: SteppedStore, clock: ManualClock, sleeper: Sleeper
) -> None:
    """E37, E29: also the reads of a resource that was declared meanwhile."""
    stock = {"a": 1}
    is_declared = asyncio.Event()
    may_read = asyncio.Event()
    parts: list[Any] = []
    declare_parts(there, stock)

    @here.cached("page", fresh_for="1h")
    async def page(sku: str) -> str:
        is_declared.set()
        await may_read.wait()
        return f"{await parts[0](sku)} left"

    loading = asyncio.create_task(page("a"))
    await is_declared.wait()
    async with cache_on(store.inner, clock, sleeper) as late:
        parts += declare_parts(late, stock)
        assert await parts[0]("a") == 1
        stock["a"] = 2
        await there.invalidate_tag("stock")
        assert await parts[0]("a") == 1
        may_read.set()
        assert await loading == "2 left"


async def test_hits_find_memory_at_once_when_no_loader_runs(
    here: Cache, clock: ManualClock
) -> None:
    """E37, E14: they look at their context while one runs, and only where memory may lag."""
    stock = {"a": 1}
    part, _ = declare_parts(here, stock)
    prompt = declare(here, Upstream())
    during: list[bool] = []
    async with Cache("memory://", clock=clock) as pages:
        alone, _ = declare_parts(pages, stock)

        @pages.cached("page", fresh_for="1h")
        async def page(sku: str) -> str:
            during.extend(face.is_watched for face in (part, prompt, alone))
            return sku

        await part("a")
        await part("a")
        assert part.entry_by_key is not part.entries
        for _ in range(OPENS_AFTER):
            await part("a")
        assert part.entry_by_key is part.entries
        await page("a")
    assert during == [True, False, False]
    for _ in range(OPENS_AFTER):
        await part("a")
    assert part.entry_by_key is part.entries


def test_a_block_that_the_garbage_collector_closes_while_another_one_opens_hangs_nobody(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """E37: such as that of a streamed body whose client has left."""
    cache = Cache("memory://")
    prices = declare(cache, Upstream())
    stand_back = prices.stand_back

    def collect_and_stand_back() -> None:
        gc.collect()
        stand_back()

    def body() -> Iterator[None]:
        with cache.at_least("1~c.*"):
            yield

    def open_another() -> None:
        stream = [body()]
        next(stream[0])
        stream.append(stream)  # type: ignore[arg-type]
        del stream
        with cache.bypassed():
            pass

    monkeypatch.setattr(prices, "stand_back", collect_and_stand_back)
    thread = threading.Thread(target=open_another, daemon=True)
    thread.start()
    thread.join(10)
    assert not thread.is_alive()
    assert cache.watched_blocks == 0


async def test_a_value_is_not_made_of_a_part_that_was_invalidated_softly(here: Cache) -> None:
    """The part is still old while both are refreshed, and the value would stay old (E37)."""
    stock = {"a": 1}
    _, whole = declare_parts(here, stock)
    assert await whole("a") == "1 left"
    stock["a"] = 2
    token = (await here.invalidate_tag("stock", soft=True)).token
    assert await whole("a") == "1 left"
    await turns()
    answer: Answer[str] = await whole.of("a").get(at_least=token)
    assert answer.value == "2 left"
    assert await whole("a") == "2 left"


async def test_a_task_that_a_loader_left_behind_reads_from_memory(
    store: SteppedStore, here: Cache, mine: Prices
) -> None:
    """It is no part of the value (E37)."""
    tasks: list[asyncio.Task[Answer[Price]]] = []
    may_read = asyncio.Event()

    async def read_later() -> Answer[Price]:
        await may_read.wait()
        return await mine.get("a")

    @here.cached("starter", fresh_for="1h")
    async def starter(key: str) -> str:
        tasks.append(asyncio.create_task(read_later()))
        return key

    await mine.get("a")
    await starter("b")
    reads = store.calls.count("read")
    may_read.set()
    await tasks[0]
    assert store.calls.count("read") == reads


async def test_a_reader_with_a_token_does_not_take_the_value_of_a_load_that_ran_before(
    store: SteppedStore, here: Cache, mine: Prices, others: Prices, upstream: Upstream
) -> None:
    """Also if the store cannot be asked when that load ends (E37)."""
    upstream.hold()
    first = asyncio.create_task(mine.get("a"))
    await until(lambda: len(upstream.calls) == 1)
    upstream.version = 2
    token = (await others.put("a", Price("a", 2))).token
    store.broken.add("publish")
    reading = asyncio.create_task(mine.get("a", at_least=token))
    await turns()
    upstream.let_go()
    await first
    assert version(await reading) == 2


async def test_an_invalidated_copy_is_no_answer_to_a_token_even_if_loading_fails(
    mine: Prices, others: Prices, upstream: Upstream
) -> None:
    """Readers without a token get it, with the error (E37)."""
    await others.get("a")
    token = await mine.invalidate("a")
    upstream.error = RuntimeError("down")
    with pytest.raises(LoadFailed):
        await others.get("a", at_least=token)
    with pytest.raises(LoadFailed):  # during the cooldown as well
        await others.get("a", at_least=token)
    answer = await mine.get("a")
    assert version(answer) == 1
    assert answer.error is not None


async def test_a_token_is_loaded_for_while_the_store_cannot_be_asked(
    store: SteppedStore, mine: Prices, others: Prices, upstream: Upstream
) -> None:
    """Memory may lack the change; if loading fails too, the read fails (E37)."""
    await mine.get("a")
    upstream.version = 2
    token = (await others.put("a", Price("a", 2))).token
    store.broken |= {"read", "acquire", "publish", "release"}
    assert version(await mine.get("a", at_least=token)) == 2
    token = (await others.put("a", Price("a", 3))).token
    upstream.error = RuntimeError("down")
    with pytest.raises(LoadFailed):
        await mine.get("a", at_least=token)


async def test_a_token_takes_no_copy_from_other_readers_while_the_store_cannot_be_asked(
    mine: Prices, store: SteppedStore, upstream: Upstream
) -> None:
    """Anybody may send one. Memory's copy is all that others have if the upstream fails, too."""
    await mine("a")
    store.broken = {"read", "acquire", "publish"}
    upstream.error = ConnectionError("down")
    with pytest.raises(LoadFailed, match="down"):
        await mine.get("a", at_least="1~c.forged")
    assert version(await mine.get("a")) == 1


async def test_a_softly_invalidated_copy_is_not_served_to_a_token_while_it_is_refreshed(
    mine: Prices, others: Prices, upstream: Upstream
) -> None:
    """Readers without a token get it as STALE (E37)."""
    await mine.get("a")
    upstream.version = 2
    token = await others.invalidate("a", soft=True)
    assert version(await mine.get("a", at_least=token)) == 2


async def test_a_copy_that_has_grown_old_since_is_served_stale_to_a_token(
    clock: ManualClock, mine: Prices, others: Prices, upstream: Upstream
) -> None:
    """It is no older than the change (E37)."""
    token = (await others.put("a", Price("a", 2))).token
    clock.advance(3601)
    answer = await mine.get("a", at_least=token)
    assert (version(answer), answer.verdict) == (2, Verdict.STALE)


async def test_tokens_are_taken_inside_bypassed_and_change_nothing_there(
    here: Cache, mine: Prices, upstream: Upstream
) -> None:
    """(E37, E22)."""
    token = await mine.invalidate("a")
    upstream.version = 7
    with here.bypassed():
        assert version(await mine.get("a", at_least=token)) == 7


@pytest.mark.parametrize(
    "token",
    [
        "nonsense",
        "1",
        "1~",
        "1~c.",
        "1~x.y",
        "2~c.abc",
        "1~p.12",
        "1~p.99999999999999999999999.shop",
        "1~c." + "x" * 17,
        "~" * 1000,
        "1~" + "~".join(f"c.{number}" for number in range(1000)),
        "1~c.ab\ncd",
    ],
)
async def test_a_token_that_cannot_be_read_stands_for_some_change(
    token: str, mine: Prices, store: SteppedStore, upstream: Upstream
) -> None:
    """It costs its sender a read of the store, and no load (E37)."""
    await mine.get("a")
    store.calls.clear()
    upstream.calls.clear()
    assert version(await mine.get("a", at_least=token)) == 1
    assert store.calls == ["read"]
    assert upstream.calls == []


@pytest.mark.parametrize("token", [1, b"1~c.x", ["1~c.x"]])
async def test_a_token_that_is_no_text_is_refused(token: object, mine: Prices) -> None:
    """(E37)."""
    with pytest.raises(ConfigError, match="at_least"):
        await mine.get("a", at_least=token)  # type: ignore[arg-type]


async def test_an_empty_token_asks_for_nothing(mine: Prices, store: SteppedStore) -> None:
    """A client that has changed nothing sends none (E37)."""
    await mine.get("a")
    store.calls.clear()
    assert (await mine.get("a", at_least="")).origin is Origin.MEMORY
    assert store.calls == []


MAKERS = st.frozensets(st.from_regex(r"[A-Za-z0-9_-]{1,12}", fullmatch=True), max_size=9)
POSITIONS = st.dictionaries(
    st.from_regex(r"[A-Za-z0-9_.-]{1,20}", fullmatch=True),
    st.integers(0, 2**63),
    max_size=9,
)


@given(st.lists(st.builds(AtLeast, MAKERS, POSITIONS), max_size=4))
def test_merged_tokens_name_all_changes_and_stay_short(seen: list[AtLeast]) -> None:
    """Or stand for changes by anybody (E37)."""
    merged = merge_tokens(*(each.text() for each in seen))
    assert len(merged) <= MOST_LETTERS
    assert merged.isascii()
    assert not set(merged) & set(' ;,"\\=\r\n\t')
    changes = at_least_of(merged)
    if changes is None:
        assert not any(each.text() for each in seen)
        return
    for each in seen:
        assert (
            changes == ANYTHING
            or changes.makers == ANYTHING.makers
            or (each.makers <= changes.makers)
        )


@given(st.text(max_size=500))
def test_any_text_can_be_a_token(text: str) -> None:
    """(E37)."""
    seen = at_least_of(text)
    assert (seen is None) == (not text)
    assert len(merge_tokens(text, text)) <= MOST_LETTERS


def test_the_greatest_position_of_each_outbox_counts() -> None:
    """(E37)."""
    merged = merge_tokens("1~p.7.shop", "1~p.9.shop~p.1.books", "1~p.3.shop")
    assert at_least_of(merged) == AtLeast(positions={"shop": 9, "books": 1})


async def test_a_read_waits_for_the_outbox_that_its_token_names(
    here: Cache, mine: Prices, upstream: Upstream
) -> None:
    """(E37)."""
    delivered = asyncio.Event()
    asked: list[int] = []

    async def wait(position: int) -> None:
        asked.append(position)
        await delivered.wait()

    here.outboxes.follow("shop", wait)
    await mine.get("a")
    reading = asyncio.create_task(mine.get("a", at_least="1~p.12.shop"))
    await until(lambda: asked == [12])
    upstream.version = 2
    await mine.invalidate("a")
    delivered.set()
    assert version(await reading) == 2


async def test_a_read_does_not_wait_for_ever_for_an_outbox(
    monkeypatch: pytest.MonkeyPatch, here: Cache, mine: Prices
) -> None:
    """It fails with an error that names the consumer (E37)."""
    monkeypatch.setattr("stillfresh.engine.at_least.LONGEST_WAIT", 0)
    here.outboxes.follow("shop", lambda _: asyncio.Event().wait())
    with pytest.raises(LoadTimeout, match="'shop' has not delivered"):
        await mine.get("a", at_least="1~p.12.shop")
    answers = await mine.get_many(["a"], at_least="1~p.12.shop")
    assert isinstance(answers["a"].error, LoadTimeout)


async def test_an_outbox_that_the_process_does_not_follow_is_logged_once(
    mine: Prices, caplog: pytest.LogCaptureFixture
) -> None:
    """A token may be made up, so it does not fail the read (E37)."""
    with caplog.at_level(logging.WARNING):
        for number in range(20):
            await mine.get("a", at_least=f"1~p.12.shop{number % 8}")
    assert 1 <= len(caplog.records) <= 4
    assert "OutboxConsumer" in caplog.text


async def test_changes_of_nested_blocks_and_tasks_are_noted(mine: Prices) -> None:
    """In each block around them: a middleware and a view may both want them (E37)."""
    with noted_changes() as outer:
        assert outer.token == ""
        with noted_changes() as inner:
            await asyncio.create_task(mine.invalidate("a"))
        assert inner.token
        assert outer.token == inner.token
        await asyncio.gather(mine.put("a", Price("a", 1)), mine.delete("b"))
    assert outer.token == inner.token


async def test_what_was_not_stored_has_no_token(here: Cache, mine: Prices) -> None:
    """(E37)."""
    assert (await mine.put("a", Price("a", 1), version=7)).token
    assert (await mine.put("a", Price("a", 1), version=3)).token == ""
    assert (await mine.add("a", Price("a", 1))).token == ""
    with here.bypassed():
        assert (await mine.put("a", Price("a", 1))).token == ""
