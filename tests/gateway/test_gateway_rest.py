"""G2: `GET /v1/{kind}/{id}` and `POST /v1/{kind}/batch`, over real sockets."""

import asyncio
from typing import Any

import httpx
import pytest

from stillfresh.engine import RetryAfter
from stillfresh.gateway import Gateway, gateway
from stillfresh.gateway.live import sign_in
from stillfresh.systems.coordinator import Kind
from stillfresh.testing import ManualClock
from tests.kit.gateway import client_of, running


class Prices:
    """An upstream, in Python: what an id is called says how it is answered."""

    def __init__(self) -> None:
        self.calls: list[tuple[list[str], str | None]] = []
        self.cents = 100
        self.error: Exception | None = None

    async def __call__(self, ids: list[str], viewer_id: str | None = None) -> dict[str, Any]:
        self.calls.append((ids, viewer_id))
        if self.error is not None:
            raise self.error
        found: dict[str, Any] = {}
        for id_ in ids:
            if id_ == "broken":
                found[id_] = RuntimeError("secret: on fire")
            elif id_ == "busy":
                found[id_] = RetryAfter("70s")
            elif id_ != "none":
                found[id_] = {"id": id_, "cents": self.cents}
                if viewer_id is not None:
                    found[id_]["viewer"] = viewer_id
        return found


VIEWERS = {"t-ann": "ann", "t-bob": "bob", "t-odd": ""}


def a_gateway(clock: ManualClock, prices: Prices, **options: Any) -> Gateway:
    kinds = [
        Kind("price", fetch=prices, fresh_for="30s", stale_for="1m", error_for="1h"),
        Kind("basket", fetch=prices, fresh_for="30s", per_viewer=True),
    ]
    return gateway(kinds=kinds, clock=clock, **options)


class World:
    """A gateway that is asked over HTTP, and what stands behind it."""

    def __init__(self, **options: Any) -> None:
        self.clock = ManualClock(1_000)
        self.prices = Prices()
        self.gateway = a_gateway(self.clock, self.prices, **options)

    async def get(self, *paths: str, **options: Any) -> list[httpx.Response]:
        async with client_of(self.gateway) as client:
            return [await client.get(path, **options) for path in paths]


def told(answer: httpx.Response) -> tuple[int, str]:
    """The status and the code of a problem, which is well formed."""
    assert answer.headers["content-type"] == "application/problem+json"
    problem = answer.json()
    assert problem["status"] == answer.status_code
    assert set(problem) == {"type", "title", "status", "detail", "code"}
    assert problem["type"] == f"urn:stillfresh:problem:{problem['code']}"
    return answer.status_code, problem["code"]


class TestG2One:
    async def test_a_read_says_how_fresh_its_value_is(self) -> None:
        """The value is the body; its age, tag and verdict are header fields."""
        world = World()
        async with client_of(world.gateway) as client:
            first = await client.get("/v1/price/a")
            world.clock.advance(10)
            answer = await client.get("/v1/price/a")
        assert first.headers["cache-status"] == "stillfresh; fwd=miss; stored; ttl=30; detail=fresh"
        assert (answer.status_code, answer.json()) == (200, {"id": "a", "cents": 100})
        headers = answer.headers
        assert headers["age"] == "10"
        assert headers["cache-status"] == "stillfresh; hit; ttl=20; detail=fresh"
        assert headers["cache-control"] == (
            "public, max-age=0, s-maxage=30, stale-while-revalidate=60"
        )
        assert headers["content-type"] == "application/json"
        assert headers["x-content-type-options"] == "nosniff"
        assert headers.get_list("date")
        assert len(headers.get_list("date")) == 1
        assert world.prices.calls == [(["a"], None)]

    async def test_a_stale_value_is_served_at_once_and_refreshed(self) -> None:
        """One refresh, which the next reader sees."""
        world = World()
        async with client_of(world.gateway) as client:
            await client.get("/v1/price/a")
            world.clock.advance(40)
            world.prices.cents = 200
            stale = await client.get("/v1/price/a")
            async with asyncio.timeout(30):
                while (now := await client.get("/v1/price/a")).json()["cents"] == 100:
                    pass
        assert (stale.json()["cents"], stale.headers["age"]) == (100, "40")
        assert stale.headers["cache-status"] == "stillfresh; hit; ttl=-10; detail=stale"
        assert "s-maxage=0" in stale.headers["cache-control"]
        assert (now.json()["cents"], now.headers["age"]) == (200, "0")
        assert len(world.prices.calls) == 2

    async def test_concurrent_reads_share_one_load(self) -> None:
        """Readers of one id share it, and readers of several share a batch."""
        world = World()
        async with client_of(world.gateway) as client:
            paths = [f"/v1/price/{id_}" for id_ in "aabbb"]
            answers = await asyncio.gather(*map(client.get, paths))
        assert [it.json()["id"] for it in answers] == list("aabbb")
        assert sorted(id_ for ids, _ in world.prices.calls for id_ in ids) == ["a", "b"]

    async def test_a_read_with_the_current_etag_gets_304(self) -> None:
        """304 by ETag; another value has another tag."""
        world = World()
        async with client_of(world.gateway) as client:
            first = await client.get("/v1/price/a")
            tag = first.headers["etag"]
            same = await client.get("/v1/price/a", headers={"if-none-match": f'"x", W/{tag}'})
            world.clock.advance(1_000)
            world.prices.cents = 200
            other = await client.get("/v1/price/a", headers={"if-none-match": tag})
        assert (same.status_code, same.content, same.headers["etag"]) == (304, b"", tag)
        assert same.headers["age"] == "0"
        assert "content-length" not in same.headers
        assert (other.status_code, other.headers["etag"] == tag) == (200, False)

    async def test_head_is_get_without_the_body(self) -> None:
        """The same fields, also of a problem."""
        world = World()
        async with client_of(world.gateway) as client:
            await client.get("/v1/price/a")
            got, head = await client.get("/v1/price/a"), await client.head("/v1/price/a")
            gone = await client.head("/v1/price/none")
        assert (head.status_code, head.content) == (200, b"")
        kept = {"age", "etag", "cache-status", "cache-control", "content-length", "content-type"}
        assert {it: head.headers[it] for it in kept} == {it: got.headers[it] for it in kept}
        assert (gone.status_code, gone.content) == (404, b"")

    async def test_an_absent_id_and_an_unknown_kind_are_different_404s(self) -> None:
        """And is kept for a tenth of the time; a kind that was never declared is another 404."""
        world = World()
        answers = await world.get("/v1/price/none", "/v1/price/none", "/v1/prize/a")
        assert [told(it) for it in answers] == [
            (404, "absent"),
            (404, "absent"),
            (404, "unknown_kind"),
        ]
        assert answers[1].headers["cache-status"] == "stillfresh; hit; ttl=3; detail=fresh"
        assert "s-maxage=3" in answers[1].headers["cache-control"]
        assert answers[2].headers["cache-control"] == "no-store"
        assert len(world.prices.calls) == 1

    @pytest.mark.parametrize(
        "id_",
        ["", "%00", "a%0Ab", "batch%0A", "%7F", "x" * 1_001, "%FF", "%ED%A0%80"],
        ids=["empty", "nul", "line", "last-line", "delete", "long", "not-utf-8", "surrogate"],
    )
    async def test_a_bad_id_gets_422(self, id_: str) -> None:
        """And nobody is asked about it."""
        world = World()
        (answer,) = await world.get(f"/v1/price/{id_}")
        assert told(answer) == (422, "bad_id")
        assert world.prices.calls == []

    @pytest.mark.parametrize(
        ("path", "id_"),
        [
            ("a:b", "a:b"),
            ("a%2Fb", "a/b"),
            ("a/b", "a/b"),
            ("%C3%BC%20x", "ü x"),
            ("batch", "batch"),
            ("a%3Fb%23c", "a?b#c"),
            ("%EF%BF%BD", "\ufffd"),
            ("x" * 1_000, "x" * 1_000),
        ],
    )
    async def test_any_other_text_is_an_id(self, path: str, id_: str) -> None:
        """Slashes, spaces and umlauts, written as URLs write them."""
        (answer,) = await World().get(f"/v1/price/{path}")
        assert answer.json()["id"] == id_

    async def test_other_methods_get_405_with_the_allowed_ones(self) -> None:
        """With those that are not."""
        async with client_of(World().gateway) as client:
            answers = [
                await client.request("DELETE", "/v1/price/a"),
                await client.request("POST", "/v1/price/a", json={"ids": ["a"]}),
                await client.request("PUT", "/v1/price/batch"),
            ]
        assert [told(it) for it in answers] == [(405, "method_not_allowed")] * 3
        allowed = [it.headers["allow"] for it in answers]
        assert allowed == ["GET, HEAD", "GET, HEAD", "GET, HEAD, POST"]


class TestG2Failing:
    async def test_a_failed_load_without_a_copy_is_503_with_retry_after(self) -> None:
        """What exactly failed is not told to every reader."""
        (answer, again) = await World().get("/v1/price/broken", "/v1/price/broken")
        assert told(answer) == (503, "upstream_failed")
        assert told(again) == (503, "upstream_failed")
        assert int(answer.headers["retry-after"]) >= 1
        assert "secret" not in answer.text + again.text

    async def test_the_upstreams_retry_after_is_passed_on(self) -> None:
        """Retry-After is when it will be asked again."""
        answers = await World().get("/v1/price/busy", "/v1/price/busy")
        assert [it.headers["retry-after"] for it in answers] == ["70", "70"]

    async def test_an_old_copy_is_served_while_refreshing_fails(self) -> None:
        """As old as it is, and says so."""
        world = World()
        async with client_of(world.gateway) as client:
            await client.get("/v1/price/a")
            world.clock.advance(600)
            world.prices.error = RuntimeError("down")
            answer = await client.get("/v1/price/a")
        assert (answer.status_code, answer.headers["age"]) == (200, "600")
        assert "detail=refresh-failed" in answer.headers["cache-status"]

    async def test_a_broken_authenticate_hook_is_503_and_logged(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        """503 without a word of why, noted in the log, and the gateway goes on."""
        world = World(authenticate={}.__getitem__)
        async with client_of(world.gateway) as client:
            broken = await client.get("/v1/basket/a", headers={"authorization": "Bearer t"})
            fine = await client.get("/v1/price/a")
        assert told(broken) == (503, "sign_in_failed")
        assert "KeyError" not in broken.text
        assert fine.status_code == 200
        assert [it.message for it in caplog.records] == ["authenticate failed"]

    async def test_a_hanging_authenticate_hook_is_503_after_its_timeout(
        self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        """503 after five seconds, here less, and a time to come back."""
        assert sign_in.SIGN_IN_TIMEOUT == 5
        monkeypatch.setattr(sign_in, "SIGN_IN_TIMEOUT", 0.01)

        async def never(_: str) -> str:
            await asyncio.Event().wait()
            raise AssertionError

        async with client_of(World(authenticate=never).gateway) as client:
            answer = await client.get("/v1/basket/a", headers={"authorization": "Bearer t"})
        assert told(answer) == (503, "sign_in_failed")
        assert answer.headers["retry-after"] == "5"
        assert [it.message for it in caplog.records] == ["authenticate failed"]

    async def test_a_closed_store_is_503(self) -> None:
        """Or the value itself, where it could be loaded."""
        world = World()
        async with client_of(world.gateway) as client:
            await world.gateway.cache.close()
            answer = await client.get("/v1/price/a")
        assert told(answer) == (503, "away")
        assert answer.headers["retry-after"] == "5"


class TestG2Batch:
    async def test_a_batch_answers_each_id_in_order(self) -> None:
        """Found, absent and failed side by side, in the order asked for, once each."""
        world = World()
        async with client_of(world.gateway) as client:
            await client.get("/v1/price/a")
            world.clock.advance(5)
            ids = ["b", "none", "broken", "a", "b"]
            answer = await client.post("/v1/price/batch", json={"ids": ids})
        items = answer.json()["items"]
        assert answer.headers["cache-control"] == "no-store"
        failed = items.pop(2)
        assert items == [
            {"id": "b", "status": "found", "value": {"id": "b", "cents": 100},
             "fetched_at": 1_005, "age": 0, "verdict": "fresh"},
            {"id": "none", "status": "absent", "fetched_at": 1_005, "age": 0, "verdict": "fresh"},
            {"id": "a", "status": "found", "value": {"id": "a", "cents": 100},
             "fetched_at": 1_000, "age": 5, "verdict": "fresh"},
        ]  # fmt: skip
        assert (failed["id"], failed["status"], failed["retry_after"] >= 1) == (
            "broken",
            "failed",
            True,
        )
        assert "secret" not in answer.text
        assert world.prices.calls == [(["a"], None), (["b", "none", "broken"], None)]

    async def test_a_batch_in_which_every_id_failed_is_503(self) -> None:
        """As for one."""
        async with client_of(World().gateway) as client:
            answer = await client.post("/v1/price/batch", json={"ids": ["broken"]})
        assert told(answer) == (503, "upstream_failed")

    @pytest.mark.parametrize(
        ("content", "status"),
        [
            (b"", 422),
            (b"[]", 422),
            (b"{}", 422),
            (b'{"ids": []}', 422),
            (b'{"ids": "a"}', 422),
            (b'{"ids": [1]}', 422),
            (b'{"ids": ["a"], "x": 1}', 422),
            (b'{"ids": [""]}', 422),
            (b'{"ids": ["\\u0000"]}', 422),
            (b'{"ids": ["\\ud800"]}', 422),
            (b'{"ids": ["\xff"]}', 422),
            (b"[" * 100_000, 422),
            (b'{"ids": [' + b",".join([b'"a"'] * 201) + b"]}", 422),
            (b" " * 1_048_577, 413),
        ],
    )
    async def test_a_malformed_batch_is_refused(self, content: bytes, status: int) -> None:
        """Before anything is asked."""
        world = World()
        headers = {"content-type": "application/json"}
        async with client_of(world.gateway) as client:
            answer = await client.post("/v1/price/batch", content=content, headers=headers)
        assert told(answer)[0] == status
        assert world.prices.calls == []

    @pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", ""])
    async def test_a_batch_sent_as_a_form_is_refused(self, kind: str) -> None:
        """A browser sends such without asking."""
        async with client_of(World().gateway) as client:
            answer = await client.post(
                "/v1/price/batch", content=b'{"ids": ["a"]}', headers={"content-type": kind}
            )
        assert told(answer) == (415, "not_json")

    async def test_a_body_that_never_ends_gets_408(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """408, over a socket that says no more."""
        monkeypatch.setattr("stillfresh.gateway.replies.BODY_WITHIN", 0.05)
        async with running(World().gateway) as url:
            reader, writer = await asyncio.open_connection("127.0.0.1", httpx.URL(url).port)
            writer.write(
                b"POST /v1/price/batch HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
                b'content-length: 100\r\n\r\n{"ids": ['
            )
            first = await reader.readline()
            writer.close()
            await writer.wait_closed()
        assert first.startswith(b"HTTP/1.1 408")


class TestG2PerViewer:
    async def test_each_viewer_reads_their_own_value(self) -> None:
        """By token; never kept by a cache between."""
        world = World(authenticate=VIEWERS.get)
        async with client_of(world.gateway) as client:
            answers = [
                await client.get("/v1/basket/a", headers={"authorization": f"Bearer {token}"})
                for token in ("t-ann", "t-bob", "t-ann")
            ]
            batch = await client.post(
                "/v1/basket/batch",
                json={"ids": ["a"]},
                headers={"authorization": "bearer t-bob"},
            )
        assert [it.json()["viewer"] for it in answers] == ["ann", "bob", "ann"]
        assert {it.headers["cache-control"] for it in answers} == {"private, no-cache"}
        assert "authorization" in answers[0].headers["vary"]
        assert batch.json()["items"][0]["value"]["viewer"] == "bob"
        assert batch.headers["cache-control"] == "private, no-store"
        assert world.prices.calls == [(["a"], "ann"), (["a"], "bob")]

    @pytest.mark.parametrize("sent", ["", "Bearer", "Bearer nobody", "Basic t-ann", "Bearer t-odd"])
    async def test_a_guest_gets_401_for_a_per_viewer_kind(self, sent: str) -> None:
        """401, and how to do it."""
        world = World(authenticate=VIEWERS.get)
        headers = {"authorization": sent} if sent else {}
        async with client_of(world.gateway) as client:
            answers = [
                await client.get("/v1/basket/a", headers=headers),
                await client.post("/v1/basket/batch", json={"ids": ["a"]}, headers=headers),
            ]
        assert [told(it) for it in answers] == [(401, "sign_in")] * 2
        assert answers[0].headers["www-authenticate"] == "Bearer"
        assert world.prices.calls == []

    async def test_without_an_authenticate_hook_everyone_is_a_guest(self) -> None:
        """Also who has a token."""
        (answer,) = await World().get("/v1/basket/a", headers={"authorization": "Bearer t-ann"})
        assert told(answer) == (401, "sign_in")

    async def test_the_authenticate_hook_may_be_a_coroutine(self) -> None:
        """A coroutine function is awaited."""

        async def authenticate(token: str) -> str | None:
            await asyncio.sleep(0)
            return VIEWERS.get(token)

        world = World(authenticate=authenticate)
        (answer,) = await world.get("/v1/basket/a", headers={"authorization": "Bearer t-ann"})
        assert answer.json()["viewer"] == "ann"

    async def test_a_shared_kind_does_not_call_the_authenticate_hook(self) -> None:
        """The same answer for all, with or without a token."""
        asked: list[str] = []
        world = World(authenticate=asked.append)
        (answer,) = await world.get("/v1/price/a", headers={"authorization": "Bearer t-ann"})
        assert (answer.status_code, asked) == (200, [])


class TestG2OtherOrigins:
    async def test_only_named_origins_may_read(self) -> None:
        """And are told the header fields that say how fresh it is."""
        world = World(origins=["https://shop.example"])
        async with client_of(world.gateway) as client:
            named, other = [
                await client.get("/v1/price/a", headers={"origin": origin})
                for origin in ("https://shop.example", "https://evil.example")
            ]
        assert named.headers["access-control-allow-origin"] == "https://shop.example"
        assert "Age" in named.headers["access-control-expose-headers"]
        assert "access-control-allow-origin" not in other.headers

    async def test_named_origins_may_read_errors(
        self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        """Also if it is our own mistake, which the server logs."""
        world = World(origins=["https://shop.example"])

        def broken(*_: object) -> None:
            raise RuntimeError("a bug")

        monkeypatch.setattr(world.gateway.hub, "resource", broken)
        async with client_of(world.gateway) as client:
            headers = {"origin": "https://shop.example"}
            answers = [await client.get(f"/v1/{it}/a", headers=headers) for it in ("price", "no")]
        assert [told(it) for it in answers] == [(500, "broken"), (404, "unknown_kind")]
        for answer in answers:
            assert answer.headers["access-control-allow-origin"] == "https://shop.example"
            assert "a bug" not in answer.text
        assert "RuntimeError: a bug" in caplog.text

    async def test_a_cors_preflight_for_the_batch_is_answered(self) -> None:
        """For the batch; not for a method that there is not."""
        world = World(origins=["https://shop.example"])
        headers = {
            "origin": "https://shop.example",
            "access-control-request-method": "POST",
            "access-control-request-headers": "content-type",
        }
        async with client_of(world.gateway) as client:
            may = await client.options("/v1/price/batch", headers=headers)
            headers["access-control-request-method"] = "DELETE"
            may_not = await client.options("/v1/price/batch", headers=headers)
        assert (may.status_code, may_not.status_code) == (200, 400)
        assert may.headers["access-control-allow-origin"] == "https://shop.example"


class TestG2OpenApi:
    async def test_the_openapi_description_names_every_kind(self) -> None:
        """Paths, parameters, answers; who must sign in."""
        (answer,) = await World().get("/openapi.json")
        described = answer.json()
        assert described["openapi"] == "3.1.0"
        assert set(described["paths"]) == {
            "/v1/price/{id}",
            "/v1/price/batch",
            "/v1/basket/{id}",
            "/v1/basket/batch",
            "/healthz",
            "/readyz",
            "/metrics",
        }
        basket = described["paths"]["/v1/basket/{id}"]["get"]
        assert basket["security"] == [{"bearer": []}]
        assert "security" not in described["paths"]["/v1/price/{id}"]["get"]
        assert {"200", "304", "401", "404", "422", "503"} == set(basket["responses"])

    async def test_every_reference_of_the_openapi_description_exists(self) -> None:
        """Inside the description itself."""
        (answer,) = await World().get("/openapi.json")
        described = answer.json()

        def references(node: Any) -> list[str]:
            if isinstance(node, dict):
                own = [node["$ref"]] if "$ref" in node else []
                return own + [it for value in node.values() for it in references(value)]
            if isinstance(node, list):
                return [it for value in node for it in references(value)]
            return []

        found = references(described)
        assert found
        for reference in found:
            node = described
            for name in reference.removeprefix("#/").split("/"):
                node = node[name]
