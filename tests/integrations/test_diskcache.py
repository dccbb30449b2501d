"""D2: DiskCache does what users of diskcache's Cache expect, without pickle.

diskcache's own tests are run by test_diskcache_suite.py; here is what they do not ask.
"""

import asyncio
import io
import pickle
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import dataclass
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path
from threading import Barrier
from typing import Any
from uuid import UUID

import apsw
import msgspec
import pydantic
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stillfresh import ConfigError, NotOpen, StoreError, encrypted, new_key, zstd
from stillfresh.integrations import diskcache
from stillfresh.integrations.diskcache import Cache, DiskCache
from stillfresh.integrations.diskcache.keys import id_of, key_of
from stillfresh.testing import ManualClock
from tests.kit.processes import Process

NOW = 1_700_000_000.0
KEYS: list[Any] = [
    None,
    False,
    True,
    -(2**63),
    -7,
    -0.5,
    0,
    2.5,
    3,
    2**63 - 1,
    "",
    "tea",
    "Tée\n",
    b"",
    b"\x00\xff",
    (),
    ("a", 1, None, (b"x",)),
    ["a"],
    2**64,
    float("inf"),
    date(2026, 1, 2),
    UUID(int=5),
    Decimal("1.10"),
]
VALUES: list[Any] = [
    None,
    True,
    2**512,
    1.5,
    "text",
    b"bytes" * 2**18,
    [1, [2]],
    (1, (2,)),
    {1, 2},
    {"a": {2: (3,)}},
    datetime(2026, 1, 2, tzinfo=UTC),
    Decimal("1.10"),
    UUID(int=5),
]

UNREADABLE_TAGS = ["", "cx", "ex", "fx", "h!"]


@dataclass
class Point:
    x: int


class Struct(msgspec.Struct):
    x: int


class Model(pydantic.BaseModel):
    x: int


def settings_of(option: str) -> dict[str, Any]:
    return {option: 1}


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(start=NOW)


@pytest.fixture
def cache(tmp_path: Path, clock: ManualClock) -> Iterator[DiskCache]:
    with DiskCache(tmp_path / "cache", clock=clock) as cache:
        yield cache


class TestD2Keys:
    @pytest.mark.parametrize("key", KEYS, ids=repr)
    def test_every_plain_key_is_its_own_entry_and_comes_back(
        self, cache: DiskCache, key: object
    ) -> None:
        cache[key] = "value"
        (back,) = cache
        assert (back, type(back)) == (key, type(key))
        assert cache[key] == "value"
        assert key in cache
        del cache[key]
        assert len(cache) == 0

    def test_no_two_keys_share_an_entry_but_equal_numbers(self, cache: DiskCache) -> None:
        """As in diskcache: 3 and 3.0 are one key, and True is not 1."""
        for number, key in enumerate([*KEYS, 1]):
            cache[key] = number
        assert len(cache) == len(KEYS) + 1
        assert cache[3.0] == cache[3]
        assert cache[True] != cache[1]

    def test_keys_are_iterated_in_order(self, cache: DiskCache) -> None:
        numbers = [-(2**40), -5, -1.5, 0, 0.25, 7, 10, 2**40]
        for key in ["b", *reversed(numbers), "a", b"z"]:
            cache[key] = 0
        assert list(cache) == [*numbers, "a", "b", b"z"]
        assert list(reversed(cache)) == [b"z", "b", "a", *reversed(numbers)]
        assert list(cache.iterkeys(reverse=True)) == list(reversed(cache))

    @given(
        one=st.integers(-(2**63), 2**63 - 1) | st.floats(-1e18, 1e18),
        other=st.integers(-(2**63), 2**63 - 1) | st.floats(-1e18, 1e18),
    )
    def test_numbers_of_different_size_have_ids_in_their_order(
        self, one: float, other: float
    ) -> None:
        """Numbers between two whole ones may be in any order."""
        assert key_of(id_of(one)) == one
        if one // 1 < other // 1:
            assert id_of(one) < id_of(other)

    @pytest.mark.parametrize("key", [object(), {"a": 1}, {1}, frozenset({1}), Point(1), ("a", {})])
    def test_another_key_is_refused_with_what_to_use(self, cache: DiskCache, key: Any) -> None:
        with pytest.raises(TypeError, match="Use a key of text, bytes, numbers"):
            cache.set(key, 1)

    def test_a_key_of_nested_tuples_has_an_id_of_its_size(self) -> None:
        """An id within an id would be escaped at each level, and double."""
        key: Any = "tea"
        for _ in range(20):
            key = (key, [1])
        assert len(id_of(key)) < 2_000
        assert key_of(id_of(key)) == key

    def test_more_entries_than_one_page_are_iterated(
        self, cache: DiskCache, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("stillfresh.integrations.diskcache.cache.PAGE", 3)
        for number in range(10):
            cache[number] = number
        assert list(cache) == list(range(10))


class TestD2Values:
    @pytest.mark.parametrize("value", VALUES, ids=lambda value: type(value).__name__)
    def test_plain_data_comes_back_equal_and_of_the_same_type(
        self, cache: DiskCache, value: object
    ) -> None:
        cache["key"] = value
        back = cache["key"]
        assert (back, type(back)) == (value, type(value))

    def test_a_caller_may_change_what_it_gets(self, cache: DiskCache) -> None:
        cache["key"] = [1]
        cache["key"].append(2)
        assert cache["key"] == [1]

    @pytest.mark.parametrize("value", [object(), Point(1), len, Model(x=1), [Struct(1)]])
    def test_another_value_is_refused_with_what_to_do(self, cache: DiskCache, value: Any) -> None:
        with pytest.raises(TypeError, match=r"value_type=….*or give codec="):
            cache["key"] = value
        assert "key" not in cache

    @pytest.mark.parametrize("of", [Point, Struct, Model])
    def test_a_type_of_all_values_can_be_named(self, tmp_path: Path, of: Any) -> None:
        with DiskCache(tmp_path, value_type=of, codec=zstd(above=0)) as cache:
            cache["key"] = of(x=1)
            assert cache["key"] == of(x=1)
            with pytest.raises((TypeError, ValueError)):
                cache["key"] = "text"
            assert cache["key"] == of(x=1)

    def test_values_can_be_encrypted_and_a_tag_stays(self, tmp_path: Path) -> None:
        with DiskCache(tmp_path, codec=encrypted(new_key())) as cache:
            cache.set("key", "secret", tag="red")
            assert cache.get("key", tag=True) == ("secret", "red")
        assert b"secret" not in (tmp_path / "stillfresh.db").read_bytes()

    def test_a_value_that_cannot_be_read_is_a_miss_and_one_log_line(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        with DiskCache(tmp_path, codec=encrypted(new_key())) as cache:
            cache["key"] = "secret"
        with DiskCache(tmp_path) as cache:
            assert cache.get("key", "default") == "default"
            assert "key" not in cache
            assert len(caplog.records) == 1
            cache["key"] = 1
            assert cache["key"] == 1

    def test_what_cannot_be_read_is_replaced_by_add_incr_and_memoize(self, tmp_path: Path) -> None:
        """The store has it, but for the caller there is nothing."""
        calls = []

        def price(sku: str) -> int:
            calls.append(sku)
            return len(calls)

        with DiskCache(tmp_path, codec=encrypted(new_key())) as before:
            before["a"] = "secret"
            before["n"] = 5
            before.memoize(name="price")(price)("tea")
        with DiskCache(tmp_path) as cache:
            assert cache.add("a", 1)
            assert not cache.add("a", 2)
            assert cache.incr("n") == 1
            memoized = cache.memoize(name="price")(price)
            assert [memoized("tea"), memoized("tea")] == [2, 2]
            assert dict.fromkeys(cache).keys() >= {"a", "n"}

    @pytest.mark.parametrize(
        "data",
        [
            b"\xc1",
            b"\xc1\x92\x91",
            b"\xc1\x05",
            b"\xc1\x92\x91\xa2\xff\xff\xc4\x01\x01",
            *(b"\xc1" + msgspec.msgpack.encode(((tag,), b"\x01")) for tag in UNREADABLE_TAGS),
        ],
    )
    def test_an_entry_whose_tag_was_changed_is_a_miss_and_one_log_line(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture, data: bytes
    ) -> None:
        """Tags are stored in front of the value, so they can be damaged as well."""
        names = ("read", "added", "counted", "removed")
        with DiskCache(tmp_path) as cache:
            for name in names:
                cache.set(name, 5, tag="red")
        with closing(apsw.Connection(str(tmp_path / "stillfresh.db"))) as rows:
            rows.execute("UPDATE diskcache SET value = ?", (data,))
        with DiskCache(tmp_path) as cache:
            assert cache.get("read", "default") == "default"
            assert "read" not in cache
            assert cache.add("added", 1)
            assert cache.incr("counted") == 1
            assert cache.incr("counted") == 2
            assert cache.pop("removed", "default") == "default"
            assert len(caplog.records) == 1

    def test_files_are_stored_as_bytes_and_read_as_files(self, cache: DiskCache) -> None:
        cache.set("key", io.BytesIO(b"content"), read=True)
        assert cache["key"] == b"content"
        with cache.read("key") as file:
            assert file.read() == b"content"
        with cache.get("key", read=True) as file:
            assert file.read(3) == b"con"
        cache["text"] = "text"
        assert cache.get("text", read=True) == "text"
        with pytest.raises(TypeError, match="is not bytes"):
            cache.read("text")
        with pytest.raises(KeyError):
            cache.read("missing")


class TestD2Ends:
    def test_an_entry_is_there_until_its_end(self, cache: DiskCache, clock: ManualClock) -> None:
        cache.set("key", 1, expire=10)
        cache.set("other", 2)
        assert cache.get("key", expire_time=True) == (1, NOW + 10)
        assert cache.get("other", expire_time=True) == (2, None)
        clock.advance(10)
        assert cache.get("key", "gone") == "gone"
        assert "key" not in cache
        assert list(cache) == ["other"]
        assert cache.add("key", 3)

    def test_expire_and_cull_remove_what_has_ended_and_count_it(
        self, cache: DiskCache, clock: ManualClock
    ) -> None:
        for number in range(10):
            cache.set(number, number, expire=5 if number < 6 else None)
        cache.delete(9)
        assert cache.expire() == 0
        clock.advance(6)
        assert cache.expire() == 6
        assert cache.expire() == 0
        cache.set("key", 1, expire=5)
        clock.advance(6)
        assert cache.cull() == 1
        assert list(cache) == [6, 7, 8]

    def test_touch_gives_a_new_end_and_keeps_value_and_tag(
        self, cache: DiskCache, clock: ManualClock
    ) -> None:
        cache.set("key", 1, expire=10, tag="red")
        clock.advance(9)
        assert cache.touch("key", 10)
        clock.advance(9)
        assert cache.get("key", tag=True) == (1, "red")
        assert cache.evict("red") == 1
        assert not cache.touch("key", 10)
        cache["other"] = 1
        assert cache.touch("other", 0)
        assert "other" not in cache

    @pytest.mark.parametrize("expire", [0, -1])
    def test_an_end_that_has_passed_stores_nothing(self, cache: DiskCache, expire: float) -> None:
        cache["key"] = 1
        assert cache.set("key", 2, expire=expire)
        assert "key" not in cache
        assert cache.add("key", 2, expire=expire)
        assert "key" not in cache

    def test_incr_keeps_end_and_tag(self, cache: DiskCache, clock: ManualClock) -> None:
        cache.set("key", 1, expire=10, tag=("red", 5))
        assert cache.incr("key", 2) == 3
        assert cache.get("key", expire_time=True, tag=True) == (3, NOW + 10, ("red", 5))
        clock.advance(11)
        assert cache.incr("key") == 1
        assert cache.get("key", expire_time=True, tag=True) == (1, None, None)


class TestD2Tags:
    @pytest.mark.parametrize("tag", ["red", 5, 1.5, b"red", ("a", 1)])
    def test_evict_removes_the_entries_of_one_tag(self, cache: DiskCache, tag: Any) -> None:
        for number in range(3):
            cache.set(number, number, tag=tag)
        cache.set(3, 3, tag="other")
        cache.set(4, 4)
        assert cache.evict(tag) == 3
        assert list(cache) == [3, 4]
        assert cache.evict(tag) == 0

    def test_an_entry_that_is_set_during_an_evict_stays(
        self, cache: DiskCache, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Another thread sets it again, after the tag was invalidated and before it is removed."""
        for name in ("a", "b"):
            cache.set(name, "old", tag="red")
        invalidate_tag = cache._cache.invalidate_tag

        def invalidate_and_set(tag: str) -> list[tuple[str, str]]:
            invalidated = invalidate_tag(tag)
            cache.set("a", "new")
            return invalidated

        monkeypatch.setattr(cache._cache, "invalidate_tag", invalidate_and_set)
        assert cache.evict("red") == 2
        assert {key: cache[key] for key in cache} == {"a": "new"}

    def test_a_new_set_replaces_the_tag(self, cache: DiskCache) -> None:
        cache.set("key", 1, tag="red")
        cache.set("key", 2)
        assert cache.get("key", tag=True) == (2, None)
        assert cache.evict("red") == 0
        assert cache["key"] == 2


class TestD2Memoize:
    def test_a_function_is_called_once_for_its_arguments(self, cache: DiskCache) -> None:
        calls = []

        @cache.memoize(expire=60, tag="sums", ignore={"log"})
        def total(*numbers: int, scale: int = 1, log: object = None) -> int:
            """Adds."""
            calls.append(numbers)
            return sum(numbers) * scale

        assert [total(1, 2), total(1, 2, log=object()), total(1, 2, scale=2)] == [3, 3, 6]
        assert calls == [(1, 2), (1, 2)]
        assert total.__doc__ == "Adds."
        key = total.__cache_key__(1, 2)  # type: ignore[attr-defined]
        assert cache[key] == 3
        assert cache.evict("sums") == 2
        assert total(1, 2) == 3
        assert len(calls) == 3

    def test_arguments_of_different_types_are_different_calls_if_asked(
        self, cache: DiskCache
    ) -> None:
        calls = []

        @cache.memoize(typed=True)
        def same(value: float) -> float:
            calls.append(value)
            return value

        assert [same(1), same(1.0), same(1)] == [1, 1.0, 1]
        assert len(calls) == 2

    def test_threads_call_a_function_once_if_its_stored_value_cannot_be_read(
        self, tmp_path: Path
    ) -> None:
        """For example after a key was dropped."""
        calls = []
        all_ready = Barrier(8)

        def price() -> int:
            calls.append("price")
            return 3

        with DiskCache(tmp_path, codec=encrypted(new_key())) as before:
            before.memoize(name="price")(price)()
        with (
            DiskCache(tmp_path, codec=encrypted(new_key())) as cache,
            ThreadPoolExecutor(8) as pool,
        ):
            memoized = cache.memoize(name="price")(price)

            def ask(_: int) -> int:
                all_ready.wait()
                return memoized()

            assert list(pool.map(ask, range(8))) == [3] * 8
        assert len(calls) == 2

    def test_a_result_that_cannot_be_stored_is_refused_at_every_call(
        self, cache: DiskCache
    ) -> None:
        """D2: also in the moment after the first one, when the load is in its cooldown."""
        memoized = cache.memoize()(object)
        for _ in range(3):
            with pytest.raises(TypeError, match=r"object cannot be cached\. Store plain data"):
                memoized()

    def test_an_exception_reaches_the_caller_and_the_function_is_called_again(
        self, cache: DiskCache
    ) -> None:
        calls = []

        @cache.memoize()
        def fails_at_first(number: int) -> int:
            calls.append(number)
            if len(calls) < 3:
                raise LookupError("not yet")
            return number

        for _ in range(2):
            with pytest.raises(LookupError, match="not yet"):
                fails_at_first(1)
        assert fails_at_first(1) == 1
        assert len(calls) == 3

    def test_a_memoized_function_may_call_itself(self, cache: DiskCache) -> None:
        @cache.memoize()
        def factorial(number: int) -> int:
            return number * factorial(number - 1) if number else 1

        assert factorial(20) == 2432902008176640000

    def test_a_value_that_cannot_be_stored_is_an_error_that_says_so(self, cache: DiskCache) -> None:
        @cache.memoize()
        def make() -> object:
            return object()

        with pytest.raises(TypeError, match="cannot be cached"):
            make()

    def test_a_result_whose_end_has_passed_is_returned_and_not_kept(self, cache: DiskCache) -> None:
        calls = []

        @cache.memoize(expire=0)
        def number() -> int:
            calls.append(1)
            return len(calls)

        assert [number(), number()] == [1, 2]
        assert len(cache) == 0

    def test_an_argument_that_cannot_be_a_key_is_refused(self, cache: DiskCache) -> None:
        @cache.memoize()
        def name(user: Point) -> int:
            return user.x

        with pytest.raises(TypeError, match="Use a key of text"):
            name(Point(1))

    def test_the_parentheses_must_not_be_forgotten(self, cache: DiskCache) -> None:
        with pytest.raises(TypeError, match=r"write @cache\.memoize\(\)"):
            cache.memoize(len)  # type: ignore[arg-type]


class TestD2Refusals:
    @pytest.mark.parametrize(
        ("name", "advice"),
        [("transact", "`update`.*`changing`"), ("push", "queue"), ("reset", "give options")],
    )
    def test_a_method_that_is_not_there_says_what_to_do(
        self, cache: DiskCache, name: str, advice: str
    ) -> None:
        with pytest.raises(AttributeError, match=f"DiskCache has no {name}.*{advice}"):
            getattr(cache, name)

    @pytest.mark.parametrize("name", ["FanoutCache", "Deque", "Index", "Lock", "Timeout"])
    def test_a_class_that_is_not_there_says_what_to_do(self, name: str) -> None:
        program = f"from stillfresh.integrations.diskcache import {name}"
        with pytest.raises(ImportError, match=f"stillfresh has no {name} of diskcache: "):
            exec(program)  # noqa: S102 (as a user's program does)
        with pytest.raises(AttributeError):
            _ = diskcache.nothing

    @pytest.mark.parametrize(
        "option",
        [
            "cull_limit",
            "disk",
            "disk_min_file_size",
            "eviction_policy",
            "sqlite_mmap_size",
            "timeout",
        ],
    )
    def test_a_setting_that_is_not_there_says_what_to_do(self, tmp_path: Path, option: str) -> None:
        with pytest.raises(ConfigError, match=f"DiskCache: {option}: leave it out"):
            DiskCache(tmp_path, **settings_of(option))
        with pytest.raises(ConfigError, match="there is no option 'shards'"):
            DiskCache(tmp_path, shards=8)

    def test_fixing_and_other_times_are_refused(self, cache: DiskCache) -> None:
        with pytest.raises(ConfigError, match="leave out `fix`"):
            cache.check(fix=True)
        with pytest.raises(ConfigError, match="leave out `now`"):
            cache.expire(5.0)

    def test_an_old_cache_in_the_directory_is_mentioned_and_not_read(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        (tmp_path / "cache.db").write_bytes(b"old")
        for _ in range(2):
            with DiskCache(tmp_path) as cache:
                cache["a"] = 1
        (line,) = (record.getMessage() for record in caplog.records)
        assert f"stillfresh diskcache convert {tmp_path}" in line


class TestD2Life:
    def test_the_name_of_diskcache_is_there_too(self) -> None:
        assert Cache is DiskCache

    def test_a_closed_cache_says_so_and_can_be_opened_again(self, cache: DiskCache) -> None:
        cache["a"] = 1
        cache.close()
        cache.close()
        with pytest.raises(NotOpen):
            cache["a"]
        with cache:
            assert cache["a"] == 1

    def test_a_directory_with_odd_letters_is_taken_as_it_is(self, tmp_path: Path) -> None:
        odd = tmp_path / "a b?c#d%41"
        with DiskCache(odd) as cache:
            cache["a"] = 1
            assert cache.check() == []
            assert cache.volume() > 0
        assert [path.name for path in odd.glob("*.db")] == ["stillfresh.db"]
        with DiskCache(str(odd)) as cache:
            assert cache["a"] == 1

    def test_without_a_directory_a_temporary_one_is_made(self) -> None:
        with DiskCache() as cache:
            cache["a"] = 1
            assert (Path(cache.directory) / "stillfresh.db").exists()

    def test_hits_and_misses_are_counted_when_asked(self, cache: DiskCache) -> None:
        cache["a"] = 1
        cache.get("a")
        assert cache.stats() == (0, 0)
        cache.get("a")
        cache.get("b")
        assert cache.stats(reset=True) == (1, 1)
        assert cache.stats(enable=False) == (0, 0)

    async def test_it_may_be_called_on_an_event_loop(self, cache: DiskCache) -> None:
        """It blocks the loop, as diskcache does."""
        await asyncio.sleep(0)
        cache["a"] = 1
        assert cache["a"] == 1

    def test_a_worker_process_gets_the_same_cache(self, cache: DiskCache) -> None:
        cache["a"] = 1
        plain = DiskCache(cache.directory, size_limit="1MB")
        with pickle.loads(pickle.dumps(plain)) as other:  # noqa: S301 (our own object)
            assert other["a"] == 1
            assert other.size_limit == 1_000_000
        assert repr(other) == f"DiskCache({cache.directory!r})"
        plain.close()

    def test_importing_it_does_not_import_diskcache_or_pickle(self) -> None:
        program = (
            "import sys; import stillfresh.integrations.diskcache; "
            "print('diskcache' in sys.modules, 'django' in sys.modules)"
        )
        done = subprocess.run(
            [sys.executable, "-c", program], capture_output=True, text=True, check=True
        )
        assert done.stdout.strip() == "False False"


class TestD2Size:
    def test_the_least_recently_used_entries_go_when_it_is_full(
        self, tmp_path: Path, clock: ManualClock
    ) -> None:
        with DiskCache(tmp_path, size_limit="1MB", clock=clock) as cache:
            for number in range(30):
                cache[number] = b"x" * 100_000
                clock.advance(61)
                assert cache.get(0) is not None
            keys = list(cache)
            assert keys[0] == 0
            assert keys[-1] == 29
            assert 5 <= len(keys) <= 10
            assert cache.volume() < 8_000_000

    def test_without_a_limit_all_entries_stay(self, tmp_path: Path) -> None:
        with DiskCache(tmp_path, size_limit=None) as cache:
            for number in range(30):
                cache[number] = b"x" * 100_000
            assert len(cache) == 30


class TestD2Processes:
    def test_four_processes_count_together(self, tmp_path: Path) -> None:
        with ExitStack() as stack:
            processes = [
                Process(stack, "diskcache", tmp_path, "count", "-", is_ready=False)
                for _ in range(4)
            ]
            for process in processes:
                assert process.line() == "ready"
                process.go()
            assert [process.line() for process in processes] == ["counted"] * 4
        with DiskCache(tmp_path) as cache:
            assert cache["counter"] == 800

    def test_sixteen_threads_in_four_processes_call_a_function_once(self, tmp_path: Path) -> None:
        log = tmp_path / "log"
        with ExitStack() as stack:
            processes = [
                Process(stack, "diskcache", tmp_path, "memoize", log, is_ready=False)
                for _ in range(4)
            ]
            for process in processes:
                assert process.line() == "ready"
            for process in processes:
                process.go()
            assert [process.line() for process in processes] == ["42 42 42 42"] * 4
        assert log.read_text().split() == ["called"]

    def test_a_process_that_is_killed_leaves_all_that_it_has_set(self, tmp_path: Path) -> None:
        """Killed amid a write, while another process has the file open."""
        with DiskCache(tmp_path) as cache, ExitStack() as stack:
            cache["ours"] = 1
            process = Process(stack, "diskcache", tmp_path, "write", "-")
            process.go()
            while (line := process.line()) != "50":
                assert line
            process.process.kill()
            process.process.wait()
            assert set(range(51)) <= set(cache)
            assert cache[50] == "x" * 1_000
            assert cache.check() == []
            cache["ours"] = 2
            assert cache.evict("many") >= 51
            assert list(cache) == ["ours"]

    def test_on_a_full_disk_a_set_raises_and_the_rest_goes_on(self, small_disk: Path) -> None:
        with DiskCache(small_disk / "cache") as cache:
            cache["small"] = 1
            with pytest.raises(StoreError, match="the disk is full"):
                cache["big"] = b"x" * 5_000_000
            assert cache.get("big") is None
            assert cache["small"] == 1
            cache["small"] = 2
            assert cache["small"] == 2
            assert cache.check() == []
