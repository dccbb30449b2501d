"""G11: `[kinds.NAME] url`: an ordinary REST API over real HTTP, one GET for each id."""

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import httpx
import msgspec
import pytest
import uvicorn
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from stillfresh.engine.rules import Terms, watched_until
from stillfresh.freshness import Policy
from stillfresh.gateway.app import Gateway
from stillfresh.gateway.config import settings_of
from stillfresh.gateway.kind_fetch import GotCodec, GotView, address, terms_of
from stillfresh.gateway.serving import gateway_of
from stillfresh.http.client import new_client
from stillfresh.http.fields import http_date_text
from stillfresh.stores.contract import Copy, Mark
from tests.kit.engine import until
from tests.kit.gateway import running


class RestApi:
    """`GET /items/{id}`; answers as it is told, and counts what it sends."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.headers_seen: list[dict[str, str]] = []
        self.version = 1
        self.status = 200
        self.headers: dict[str, str] = {}
        self.body: bytes | None = None
        self.at_once = self.most_at_once = 0
        self.gate: asyncio.Event | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        query = scope["query_string"]
        self.asked.append((scope["raw_path"] + (b"?" + query if query else b"")).decode())
        self.headers_seen.append(dict(request.headers))
        self.at_once += 1
        self.most_at_once = max(self.at_once, self.most_at_once)
        if self.gate is not None:
            await self.gate.wait()
        self.at_once -= 1
        headers = {"etag": f'"v{self.version}"', **self.headers}
        status, body = self.status, self.body
        if status == 200 and request.headers.get("if-none-match") == headers["etag"]:
            status, body = 304, b""
        elif body is None:
            view = {"id": scope["path"].rpartition("/")[2], "version": self.version}
            body = msgspec.json.encode(view)
        await Response(body, status, headers, "application/json")(scope, receive, send)

    @property
    def conditions(self) -> list[str | None]:
        return [it.get("if-none-match") for it in self.headers_seen]


@pytest.fixture
def api() -> RestApi:
    return RestApi()


@asynccontextmanager
async def world(
    api: RestApi, *, store: str = "memory://", path: str = "/items/{id}", **more: Any
) -> AsyncIterator[tuple[httpx.AsyncClient, Gateway]]:
    """A client of a gateway in front of this API."""
    undated = uvicorn.Config(
        api, lifespan="off", log_level="critical", ws="none", date_header=False
    )
    async with running(api, undated) as url, new_client(5, idle_connections=2) as upstream:
        kind = {"url": url + path, "fresh_for": "5m", **more}
        who = {"authenticate_url": f"{url}/who"} if more.get("per_viewer") else {}
        tables = {"store": {"url": store}, "kinds": {"item": kind}, "server": who}
        app = gateway_of(settings_of(tables, {}), upstream, checks_page_names=True)
        transport = httpx.ASGITransport(app=app)
        async with (
            app,
            httpx.AsyncClient(transport=transport, base_url="http://localhost") as client,
        ):
            yield client, app


class TestG11Gets:
    async def test_one_get_is_sent_for_each_id_up_to_concurrency(self, api: RestApi) -> None:
        """`concurrency` GETs are under way, each for one id, with the file's header fields."""
        api.gate = asyncio.Event()
        async with world(api, concurrency=3, headers={"X-Key": "k"}) as (client, _):
            ids = [f"i{n}" for n in range(8)]
            reading = asyncio.ensure_future(client.post("/v1/item/batch", json={"ids": ids}))
            await until(lambda: api.at_once == 3)
            api.gate.set()
            answer = await reading
        assert [it["value"]["id"] for it in answer.json()["items"]] == ids
        assert sorted(api.asked) == [f"/items/{id_}" for id_ in ids]
        assert api.most_at_once == 3
        assert api.headers_seen[0]["x-key"] == "k"

    @pytest.mark.parametrize("status", [404, 410])
    async def test_a_404_or_410_is_an_absence(self, api: RestApi, status: int) -> None:
        """404 and 410 are an absence, believed for `absent_for`; others of the batch are found."""
        api.status = status
        async with world(api) as (client, _):
            answers = [await client.get("/v1/item/a") for _ in range(2)]
            api.status = 200
            mixed = await client.post("/v1/item/batch", json={"ids": ["a", "b"]})
        assert [it.json()["code"] for it in answers] == ["absent", "absent"]
        assert [it["status"] for it in mixed.json()["items"]] == ["absent", "found"]
        assert api.asked == ["/items/a", "/items/b"]

    @pytest.mark.parametrize("status", [201, 204, 301, 304, 307, 400, 401, 403, 429, 500, 503])
    async def test_any_other_status_is_a_failed_get(self, api: RestApi, status: int) -> None:
        """Also a redirect: header fields are told to nobody else; and a 304 nobody asked for."""
        api.status, api.headers, api.body = status, {"location": "/again?x"}, b""
        async with world(api) as (client, app):
            answer = await client.get("/v1/item/a")
            told = await app.hub.resource("item").explain("a")
        assert (answer.status_code, answer.json()["code"]) == (503, "upstream_failed")
        assert len(api.asked) == 1
        assert f"/items/{{id}}: HTTP {status}" in told.text
        if status in {301, 307}:
            assert "to '/again'; redirects are not followed" in told.text

    async def test_a_get_obeys_retry_after(self, api: RestApi) -> None:
        """Told on, and not asked before; other ids are."""
        api.status, api.headers = 429, {"retry-after": "120"}
        async with world(api) as (client, _):
            answers = [await client.get("/v1/item/a") for _ in range(3)]
            await client.get("/v1/item/b")
        assert {it.headers["retry-after"] for it in answers} <= {"119", "120"}
        assert api.asked == ["/items/a", "/items/b"]

    @pytest.mark.parametrize("body", [b"", b"{", b"\xff", b"[" * 50_000, b" " * 2_000 + b"1"])
    async def test_a_body_that_is_not_json_or_too_long_is_a_failed_get(
        self, api: RestApi, body: bytes
    ) -> None:
        """Not JSON, or longer than `max_bytes`."""
        api.body = body
        async with world(api, max_bytes=1_000) as (client, _):
            answer = await client.get("/v1/item/a")
        assert answer.status_code == 503

    @pytest.mark.parametrize("body", [b"null", b"[]", b"0", b'"x"', b"{}"])
    async def test_any_json_value_is_a_view(self, api: RestApi, body: bytes) -> None:
        """Also null: that an item does not exist is said by a status."""
        api.body = body
        async with world(api) as (client, _):
            answers = [await client.get("/v1/item/a") for _ in range(2)]
        assert [it.content for it in answers] == [body, body]
        assert len(api.asked) == 1

    async def test_the_viewer_id_is_put_into_the_url(self, api: RestApi) -> None:
        """`{viewer_id}` is put into the address, and a copy is shown to that viewer alone."""
        api.body = b'{"viewer_id": "a/b"}'
        path = "/of/{viewer_id}/items/{id}?v={viewer_id}"
        async with world(api, path=path, per_viewer=True) as (client, _):
            signed = {"authorization": "Bearer t"}
            answers = [await client.get("/v1/item/x", headers=signed) for _ in range(2)]
        assert [it.status_code for it in answers] == [200, 200]
        assert api.asked == ["/who", "/of/a%2Fb/items/x?v=a%2Fb"]


class TestG11Ids:
    @pytest.mark.parametrize("id_", ["a/b", "a?b", "a#b", "a b", "%2e%2e", "ä/ö", "a;b", "a\\b"])
    async def test_ids_are_percent_encoded_in_the_url(self, api: RestApi, id_: str) -> None:
        """What the upstream decodes from its path is the id, and nothing else changed."""
        api.body = b"1"
        async with world(api, path="/items/{id}/view?of={id}") as (client, _):
            await client.post("/v1/item/batch", json={"ids": [id_]})
        (asked,) = api.asked
        path, _, query = asked.partition("?")
        assert path.count("/") == 3
        assert unquote(path) == f"/items/{id_}/view"
        assert unquote(query) == f"of={id_}"

    @pytest.mark.parametrize("id_", [".", "..", "../admin", "a/../../admin", "a\\..\\b", "./x"])
    async def test_an_id_that_could_leave_its_place_in_the_url_is_absent(
        self, api: RestApi, id_: str
    ) -> None:
        """An id that a server could take for another path does not exist: nobody is asked."""
        async with world(api) as (client, _):
            answer = await client.post("/v1/item/batch", json={"ids": [id_]})
        assert [it["status"] for it in answer.json()["items"]] == ["absent"]
        assert api.asked == []

    @given(st.text(), st.sampled_from(["/i/{id}", "/i/.{id}", "/i/{id}.", "/i/{id}/x?y={id}"]))
    def test_any_id_keeps_the_parts_of_the_url_template(self, id_: str, path: str) -> None:
        """Host, path and query have as many parts as the template; none becomes `.` or `..`."""
        try:
            id_.encode()
        except UnicodeEncodeError:
            return
        url = address(f"http://host{path}", id=id_)
        if url is None:
            assert re.search(r"\.", id_ + path)
            return
        parts, meant = urlsplit(url), urlsplit(f"http://host{path}")
        assert url.isascii()
        assert url.isprintable()
        assert (parts.netloc, parts.fragment) == ("host", "")
        assert parts.path.count("/") == meant.path.count("/")
        assert parts.query.count("=") == meant.query.count("=")
        assert not {".", ".."} & set(re.split(r"[/\\]", unquote(parts.path)))


class TestG11Validation:
    async def test_304_renews_the_copy(self, api: RestApi) -> None:
        """The stored view is served on, as new as the 304, and is not sent again."""
        async with world(api) as (client, app):
            first = await client.get("/v1/item/a")
            before = (await app.hub.get("item", "a")).fetched_at
            await app.hub.resource("item").refresh("a")
            second = await client.get("/v1/item/a")
            after = (await app.hub.get("item", "a")).fetched_at
        assert first.json() == second.json() == {"id": "a", "version": 1}
        assert api.conditions == [None, '"v1"']
        assert after > before

    async def test_a_new_version_replaces_the_copy_and_its_validator(self, api: RestApi) -> None:
        """And its validator too."""
        async with world(api) as (client, app):
            await client.get("/v1/item/a")
            for api.version in (2, 2):
                await app.hub.resource("item").refresh("a")
            answer = await client.get("/v1/item/a")
        assert answer.json()["version"] == 2
        assert api.conditions == [None, '"v1"', '"v2"']

    async def test_the_validator_is_stored_with_the_copy(
        self, api: RestApi, tmp_path: Path
    ) -> None:
        """Another process, or a later one, asks with it, too; also of an invalidated copy."""
        store = f"sqlite:///{tmp_path}/cache.db"
        async with world(api, store=store) as (client, _):
            await client.get("/v1/item/a")
        async with world(api, store=store) as (client, app):
            await app.hub.resource("item").invalidate("a")
            answer = await client.get("/v1/item/a")
        assert answer.json()["version"] == 1
        assert api.conditions == [None, '"v1"']

    async def test_a_copy_is_validated_by_last_modified_alone(self, api: RestApi) -> None:
        """As If-Modified-Since."""
        api.headers = {"etag": "", "last-modified": "Tue, 03 Nov 2026 10:00:00 GMT"}
        async with world(api) as (client, app):
            await client.get("/v1/item/a")
            await app.hub.resource("item").refresh("a")
        seen = [it.get("if-modified-since") for it in api.headers_seen]
        assert seen == [None, "Tue, 03 Nov 2026 10:00:00 GMT"]

    async def test_a_304_about_another_version_is_not_believed(self, api: RestApi) -> None:
        """RFC 9111 §4.3.4: it is asked for again, without conditions."""
        async with world(api) as (client, app):
            await client.get("/v1/item/a")
            api.status, api.version, api.body = 304, 2, b""
            with pytest.raises(Exception, match="HTTP 304"):
                await app.hub.resource("item").refresh("a")
        assert api.conditions == [None, '"v1"', None]

    def test_a_copy_stored_by_batch_url_is_not_used_by_url(self) -> None:
        """What `batch_url` stored is loaded anew by `url`, and the other way round."""
        plain = msgspec.msgpack.encode({"id": "a"})
        with pytest.raises(ValueError, match="not stored by a GET"):
            GotCodec().decode(plain)
        data = GotCodec().encode(GotView({"id": "a"}))
        with pytest.raises(msgspec.DecodeError):
            msgspec.msgpack.decode(data)
        assert GotCodec().decode(data) == {"id": "a"}

    async def test_a_per_viewer_copy_is_validated_too(self, api: RestApi) -> None:
        """It is found by its viewer and its id."""
        api.body = b'{"viewer_id": "ann"}'
        path = "/{viewer_id}/{id}"
        async with world(api, path=path, per_viewer=True) as (client, app):
            await client.get("/v1/item/x", headers={"authorization": "Bearer t"})
            key = app.hub.named("item", "x", "ann")[2]
            await app.hub.resource("item").refresh(key)
        assert [it["if-none-match"] for it in api.headers_seen if "if-none-match" in it] == ['"v1"']


OWN = Policy(300, 60, 600)
NOW = 1_700_000_000.0
SHARED = {"no-store", "private"}


class TestG11Terms:
    @pytest.mark.parametrize(
        ("fields", "terms"),
        [
            ({}, (300, 60, 600)),
            ({"cache-control": "public"}, (300, 60, 600)),
            ({"cache-control": "max-age=20"}, (20, 0, 600)),
            ({"cache-control": "max-age=20, s-maxage=30"}, (30, 0, 600)),
            ({"cache-control": "max-age=20", "age": "5"}, (15, 0, 600)),
            ({"cache-control": "max-age=20", "age": "50"}, (0, 0, 570)),
            ({"cache-control": "max-age=20", "age": "700"}, (0, 0, 0)),
            ({"cache-control": "max-age=20, stale-if-error=9", "age": "25"}, (0, 0, 4)),
            ({"age": "700"}, (300, 60, 600)),
            ({"cache-control": "max-age=20, stale-while-revalidate=7"}, (20, 7, 600)),
            ({"cache-control": "max-age=20, stale-if-error=9"}, (20, 0, 9)),
            ({"cache-control": "max-age=20, must-revalidate"}, (20, 0, 0)),
            ({"cache-control": "no-cache"}, (0, 0, 0)),
            ({"cache-control": "no-store, max-age=20"}, (0, 0, 0)),
            ({"cache-control": "private, max-age=20"}, (0, 0, 0)),
            ({"expires": http_date_text(NOW + 40).decode()}, (40, 0, 600)),
            ({"expires": "0"}, (0, 0, 600)),
        ],
    )
    def test_the_answers_cache_control_sets_the_terms(
        self, fields: dict[str, str], terms: tuple[float, float, float]
    ) -> None:
        """What it does not say is the file's; freshness it speaks of is never stretched."""
        raw = tuple((name.encode(), value.encode()) for name, value in fields.items())
        assert terms_of(raw, NOW, OWN, SHARED) == Policy(*terms)

    def test_a_private_answer_may_be_kept_for_its_viewer(self) -> None:
        """It is that viewer's cache."""
        raw = ((b"cache-control", b"private, max-age=20"),)
        assert terms_of(raw, NOW, OWN, {"no-store"}).fresh_for == 20

    async def test_the_answer_sets_the_terms_only_if_the_file_says_upstream(
        self, api: RestApi
    ) -> None:
        """`terms = "upstream"`; else the file's own count, whatever the answer says."""
        api.headers = {"cache-control": "s-maxage=7, stale-while-revalidate=3"}
        told = []
        for terms in ("own", "upstream"):
            async with world(api, terms=terms) as (client, _):
                answers = [await client.get("/v1/item/a") for _ in range(2)]
                told.append([it.headers["cache-control"] for it in answers])
        own = "public, max-age=0, s-maxage=300, stale-while-revalidate=86400"
        upstream = "public, max-age=0, s-maxage=7, stale-while-revalidate=3"
        assert told == [[own] * 2, [upstream] * 2]
        assert len(api.asked) == 2

    async def test_a_copys_age_begins_with_the_upstreams_age(self, api: RestApi) -> None:
        """RFC 9111 §5.1: caches behind this one subtract it from the lifetime in the answer."""
        api.headers = {"cache-control": "max-age=60, stale-while-revalidate=3", "age": "50"}
        async with world(api, terms="upstream") as (client, app):
            one = await client.get("/v1/item/a")
            batch = await client.post("/v1/item/batch", json={"ids": ["a"]})
            answer = await app.hub.get("item", "a")
        assert one.headers["age"] == "50"
        assert "ttl=9;" in one.headers["cache-status"] or "ttl=10;" in one.headers["cache-status"]
        lifetime = "public, max-age=0, s-maxage=60, stale-while-revalidate=3"
        assert one.headers["cache-control"] == lifetime
        (item,) = batch.json()["items"]
        assert 50 <= item["age"] < 60
        assert item["fetched_at"] == answer.fetched_at
        assert item["value"] == {"id": "a", "version": 1}
        assert answer.value == item["value"]

    async def test_a_304_without_an_age_makes_the_copy_new(self, api: RestApi) -> None:
        """The Age of the response that it confirms is over (RFC 9111 §4.3.4)."""
        api.headers = {"cache-control": "max-age=60", "age": "50"}
        async with world(api, terms="upstream") as (client, app):
            await client.get("/v1/item/a")
            api.headers = {}
            await app.hub.resource("item").refresh("a")
            answer = await client.get("/v1/item/a")
        assert len(api.asked) == 2
        assert answer.headers["age"] == "0"
        assert "s-maxage=60" in answer.headers["cache-control"]

    @pytest.mark.parametrize(
        ("terms", "cache_control"), [("own", "max-age=60"), ("upstream", "public")]
    )
    async def test_with_the_files_terms_age_counts_from_the_request(
        self, api: RestApi, terms: str, cache_control: str
    ) -> None:
        """As on a page with a route's duration: its freshness counts from the request, too."""
        api.headers = {"cache-control": cache_control, "age": "50"}
        async with world(api, terms=terms) as (client, _):
            answer = await client.get("/v1/item/a")
        assert answer.headers["age"] == "0"
        assert "s-maxage=300" in answer.headers["cache-control"]

    async def test_a_304_updates_the_terms(self, api: RestApi) -> None:
        """RFC 9111 §3.2: its fields count in the place of the stored ones, which stay otherwise."""
        api.headers = {"cache-control": "max-age=7"}
        async with world(api, terms="upstream") as (client, app):
            await client.get("/v1/item/a")
            policies = []
            for headers in ({}, {"cache-control": "max-age=9"}, {}):
                api.headers = headers
                await app.hub.resource("item").refresh("a")
                answer = await app.hub.get("item", "a")
                policies.append(answer.policy.fresh_for)
        assert policies == [7, 9, 9]
        assert len(set(api.conditions)) == 2

    async def test_a_no_store_answer_goes_only_to_callers_that_waited(self, api: RestApi) -> None:
        """no-store: all callers of one moment share one request; later ones ask again."""
        api.headers, api.gate = {"cache-control": "no-store"}, asyncio.Event()
        async with world(api, terms="upstream") as (client, _):
            reading = [asyncio.ensure_future(client.get("/v1/item/a")) for _ in range(3)]
            await until(lambda: api.asked)
            api.gate.set()
            answers = [await it for it in reading]
            assert len(api.asked) == 1
            later = await client.get("/v1/item/a")
        assert [it.status_code for it in (*answers, later)] == [200] * 4
        assert {it.headers["cache-control"] for it in answers} == {"public, max-age=0, s-maxage=0"}
        assert len(api.asked) == 2

    def test_a_watched_no_cache_item_is_refreshed_once_per_fresh_for(self) -> None:
        """A viewer of a no-cache item costs one request for each `fresh_for`, not ten a second."""
        terms = Terms(Policy(300, 60, 600), absent_for=30, jitter=0)
        never = Copy("g", NOW, Policy(0), b"x")
        assert watched_until(never, terms) == NOW + 300
        assert watched_until(structs.replace(never, policy=Policy(7)), terms) == NOW + 7
        assert watched_until(structs.replace(never, mark=Mark.HARD), terms) == NOW


class TestG11Everywhere:
    async def test_the_gateway_shows_a_get_kind_as_any_other_kind(self, api: RestApi) -> None:
        """OpenAPI, entries, an entry's value with its validator, live, and a conditional read."""
        async with world(api) as (client, app):
            first = await client.get("/v1/item/a")
            again = await client.get("/v1/item/a", headers={"if-none-match": first.headers["etag"]})
            described = (await client.get("/openapi.json")).json()
            told = (await client.get("/_stillfresh/api/entries/item/a")).json()
            with app.hub.connect() as connection:
                connection.subscribe("item", "b")
                await until(lambda: connection.take(10))
        assert again.status_code == 304
        assert "/v1/item/{id}" in described["paths"]
        shown = msgspec.json.decode(told["value"]["text"])
        assert shown["view"] == {"id": "a", "version": 1}
        assert ["etag", '"v1"'] in shown["fields"]
        assert told["can_refresh"]
