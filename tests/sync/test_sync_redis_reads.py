"""E20: a thread reads Redis on a connection of its own; what goes wrong is the loop's to mend."""

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from stillfresh import Loaded, StoreError, SyncCache, Verdict
from stillfresh.engine import Spec, terms_of
from stillfresh.stores.redis import RedisStore
from stillfresh.stores.redis.link import Link
from stillfresh.stores.urls import store_for
from stillfresh.sync import SyncResource
from tests.kit.servers.valkey import Server, binary_of, serving
from tests.kit.sync import PlainUpstream, declare, until


class Words:
    """A codec of text."""

    def encode(self, value: str) -> bytes:
        return value.encode()

    def decode(self, data: bytes) -> str:
        return data.decode()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    """One that can be stopped."""
    binary = binary_of("valkey")
    assert binary is not None
    with serving(binary, tmp_path) as server:
        yield server


@pytest.fixture
def url(server: Server) -> str:
    return server.url(timeout="30s")


@pytest.fixture
def cache(url: str) -> Iterator[SyncCache]:
    with SyncCache(url) as cache:
        yield cache


def declared(cache: SyncCache, memory_for: float = 0) -> SyncResource[str, str]:
    spec: Spec[str, str] = Spec(
        "word",
        lambda _: {},
        Words(),
        None,
        terms_of("word", 60, 60, 60, 0),
        max_batch=1,
        concurrency=4,
        max_entries=10,
        memory_for=memory_for,
        lease_for=5,
        load_timeout=30,
        in_thread=True,
    )
    return cache.declare(spec, str, str)


def values(core: SyncResource[str, str], *keys: str) -> dict[str, Any]:
    return {key: getattr(it, "value", it) for key, it in core.known(keys).items()}


class TestE20RedisReads:
    def test_sync_reads_of_redis_need_no_turn_of_the_loop(
        self, cache: SyncCache, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """What is there, and that nothing is there; stale copies too."""
        words = declared(cache)
        words.put_many({"a": "one", "b": Loaded("two", fresh_for=0, stale_for=60)})

        def run(*_: object) -> None:
            raise AssertionError("the loop was asked")

        monkeypatch.setattr(words, "_run", run)
        assert values(words, "a", "b", "c") == {"a": "one", "b": "two"}

    def test_sync_reads_of_redis_see_another_process_at_once(
        self, cache: SyncCache, url: str
    ) -> None:
        """Its changes and its invalidations."""
        words = declared(cache)
        with SyncCache(url) as there:
            others = declared(there)
            words.put("a", "one")
            others.put("a", "two")
            assert values(words, "a") == {"a": "two"}
            others.invalidate("a")
            assert values(words, "a") == {}

    def test_sync_reads_go_on_when_a_server_comes_back(
        self, cache: SyncCache, server: Server
    ) -> None:
        """While it is unavailable, memory answers at once; then the store is read again."""
        words = declared(cache)
        words.put("a", "one")
        assert values(words, "a") == {"a": "one"}
        server.stop()
        began = time.monotonic()
        for _ in range(20):
            values(words, "a")
        assert time.monotonic() - began < 10
        server.start()
        until(lambda: values(words, "b") == {} and _stored(words))

    def test_e29_no_thread_is_told_fresh_of_what_was_invalidated_before_the_server_went(
        self, cache: SyncCache, url: str, server: Server
    ) -> None:
        """Another process's invalidation was confirmed, and this one cannot ask any more."""
        upstream = PlainUpstream()
        prices = declare(cache, upstream)
        prices("a")
        with SyncCache(url) as there:
            declare(there, upstream).invalidate("a")
        server.stop()
        answers = [prices.get("a") for _ in range(10)]
        answers += [prices.get_many(["a"])["a"] for _ in range(10)]
        answers += [prices.known(["a"])["a"] for _ in range(10)]
        peeked = prices.peek("a")
        assert peeked is not None
        told = {(it.verdict, it.unverified) for it in [*answers, peeked]}
        assert told == {(Verdict.STALE, True)}
        assert upstream.loaded == [["a"]]

    def test_memory_that_may_answer_is_filled_by_the_loop(
        self, cache: SyncCache, url: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """With `memory_for` the second read asks nobody."""
        words = declared(cache, memory_for=60)
        with SyncCache(url) as there:
            declared(there).put("a", "one")
        assert values(words, "a") == {"a": "one"}
        monkeypatch.setattr(words, "_run", None)
        monkeypatch.setattr(Link, "send", None)
        monkeypatch.setattr(Link, "send_in_thread", None)
        assert values(words, "a") == {"a": "one"}

    def test_a_key_that_is_missing_asks_once_also_with_memory_for(
        self, cache: SyncCache, url: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """S14: and so does one that is there, which memory keeps from then on."""
        words = declared(cache, memory_for=60)
        with SyncCache(url) as there:
            declared(there).put("a", "one")
        asked: list[Any] = []
        send = Link.send_in_thread

        def noted(link: Link, commands: Any) -> Any:
            asked.append([command[0] for command in commands])
            return send(link, commands)

        monkeypatch.setattr(Link, "send_in_thread", noted)
        assert values(words, "none") == {}
        assert values(words, "a") == {"a": "one"}
        assert values(words, "a") == {"a": "one"}
        assert asked == [["MGET"], ["MGET"]]

    def test_a_value_that_memory_has_is_confirmed_by_its_first_bytes(
        self, cache: SyncCache, url: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """S14: one round trip without the value; what others changed is seen at once."""
        words = declared(cache)
        long = "long" * 1_000
        words.put("a", long)
        with SyncCache(url) as there:
            others = declared(there)
            asked: list[Any] = []
            send = Link.send_in_thread

            def noted(link: Link, commands: Any) -> Any:
                asked.append([command[0] for command in commands])
                return send(link, commands)

            with monkeypatch.context() as patch:
                patch.setattr(Link, "send_in_thread", noted)
                answers = [words.get("a"), words.get("a")]
                assert words("a") == long
                assert asked == [["GETRANGE"]] * 3
            assert {answer.value for answer in answers} == {long}
            assert {answer.verdict for answer in answers} == {Verdict.FRESH}
            others.put("a", "short")
            assert words("a") == "short"
            others.put("a", long * 2)
            assert words("a") == long * 2
            others.delete("a")
            assert words.known(["a"]) == {}
            assert not words.get("a").found
            others.put("a", "again")
            others.invalidate("a", soft=True)
            # A stale read begins a refresh, which stores an absence: so it comes last.
            assert words.get("a").verdict is Verdict.STALE

    async def test_no_thread_that_runs_an_event_loop_waits_for_the_server(
        self, server: Server
    ) -> None:
        """The loop thread answers such a call, and a warning says what to write."""
        cache = SyncCache(server.url())
        await asyncio.to_thread(cache.open)
        try:
            words = declared(cache)
            await asyncio.to_thread(words.put, "a", "one")
            with pytest.warns(RuntimeWarning, match="blocks the event loop"):
                assert words.get("a").value == "one"
            assert words("a") == "one"
        finally:
            await asyncio.to_thread(cache.close)

    def test_memory_takes_nothing_that_was_read_before_a_change(
        self, cache: SyncCache, url: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """E6: another thread invalidates the key while the store answers this one."""
        words = declared(cache, memory_for=60)
        with SyncCache(url) as there:
            declared(there).put("a", "one")
        texts = Link.texts_in_thread

        def late(link: Link, keys: list[bytes]) -> list[bytes | None]:
            found = texts(link, keys)
            monkeypatch.setattr(Link, "texts_in_thread", texts)
            words.invalidate("a")
            return found

        monkeypatch.setattr(Link, "texts_in_thread", late)
        assert values(words, "a") == {}
        assert words.peek("a") is None

    async def test_threads_read_rows_as_the_loop_reads_them(self, server: Server) -> None:
        """The same records, for all that may lie there."""
        store = store_for(server.url(), time.time)
        assert isinstance(store, RedisStore)
        await store.open()
        try:
            ids = [f"id-{number}" for number in range(50)]
            server.command("SET", "stillfresh:v2:{6u}:word:odd", "not ours")
            ids.append("odd")
            assert store.read_in_thread("word", ids) == await store.read("word", ids)
        finally:
            await store.close()

    def test_a_server_that_hangs_costs_one_time_out(self, server: Server) -> None:
        """Further threads are told at once, until its pause is over."""
        with SyncCache(server.url(timeout="200ms")) as cache:
            words = declared(cache)
            words.put("a", "one")
            server.pause()
            try:
                with pytest.raises(StoreError, match="is unavailable: "):
                    words.put("a", "two")
                until(lambda: _is_refused_at_once(words))
            finally:
                server.go_on()
            until(lambda: _stored(words))


def _is_refused_at_once(words: SyncResource[str, str]) -> bool:
    """Other words than those of a put that has waited for the server."""
    with pytest.raises(StoreError) as refused:
        words.put("a", "two")
    return "tries it again" in str(refused.value)


def _stored(words: SyncResource[str, str]) -> bool:
    try:
        words.put("a", "two")
    except StoreError:
        return False
    return values(words, "a") == {"a": "two"}
