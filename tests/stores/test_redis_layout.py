"""S5, S8, S9: how an id is stored in Redis, and the pure parts of the way there; no server."""

import asyncio
from typing import Any

import pytest
from msgspec.structs import replace
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import ResponseError

from stillfresh import ConfigError, Policy, StoreError
from stillfresh.stores.contract import UNREAD, Copy, Failure, Held, Lease, Mark, Newer, Record
from stillfresh.stores.redis import link as redis_link
from stillfresh.stores.redis.heard import (
    AGAIN,
    FENCE,
    Blank,
    HeardStamps,
    PutFence,
    ReadCommand,
    StampedCommand,
)
from stillfresh.stores.redis.layout import (
    ABSENT,
    BUCKETS,
    CHANGED_AT,
    EXTRA,
    EXTRA_MARK,
    FIELDS,
    FULL_HEAD,
    GLANCE,
    HEAD,
    LATE,
    LENGTH,
    MAGIC,
    MOST_FAILURES,
    NAME,
    NUMBER,
    VALUE,
    Keyspace,
    announced,
    asker_of,
    copy_fields,
    failure_fields,
    grant_of,
    is_enough,
    listed,
    packed_tags,
    padded,
    put_front,
    put_tags,
    record_of,
    stamp_of,
    stored_tags,
    unpacked_tags,
    unpadded,
)
from stillfresh.stores.redis.link import Link, is_away
from stillfresh.stores.server import SLICE, SLICE_BYTES, slices
from stillfresh.stores.versions import packed_version

COPY = Copy("gen", 5.5, Policy(30, 60, 90), b"value", Mark.SOFT)
TAGS = packed_tags(["a", "b"])
STAMP = 1_700_000_000_000_007


def a_string(
    kind: int = VALUE,
    mark: int = Mark.SOFT,
    times: tuple[float, ...] = (5.5, 30, 60, 90),
    held: tuple[float, str | None] = (7.5, "token"),
    failed: tuple[int, float] = (2, 9.5),
    value: bytes = b"value",
    extra: bytes = b"",
) -> bytes:
    head = (MAGIC, kind, mark, *times, padded("gen"), held[0], padded(held[1]), *failed)
    return FIELDS.pack(*head, len(extra + TAGS), len(b"no")) + extra + TAGS + b"no" + value


def an_extra(version: bytes = b"", stamp: float = STAMP) -> bytes:
    size = EXTRA.size - LENGTH.size + len(version)
    return EXTRA.pack(size, EXTRA_MARK, stamp, bytes(32)) + version


class TestS5Layout:
    def test_a_string_is_a_record(self) -> None:
        """With its copy, lease and failure; a value that is known already is not read again."""
        failure = Failure(2, 9.5, "no")
        assert record_of(a_string()) == Record(COPY, 7.5, failure)
        known = record_of(a_string(), "gen")
        assert known is not None
        assert known.copy is not None
        assert known.copy.value is UNREAD
        absent = record_of(a_string(ABSENT, value=b""))
        assert absent is not None
        assert absent.copy is not None
        assert absent.copy.value is None
        assert record_of(a_string(0, failed=(0, 0.0))) == Record(None, 7.5)
        assert a_string().startswith(copy_fields(COPY))
        assert stored_tags(a_string()) == [b"a", b"b"]
        assert stored_tags(b"") == []

    def test_a_damaged_lease_or_failure_leaves_the_rest(self) -> None:
        """S15: each part is read by itself."""
        failure = Failure(2, 9.5, "no")
        assert record_of(a_string(held=(float("inf"), "token"))) == Record(COPY, None, failure)
        assert record_of(a_string(failed=(2, float("nan")))) == Record(COPY, 7.5)

    @pytest.mark.parametrize(
        "data",
        [
            None,
            b"",
            a_string()[: HEAD - 1],
            b"XX" + a_string()[2:],
            a_string(3),
            a_string(mark=9),
            a_string(times=(float("nan"), 30, 60, 90)),
            a_string(times=(5.5, -1, 60, 90)),
        ],
    )
    def test_a_string_of_another_program_is_not_ours(self, data: bytes | None) -> None:
        """Too short, of another form, or with times that there are not."""
        assert record_of(data) is None

    def test_the_shortest_string_is_read(self) -> None:
        """It has nothing but its fields."""
        bare = FIELDS.pack(MAGIC, 0, 0, 0, 0, 0, 0, padded(None), 7.5, padded("t"), 0, 0, 0, 0)
        assert record_of(bare) == Record(None, 7.5)

    def test_a_string_without_copy_lease_and_failure_is_nothing(self) -> None:
        """S13: the trace of a deletion is there for late puts alone; readers see a miss."""
        assert record_of(a_string(0, held=(7.5, None), failed=(0, 0.0))) is None
        trace = a_string(0, held=(0.0, None), failed=(0, 0.0), value=b"", extra=an_extra())
        assert record_of(trace) is None
        assert stamp_of(trace) == STAMP
        assert listed(trace, len(trace)) is None

    def test_a_changed_string_has_a_stamp_and_a_version(self) -> None:
        """S13: they stand in its first tag, which is none; older strings have neither."""
        version = packed_version(7)
        changed = a_string(extra=an_extra(version))
        expected = replace(COPY, version=version)
        assert record_of(changed) == Record(expected, 7.5, Failure(2, 9.5, "no"))
        assert stamp_of(changed) == STAMP
        assert stored_tags(changed) == [b"a", b"b"]
        found = listed(changed, len(changed))
        assert found is not None
        assert found[1] == len(b"value")
        assert stamp_of(a_string()) == 0
        assert stamp_of(b"") == 0

    @pytest.mark.parametrize("stamp", [-1.0, 0.0, float("nan"), float("inf"), 3e15])
    def test_a_stamp_that_there_is_not_is_not_known(self, stamp: float) -> None:
        """S13, S15: what another program wrote there is never taken for one."""
        assert stamp_of(a_string(extra=an_extra(stamp=stamp))) == 0

    @pytest.mark.parametrize(
        "extra",
        [
            EXTRA.pack(43, EXTRA_MARK, STAMP, bytes(32)),
            EXTRA.pack(500, EXTRA_MARK, STAMP, bytes(32)),
            EXTRA.pack(47, EXTRA_MARK, STAMP, bytes(32)) + b"xyz",
        ],
    )
    def test_a_broken_extra_tag_is_not_ours(self, extra: bytes) -> None:
        """S15: too short, longer than all tags, or with a version that is none."""
        assert record_of(a_string(extra=extra)) is None

    def test_a_string_that_was_cut_in_its_extra_tag_is_not_ours(self) -> None:
        """S15: the scripts read it in the same way."""
        whole = a_string(extra=an_extra())
        for size in range(CHANGED_AT, FULL_HEAD):
            assert record_of(whole[:size]) is None

    def test_the_tags_of_a_string_that_was_cut_anywhere_are_those_that_are_left(self) -> None:
        """S15: a step on a slot that moves reads them."""
        whole = a_string(extra=an_extra())
        for size in range(len(whole)):
            tags = stored_tags(whole[:size])
            assert len(tags) <= len(stored_tags(whole))
            assert all(isinstance(tag, bytes) for tag in tags)

    def test_the_front_of_a_put_is_that_of_its_string(self) -> None:
        """S13: the server adds the stamp and the replaced ids between front and rest."""
        version = packed_version("v1")
        copy = replace(COPY, mark=Mark.NONE, version=version)
        front = put_front(copy, len(TAGS))
        text = front + NUMBER.pack(STAMP) + bytes(32) + version + TAGS + b"value"
        assert record_of(text) == Record(copy)
        assert put_tags(front + version + TAGS + b"value") == [b"a", b"b"]
        assert stamp_of(text) == STAMP
        assert stored_tags(text) == [b"a", b"b"]

    def test_the_asker_of_a_lease(self) -> None:
        """S15: the part of the token that its sender drew."""
        token = "ab" * 10 + "0" * 16
        assert asker_of(a_string(held=(7.5, token))) == "ab" * 10
        assert asker_of(a_string(held=(7.5, None))) == ""
        assert asker_of(b"") == ""

    def test_tags_of_the_lease_and_of_the_copy(self) -> None:
        """I26: both are tags; each once."""
        late = packed_tags(["a", "b", "a"]) + LENGTH.pack(LATE) + packed_tags(["c"])
        assert unpacked_tags(late) == [b"a", b"b", b"c"]
        assert unpacked_tags(b"") == []

    def test_a_token_has_so_many_bytes_at_most(self) -> None:
        """A longer one would be cut, and be another's."""
        assert unpadded(padded("t" * NAME)) == "t" * NAME
        assert padded(None) == padded("") == bytes(NAME)
        with pytest.raises(ConfigError, match=f"token: at most {NAME} bytes"):
            padded("t" * (NAME + 1))

    @pytest.mark.parametrize("kind", ["", "A", "1a", "a-b", "a:b"])
    def test_a_kind_is_a_plain_name(self, kind: str) -> None:
        """Since it stands in the key, before a colon."""
        with pytest.raises(ConfigError, match="kind: must be"):
            Keyspace("p").of(kind, ["a"])
        assert Keyspace("p").name(kind.replace(":", "#").encode()) is None

    @pytest.mark.parametrize("prefix", ["", "a b", "a{b}", "p" * 65, 5])
    def test_a_prefix_is_a_plain_name(self, prefix: Any) -> None:
        """Braces would move its keys to another slot."""
        with pytest.raises(ConfigError, match="prefix: must be 1 to 64"):
            Keyspace(prefix)
        assert len(Keyspace("p" * 64).bases) == len(BUCKETS)

    def test_a_key_leads_back_to_its_id(self) -> None:
        """And bytes that are no name do not."""
        places = Keyspace("p")
        (key,) = places.of("post", ["a:b\ud800"])
        assert key.key == key.base + key.member
        assert places.name(places.member(key.key)) == ("post", "a:b\ud800")
        assert places.name(b"post:\xff") is None
        assert (key.base, key.base + b"#blog") in places.tagged("blog")
        assert announced(key.base, b"V", b"x") == ("SPUBLISH", key.base + b"!", b"Vx")

    def test_a_pattern_takes_text_literally(self) -> None:
        """A search for a star finds a star."""
        assert Keyspace("p").pattern(None, "a*") == rb"p:v2:{??}:[a-z]*a\**"
        assert Keyspace("p").pattern("post", "[x]") == rb"p:v2:{??}:post:*\[x\]*"

    def test_a_failure_that_counts_on_fits(self) -> None:
        """The field has four bytes."""
        assert failure_fields(None) == (b"", b"")
        most = failure_fields(Failure(MOST_FAILURES + 1, 9.5, "no"))
        assert most == failure_fields(Failure(MOST_FAILURES, 9.5, "no"))
        assert most[1] == b"no"

    def test_the_first_bytes_are_enough_if_the_value_is_known_or_short(self) -> None:
        """The first bytes, if the value is known or all of it is there."""
        short, long = a_string(), a_string(value=b"v" * GLANCE)[:GLANCE]
        assert is_enough(None, "gen")
        assert is_enough(short, "other")
        assert is_enough(long, "gen")
        assert not is_enough(long, "other")
        fields = list(FIELDS.unpack_from(long))
        for length, expected in ((GLANCE - HEAD, True), (GLANCE - HEAD + 1, False)):
            fields[12:] = [length - 2, 2]
            assert is_enough(FIELDS.pack(*fields) + long[HEAD:], "gen") is expected

    def test_a_listed_entry_has_a_size_and_no_value(self) -> None:
        """The size is that of the value; an absent copy has none."""
        whole = a_string()
        found = listed(whole, len(whole))
        assert found is not None
        record, size = found
        assert record.copy is not None
        assert (record.copy.value, size) == (UNREAD, len(b"value"))
        absent = listed(a_string(ABSENT, value=b""), HEAD)
        assert absent is not None
        assert absent[1] is None
        assert listed(b"XX" + whole[2:], len(whole)) is None
        cut = listed(whole, 0)
        assert cut is not None
        assert cut[1] == 0

    def test_a_reply_is_a_grant(self) -> None:
        """A lease, the end of another's, or the copy that is newer."""
        end = NUMBER.pack(7.5)
        assert grant_of("a", [b"lease", end, padded("t"), b"3"]) == Lease("a", "t", 7.5, 3)
        assert grant_of("a", [b"held", end]) == Held(7.5)
        assert grant_of("a", [b"newer", a_string()]) == Newer(
            Record(COPY, 7.5, Failure(2, 9.5, "no"))
        )
        assert grant_of("a", [b"newer", b"XX"]) == Newer(Record())


class TestS5RoundTrips:
    def test_a_round_trip_is_limited(self) -> None:
        """By commands and by bytes beyond the first; what belongs together stays together."""
        half, large = SLICE_BYTES // 2, SLICE_BYTES + 1

        def cut(sizes: list[int], *bound: int) -> list[tuple[int, int]]:
            return [(it.start, it.stop) for it in slices(sizes, bound.__contains__)]

        assert cut([]) == []
        assert cut([1] * SLICE) == [(0, SLICE)]
        assert cut([1] * (SLICE + 1)) == [(0, SLICE), (SLICE, SLICE + 1)]
        assert cut([half] * 4) == [(0, 2), (2, 4)]
        assert cut([large, large]) == [(0, 1), (1, 2)]
        assert cut([half] * 4, 2) == [(0, 3), (3, 4)]

    @pytest.mark.parametrize(
        ("memory", "expected"),
        [
            (b"maxmemory:100\r\nmaxmemory_policy:allkeys-lru\r\n", True),
            (b"maxmemory:100\r\nmaxmemory_policy:noeviction\r\n", False),
            (b"maxmemory:0\r\nmaxmemory_policy:allkeys-lru\r\n", False),
            (b"maxmemory:100\r\n", False),
        ],
    )
    def test_a_server_that_drops_keys_is_known_by_its_settings(
        self, memory: bytes, *, expected: bool
    ) -> None:
        """With a limit, and a policy that drops any of them."""
        assert redis_link.drops_keys(memory) is expected

    def test_a_node_of_a_cluster_is_refused_at_a_plain_address(self) -> None:
        """S9: and a plain server at a cluster's; a server that does not say is taken."""
        check = redis_link._check_mode
        with pytest.raises(ConfigError, match=r"is a node of a cluster: .*redis\+cluster://"):
            check(b"cluster_enabled:1", "")
        with pytest.raises(ConfigError, match=r"n:1 is not a node of a cluster: .*write redis://"):
            check(b"cluster_enabled:0", "n:1")
        for about, node in ((b"cluster_enabled:0", ""), (b"cluster_enabled:1", "n:1")):
            check(about, node)
            check(ResponseError("no permission"), node)

    def test_too_few_replicas_are_an_error(self) -> None:
        """`wait_replicas`: the change was made, and a failover may undo it."""
        confirmed, wait = redis_link._check_confirmation, [("WAIT", 2, 500)]
        assert confirmed([b"a", b"b", 2], wait) == [b"a", b"b"]
        assert confirmed([b"a"], []) == [b"a"]
        with pytest.raises(StoreError, match=r"1 of 2 replicas .* within 500 ms: it was made"):
            confirmed([b"a", 1], wait)
        with pytest.raises(StoreError, match="refused: ResponseError: no"):
            confirmed([b"a", ResponseError("no")], wait)

    def test_an_answer_that_nothing_was_done_needs_no_replicas(self) -> None:
        """S13: AGAIN promises nothing; beside another answer, they must confirm that one."""
        confirmed, wait = redis_link._check_confirmation, [("WAIT", 2, 500)]
        again = [AGAIN, 7]
        assert confirmed([again, again, 0], wait) == [again, again]
        with pytest.raises(StoreError, match="0 of 2 replicas"):
            confirmed([again, [1, 7, b""], 0], wait)

    def test_a_server_that_refuses_is_not_away(self) -> None:
        """Only without an answer may the step have been done or not."""
        error = StoreError("x")
        assert is_away(error)
        error.__cause__ = ConnectionResetError()
        assert is_away(error)
        error.__cause__ = ResponseError("no")
        assert not is_away(error)

    async def test_s8_the_library_repeats_nothing(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """A connection that fails is an error at once: only we know what may be sent again."""
        tries = list[object]()

        async def refused(*_: object, **given: object) -> None:
            tries.append(given)
            raise ConnectionRefusedError

        monkeypatch.setattr(asyncio, "open_connection", refused)
        link = Link("redis://127.0.0.1:1", most=1, timeout=5, options={})
        with pytest.raises(RedisConnectionError):
            await link.send([("PING",)])
        assert len(tries) == 1
        with pytest.raises(StoreError, match="the Redis server is unavailable"):
            await link.dedicated()
        assert len(tries) == 2
        await link.close()


BASE = b"p:v2:{by}:"


class TestS13Heard:
    """What a process has heard of a server's stamps."""

    def test_commands_are_filled_in_when_they_are_sent(self) -> None:
        """The last stamp of the command's own bucket; 0 if none was heard. Others stay as is."""
        heard = HeardStamps(len(BASE))
        step = StampedCommand(("EVALSHA", "sha", 1, BASE + b"k", Blank.AS_OF, b"x"))
        put = StampedCommand(("EVALSHA", "sha", 1, BASE + b"k", PutFence(b"how"), b"value"))
        assert heard.filled(step, drops_keys=True)[4:] == (0, b"x")
        fence = FENCE.pack(0, 0, drops_keys := True) + b"how"
        assert heard.filled(put, drops_keys=drops_keys)[4:] == (fence, b"value")
        heard.note_stamp(BASE, 7)
        heard.note_stamp(b"p:v2:{25}:", 9)
        heard.note_time(100.0)
        assert heard.filled(step, drops_keys=False)[4:] == (7, b"x")
        fence = heard.filled(put, drops_keys=False)[4]
        as_of, good_until, drops_keys = FENCE.unpack_from(fence)
        assert (as_of, drops_keys) == (7, 0)
        assert 130e6 <= good_until < 140e6
        plain = ("MGET", b"a")
        assert heard.filled(plain, drops_keys=False) is plain

    def test_the_highest_stamp_counts_until_the_server_says_again(self) -> None:
        """A server that has lost its counter begins lower: its own word counts."""
        heard = HeardStamps(len(BASE))
        put = StampedCommand(("EVALSHA", "sha", 2, BASE + b"+", BASE + b"+", b"k"))
        for reply, expected in (
            ([1, 7, b""], 7),
            ([1, 5, b""], 7),
            (6, 7),
            (ResponseError("no"), 7),
            ([0], 7),
            ([AGAIN, 4], 4),
            ([AGAIN, 9, 50_000_000], 9),
        ):
            heard.hear(put, reply)
            assert heard.as_of(BASE) == expected
        assert heard._good_until() > 0

    def test_every_key_of_a_command_is_noted(self) -> None:
        """By the keys of the command, of whatever kind it is; what is no string is passed over."""
        text, keys = a_string(extra=an_extra()), [BASE + b"a", b"p:v2:{25}:b"]
        for command, reply in (
            (("MGET", *keys), [text, None]),
            (("GETRANGE", keys[0], 0, 511), text),
            (("EVALSHA", "sha", 2, *keys, 512), [text, b""]),
        ):
            heard = HeardStamps(len(BASE))
            heard.hear(ReadCommand(command), reply)
            heard.hear(command, reply)
            assert (heard.as_of(BASE), heard.as_of(keys[1][: len(BASE)])) == (STAMP, 0)
            heard.hear(ReadCommand(command), ResponseError("no"))
