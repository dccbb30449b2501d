"""C12: NexusClient against a real HTTP server that is slow, fails, lies, and never ends."""

import asyncio
import gzip
import json
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stillfresh import ConfigError, LoadFailed, RetryAfter
from stillfresh.systems.coordinator import (
    Database,
    NexusClient,
    TtlConfig,
    TtlController,
    TtlCoordinator,
)
from stillfresh.systems.coordinator.rules import by_id, post_id, user_id
from stillfresh.testing import ManualClock
from tests.kit.coordinator import START, VIEWER, post, user
from tests.kit.servers.nexus import NexusServer, nexus_server


@pytest.fixture
async def server() -> AsyncIterator[NexusServer]:
    async with nexus_server() as server:
        yield server


@pytest.fixture
async def client(server: NexusServer) -> AsyncIterator[NexusClient]:
    async with NexusClient(server.url, max_bytes=100_000) as client:
        yield client


class TestC12Requests:
    async def test_posts_are_requested_with_their_ids_and_the_viewer(
        self, server: NexusServer, client: NexusClient
    ) -> None:
        """`POST v0/stream/posts/by_ids {post_ids, viewer_id}`."""
        assert await client.posts_by_ids(["a:1", "b:2"], "ann") == [post("a:1"), post("b:2")]
        asked = {"post_ids": ["a:1", "b:2"], "viewer_id": "ann"}
        assert server.asked == [("v0/stream/posts/by_ids", asked)]

    async def test_a_request_for_users_without_a_viewer_leaves_the_viewer_out(
        self, server: NexusServer, client: NexusClient
    ) -> None:
        """`POST v0/stream/users/by_ids {user_ids}`: the viewer is left out, not null."""
        assert await client.users_by_ids(["ann"]) == [user("ann")]
        assert server.asked == [("v0/stream/users/by_ids", {"user_ids": ["ann"]})]

    async def test_the_path_of_a_base_url_is_kept_without_a_double_slash(
        self, server: NexusServer
    ) -> None:
        """A slash at its end is not doubled."""
        async with NexusClient(f"{server.url}/api/") as client:
            with pytest.raises(LoadFailed, match="HTTP 404"):
                await client.users_by_ids(["ann"])
        assert server.asked[0][0] == "api/v0/stream/users/by_ids"

    async def test_a_204_and_an_empty_list_mean_that_all_are_absent(
        self, server: NexusServer, client: NexusClient
    ) -> None:
        """204, or an empty list: all of them are absent."""
        server.status, server.body = 204, b""
        assert await client.posts_by_ids(["a:1"]) == []
        server.status, server.body = 200, b"[]"
        assert await client.posts_by_ids(["a:1"]) == []

    async def test_the_nexus_client_leaves_no_connection_open(
        self, server: NexusServer, client: NexusClient
    ) -> None:
        """Nobody has to close the client for that."""
        await asyncio.gather(*(client.posts_by_ids(["a:1"]) for _ in range(5)))
        async with asyncio.timeout(30):
            while server.open:
                await asyncio.sleep(0)

    async def test_an_http_client_of_your_own_is_used_with_its_headers(
        self, server: NexusServer
    ) -> None:
        """With its headers, proxies and certificates."""
        own = httpx.AsyncClient(headers={"x-app": "mine"})
        async with NexusClient(server.url, client=own) as client:
            assert await client.posts_by_ids(["a:1"]) == [post("a:1")]
        assert own.is_closed

    async def test_an_error_of_an_httpx_client_fails_the_load(self) -> None:
        """Its errors are the load's, as those of httpx2 are."""
        async with nexus_server() as gone:
            url = gone.url
        async with NexusClient(url, client=httpx.AsyncClient()) as client:
            with pytest.raises(LoadFailed, match="ConnectError"):
                await client.posts_by_ids(["a:1"])

    def test_an_object_that_is_no_http_client_is_refused(self) -> None:
        """It is refused before anything is asked."""
        wrong: Any = "httpx"
        with pytest.raises(ConfigError, match="client: must be an httpx2"):
            NexusClient("http://nexus.example", client=wrong)


class TestC12BadAnswers:
    @pytest.mark.parametrize("status", [199 + 102, 400, 404, 429, 500, 503])
    async def test_any_status_but_200_fails_the_batch(
        self, server: NexusServer, client: NexusClient, status: int
    ) -> None:
        """Anything but 200 has failed, a redirect too."""
        server.status, server.headers = status, {"location": "/elsewhere"}
        with pytest.raises(LoadFailed, match=f"HTTP {status}"):
            await client.posts_by_ids(["a:1"])

    async def test_a_retry_after_in_seconds_is_obeyed(
        self, server: NexusServer, client: NexusClient
    ) -> None:
        """`Retry-After` in seconds is listened to; a date, or nonsense, is not."""
        server.status, server.headers = 503, {"retry_after": "120"}
        with pytest.raises(RetryAfter) as caught:
            await client.posts_by_ids(["a:1"])
        assert caught.value.seconds == 120
        server.headers = {"retry_after": "soon"}
        with pytest.raises(LoadFailed):
            await client.posts_by_ids(["a:1"])

    @pytest.mark.parametrize(
        "body",
        [b"{}", b"null", b"<html>", b"[", b"\xff\xfe", b'"a:1"', b"[" * 50_000, b"[1e999999999]"],
    )
    async def test_an_answer_of_another_shape_fails_the_batch_or_its_entries(
        self, server: NexusServer, client: NexusClient, body: bytes
    ) -> None:
        """Not a list of views: the whole batch has failed, or its entries have."""
        server.body = body
        try:
            views = await client.posts_by_ids(["a:1"])
        except LoadFailed as exc:
            assert "not a list of views" in str(exc)  # noqa: PT017 (either is right)
        else:
            found = by_id("post", ["a:1"], views, post_id)
            assert isinstance(found["a:1"], LoadFailed)

    async def test_an_answer_that_is_too_long_fails_and_is_not_read_to_its_end(
        self, server: NexusServer, client: NexusClient
    ) -> None:
        """No more is read than is allowed, whatever the server goes on to send."""
        sent = 0

        async def endless(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            nonlocal sent
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n\r\n[")
            while not writer.is_closing():
                writer.write(b" " * 10_000)
                sent += 10_000
                await writer.drain()

        server.raw = endless
        with pytest.raises(LoadFailed, match="more than 100,000 bytes"):
            await client.posts_by_ids(["a:1"])
        assert sent < 100_000_000

    async def test_a_gzip_answer_is_unpacked_within_the_limit(
        self, server: NexusServer, client: NexusClient
    ) -> None:
        """gzip is understood; what it unpacks to is bounded too, and nonsense has failed."""
        server.headers = {"content_encoding": "gzip"}
        server.body = gzip.compress(json.dumps([post("a:1")]).encode())
        assert await client.posts_by_ids(["a:1"]) == [post("a:1")]
        server.body = gzip.compress(b"[" + b" " * 50_000_000)
        with pytest.raises(LoadFailed, match="more than"):
            await client.posts_by_ids(["a:1"])
        server.body = b"not packed at all"
        with pytest.raises(LoadFailed, match="broken gzip"):
            await client.posts_by_ids(["a:1"])
        server.headers = {"content_encoding": "br"}
        with pytest.raises(LoadFailed, match="not as gzip"):
            await client.posts_by_ids(["a:1"])

    async def test_an_answer_that_is_too_slow_fails_even_if_bytes_keep_coming(
        self, server: NexusServer
    ) -> None:
        """The time-out is for the whole answer: one byte now and then does not extend it."""

        async def never(reader: asyncio.StreamReader, _: asyncio.StreamWriter) -> None:
            await reader.read()

        async def drip(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
            while not writer.is_closing():
                writer.write(b" ")
                await writer.drain()
                await asyncio.sleep(0)

        async with NexusClient(server.url, timeout="50ms") as client:
            for server.raw in (never, drip):
                with pytest.raises(LoadFailed):
                    await client.posts_by_ids(["a:1"])

    async def test_an_answer_that_is_shorter_than_announced_fails(
        self, server: NexusServer, client: NexusClient
    ) -> None:
        """Less than was announced is no answer."""

        async def cut(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 500\r\n\r\n[{}")
            await writer.drain()

        server.raw = cut
        with pytest.raises(LoadFailed, match="RemoteProtocolError"):
            await client.posts_by_ids(["a:1"])

    @pytest.mark.parametrize(
        "sent",
        [
            b"content-type: application/json\r\n\r\n",
            b"content-length: 0\r\n\r\n",
            b"content-encoding: gzip\r\n\r\n" + gzip.compress(b"[]", mtime=0)[:-8],
            b"content-encoding: gzip\r\n\r\n" + gzip.compress(b"[]", mtime=0)[:10],
        ],
    )
    async def test_an_answer_that_broke_off_says_nothing_of_absence(
        self, server: NexusServer, client: NexusClient, sent: bytes
    ) -> None:
        """Nothing after the headers, or nothing at the end of what is packed."""

        async def broken(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(b"HTTP/1.1 200 OK\r\n" + sent)
            await writer.drain()

        server.raw = broken
        with pytest.raises(LoadFailed):
            await client.posts_by_ids(["a:1"])

    async def test_a_retry_after_of_a_thousand_years_counts_as_one_day(
        self, server: NexusServer, client: NexusClient
    ) -> None:
        """However many digits it has."""
        server.status, server.headers = 503, {"retry_after": "9" * 5000}
        with pytest.raises(RetryAfter) as caught:
            await client.posts_by_ids(["a:1"])
        assert caught.value.seconds == 86_400

    async def test_a_refused_connection_and_an_unknown_name_fail_the_load(self) -> None:
        """A refused connection, and a name that does not exist."""
        async with nexus_server() as gone:
            url = gone.url
        async with NexusClient(url) as client:
            with pytest.raises(LoadFailed, match="ConnectError"):
                await client.posts_by_ids(["a:1"])

    @pytest.mark.parametrize("url", ["", "nexus", "ftp://nexus", None])
    def test_a_bad_url_and_a_bad_limit_are_refused_at_construction(self, url: str) -> None:
        """Refused where it is given, and so is a bad limit."""
        with pytest.raises(ConfigError, match="url"):
            NexusClient(url)
        with pytest.raises(ConfigError, match="max_bytes"):
            NexusClient("http://x", max_bytes=0)
        with pytest.raises(ConfigError, match="timeout"):
            NexusClient("http://x", timeout=0)


class TestC12BrokenEntries:
    async def test_a_broken_entry_fails_alone(
        self, server: NexusServer, client: NexusClient
    ) -> None:
        """With an id of its own it casts no doubt on the others."""
        views = [post("a:1"), {**post("a:2"), "counts": "many"}, post("a:3")]
        server.body = json.dumps(views).encode()
        ids = ["a:1", "a:2", "a:3", "a:4"]
        found = by_id("post", ids, await client.posts_by_ids(ids), post_id)
        assert isinstance(found.pop("a:2"), LoadFailed)
        assert found == {"a:1": post("a:1"), "a:3": post("a:3")}

    async def test_one_batch_of_a_nexus_server_is_stored_failed_and_absent_by_id(
        self, server: NexusServer, tmp_path: Path
    ) -> None:
        """From the server to the file: stored, failed alone, and absent, in one batch."""
        clock = ManualClock(START)
        views = [post("a:1"), {**post("a:2"), "tags": {}}]
        server.body = json.dumps(views).encode()
        absent: list[str] = []
        async with NexusClient(server.url) as client:
            controller = TtlController(
                nexus=client, database=Database(tmp_path / "app.db"), clock=clock
            )
            controller.on_absent(lambda _kind, ids: absent.extend(ids))
            async with controller, TtlCoordinator(controller, TtlConfig()) as ttl:
                ttl.sign_in(VIEWER)
                ttl.set_visible(True)
                for number in (1, 2, 3):
                    ttl.subscribe_post(composite_post_id=f"a:{number}")
                await ttl.tick()
                assert await controller.get("post", "a:1") == post("a:1")
                assert set(ttl.snapshot().cooling["post"]) == {"a:2"}
                assert absent == ["a:3"]
                server.body = None
                clock.advance(10)
                await ttl.tick()
                assert await controller.get("post", "a:2") == post("a:2")
        assert server.asked[0][1]["viewer_id"] == VIEWER

    async def test_views_of_a_nexus_of_your_own_are_not_checked(self, tmp_path: Path) -> None:
        """What shape a view has is said of a Nexus server's, not of anybody's."""
        views = {
            "a:1": {**post("a:1"), "tags": ("x", "y")},
            "a:2": {**post("a:2"), "bookmark": True},
        }

        class Own:
            async def posts_by_ids(self, post_ids: list[str], _: str | None) -> list[Any]:
                return [views[id_] for id_ in post_ids]

            async def users_by_ids(self, user_ids: list[str], _: str | None) -> list[Any]:
                return [{**user(id_), "bookmark": True} for id_ in user_ids]

        database = Database(tmp_path / "app.db")
        async with TtlController(nexus=Own(), database=database) as controller:
            found = await controller.force_refresh_posts_by_ids(["a:1", "a:2"], VIEWER)
            assert found == {"a:1": {**post("a:1"), "tags": ["x", "y"]}, "a:2": views["a:2"]}
            users = await controller.force_refresh_users_by_ids(["u"], VIEWER)
            assert users == {"u": {**user("u"), "bookmark": True}}

    async def test_parts_are_checked_only_for_the_kind_that_has_them(
        self, server: NexusServer, client: NexusClient
    ) -> None:
        """Only a post has a bookmark, and only a user one relationship."""
        server.body = json.dumps([{**user("u"), "bookmark": True}]).encode()
        found = by_id("user", ["u"], await client.users_by_ids(["u"]), user_id)
        assert found == {"u": {**user("u"), "bookmark": True}}

    @given(
        st.lists(
            st.recursive(
                st.none() | st.booleans() | st.integers() | st.text(),
                lambda of: st.lists(of) | st.dictionaries(st.sampled_from(["details", "id"]), of),
            )
        )
    )
    def test_any_json_gives_views_or_failures_and_no_false_absence(
        self, entries: list[Any]
    ) -> None:
        """Each entry is somebody's view, or what was asked for has failed and is not absent."""
        for id_of in (post_id, user_id):
            found = by_id("kind", ["asked"], entries, id_of)
            whole = [it for it in found.values() if not isinstance(it, LoadFailed)]
            assert all(entry in entries for entry in whole)
            assert found or not entries


def test_without_httpx2_only_the_client_is_missing() -> None:
    """C12: the coordinator works with any nexus; naming NexusClient says what to install."""
    script = """
import sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "httpx2":
            raise ModuleNotFoundError("No module named 'httpx2'", name="httpx2")
sys.meta_path.insert(0, Refuse())
import stillfresh.systems.coordinator
try:
    from stillfresh.systems.coordinator import NexusClient
except ModuleNotFoundError as exc:
    assert "stillfresh[web]" in str(exc), exc
else:
    raise SystemExit("no error")
"""
    subprocess.run([sys.executable, "-W", "error", "-c", script], check=True, timeout=60)
