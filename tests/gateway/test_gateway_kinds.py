"""G1: `[kinds.NAME]`: an upstream API over real HTTP, in all the ways it can fail."""

import gzip
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stillfresh.errors import LoadFailed
from stillfresh.gateway.config import Settings, settings_of
from stillfresh.gateway.serving import gateway_of
from stillfresh.gateway.sources import Authority, id_maker, views_by_id
from stillfresh.http.client import Endpoint, new_client
from tests.kit.gateway import Api, api_config, running


def settings_for(url: str, **more: Any) -> Settings:
    kind = {"batch_url": f"{url}/by_ids", "fresh_for": "5m", **more}
    who = {"authenticate_url": f"{url}/who"} if more.get("per_viewer") else {}
    return settings_of({"kinds": {"post": kind}, "server": who}, {})


@asynccontextmanager
async def world(api: Api, **more: Any) -> AsyncIterator[httpx.AsyncClient]:
    """A client of a gateway in front of this API."""
    async with running(api, api_config(api)) as url, new_client(5, idle_connections=2) as upstream:
        app = gateway_of(settings_for(url, **more), upstream, checks_page_names=True)
        transport = httpx.ASGITransport(app=app)
        async with (
            app,
            httpx.AsyncClient(transport=transport, base_url="http://localhost") as client,
        ):
            yield client


@pytest.fixture
def api() -> Api:
    return Api()


class TestG1Kinds:
    async def test_one_request_asks_for_many_ids(self, api: Api) -> None:
        """One request for many ids; those without a view do not exist."""
        api.absent = {"c"}
        async with world(api, headers={"X-Key": "k"}) as client:
            answer = await client.post("/v1/post/batch", json={"ids": ["a", "b", "c"]})
        statuses = [(it["id"], it["status"]) for it in answer.json()["items"]]
        assert statuses == [("a", "found"), ("b", "found"), ("c", "absent")]
        assert api.asked == [{"ids": ["a", "b", "c"]}]
        assert api.headers_seen[0]["x-key"] == "k"
        assert api.headers_seen[0]["content-type"] == "application/json"

    async def test_a_batch_has_at_most_max_batch_ids(self, api: Api) -> None:
        """`max_batch`."""
        async with world(api, max_batch=2) as client:
            await client.post("/v1/post/batch", json={"ids": ["a", "b", "c", "d", "e"]})
        assert sorted(len(it["ids"]) for it in api.asked) == [1, 2, 2]

    async def test_the_names_of_upstream_fields_can_be_set(self, api: Api) -> None:
        """The ids' field, the list's, and an id that is put together."""
        posts = [{"details": {"author": "ann", "id": 7}}, {"details": {"author": "bob", "id": "x"}}]
        api.body = msgspec.json.encode({"data": {"posts": posts}})
        options = {"ids_field": "post_ids", "list_field": "data.posts"}
        async with world(api, id="{details.author}:{details.id}", **options) as client:
            answer = await client.get("/v1/post/ann:7")
            other = await client.post("/v1/post/batch", json={"ids": ["ann:7", "bob:x"]})
        assert answer.json() == posts[0]
        assert [it["status"] for it in other.json()["items"]] == ["found", "found"]
        assert api.asked[0] == {"post_ids": ["ann:7"]}

    async def test_a_204_or_a_null_view_is_an_absence(self, api: Api) -> None:
        """204; `null` is no view either."""
        api.status, api.body = 204, b""
        async with world(api) as client:
            none = await client.get("/v1/post/a")
            api.status, api.body = 200, b"[null]"
            null = await client.get("/v1/post/b")
        assert [it.json()["code"] for it in (none, null)] == ["absent", "absent"]

    async def test_the_upstream_is_told_the_viewer_of_a_per_viewer_kind(self, api: Api) -> None:
        """The upstream is told who looks, and is asked who has a token, once."""
        who = {"t-ann": {"viewer_id": "ann"}}

        def views(asked: dict[str, Any]) -> bytes:
            if "token" not in asked:
                return Api.views(api, asked)
            api.status = 200 if asked["token"] in who else 401
            return msgspec.json.encode(who.get(asked["token"], {}))

        api.views = views  # type: ignore[method-assign]
        async with world(api, per_viewer=True) as client:
            ann = {"authorization": "Bearer t-ann"}
            answers = [await client.get(f"/v1/post/{id_}", headers=ann) for id_ in "ab"]
            refused = await client.get("/v1/post/a", headers={"authorization": "Bearer no"})
        assert [it.json()["viewer"] for it in answers] == ["ann", "ann"]
        assert refused.status_code == 401
        asked = [it for it in api.asked if "token" not in it]
        assert asked == [{"ids": ["a"], "viewer_id": "ann"}, {"ids": ["b"], "viewer_id": "ann"}]
        assert [it for it in api.asked if "token" in it] == [{"token": "t-ann"}, {"token": "no"}]

    @pytest.mark.parametrize(
        ("status", "body"), [(500, b""), (200, b"[]"), (200, b'{"viewer_id": 1}'), (200, b"x")]
    )
    async def test_a_sign_in_that_fails_is_503(self, api: Api, status: int, body: bytes) -> None:
        """Nobody is refused, and nobody let in, because the upstream is broken."""
        api.status, api.body = status, body
        async with world(api, per_viewer=True) as client:
            answer = await client.get("/v1/post/a", headers={"authorization": "Bearer t"})
        assert (answer.status_code, answer.json()["code"]) == (503, "upstream_failed")


class TestG12Authority:
    async def test_sessions_ask_each_time_and_reads_remember(self, api: Api) -> None:
        """A live session's token is really checked; a read may use an answer of a minute."""
        api.body = b'{"viewer_id": "ann"}'
        async with (
            running(api, api_config(api)) as url,
            new_client(5, idle_connections=2) as client,
        ):
            authority = Authority(client, url)
            assert [await authority.remembered("t") for _ in "ab"] == ["ann", "ann"]
            assert await authority("t") == "ann"
            assert len(api.asked) == 2
            api.status = 401
            assert await authority.remembered("t") == "ann"
            assert await authority("t") is None
            assert await authority.remembered("t") is None
            assert len(api.asked) == 4


class TestG1KindsFailing:
    @pytest.mark.parametrize("status", [201, 301, 302, 307, 308, 400, 401, 404, 429, 500, 503])
    async def test_any_other_status_is_a_failed_batch(self, api: Api, status: int) -> None:
        """Redirects are not followed: ids and header fields are told to nobody else."""
        api.status, api.headers = status, {"location": "/again"}
        async with world(api) as client:
            answer = await client.get("/v1/post/a")
        assert (answer.status_code, answer.json()["code"]) == (503, "upstream_failed")
        assert len(api.asked) == 1

    async def test_a_batch_obeys_retry_after(self, api: Api) -> None:
        """Told on, and not asked before."""
        api.status, api.headers = 429, {"retry-after": "120"}
        async with world(api) as client:
            answers = [await client.get("/v1/post/a") for _ in range(3)]
        assert {it.headers["retry-after"] for it in answers} <= {"119", "120"}
        assert len(api.asked) == 1

    @pytest.mark.parametrize(
        "body",
        [b"", b"{}", b"null", b"1", b'"x"', b"[", b"\xff", b'[{"id": "a"}', b"[" * 50_000],
    )
    async def test_an_answer_of_another_shape_is_a_failure_not_an_absence(
        self, api: Api, body: bytes
    ) -> None:
        """And says nothing of absence."""
        api.body = body
        async with world(api) as client:
            answer = await client.get("/v1/post/a")
        assert answer.status_code == 503

    @pytest.mark.parametrize("entry", [1, "a", [], {}, {"id": None}, {"id": True}, {"id": ""}])
    async def test_a_broken_entry_fails_alone(self, api: Api, entry: object) -> None:
        """What is missing beside it is not taken for absent."""
        api.body = msgspec.json.encode([{"id": "a"}, entry])
        async with world(api) as client:
            answer = await client.post("/v1/post/batch", json={"ids": ["a", "b"]})
        assert [it["status"] for it in answer.json()["items"]] == ["found", "failed"]

    async def test_an_answer_longer_than_max_bytes_is_a_failure(self, api: Api) -> None:
        """Also once it is unpacked."""
        api.headers = {"content-encoding": "gzip"}
        async with world(api, max_bytes=1_000) as client:
            fine = await client.get("/v1/post/a")
            api.body = b"[" + b" " * 10_000_000 + b"]"
            bomb = await client.get("/v1/post/b")
            api.headers = {}
            long = await client.get("/v1/post/c")
        assert [it.status_code for it in (fine, bomb, long)] == [200, 503, 503]
        assert len(gzip.compress(api.body)) < 100_000

    async def test_a_silent_upstream_times_out(self, api: Api) -> None:
        """`timeout` is for the whole answer."""
        api.silent = True
        async with world(api, timeout="100ms") as client:
            answer = await client.get("/v1/post/a")
        assert answer.status_code == 503

    async def test_the_gateway_starts_with_a_dead_upstream(self) -> None:
        """The gateway starts all the same, and says 503."""
        async with new_client(5, idle_connections=0) as upstream:
            app = gateway_of(settings_for("http://127.0.0.1:1"), upstream, checks_page_names=True)
            transport = httpx.ASGITransport(app=app)
            async with (
                app,
                httpx.AsyncClient(transport=transport, base_url="http://localhost") as client,
            ):
                answer = await client.get("/v1/post/a")
                ready = await client.get("/readyz")
        assert (answer.status_code, ready.status_code) == (503, 200)


class TestG1Ids:
    @given(st.text(min_size=1), st.integers())
    def test_ids_are_built_from_several_fields(self, author: str, number: int) -> None:
        """Texts and whole numbers, with what stands between them."""
        id_of = id_maker("{details.author}:{n}{{x}}")
        assert id_of({"details": {"author": author}, "n": number}) == f"{author}:{number}{{x}}"

    @given(st.lists(st.sampled_from("abcdef"), unique=True), st.lists(st.sampled_from("abcdef-")))
    def test_each_asked_id_is_found_absent_or_failed(
        self, asked: list[str], came: list[str]
    ) -> None:
        """Absent only if every view has an id."""
        views = [{"id": it} if it != "-" else {} for it in came]
        found = views_by_id(asked, views, id_maker("{id}"))
        for id_ in asked:
            if id_ in came:
                assert found[id_] == {"id": id_}
            else:
                assert isinstance(found.get(id_), LoadFailed) == ("-" in came)


class TestG1Told:
    async def test_an_upstream_error_names_the_host_without_the_query(self) -> None:
        """Which of several upstreams it was; what stands behind ? may be a secret."""
        refusing = httpx.MockTransport(lambda _: httpx.Response(501))
        async with httpx.AsyncClient(transport=refusing) as client:
            endpoint = Endpoint(client, "http://api.example:4000/by_ids?key=hush")
            with pytest.raises(LoadFailed) as caught:
                await endpoint.ask({"ids": ["a"]})
        assert str(caught.value) == "api.example:4000/by_ids: HTTP 501"
