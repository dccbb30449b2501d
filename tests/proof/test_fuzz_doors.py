"""T5: anything through the doors that an application calls: durations, keys, kinds, settings.

Each takes it, or refuses it with a ConfigError that is one line of a sane length.
"""

import asyncio
import os
from contextlib import chdir, suppress
from dataclasses import fields
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from click.testing import CliRunner
from hypothesis import example, given, settings
from hypothesis import strategies as st

from stillfresh import Cache, Policy, TtlCache
from stillfresh.cli import main
from stillfresh.durations import seconds
from stillfresh.errors import ConfigError
from stillfresh.gateway.config import Mistakes, load
from stillfresh.pages import PageCache
from stillfresh.systems.coordinator import Kind, TtlConfig
from stillfresh.systems.feed import Comment, FeedCache, Topic
from stillfresh.systems.waiting import WaitingCache
from stillfresh.systems.waiting.client import WaitingClient
from stillfresh.testing import ManualClock
from tests.kit.examples import examples

MODEST = settings(max_examples=examples(40), deadline=None)
FEW = settings(max_examples=examples(15), deadline=None)

TEXTS = st.text(max_size=20) | st.sampled_from(["", "\0", "\ud800", "a" * 5_000, "../..", "%", "é"])
ANYTHING = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.builds(pow, st.just(10), st.sampled_from([400, 5_000]))
    | st.floats()
    | TEXTS
    | st.binary(max_size=9)
    | st.timedeltas()
    | st.complex_numbers(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=4,
)
TAGS = st.text(st.characters(codec="utf-8"), max_size=20)
KEYS = TEXTS | ANYTHING.filter(lambda key: not isinstance(key, list | dict))
"""Python itself refuses what cannot be hashed."""
DURATIONS = (
    ANYTHING
    | st.builds("{}{}".format, st.integers() | st.floats(), st.sampled_from(["ms", "s", "m", "d"]))
    | st.from_regex(r"[0-9.]{0,9}(ms|s|m|h|d)?")
)


def refused(error: ConfigError, *names: str) -> None:
    """As a person can read it; one of the names is in it."""
    said = str(error)
    assert not names or any(name in said for name in names)
    assert 0 < len(said) < 600, said
    assert "\n" not in said


class TestT5Durations:
    @MODEST
    @given(DURATIONS)
    def test_any_duration_is_finite_seconds_or_refused(self, value: Any) -> None:
        """Never less than zero."""
        try:
            found = seconds(value, name="x")
        except ConfigError as exc:
            refused(exc)
        else:
            assert 0 <= found < float("inf")

    @FEW
    @given(DURATIONS, st.integers(0, 5))
    def test_every_setting_that_takes_a_duration_reads_or_refuses_it(
        self, value: Any, where: int
    ) -> None:
        """By every door the same."""
        doors = (
            lambda: Policy(value, value, value),
            lambda: TtlCache[str, int](ttl=value),
            lambda: Kind("a", fetch=echo, fresh_for=value, stale_for=value, memory_for=value),
            lambda: PageCache("memory://", stale_for=value, wait=value),
            lambda: Cache("memory://").batched("a", fresh_for=value, load_timeout=value),
            lambda: ManualClock().advance(value) if isinstance(value, str) else None,
        )
        try:
            doors[where]()
        except ConfigError as exc:
            refused(exc)


async def named(ids: list[int]) -> dict[int, str]:
    return {id_: hex(id_) for id_ in ids}


async def echo(ids: list[str]) -> dict[str, str]:
    return {id_: id_ for id_ in ids}


class TestT5Keys:
    @FEW
    @given(keys=st.lists(KEYS, min_size=1, max_size=4), tags=st.lists(TAGS, max_size=2))
    @pytest.mark.parametrize("store", ["memory", "sqlite"])
    def test_each_key_has_its_own_value_or_is_refused(
        self, store: str, keys: list[Any], tags: list[str]
    ) -> None:
        """Of any type, bytes and length; a tag may be anything, too."""
        with TemporaryDirectory() as folder:
            asyncio.run(self._used(address(store, folder), keys, tags))

    @FEW
    @given(KEYS)
    @example(-(2**63) - 1)
    def test_whole_number_keys_have_their_own_value_or_are_refused(self, key: Any) -> None:
        """The same, where keys are numbers."""
        asyncio.run(self._numbered(key))

    async def _numbered(self, key: Any) -> None:
        async with Cache("memory://") as cache:
            try:
                answer = await cache.batched("thing", fresh_for="1h")(named).get(key)
                assert answer.value == hex(key)
            except ConfigError as exc:
                refused(exc)

    async def _used(self, url: str, keys: list[Any], tags: list[str]) -> None:
        async with Cache(url) as cache:
            things = cache.batched("thing", fresh_for="1h", memory_for=0, tags=lambda _: tags)(echo)
            for key in keys:
                try:
                    assert (await things.get(key)).value == key
                    assert (await things.get(key)).value == key
                    await things.invalidate(key)
                    await things.delete(key)
                except ConfigError as exc:
                    refused(exc)
            for tag in tags:
                with suppress(ConfigError):
                    await cache.invalidate_tag(tag)


def address(store: str, folder: str) -> str:
    return "memory://" if store == "memory" else f"sqlite:///{folder}/keys.db"


class TestT5Files:
    @MODEST
    @given(st.binary(max_size=60) | st.text(max_size=60).map(str.encode))
    def test_a_settings_file_of_any_bytes_gets_printable_mistakes(self, data: bytes) -> None:
        """Each mistake is one printable line."""
        with TemporaryDirectory() as folder:
            file = Path(folder) / "stillfresh.toml"
            file.write_bytes(data)
            with pytest.raises(Mistakes) as caught:  # nothing so short says what to serve
                load(file)
        assert caught.value.mistakes
        assert all(line.isprintable() for line in caught.value.mistakes)


NAMES = [field.name.upper() for field in fields(TtlConfig)]


class TestT5Coordinator:
    @MODEST
    @given(st.dictionaries(st.sampled_from(NAMES), TEXTS | st.integers().map(str)))
    def test_any_environment_is_a_coordinator_config_or_refused(
        self, environ: dict[str, str]
    ) -> None:
        """What is refused is named."""
        try:
            TtlConfig.from_env(environ)
        except ConfigError as exc:
            refused(exc, *environ)

    @MODEST
    @given(ANYTHING, ANYTHING, ANYTHING)
    def test_any_arguments_make_a_kind_or_are_refused(
        self, name: Any, number: Any, flag: Any
    ) -> None:
        """Name, batches and flags."""
        try:
            Kind(name, fetch=echo, fresh_for=60, max_batch=number, per_viewer=flag)
        except ConfigError as exc:
            refused(exc)


GIVEN = st.binary(max_size=20).map(lambda raw: os.fsdecode(raw.replace(b"\0", b"")))
"""Any bytes but NUL are what a shell can pass."""
WORDS = GIVEN | st.sampled_from(
    [
        "inspect",
        "explain",
        "invalidate",
        "evict",
        "check",
        "table",
        "--json",
        "--all",
        "--kind",
        "-",
    ]
)


class TestT5CommandLine:
    @FEW
    @given(
        st.sampled_from(["inspect", "explain", "invalidate", "evict", "check", "table"]),
        st.lists(WORDS, max_size=4),
    )
    def test_any_command_line_ends_without_a_traceback(
        self, command: str, words: list[str]
    ) -> None:
        """0, 1 or 2, and no traceback."""
        with TemporaryDirectory() as folder, chdir(folder):
            found = CliRunner().invoke(main, [command, *words])
        assert found.exit_code in {0, 1, 2}, found.output
        assert found.exception is None or isinstance(found.exception, SystemExit), found.exception
        assert "Traceback" not in found.output


class TestT5Feed:
    @MODEST
    @given(ANYTHING, ANYTHING, ANYTHING)
    def test_any_topic_is_stored_whole_or_refused(self, uuid: Any, text: Any, at: Any) -> None:
        """And given back as it was."""
        with TemporaryDirectory() as folder, FeedCache.open(Path(folder) / "feed.db") as cache:
            self._put(cache, Topic(uuid, author=text, title="t", created_at=at))
            for call in (cache.get_topic, cache.get_comments, cache.is_stale, cache.delete_topic):
                with suppress(ConfigError):
                    call(uuid)
            with suppress(ConfigError):
                cache.put_comments(uuid, [Comment("c", uuid, author=text, created_at=at)])
            with suppress(ConfigError):
                cache.put_topics(text, uuid, complete=True)
            with suppress(ConfigError):
                cache.get_topics_by_category(text, at)

    def _put(self, cache: FeedCache, topic: Topic) -> None:
        try:
            cache.put_topic(topic)
        except ConfigError as exc:
            refused(exc)
        else:
            found = cache.get_topic(topic.topic_uuid)
            assert found is not None
            assert (found.author, found.created_at) == (topic.author, topic.created_at)


CALLS = ["opened", "move_sent", "your_turn", "game_state", "move_failed", "navigation"]


class TestT5Waiting:
    @MODEST
    @given(st.lists(st.tuples(st.sampled_from(CALLS), ANYTHING, ANYTHING), max_size=6), ANYTHING)
    def test_any_event_and_answer_of_the_waiting_cache_is_taken_or_refused(
        self, calls: list[tuple[str, Any, Any]], answer: Any
    ) -> None:
        """Is taken or refused; what is no answer is asked for again, and the pool stays."""
        asyncio.run(self._told(calls, answer))

    async def _told(self, calls: list[tuple[str, Any, Any]], answer: Any) -> None:
        answers = [["a", "b"], answer]

        async def fetch() -> Any:
            return answers.pop(0) if answers else ["a", "b"]

        async def sleep(_: float) -> None:
            await asyncio.Event().wait()

        async with WaitingCache(fetch, sleep=sleep) as cache:
            cache.start()
            await cache.settled()
            cache.invalidated()
            for name, *arguments in calls:
                wanted = arguments[: 1 if name in {"navigation", "move_sent"} else 2]
                with suppress(ConfigError):
                    getattr(cache, name)(*wanted)
            await asyncio.sleep(0)
            assert all(isinstance(game, str | int) for game in cache.state.pool)

    @MODEST
    @given(ANYTHING | TEXTS.map("http://{}".format), ANYTHING)
    def test_any_arguments_make_a_waiting_client_or_are_refused(
        self, url: Any, headers: Any
    ) -> None:
        """When it is made, not when it is used."""
        try:
            WaitingClient(url, headers=headers)
        except ConfigError as exc:
            refused(exc)
