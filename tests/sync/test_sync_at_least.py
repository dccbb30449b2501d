"""Read your writes in threads: tokens of changes, and reads that accept nothing older (E37)."""

import asyncio
import os
import threading
from collections.abc import Iterator

import pytest

from stillfresh import (
    Cache,
    LoadFailed,
    Origin,
    SyncCache,
    SyncFunction,
    SyncResource,
    merge_tokens,
    noted_changes,
)
from stillfresh.engine.face import OPENS_AFTER
from tests.kit.servers.valkey import Server
from tests.kit.sync import Calling
from tests.sync.conftest import place

every_shared_store = pytest.fixture(params=["sqlite", "redis", "postgres", "dynamodb"])(place)


@pytest.fixture
def stock() -> dict[str, int]:
    """The database."""
    return {"a": 1, "b": 1}


def declared(cache: SyncCache, stock: dict[str, int]) -> SyncResource[str, int]:
    """Memory may lag ten minutes behind."""

    @cache.batched("number", fresh_for="1h", memory_for="10m")
    def numbers(keys: list[str]) -> dict[str, int]:
        return {key: stock[key] for key in keys}

    return numbers


@pytest.fixture
def caches(every_shared_store: str) -> Iterator[tuple[SyncCache, SyncCache]]:
    """Two processes."""
    with SyncCache(every_shared_store) as here, SyncCache(every_shared_store) as there:
        yield here, there


def test_a_thread_reads_what_another_process_wrote(
    caches: tuple[SyncCache, SyncCache], stock: dict[str, int]
) -> None:
    """By a token for one read, for many and for a block (E37)."""
    here, there = caches
    mine = declared(here, stock)
    others = declared(there, stock)
    others.get_many(["a", "b"])
    stock.update(a=2, b=2)
    token = merge_tokens(mine.put("a", 2).token, mine.invalidate("b"))
    assert others.get("a", at_least=token).value == 2
    assert others.of("b").get(at_least=token).value == 2
    stock.update(a=3, b=3)
    token = mine.invalidate("a", "b")
    answers = others.get_many(["a", "b"], at_least=token)
    assert [answers[key].value for key in "ab"] == [3, 3]
    stock.update(a=4, b=4)
    with noted_changes() as changes:
        mine.put_many({"a": 4})
        here.invalidate_all()
    with there.at_least(changes.token):
        assert (others("a"), others("b")) == (4, 4)


def test_other_threads_go_on_using_memory_while_a_block_is_open(
    caches: tuple[SyncCache, SyncCache], stock: dict[str, int]
) -> None:
    """(E37)."""
    here, there = caches
    mine = declared(here, stock)
    others = declared(there, stock)
    others("a")
    token = mine.put("a", 2).token
    with there.at_least(token):
        other_thread = Calling(lambda: others.get("a"))
        assert other_thread.result().origin is not Origin.LOADED
        assert others("a") == 2


def test_a_cached_function_inside_a_block_reads_with_the_token(
    caches: tuple[SyncCache, SyncCache], stock: dict[str, int]
) -> None:
    """Also one whose arguments it remembers; other threads go on using memory (E37)."""
    here, there = caches

    def cached(cache: SyncCache) -> SyncFunction[[str], int]:
        @cache.cached("left", fresh_for="1h", memory_for="10m")
        def left(sku: str) -> int:
            return stock[sku]

        return left

    mine = cached(here)
    others = cached(there)
    for _ in range(3):
        assert others("a") == 1
    stock["a"] = 2
    token = mine.of("a").invalidate()
    with there.at_least(token):
        Calling(lambda: others("a")).result()
        assert others("a") == 2


def test_memory_answers_a_token_of_its_own_process(
    caches: tuple[SyncCache, SyncCache], stock: dict[str, int]
) -> None:
    """(E37)."""
    mine = declared(caches[0], stock)
    token = mine.put("a", 2).token
    mine("a")
    answer = mine.get("a", at_least=token)
    assert answer.value == 2


def test_a_write_through_has_a_token(
    caches: tuple[SyncCache, SyncCache], stock: dict[str, int]
) -> None:
    """(E37, E36)."""
    here, there = caches
    mine = declared(here, stock)
    others = declared(there, stock)
    others("a")
    with mine.changing("a") as change:
        stock["a"] = 2
        change.put(2)
    assert others.get("a", at_least=change.token).value == 2
    with mine.changing("a") as change:
        stock["a"] = 3
    assert others.get("a", at_least=change.token).value == 3


def test_a_tag_has_a_token(caches: tuple[SyncCache, SyncCache], stock: dict[str, int]) -> None:
    """(E37)."""
    here, there = caches

    def tagged(cache: SyncCache) -> SyncResource[str, int]:
        @cache.batched("number", fresh_for="1h", memory_for="10m", tags=["all"])
        def numbers(keys: list[str]) -> dict[str, int]:
            return {key: stock[key] for key in keys}

        return numbers

    tagged(here)
    others = tagged(there)
    others("a")
    stock["a"] = 2
    tagged_entries = here.invalidate_tag("all")
    assert tagged_entries == [("number", "a")]
    assert others.get("a", at_least=tagged_entries.token).value == 2


def test_an_old_copy_is_no_answer_to_a_token(
    caches: tuple[SyncCache, SyncCache], stock: dict[str, int]
) -> None:
    """If loading fails, the read fails (E37)."""
    here, there = caches
    mine = declared(here, stock)
    others = declared(there, stock)
    others("a")
    token = mine.invalidate("a")
    del stock["a"]
    with pytest.raises(LoadFailed):
        others.get("a", at_least=token)


def test_what_a_loader_reads_of_another_cache_is_no_older_than_the_last_change(
    caches: tuple[SyncCache, SyncCache], stock: dict[str, int]
) -> None:
    """E37, E29: a process has two caches; one memory lags, and the other cache's value stays."""
    here, there = caches
    others = declared(there, stock)
    mine = declared(here, stock)
    with SyncCache("memory://") as pages:

        @pages.cached("page", fresh_for="1h")
        def page(sku: str) -> str:
            return f"{mine(sku)} left"

        assert page("a") == "1 left"
        assert mine("a") == 1
        stock["a"] = 2
        others.invalidate("a")
        page.of("a").invalidate()
        assert page("a") == "2 left"


async def test_a_loader_of_an_async_cache_reads_nothing_old_of_a_sync_one(
    caches: tuple[SyncCache, SyncCache], stock: dict[str, int]
) -> None:
    """E37, E29: it runs in a thread, for another event loop."""
    here, there = caches
    others = declared(there, stock)
    mine = declared(here, stock)
    async with Cache("memory://") as pages:

        @pages.cached("page", fresh_for="1h")
        def page(sku: str) -> str:
            return f"{mine(sku)} left"

        assert await page("a") == "1 left"
        assert await asyncio.to_thread(mine, "a") == 1
        stock["a"] = 2
        await asyncio.to_thread(others.invalidate, "a")
        await page.of("a").invalidate()
        assert await page("a") == "2 left"


@pytest.mark.filterwarnings(
    "ignore:This process .* is multi-threaded, use of fork:DeprecationWarning"
)
def test_a_child_that_is_forked_while_a_loader_runs_looks_at_nothing(
    valkey: Server, stock: dict[str, int]
) -> None:
    """E37, E14: the loader runs in the parent, and another thread may just have begun one."""
    cache = SyncCache(valkey.url())
    numbers = declared(cache, stock)
    may_end = threading.Event()

    @cache.cached("slow", fresh_for="1h")
    def slow(sku: str) -> str:
        begun.set()
        assert may_end.wait(20)
        return sku

    begun = threading.Event()
    with cache:
        numbers("a")
        loading = Calling(lambda: slow("a"))
        assert begun.wait(20)
        if (child := os.fork()) == 0:
            for _ in range(OPENS_AFTER + 2):
                numbers("a")
            os._exit(0 if numbers.entry_by_key is numbers.entries else 1)
        _, status = os.waitpid(child, 0)
        may_end.set()
        assert loading.result() == "a"
    assert os.waitstatus_to_exitcode(status) == 0


@pytest.mark.filterwarnings(
    "ignore:This process .* is multi-threaded, use of fork:DeprecationWarning"
)
def test_children_of_a_preloaded_cache_do_not_take_each_other_for_themselves(
    valkey: Server, stock: dict[str, int]
) -> None:
    """The cache is declared before the fork, and opened after it, as with gunicorn (E37)."""
    numbers = declared(SyncCache(valkey.url()), stock)

    def token_of_child() -> str:
        reading, writing = os.pipe()
        if (child := os.fork()) == 0:
            os.write(writing, numbers.invalidate("a").encode())
            os._exit(0)
        os.close(writing)
        with os.fdopen(reading) as pipe:
            token = pipe.read()
        os.waitpid(child, 0)
        return token

    tokens = {token_of_child(), token_of_child()}
    assert len(tokens) == 2
    assert all(tokens)
