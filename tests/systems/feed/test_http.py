"""The feed over HTTP (F6, F7, F10): real requests to a real server that misbehaves on purpose."""

import asyncio
import gzip
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from datetime import date
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stillfresh import ConfigError, LoadFailed, NotOpen, RetryAfter, StillfreshError, Verdict
from stillfresh.http.client import BodyReader, Unreadable
from stillfresh.http.fields import pause_of
from stillfresh.systems.feed import Comment, FeedCache, FeedCacheUpdated, FeedEngine, Topic
from stillfresh.systems.feed.http import FeedHttpError, HttpFeedSource
from stillfresh.testing import ManualClock
from tests.kit.servers.feed import FeedServer, Hold, Seen, always, begun, response

NOW = 1_700_000_000.0
DAY = date(2023, 11, 14)
"""The day of NOW, by UTC."""
DATE = "Tue, 14 Nov 2023 22:13:20 GMT"
"""NOW, as HTTP writes it."""
COMMENT = Comment("c1", "t1", "bob", int(NOW), body="Well said")
PATIENCE = 60.0


def packed(data: bytes) -> bytes:
    """The same in every process: gzip notes the time otherwise, and tests are named by it."""
    return gzip.compress(data, mtime=0)


@pytest.fixture(autouse=True)
def no_proxies(monkeypatch: pytest.MonkeyPatch) -> None:
    """A proxy of the machine's is no way to a server on it."""
    for name in ("http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)


@pytest.fixture
async def server() -> AsyncIterator[FeedServer]:
    async with FeedServer() as server:
        yield server


@pytest.fixture
async def source(server: FeedServer) -> AsyncIterator[HttpFeedSource]:
    async with HttpFeedSource(server.url) as source:
        yield source


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(start=NOW)


@pytest.fixture
def cache(tmp_path: Path, clock: ManualClock) -> Iterator[FeedCache]:
    with FeedCache.open(tmp_path / "feed.db", clock=clock) as cache:
        yield cache


@pytest.fixture
async def engine(cache: FeedCache, source: HttpFeedSource) -> AsyncIterator[FeedEngine]:
    async with FeedEngine(cache, source) as engine:
        yield engine


def a_topic(uuid: str = "t1", **more: Any) -> Topic:
    given = {"author": "ann", "title": f"Title of {uuid}", "category_id": "general"} | more
    return Topic(topic_uuid=uuid, created_at=int(NOW), **given)


async def the_failure(engine: FeedEngine) -> LoadFailed:
    """Why the feed is not newer, once the revalidation behind the reads has failed."""
    async with asyncio.timeout(PATIENCE):
        while (error := (await engine.get_all()).error) is None:
            await asyncio.sleep(0)
    return error


async def updated(engine: FeedEngine) -> FeedCacheUpdated:
    """The event of the revalidation that reading begins."""
    events: list[FeedCacheUpdated] = []
    unsubscribe = engine.on_updated(events.append)
    async with asyncio.timeout(PATIENCE):
        while not events:
            await engine.get_all()
            await asyncio.sleep(0)
    unsubscribe()
    return events[0]


async def failing(source: HttpFeedSource) -> FeedHttpError:
    with pytest.raises(FeedHttpError) as caught:
        await source.day_index(DAY, None)
    return caught.value


class TestF6Routes:
    async def test_a_day_is_asked_for_by_its_date(
        self, server: FeedServer, source: HttpFeedSource
    ) -> None:
        """A day is asked for by its date, and answered with its topics, without bodies."""
        server.put("t1", NOW, body="long", tags=["a"], unknown={"of": "others"})
        server.put("t2", NOW - 86_400)
        assert await source.day_index(DAY, None) == [
            a_topic(tags=["a"], extra={"unknown": {"of": "others"}})
        ]
        assert server.asked("GET") == ["/days/2023-11-14"]

    async def test_the_category_of_a_day_is_sent_as_a_query(
        self, server: FeedServer, source: HttpFeedSource
    ) -> None:
        """The category goes along as a query, whatever characters it has."""
        server.put("t1", NOW, category_id="q&a=1 #é/%")
        server.put("t2", NOW)
        topics = await source.day_index(DAY, "q&a=1 #é/%")
        assert [topic.topic_uuid for topic in topics] == ["t1"]

    async def test_a_body_in_an_index_is_ignored(
        self, server: FeedServer, source: HttpFeedSource
    ) -> None:
        """A preview, or an empty body, never stands for the topic's own (F9)."""
        topic = {"topic_uuid": "t1", "author": "ann", "title": "T", "created_at": 1, "body": ""}
        server.on("GET /days", response([topic]))
        assert [topic.body for topic in await source.day_index(DAY, None)] == [None]

    @pytest.mark.parametrize("uuid", ["t1", "a/b?c#d%e f", "é☃😀", "..", ".", "%2F", "x" * 5_000])
    async def test_a_topic_is_asked_for_by_its_uuid(
        self, server: FeedServer, source: HttpFeedSource, uuid: str
    ) -> None:
        """A whole topic, by a uuid of any characters and length."""
        server.put(uuid, NOW, body="long")
        server.comments[uuid] = [{"comment_uuid": "c", "topic_uuid": uuid, "author": "b"}]
        server.comments[uuid][0]["created_at"] = 1
        assert await source.topic(uuid) == a_topic(uuid, body="long")
        assert [one.comment_uuid for one in await source.comments(uuid)] == ["c"]

    @pytest.mark.parametrize("status", [404, 410])
    async def test_a_404_means_no_topic_and_no_comments_but_fails_a_day(
        self, server: FeedServer, source: HttpFeedSource, status: int
    ) -> None:
        """No such topic: None, and no comments; a day that is not there is an error."""
        server.on("GET", response({"error": "no"}, status))
        assert await source.topic("t1") is None
        assert await source.comments("t1") == []
        assert (await failing(source)).status == status

    async def test_topics_and_comments_are_posted_as_json(
        self, server: FeedServer, source: HttpFeedSource
    ) -> None:
        """Topics and comments are posted as JSON, and a topic is deleted by its name."""
        await source.create_topic(a_topic(body="long"))
        await source.add_comment("t1", COMMENT)
        assert await source.topic("t1") == a_topic(body="long")
        assert await source.comments("t1") == [COMMENT]
        await source.delete_topic("t1")
        assert await source.topic("t1") is None
        posted = [seen for seen in server.requests if seen.method == "POST"]
        assert {seen.headers["content-type"] for seen in posted} == {"application/json"}

    @pytest.mark.parametrize("status", [404, 410])
    async def test_deleting_a_topic_that_is_gone_upstream_succeeds(
        self, server: FeedServer, source: HttpFeedSource, status: int
    ) -> None:
        """A topic that upstream has no longer counts as deleted."""
        server.on("DELETE", response(b"", status))
        await source.delete_topic("t1")

    async def test_a_write_is_done_when_its_status_has_come(
        self, server: FeedServer, source: HttpFeedSource
    ) -> None:
        """What follows the status of a write is not waited for, be it endless or broken."""
        head = b"HTTP/1.1 201 Created\r\nTransfer-Encoding: chunked\r\n\r\n"
        server.on("POST /topics", begun(head, b"400\r\n" + b"x" * 0x400 + b"\r\n"))
        await source.create_topic(a_topic())

    async def test_the_path_of_the_base_url_comes_before_every_route(
        self, server: FeedServer
    ) -> None:
        """The path of the base URL comes before every route, with or without its last slash."""
        for base in ("/api/v1", "/api/v1/"):
            async with HttpFeedSource(server.url + base) as source:
                assert await source.topic("t1") is None
        assert server.asked("GET") == ["/api/v1/topics/t1"] * 2

    async def test_a_connection_is_used_for_several_requests(
        self, server: FeedServer, source: HttpFeedSource
    ) -> None:
        """Connections are kept between requests, after a 404 as well."""
        server.put("t1", NOW)
        for uuid in ("t1", "missing", "t1"):
            await source.topic(uuid)
        assert server.connections == 1

    async def test_given_headers_are_sent_with_every_request(self, server: FeedServer) -> None:
        """Those that were given, and those that ask for JSON, once each."""
        given = {"X-Api-Key": "k", "accept": "application/feed+json", "Accept-Encoding": "br"}
        async with HttpFeedSource(server.url, headers=given) as source:
            await source.comments("t1")
        (seen,) = server.requests
        assert seen.headers["x-api-key"] == "k"
        assert seen.headers["accept"] == "application/feed+json"
        assert seen.headers["accept-encoding"] == "gzip"


TOPIC = {"topic_uuid": "t1", "author": "ann", "title": "T", "created_at": 1}
RUBBISH: dict[str, tuple[bytes, str]] = {
    "no JSON": (b"<html>Sorry</html>", "<html>Sorry"),
    "nothing": (b"", "nothing"),
    "cut": (b'[{"topic_uuid": "t1"', "truncated"),
    "more than one value": (b"[] []", "trailing"),
    "an object": (b'{"topics": []}', "Expected `array`, got `object`"),
    "null": (b"null", "got `null`"),
    "no UTF-8": (b'["\xff"]', "can't decode byte 0xff"),
    "no UTF-8 in a name": (
        b'[{"topic_uuid": "\xff", "author": "a", "title": "t", "created_at": 1}]',
        "can't decode byte 0xff",
    ),
    "too deep": (b"[" * 100_000 + b"]" * 100_000, "Expected `object`, got `array`"),
    "too deep inside": (
        b'[{"unknown": ' + b"[" * 100_000 + b"]" * 100_000 + b"}]",
        "recursion",
    ),
}
BROKEN_ENTRIES: dict[str, tuple[dict[str, Any], str]] = {
    "without an author": ({"author": ...}, "missing required field `author`"),
    "a wrong type": ({"title": 7}, "Expected `str`, got `int` - at `$[1].title`"),
    "a null": ({"tags": None}, "`$[1].tags`"),
    "an empty uuid": ({"topic_uuid": ""}, "an empty uuid - at `$[1]`"),
    "a time beyond all": ({"created_at": 2**63}, "beyond 64 bits - at `$[1].created_at`"),
    "a time long gone": ({"created_at": -(2**63) - 1}, "beyond 64 bits"),
}


class TestF6Failures:
    @pytest.mark.parametrize("name", RUBBISH)
    async def test_a_body_that_is_no_list_of_topics_is_an_error(
        self, server: FeedServer, source: HttpFeedSource, name: str
    ) -> None:
        """What is no list of topics is an error that shows where, what came, what was expected."""
        body, reason = RUBBISH[name]
        server.on("GET /days", response(body, headers={"Content-Type": "text/html"}))
        said = str(await failing(source))
        assert said.startswith(f"GET {server.url}/days/2023-11-14: 'text/html' with")
        assert reason in said
        assert said.endswith("; expected 200 and a JSON array of topics")
        assert len(said) < 400

    @pytest.mark.parametrize("name", BROKEN_ENTRIES)
    async def test_a_broken_entry_fails_the_day(
        self, server: FeedServer, source: HttpFeedSource, name: str
    ) -> None:
        """One entry left out would look as if its topic were gone, so the whole day fails (F9)."""
        change, reason = BROKEN_ENTRIES[name]
        broken = {key: value for key, value in (TOPIC | change).items() if value is not ...}
        server.on("GET /days", response([TOPIC, broken]))
        assert reason in str(await failing(source))

    async def test_a_body_that_is_no_topic_or_no_comments_is_an_error(
        self, server: FeedServer, source: HttpFeedSource
    ) -> None:
        """The other two reads are as strict."""
        server.on("GET /topics", response([TOPIC]))
        with pytest.raises(FeedHttpError, match=r"Expected `object`, got `array`.* a topic as"):
            await source.topic("t1")
        server.on("GET /topics", response([{"comment_uuid": "", "topic_uuid": "t1"}]))
        with pytest.raises(FeedHttpError, match="missing required field `author`"):
            await source.comments("t1")
        comment = {"comment_uuid": "", "topic_uuid": "t1", "author": "a", "created_at": 1}
        server.on("GET /topics", response([comment]))
        with pytest.raises(FeedHttpError, match="an empty uuid"):
            await source.comments("t1")

    @pytest.mark.parametrize("status", [204, 206, 304, 400, 401, 500, 599])
    async def test_a_status_other_than_200_is_an_error(
        self, server: FeedServer, source: HttpFeedSource, status: int
    ) -> None:
        """Only 200 is an answer; the error has the status and the beginning of the body."""
        body = b"" if status in {204, 304} else b"Out of order. " + b"x" * 100_000
        length = {} if body else {"Content-Length": "0"}
        server.on("GET /days", response(body, status, length))
        error = await failing(source)
        assert error.status == status
        assert f"status {status} Because" in str(error)
        assert ("'Out of order. xxx" in str(error)) == bool(body)
        assert len(str(error)) < 300

    async def test_an_endless_error_body_is_read_only_as_far_as_it_is_shown(
        self, server: FeedServer, source: HttpFeedSource
    ) -> None:
        """Of an error's body no more is read than is shown."""
        head = b"HTTP/1.1 500 Oops\r\nTransfer-Encoding: chunked\r\n\r\n"
        server.on("GET /days", begun(head, b"400\r\n" + b"x" * 0x400 + b"\r\n"))
        assert (await failing(source)).status == 500

    @pytest.mark.parametrize(
        "sent",
        [
            b"",
            b"HTTP/1.1 200 OK\r\nContent-Le",
            b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n[",
            b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n[]\r\n",
            b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\n\r\n" + packed(b"[]")[:-3],
            b"220 mail.example ESMTP\r\n",
        ],
    )
    async def test_an_answer_that_breaks_off_is_an_error(
        self, server: FeedServer, source: HttpFeedSource, sent: bytes
    ) -> None:
        """Half an answer is none, at whatever byte it breaks off."""

        async def cut(seen: Seen) -> None:
            seen.writer.write(sent)
            await seen.writer.drain()

        server.on("GET /days", cut)
        assert f"GET {server.url}/days" in str(await failing(source))

    async def test_a_refused_connection_is_an_error_that_names_the_server(
        self, server: FeedServer, source: HttpFeedSource
    ) -> None:
        """Nobody listens: the error says whom it could not reach."""
        await server.stop()
        error = await failing(source)
        assert "ConnectError" in str(error)
        assert server.url in str(error)
        assert error.status is None

    @pytest.mark.parametrize(
        ("start", "more"),
        [
            (b"", b""),
            (b"HTTP/1.1 200 OK\r\n", b""),
            (b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\n[", b""),
            (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", b"1\r\n \r\n"),
        ],
    )
    async def test_the_time_out_covers_the_whole_exchange(
        self, server: FeedServer, start: bytes, more: bytes
    ) -> None:
        """The time-out is for the whole exchange: one that drips on for ever ends as well."""
        server.on("GET /days", begun(start, more))
        async with HttpFeedSource(server.url, timeout="200ms", max_bytes=10**12) as source:
            assert "no complete answer in 0.2 s" in str(await failing(source))

    async def test_a_server_that_speaks_no_tls_times_out(self, server: FeedServer) -> None:
        """A server that speaks no TLS is given up as well, and no socket is left behind."""
        base = server.url.replace("http:", "https:")
        async with HttpFeedSource(base, timeout="200ms") as source:
            assert "no connection within 0.1 s" in str(await failing(source))

    async def test_an_error_message_is_short_however_long_its_parts_are(
        self, server: FeedServer, source: HttpFeedSource
    ) -> None:
        """However long the URL, the reason and the body are."""
        server.on("GET /topics", response(b"x" * 5_000, 500).replace(b"Because", b"r" * 5_000))
        with pytest.raises(FeedHttpError) as caught:
            await source.topic("y" * 5_000)
        assert len(str(caught.value)) < 800

    async def test_a_cancelled_caller_gets_no_time_out(
        self, server: FeedServer, source: HttpFeedSource
    ) -> None:
        """Cancelling is no time-out, and the source goes on serving others."""
        held = Hold(server.feed)
        server.on("GET /days", held)
        asking = asyncio.create_task(source.day_index(DAY, None))
        await held.asked.wait()
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        assert await source.topic("t1") is None


class TestF6Size:
    @pytest.mark.parametrize("is_packed", [False, True], ids=["plain", "gzip"])
    async def test_max_bytes_counts_the_unpacked_body(
        self, server: FeedServer, is_packed: bool
    ) -> None:
        """`max_bytes` counts the unpacked body: as many are fine, one more is not."""
        body = b"[]".ljust(1_000)
        headers = {"Content-Encoding": "gzip"} if is_packed else {}
        server.on("GET /days", response(packed(body) if is_packed else body, headers=headers))
        async with HttpFeedSource(server.url, max_bytes=1_000) as source:
            assert await source.day_index(DAY, None) == []
        async with HttpFeedSource(server.url, max_bytes=999) as source:
            assert "more than 999 bytes (max_bytes)" in str(await failing(source))

    async def test_an_endless_body_is_given_up_at_max_bytes(
        self, server: FeedServer, source: HttpFeedSource
    ) -> None:
        """A body without an end is given up at the bound, not at the end of the memory."""
        head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
        server.on("GET /days", begun(head, b"10000\r\n" + b" " * 0x10000 + b"\r\n"))
        assert "more than 8,000,000 bytes" in str(await failing(source))

    async def test_a_compression_bomb_is_not_unpacked_beyond_max_bytes(
        self, server: FeedServer
    ) -> None:
        """A few kilobytes that stand for many megabytes are never unpacked beyond the bound."""
        bomb = packed(bytes(2**24))
        body = BodyReader(1_000, "gzip")
        with pytest.raises(Unreadable):
            body.add(bomb)
        assert len(body.data) == 1_001
        server.on("GET /days", response(bomb, headers={"Content-Encoding": "gzip"}))
        async with HttpFeedSource(server.url, max_bytes=1_000) as source:
            assert "more than 1,000 bytes" in str(await failing(source))

    @pytest.mark.parametrize(
        ("encoding", "body", "reason"),
        [
            ("br", b"[]", "encoded as 'br'"),
            ("gzip, gzip", packed(packed(b"[]")), "encoded as 'gzip, gzip'"),
            ("gzip", b"[]", "broken gzip"),
            ("gzip", packed(b"[]")[:-1], "cut short"),
            ("gzip", packed(b"[]") + b"more", "data after the end"),
        ],
    )
    async def test_an_encoding_other_than_gzip_is_an_error(
        self, server: FeedServer, source: HttpFeedSource, encoding: str, body: bytes, reason: str
    ) -> None:
        """Only gzip was asked for, whole and once."""
        server.on("GET /days", response(body, headers={"Content-Encoding": encoding}))
        assert reason in str(await failing(source))


class TestF6Redirects:
    async def test_a_read_follows_redirects_on_the_same_host(
        self, server: FeedServer, source: HttpFeedSource
    ) -> None:
        """A read goes where it is sent, on the same host."""
        server.put("t1", NOW)
        server.on("GET /days", response(b"", 308, {"Location": "/v2/days"}))
        server.on("GET /v2/days", response([TOPIC]))
        assert [topic.topic_uuid for topic in await source.day_index(DAY, None)] == ["t1"]

    @pytest.mark.parametrize(
        ("location", "said"),
        [
            ("/days/again", "5 times"),
            ("http://127.0.0.1:1/elsewhere?token=secret", "to 'http://127.0.0.1:1/elsewhere'"),
            ("https://user:secret@feed.example/", "to 'https://feed.example/'"),
            ("http://[", "to 'http://%5b'"),
            ("http://127.0.0.1:port/", "Invalid URL in location header"),
            ("mailto:ann@feed.example", "redirect"),
            (None, "status 302 Because; expected"),
        ],
    )
    async def test_a_redirect_to_another_host_or_in_a_circle_is_an_error(
        self, server: FeedServer, source: HttpFeedSource, location: str | None, said: str
    ) -> None:
        """Round and round, to another host, to no URL at all: an error that says where it led."""
        headers = {} if location is None else {"Location": location}
        server.on("GET /days", response(b"", 302, headers))
        error = str(await failing(source))
        assert said in error
        assert "secret" not in error
        assert len(server.requests) <= 6

    async def test_no_secret_is_sent_to_another_host(self, server: FeedServer) -> None:
        """Another port is another host: it hears nothing, not even a header."""
        async with FeedServer() as other:
            server.on("GET /days", response(b"", 302, {"Location": f"{other.url}/days"}))
            async with HttpFeedSource(server.url, headers={"X-Api-Key": "secret"}) as source:
                await failing(source)
            assert other.requests == []

    async def test_a_redirected_write_is_an_error(
        self, server: FeedServer, source: HttpFeedSource
    ) -> None:
        """A redirected write is refused: who knows what it would write where."""
        server.on("POST /topics", response(b"", 307, {"Location": "/v2/topics"}))
        with pytest.raises(FeedHttpError, match="status 307"):
            await source.create_topic(a_topic())
        assert server.asked("POST") == ["/topics"]


class TestF7RetryAfter:
    @pytest.mark.parametrize("status", [429, 503])
    @pytest.mark.parametrize(
        ("told", "pause"),
        [
            ("120", 120),
            ("Tue, 14 Nov 2023 22:14:20 GMT", 60),
            ("9" * 5_000, 86_400),
            ("Tue, 14 Nov 2073 22:14:20 GMT", 86_400),
        ],
    )
    async def test_retry_after_is_seconds_or_a_date_and_a_day_at_most(
        self, server: FeedServer, source: HttpFeedSource, status: int, told: str, pause: float
    ) -> None:
        """Seconds, or a date by the server's own clock; never more than a day."""
        server.on("GET", response(b"Busy", status, {"Retry-After": told, "Date": DATE}))
        with pytest.raises(RetryAfter, match=f"GET .* {status} Because, 'Busy'") as caught:
            await source.day_index(DAY, None)
        assert caught.value.seconds == pause

    @pytest.mark.parametrize("told", ["", "soon", "-5", "0", "1e3", "٣", DATE])
    async def test_a_retry_after_without_a_usable_time_is_a_plain_error(
        self, server: FeedServer, source: HttpFeedSource, told: str
    ) -> None:
        """No time, one that is over, or rubbish: an error like others, with the engine's pause."""
        headers = {"Retry-After": told.encode().decode("latin-1"), "Date": DATE}
        server.on("GET", response(b"Busy", 503, headers))
        assert (await failing(source)).status == 503

    async def test_retry_after_counts_only_with_429_and_503(
        self, server: FeedServer, source: HttpFeedSource
    ) -> None:
        """Only those two mean a pause."""
        server.on("GET", response(b"", 500, {"Retry-After": "120"}))
        assert (await failing(source)).status == 500

    async def test_a_write_raises_retry_after_too(
        self, server: FeedServer, source: HttpFeedSource
    ) -> None:
        """Who writes is told as well."""
        server.on("DELETE", response(b"", 429, {"Retry-After": "7"}))
        with pytest.raises(RetryAfter):
            await source.delete_topic("t1")

    def test_a_retry_after_date_without_a_date_field_uses_the_local_clock(self) -> None:
        """Then the clock here has to do."""
        assert pause_of(DATE, "", NOW - 5) == 5
        assert pause_of(DATE, "rubbish", NOW - 5) == 5
        assert pause_of("Tue, 14 Nov 2023 22:13:20 -0000", "", NOW - 5) is None

    @given(st.text(), st.text(), st.floats(min_value=0, max_value=4e9))
    def test_any_text_in_retry_after_is_a_pause_of_up_to_a_day_or_none(
        self, told: str, day: str, now: float
    ) -> None:
        """Whatever a header holds, it is a pause of up to a day, or none."""
        pause = pause_of(told, day, now)
        assert pause is None or 0 < pause <= 86_400


class TestCredentials:
    async def test_credentials_of_the_base_url_are_sent_and_never_shown(
        self, server: FeedServer
    ) -> None:
        """The name and password of the base URL go to the server, and into no error."""
        base = server.url.replace("//", "//ann:s%40fe@")
        async with HttpFeedSource(base) as source:
            server.on("GET /days", response(b"", 302, {"Location": "/v2/days"}))
            server.on("GET /v2", response(b"", 403))
            error = await failing(source)
            told = {seen.headers["authorization"] for seen in server.requests}
            assert told == {"Basic YW5uOnNAZmU="}
            assert len(server.requests) == 2
            await server.stop()
            for text in (str(error), str(await failing(source)), repr(source)):
                assert "fe@" not in text
                assert "ann" not in text

    @pytest.mark.parametrize(
        "base", ["http://ann:sa/fe@host", "http://ann:safe@", "ftp://ann:safe@host"]
    )
    def test_credentials_are_not_shown_in_the_error_about_a_bad_url(self, base: str) -> None:
        """Not even the one that cannot be used."""
        with pytest.raises(ConfigError) as caught:
            HttpFeedSource(base)
        assert "sa" not in str(caught.value).replace("base_url", "")
        assert caught.value.__cause__ is None

    async def test_cookies_are_not_kept(self, server: FeedServer, source: HttpFeedSource) -> None:
        """A feed is public: nothing that upstream hands out is carried back."""
        server.on("GET", response([], headers={"Set-Cookie": "id=1; Path=/"}))
        await source.day_index(DAY, None)
        await source.day_index(DAY, None)
        assert "cookie" not in server.requests[-1].headers


class TestOptions:
    @pytest.mark.parametrize(
        "wrong",
        [
            {"base_url": "feed.example"},
            {"base_url": "ftp://feed.example"},
            {"base_url": "http://"},
            {"base_url": "http://feed.example/?a=1"},
            {"base_url": "http://feed.example/#a"},
            {"base_url": "http://feed.example:port"},
            {"base_url": "http://feed.example:99999"},
            {"base_url": "http://feed.example:0"},
            {"base_url": "http://xn--.example"},
            {"base_url": 7},
            {"base_url": "http://\ud800"},
            {"timeout": 0},
            {"timeout": "soon"},
            {"max_bytes": 0},
            {"max_bytes": True},
            {"max_bytes": "8MB"},
            {"headers": ["X-Api-Key"]},
            {"headers": {"X Api Key": "k"}},
            {"headers": {"X-Api-Key": "k\r\nHost: other"}},
            {"headers": {"X-Api-Key": 7}},
            {"client": "httpx"},
        ],
        ids=str,
    )
    def test_options_that_cannot_be_used_are_refused(self, wrong: dict[str, Any]) -> None:
        """A wrong option is named at once, before anything is asked."""
        (name,) = wrong
        with pytest.raises(ConfigError, match=f"^{name}: "):
            HttpFeedSource(**({"base_url": "http://feed.example"} | wrong))

    @pytest.mark.parametrize("bad", ["", "\ud800", 7, None])
    async def test_uuids_and_categories_that_are_no_text_are_refused(
        self, source: HttpFeedSource, bad: Any
    ) -> None:
        """A uuid or category that is no text is refused here, not by the server."""
        with pytest.raises(ConfigError, match=r"^uuid: "):
            await source.topic(bad)
        with pytest.raises(ConfigError, match=r"^topic_uuid: "):
            await source.add_comment(bad, COMMENT)
        if bad is not None:
            with pytest.raises(ConfigError, match=r"^category: "):
                await source.day_index(DAY, bad)

    async def test_records_that_cannot_be_sent_are_refused(self, source: HttpFeedSource) -> None:
        """What is no topic, no comment, or no valid text is refused here as well."""
        wrong: Any = {"topic_uuid": "t1"}
        with pytest.raises(ConfigError, match="expected a Topic"):
            await source.create_topic(wrong)
        with pytest.raises(ConfigError, match="expected a Comment"):
            await source.add_comment("t1", wrong)
        with pytest.raises(ConfigError, match="surrogates"):
            await source.create_topic(a_topic("\ud800"))

    async def test_a_given_client_is_used_and_not_closed(self, server: FeedServer) -> None:
        """It is used as it is, but for its time-outs and redirects, and not closed."""
        async with httpx.AsyncClient(
            headers={"X-Api-Key": "k"}, timeout=0.001, follow_redirects=True
        ) as client:
            async with HttpFeedSource(server.url, client=client) as source:
                assert await source.topic("t1") is None
            assert not client.is_closed
            assert server.requests[0].headers["x-api-key"] == "k"
            with pytest.raises(NotOpen):
                await source.topic("t1")

    async def test_a_closed_source_raises_not_open(self, server: FeedServer) -> None:
        """After closing, or after its client was closed, it says so."""
        source = HttpFeedSource(server.url)
        await source.close()
        await source.close()
        with pytest.raises(NotOpen, match=server.url):
            await source.topic("t1")
        with pytest.raises(NotOpen):
            await source.__aenter__()
        client = httpx.AsyncClient()
        source = HttpFeedSource(server.url, client=client)
        await client.aclose()
        with pytest.raises(NotOpen):
            await source.create_topic(a_topic())

    async def test_errors_of_an_httpx_client_are_told_as_those_of_httpx2(
        self, server: FeedServer
    ) -> None:
        """Its errors are told as those of httpx2 are, and so are redirects and credentials."""
        server.on("GET /days", response(b"", 302, {"Location": "/v2/days"}))
        server.on("GET /v2", response([]))
        base = server.url.replace("//", "//ann:safe@")
        async with httpx.AsyncClient() as client:
            source = HttpFeedSource(base, client=client)
            assert await source.day_index(DAY, None) == []
            assert {it.headers["authorization"] for it in server.requests} == {"Basic YW5uOnNhZmU="}
            await server.stop()
            assert "ConnectError" in str(await failing(source))

    def test_without_httpx2_the_import_names_the_extra(self) -> None:
        """The module names the extra that it needs; the feed itself needs none."""
        script = """
import sys
sys.modules["httpx2"] = None
import stillfresh.systems.feed
try:
    import stillfresh.systems.feed.http
except stillfresh.ConfigError as exc:
    assert "stillfresh[web]" in str(exc), exc
else:
    raise SystemExit("imported without httpx2")
"""
        subprocess.run([sys.executable, "-W", "error", "-c", script], check=True, timeout=60)


class TestF6EndToEnd:
    async def test_a_cold_feed_asks_seven_at_once(
        self, server: FeedServer, engine: FeedEngine
    ) -> None:
        """The server answers nobody before all seven days have been asked for."""
        everyone = asyncio.Barrier(7)

        async def together(seen: Seen) -> bytes | None:
            await everyone.wait()
            return await server.feed(seen)

        for days in range(7):
            server.put(f"t{days}", NOW - days * 86_400 + 1)
        server.on("GET /days", together)
        feed = await engine.get_all(days_back=7)
        assert [topic.topic_uuid for topic in feed.topics] == [f"t{days}" for days in range(7)]
        assert feed.verdict is Verdict.FRESH
        assert len(server.requests) == 7
        assert (await engine.get_all()).topics == feed.topics
        assert len(server.requests) == 7

    async def test_while_upstream_is_down_the_old_feed_is_served_with_the_reason(
        self, server: FeedServer, engine: FeedEngine, clock: ManualClock
    ) -> None:
        """The old feed is served at once, and says why it is not newer; then it is renewed."""
        server.put("t1", NOW)
        await engine.get_all()
        await server.stop()
        clock.advance("10m")
        feed = await engine.get_all()
        assert (feed.verdict, feed.age, len(feed.topics)) == (Verdict.STALE, 600, 1)
        assert "ConnectError" in str(await the_failure(engine))
        await server.start_again()
        server.put("t2", NOW)
        clock.advance("2s")
        assert len((await engine.get_all()).topics) == 1
        assert await updated(engine) == FeedCacheUpdated("index:all:7", changed=True)
        feed = await engine.get_all()
        assert (feed.verdict, len(feed.topics), feed.error) == (Verdict.FRESH, 2, None)

    async def test_with_a_failing_day_the_others_are_shown_and_not_fresh(
        self, server: FeedServer, engine: FeedEngine
    ) -> None:
        """What the other days brought is shown and kept, and is not called fresh."""
        server.put("t0", NOW)
        server.put("t1", NOW - 86_400)
        server.on("GET /days/2023-11-13", response(b"Oops", 500))
        feed = await engine.get_all()
        assert [topic.topic_uuid for topic in feed.topics] == ["t0"]
        assert feed.verdict is Verdict.STALE

    async def test_a_broken_entry_deletes_nothing(
        self, server: FeedServer, engine: FeedEngine, clock: ManualClock
    ) -> None:
        """F9: the day with the broken entry says nothing of its topics, and none of them goes."""
        server.put("t0", NOW)
        server.put("t1", NOW)
        await engine.get_all()
        clock.advance("10m")
        server.topics["t1"]["title"] = 7
        await updated(engine)
        assert {topic.topic_uuid for topic in (await engine.get_all()).topics} == {"t0", "t1"}

    async def test_a_miss_that_gets_only_rubbish_raises_and_names_the_url(
        self, server: FeedServer, engine: FeedEngine
    ) -> None:
        """With nothing to serve, the error names a URL and what came of it."""
        server.on("GET", response(b"<html>", 200))
        with pytest.raises(LoadFailed, match=r"/days/2023-11-14: .*<html>") as caught:
            await engine.get_all()
        assert isinstance(caught.value.__cause__, FeedHttpError)
        with pytest.raises(LoadFailed, match="/topics/t1: "):
            await engine.get_topic("t1")

    async def test_retry_after_is_respected(
        self, server: FeedServer, engine: FeedEngine, clock: ManualClock
    ) -> None:
        """F7: nobody is asked before the time that upstream named."""
        server.put("t1", NOW)
        await engine.get_all()
        clock.advance("10m")
        server.on("GET", response(b"Busy", 429, {"Retry-After": "120"}))
        assert "429" in str(await the_failure(engine))
        server.mend()
        before = len(server.requests)
        clock.advance(119)
        assert (await engine.get_all()).verdict is Verdict.STALE
        assert len(server.requests) == before
        clock.advance(2)
        await updated(engine)
        assert len(server.requests) == before + 7
        assert (await engine.get_all()).verdict is Verdict.FRESH


class TestF10EndToEnd:
    async def test_a_topic_is_shown_before_it_is_published(
        self, server: FeedServer, engine: FeedEngine
    ) -> None:
        """In the very next read of the one who wrote it, while the network is still busy."""
        await engine.get_all()
        held = Hold(server.feed)
        server.on("POST /topics", held)
        creating = asyncio.create_task(engine.create_topic(a_topic(body="long")))
        await held.asked.wait()
        assert [topic.body for topic in (await engine.get_all()).topics] == ["long"]
        held.let_go()
        await creating
        assert server.topics["t1"]["body"] == "long"

    @pytest.mark.parametrize("refusal", [response(b"Not you", 403), None], ids=["403", "cut"])
    async def test_refused_writes_are_undone(
        self, server: FeedServer, engine: FeedEngine, refusal: bytes | None
    ) -> None:
        """Create, delete, comment: as before, and the error raised."""
        server.put("t1", NOW, body="long")
        await engine.get_all()
        await engine.get_comments("t1")
        for method in ("POST", "DELETE"):
            server.on(method, always(refusal))
        with pytest.raises(StillfreshError):
            await engine.create_topic(a_topic("t2"))
        with pytest.raises(StillfreshError):
            await engine.delete_topic("t1")
        with pytest.raises(StillfreshError):
            await engine.add_comment("t1", COMMENT)
        assert [topic.topic_uuid for topic in (await engine.get_all()).topics] == ["t1"]
        assert (await engine.get_comments("t1")).comments == []

    async def test_writes_reach_the_upstream(self, server: FeedServer, engine: FeedEngine) -> None:
        """What was created, commented on and deleted here is so upstream."""
        await engine.create_topic(a_topic("a/b", body="long"))
        comment = Comment("c1", "a/b", "bob", int(NOW), body="Well said")
        await engine.add_comment("a/b", comment)
        assert (await engine.get_comments("a/b")).comments == [comment]
        assert [one["body"] for one in server.comments["a/b"]] == ["Well said"]
        await engine.delete_topic("a/b")
        assert server.topics == {}
        assert (await engine.get_all()).topics == []
