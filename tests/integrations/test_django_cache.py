"""Django's cache API on the stores: E2, E5, E17, E20 as Django code sees them.

Django's own tests of a backend are run by test_django_suite.py; here is what they do not ask.
"""

import asyncio
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from datetime import date
from pathlib import Path
from typing import Any

import pytest

from stillfresh import ConfigError, encrypted, new_key, zstd
from stillfresh.testing import ManualClock
from tests.kit import shop
from tests.kit.processes import Process
from tests.kit.servers.valkey import Server
from tests.kit.sync import until

shop.configure()

from django.core.cache import caches  # noqa: E402 (after settings)
from django.db import connection, connections  # noqa: E402
from django.utils import translation  # noqa: E402

from stillfresh.integrations.django import shared  # noqa: E402

THREADS = 16


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(start=1_700_000_000.0)


@pytest.fixture(params=["memory", "sqlite", "redis"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "redis":
        server: Server = request.getfixturevalue("valkey")
        return server.url()
    return "memory://" if request.param == "memory" else f"sqlite:///{tmp_path}/cache.db"


@pytest.fixture
def cache(url: str, clock: ManualClock, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Stale for a minute; kept against failures for ten."""
    with shop.cache_on(url, clock, monkeypatch, STALE_FOR=60, ERROR_FOR=600) as cache:
        yield cache


class Maker:
    """A callable for `get_or_set`: counts, and can be held up or fail."""

    def __init__(self) -> None:
        self.calls: list[threading.Thread] = []
        self.error: Exception | None = None
        self.gate = threading.Event()
        self.gate.set()
        self.ended = threading.Semaphore(0)
        self.languages: list[str | None] = []

    def __call__(self) -> int:
        self.calls.append(threading.current_thread())
        self.languages.append(translation.get_language())
        try:
            self.gate.wait(30)
            if self.error is not None:
                raise self.error
            return len(self.calls)
        finally:
            self.ended.release()


@pytest.fixture
def make() -> Maker:
    return Maker()


def together(work: Callable[[int], Any]) -> list[Any]:
    """Sixteen threads at once, each with a backend object of its own."""
    start = threading.Barrier(THREADS)

    def one(number: int) -> Any:
        start.wait(30)
        return work(number)

    with ThreadPoolExecutor(THREADS) as pool:
        return list(pool.map(one, range(THREADS)))


class TestE20Values:
    def test_each_caller_of_a_django_cache_gets_its_own_value(self, cache: Any) -> None:
        """Django code changes what it is given; what is cached stays as it was."""
        cache.set("a", [1])
        cache.get("a").append(2)
        cache.get_or_set("a", [9]).append(3)
        assert cache.get("a") == [1]

    def test_a_stored_value_that_cannot_be_decoded_is_a_miss(self, cache: Any) -> None:
        """E11: another release wrote it; it is made anew."""
        for key in "ab":
            cache.put(key, cache._on_terms(b"\xc7\x00\x63", 60))
        assert (cache.get("a", "none"), cache.get_many(["a"])) == ("none", {})
        assert (cache.get_or_set("a", lambda: 1), cache.get("a")) == (1, 1)
        assert cache.add("b", 2) is False  # it is there, if one knows how to read it

    def test_a_value_that_cannot_be_stored_is_refused_by_every_method(self, cache: Any) -> None:
        """With the type's name, by every way in; nothing is stored and no load has failed."""
        ways: list[Callable[[], object]] = [
            lambda: cache.set("a", object()),
            lambda: cache.set_many({"a": object()}),
            lambda: cache.add("a", object()),
            lambda: cache.get_or_set("a", object),
        ]
        for way in ways:
            with pytest.raises(TypeError, match=r"a builtins\.object cannot be cached"):
                way()
        assert cache.get_or_set("a", 1) == 1

    def test_a_codec_can_be_named_by_its_dotted_path(
        self, url: str, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """By its dotted name; its bytes may begin with anything."""
        codec = f"{__name__}.Upper"
        with shop.cache_on(url, clock, monkeypatch, CODEC=codec, NAME="upper") as cache:
            cache.set("a", "text", tags=["t"])
            cache.set("b", "text")
            assert (cache.get("a"), cache.get("b")) == ("TEXT", "TEXT")


class Upper:
    """A codec of somebody's own."""

    def encode(self, value: str) -> bytes:
        return b"\xc1" + value.encode()

    def decode(self, data: bytes) -> str:
        return data[1:].decode().upper()


class TestE20Stale:
    def test_get_returns_only_fresh_values(self, cache: Any, clock: ManualClock) -> None:
        """A copy past its timeout is a miss, though `get_or_set` may serve it."""
        cache.set("a", 1, 10)
        clock.advance(11)
        assert (cache.get("a"), cache.get_many(["a"]), "a" in cache) == (None, {}, False)
        assert (cache.touch("a"), cache.add("a", 2)) == (False, True)

    def test_get_or_set_serves_a_stale_value_and_refreshes_in_the_background(
        self, cache: Any, clock: ManualClock, make: Maker
    ) -> None:
        """By another thread, in the caller's language; its database connections are closed."""
        opened: list[Any] = []

        def query() -> int:
            with connection.cursor() as cursor:
                cursor.execute("SELECT 1")
            opened.append(connections["default"])
            return make()

        assert cache.get_or_set("a", query, 10) == 1
        clock.advance(11)
        make.gate.clear()
        with translation.override("de"):
            assert [cache.get_or_set("a", query, 10) for _ in range(3)] == [1, 1, 1]
        make.gate.set()
        make.ended.acquire()
        assert make.ended.acquire(timeout=30)
        until(lambda: cache.get("a") == 2)
        assert make.calls[0] is threading.current_thread() is not make.calls[1]
        assert (len(make.calls), make.languages[1]) == (2, "de")
        until(lambda: opened[1].connection is None)
        assert opened[0].connection is not None
        connections.close_all()

    def test_get_or_set_serves_the_old_value_during_error_for(
        self, cache: Any, clock: ManualClock, make: Maker
    ) -> None:
        """For ERROR_FOR, and then it is raised."""
        cache.get_or_set("a", make, 10)
        make.error = KeyError("upstream")
        clock.advance(100)
        assert cache.get_or_set("a", make, 10) == 1
        clock.advance(1000)
        with pytest.raises(KeyError, match="upstream"):
            cache.get_or_set("a", make, 10)

    def test_stale_for_and_error_for_of_a_call_apply_to_its_entry(
        self, cache: Any, clock: ManualClock, make: Maker
    ) -> None:
        """`stale_for` and `error_for` of a call are those of its entry."""
        cache.get_or_set("a", make, 10, stale_for=0, error_for=0)
        clock.advance(11)
        assert cache.get_or_set("a", make, 10) == 2
        assert make.calls == [threading.current_thread()] * 2


class TestE5OneCall:
    def test_sixteen_threads_cause_one_call_of_the_default(self, cache: Any, make: Maker) -> None:
        """All are told what it made; it runs in the thread of one of them."""
        make.gate.clear()
        timer = threading.Timer(0.2, make.gate.set)
        timer.start()
        values = together(lambda _: caches["default"].get_or_set("a", make))
        timer.join()
        assert (values, len(make.calls)) == ([1] * THREADS, 1)
        assert make.calls[0].name.startswith("ThreadPoolExecutor")

    def test_sixteen_threads_in_four_processes_cause_one_call_of_the_default(
        self, url: str, tmp_path: Path, clock: ManualClock
    ) -> None:
        """The store's lease decides who calls it; the others wait for the value."""
        if url == "memory://":
            return  # lives in one process
        log = tmp_path / "log"
        with ExitStack() as stack:
            processes = [Process(stack, "django_make", url, log) for _ in range(4)]
            for process in processes:
                process.go()
            assert [process.line() for process in processes] == ["made made made made"] * 4
        assert log.read_text().split() == ["made"]

    def test_an_exception_of_the_callable_is_raised_unwrapped(
        self, cache: Any, make: Maker
    ) -> None:
        """Not wrapped, and the next call may try again at once, as without a cache."""
        make.error = KeyError("upstream")
        for _ in range(2):
            with pytest.raises(KeyError, match="upstream"):
                cache.get_or_set("a", make)
        make.error = None
        assert (cache.get_or_set("a", make), cache.get("a")) == (3, 3)

    def test_the_callable_runs_in_the_callers_transaction(self, cache: Any) -> None:
        """It sees what the caller has written and not committed."""
        from django.db import transaction  # noqa: PLC0415

        from tests.kit.shop.models import Label  # noqa: PLC0415

        shop.tables()
        with transaction.atomic():
            Label.objects.create(name="new")
            assert cache.get_or_set("count", Label.objects.count) == 1
            transaction.set_rollback(True)
        connections.close_all()

    def test_a_timeout_of_none_never_ends_and_zero_stores_nothing(
        self, cache: Any, clock: ManualClock
    ) -> None:
        """None: never over; 0: the caller has it, and nobody else."""
        assert (cache.get_or_set("a", 1, None), cache.get_or_set("b", 2, 0)) == (1, 2)
        clock.advance(10 * 365 * 86_400)
        assert (cache.get("a"), cache.get("b")) == (1, None)


class TestE20DjangoRedis:
    """What users of django-redis call besides Django's own methods."""

    def test_ttl_says_how_long_a_value_is_there(self, cache: Any, clock: ManualClock) -> None:
        """As django-redis does: 0 for none, None without a timeout."""
        cache.set("a", 1, 10)
        cache.set("b", 1, None)
        assert [cache.ttl(key) for key in ("a", "b", "none")] == [10, None, 0]
        clock.advance(9.5)
        assert cache.ttl("a") == 1
        clock.advance(1)
        assert cache.ttl("a") == 0

    @pytest.mark.parametrize(
        ("method", "replacement"),
        [
            ("delete_pattern", "invalidate_tag"),
            ("keys", "stillfresh inspect"),
            ("iter_keys", "stillfresh inspect"),
            ("lock", "get_or_set"),
            ("pttl", r"cache\.ttl"),
            ("expire", r"cache\.touch"),
            ("persist", r"cache\.touch\(key, None\)"),
            ("client", "Redis client of your own"),
        ],
    )
    def test_a_method_that_is_not_offered_names_its_replacement(
        self, cache: Any, method: str, replacement: str
    ) -> None:
        """Code that asks with `hasattr` sees that it is not there."""
        assert not hasattr(cache, method)
        with pytest.raises(AttributeError, match=f"django-redis.*{replacement}"):
            getattr(cache, method)
        with pytest.raises(AttributeError, match="no attribute 'nothing_of_the_kind'"):
            _ = cache.nothing_of_the_kind


class TestE17Atomic:
    def test_incr_in_sixteen_threads_loses_nothing(self, cache: Any) -> None:
        """Sixteen threads add to one number; nothing is lost."""
        cache.set("hits", 0)
        results = together(lambda _: [caches["default"].incr("hits") for _ in range(3)])
        assert cache.get("hits") == 3 * THREADS
        assert len({it for row in results for it in row}) == 3 * THREADS

    def test_of_sixteen_threads_one_adds_and_one_deletes(self, cache: Any) -> None:
        """Of sixteen that try it at once."""
        assert together(lambda number: caches["default"].add("a", number)).count(True) == 1
        assert together(lambda _: caches["default"].delete("a")).count(True) == 1

    def test_a_deletion_voids_a_load_that_had_begun(self, cache: Any, make: Maker) -> None:
        """E2: there is nothing to delete yet, and what is being loaded may be wrong by now."""
        make.gate.clear()
        with ThreadPoolExecutor(1) as pool:
            loading = pool.submit(lambda: caches["default"].get_or_set("a", make))
            until(lambda: make.calls)
            assert cache.delete("a") is False
            make.gate.set()
            assert loading.result(30) == 1
        assert cache.get("a") != 1  # it may have been loaded anew

    def test_a_deletion_tells_whether_there_was_a_fresh_value(
        self, cache: Any, clock: ManualClock
    ) -> None:
        """E17: a stale value goes, too, and was none to Django."""
        assert cache.delete("a") is False
        cache.set("a", 1, timeout=10)
        assert cache.delete("a") is True
        assert cache.delete("a") is False
        cache.set("a", 1, timeout=10)
        clock.advance(20)
        assert cache.delete("a") is False
        assert cache.get_or_set("a", 2) == 2

    def test_incr_keeps_the_timeout_and_touch_renews_it(
        self, cache: Any, clock: ManualClock
    ) -> None:
        """`incr` does not renew it; `touch` does."""
        cache.set("a", 1, 10)
        cache.set("b", 1, 10)
        clock.advance(6)
        cache.incr("a")
        cache.touch("b", 10)
        clock.advance(6)
        assert (cache.get("a"), cache.get("b")) == (None, 1)


class TestE8Tags:
    def test_invalidate_tag_removes_the_entries_of_the_tag(self, cache: Any, make: Maker) -> None:
        """`get` misses, `get_or_set` waits for a new one; entries without the tag stay."""
        cache.set("a", 1, tags=["shop"])
        cache.set("b", 2)
        assert cache.get_or_set("c", make, tags=["shop", "c"]) == 1
        assert cache.invalidate_tag("shop") == 2
        assert cache.get_many("abc") == {"b": 2}
        assert cache.get_or_set("c", make, tags=["shop", "c"]) == 2

    def test_incr_and_touch_keep_the_tags_of_an_entry(self, cache: Any) -> None:
        """`incr` and `touch` know nothing of them."""
        cache.set_many({"a": 1, "b": 1}, tags=["shop"])
        assert (cache.incr("a"), cache.touch("b", 100)) == (2, True)
        assert cache.invalidate_tag("shop") == 2
        assert cache.get_many("ab") == {}

    def test_another_version_of_an_entry_keeps_the_tags(self, cache: Any) -> None:
        """Else it would be served after the tag is invalidated."""
        cache.set_many({"a": 1, "b": 1}, tags=["shop"])
        assert cache.incr_version("a") == 2
        assert asyncio.run(cache.aincr_version("b")) == 2
        assert cache.get_many(["a", "b"]) == {}
        assert cache.get_many(["a", "b"], version=2) == {"a": 1, "b": 1}
        cache.invalidate_tag("shop")
        assert cache.get_many(["a", "b"], version=2) == {}
        with pytest.raises(ValueError, match="'a' not found"):
            cache.incr_version("a", version=2)

    def test_invalidate_tag_reaches_a_running_load(self, cache: Any, make: Maker) -> None:
        """What it read before the invalidation is not kept as fresh."""
        make.gate.clear()
        with ThreadPoolExecutor(1) as pool:
            loading = pool.submit(cache.get_or_set, "a", make, tags=["shop"])
            until(lambda: make.calls)
            cache.invalidate_tag("shop")
            make.gate.set()
            assert loading.result(30) == 1
        assert cache.get_or_set("a", make, tags=["shop"]) == 2


class TestE20Async:
    async def test_every_async_method_works_as_its_sync_one(self, cache: Any) -> None:
        """As the sync ones, without holding the loop."""
        await cache.aset("a", 1)
        await cache.aset_many({"b": 2, "c": 3})
        assert [await cache.aget(key) for key in "abcd"] == [1, 2, 3, None]
        assert await cache.aget_many(["a", "d"]) == {"a": 1}
        assert [await cache.aadd("a", 5), await cache.aadd("d", 5)] == [False, True]
        assert [await cache.aincr("a"), await cache.adecr("b", 2)] == [2, 0]
        assert [await cache.atouch("a"), await cache.atouch("z")] == [True, False]
        assert [await cache.adelete("a"), await cache.adelete("a")] == [True, False]
        await cache.adelete_many(["b"])
        assert [await cache.ahas_key(key) for key in "abcd"] == [False, False, True, True]
        await cache.aclear()
        assert await cache.aget_many("abcd") == {}

    async def test_aget_or_set_takes_plain_and_coroutine_functions(self, cache: Any) -> None:
        """A coroutine function is awaited on the caller's loop."""
        loops: list[Any] = []

        async def asked() -> str:
            loops.append(asyncio.get_running_loop())
            return "value"

        assert await cache.aget_or_set("a", asked) == "value"
        assert await cache.aget_or_set("b", lambda: "plain") == "plain"
        assert loops == [asyncio.get_running_loop()]

    async def test_a_sync_method_works_inside_an_event_loop(self, cache: Any) -> None:
        """As with Django's own backends, it holds the loop: templates of async views do that."""
        cache.set("a", 1)
        assert cache.get("a") == 1

    async def test_aget_or_set_does_not_block_the_event_loop(self, cache: Any, make: Maker) -> None:
        """While a callable runs."""
        make.gate.clear()
        making = asyncio.create_task(cache.aget_or_set("a", make))
        while not make.calls:
            await asyncio.sleep(0.001)
        make.gate.set()
        assert await making == 1


class TestE20Settings:
    def test_clear_removes_only_entries_of_its_own_name(
        self, url: str, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Others on the same store keep what they have; more than a page of entries is cleared."""
        with shop.cache_on(url, clock, monkeypatch, NAME="one") as one:
            other = type(one)(url, {"OPTIONS": {"NAME": "two"}})
            other.set("a", 1)
            one.set_many({f"key-{number}": number for number in range(1200)}, 60)
            one.clear()
            assert one.get_many(f"key-{number}" for number in range(1200)) == {}
            assert other.get("a") == 1

    @pytest.mark.parametrize(
        ("options", "said"),
        [
            ({"MAX_ENTRY": 5}, r"there is no OPTIONS\['MAX_ENTRY'\]; there are NAME"),
            ({"NAME": "Prices!"}, "resource name 'Prices!'"),
            ({"STALE_FOR": "soon"}, r"OPTIONS\['STALE_FOR'\]: cannot read 'soon'"),
            ({"MEMORY_FOR": -1}, "memory_for"),
            ({"MAX_ENTRIES": 0}, "max_entries"),
        ],
    )
    def test_wrong_options_of_a_django_cache_are_named(
        self, options: dict[str, Any], said: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """When the alias is first used; also those of other backends."""
        monkeypatch.setattr(shared, "_caches", {})
        from stillfresh.integrations.django import StillfreshCache  # noqa: PLC0415

        with pytest.raises(ConfigError, match=said):
            StillfreshCache("memory://", {"OPTIONS": options})
        with pytest.raises(ConfigError, match="LOCATION is ''"):
            StillfreshCache("", {})
        with pytest.raises(ConfigError, match="TIMEOUT is '1h'"):
            StillfreshCache("memory://", {"TIMEOUT": "1h"})

    def test_aliases_of_one_store_that_disagree_are_refused(self, cache: Any, url: str) -> None:
        """Two that disagree on what they share are told which option it is."""
        with pytest.raises(ConfigError, match=r"OPTIONS\['MEMORY_FOR'\] is '1s'"):
            type(cache)(url, {"OPTIONS": {"MEMORY_FOR": "1s"}})

    def test_close_at_the_end_of_a_request_closes_nothing(self, cache: Any) -> None:
        """The thread, the file and the connections stay for the next one."""
        cache.set("a", 1)
        before = set(threading.enumerate())
        cache.close()
        assert cache.get("a") == 1
        assert set(threading.enumerate()) >= before


def values_of(cache: Any) -> list[object]:
    """The bytes in the store."""
    on_loop = cache._shared.cache.on_loop

    async def read() -> list[object]:
        store = await on_loop.store()
        ids = [entry.id for entry in await on_loop.entries()]
        records = await store.read("django", ids)
        return [record.copy.value for record in records.values() if record.copy]

    return list(cache._shared.cache.run(read))


class TestD3Codecs:
    def test_values_are_encrypted_around_djangos_own_codec(
        self, url: str, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Dates and tuples come back as with the codec alone; the store sees none of it."""
        codec = encrypted(new_key(), zstd(above=0))
        value = {"at": (1, date(2026, 1, 2)), "text": "secret " * 50}
        with shop.cache_on(url, clock, monkeypatch, CODEC=codec) as cache:
            cache.set("key", value)
            cache.set_many({"a": 1, "b": 2})
            assert cache.get("key") == value
            assert cache.get_many(["a", "b"]) == {"a": 1, "b": 2}
            assert cache.incr("a") == 2
            assert cache.get_or_set("new", lambda: value) == value
            stored = [data for data in values_of(cache) if isinstance(data, bytes)]
            assert len(stored) == 4
            assert not any(b"secret" in data for data in stored)

    def test_a_value_of_another_key_is_a_miss_and_one_log_line(
        self,
        tmp_path: Path,
        clock: ManualClock,
        monkeypatch: pytest.MonkeyPatch,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        url = f"sqlite:///{tmp_path}/cache.db"
        with shop.cache_on(url, clock, monkeypatch, CODEC=encrypted(new_key())) as cache:
            cache.set("key", 1)
        with shop.cache_on(url, clock, monkeypatch, CODEC=encrypted(new_key())) as cache:
            assert cache.get("key") is None
            assert cache.get("key", "default") == "default"
            (line,) = (record.getMessage() for record in caplog.records)
            assert "a stored value cannot be read" in line
            assert cache.get_or_set("key", 2) == 2
            assert cache.get("key") == 2
