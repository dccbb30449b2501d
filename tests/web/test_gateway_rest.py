"""G2: `GET /v1/{kind}/{id}` and `POST /v1/{kind}/batch`, over HTTP."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx

from stillfresh.coordinator import Kind
from stillfresh.testing import ManualClock
from stillfresh.web import Gateway, gateway


async def prices(ids: list[str]) -> dict[str, Any]:
    if "broken" in ids:
        raise RuntimeError("upstream is on fire")
    return {id_: {"id": id_, "cents": 100} for id_ in ids if id_ != "none"}


@asynccontextmanager
async def client_of(app: Gateway) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(app=app)
    async with app, httpx.AsyncClient(transport=transport, base_url="http://gateway") as client:
        yield client


def a_gateway(clock: ManualClock, **options: Any) -> Gateway:
    kinds = [Kind("price", fetch=prices, fresh_for="30s")]
    return gateway(kinds=kinds, clock=clock, **options)


class TestG2One:
    async def test_says_how_fresh_it_is(self) -> None:
        """The value is the body; its age, tag and verdict are header fields."""
        clock = ManualClock(1_000)
        async with client_of(a_gateway(clock)) as client:
            await client.get("/v1/price/a")
            clock.advance(10)
            answer = await client.get("/v1/price/a")
        assert (answer.status_code, answer.json()) == (200, {"id": "a", "cents": 100})
        assert answer.headers["age"] == "10"
        assert answer.headers["cache-status"] == "stillfresh; hit; ttl=20; detail=fresh"
        assert answer.headers["etag"]

    async def test_absent_unknown_and_failed_differ(self) -> None:
        """What does not exist, what was never declared, and what nobody could say."""
        async with client_of(a_gateway(ManualClock(1_000))) as client:
            answers = [
                await client.get(path)
                for path in ("/v1/price/none", "/v1/prize/a", "/v1/price/broken", "/v1/price/")
            ]
        found = [(answer.status_code, answer.json()["code"]) for answer in answers]
        assert found == [
            (404, "absent"),
            (404, "unknown_kind"),
            (503, "upstream_failed"),
            (422, "bad_id"),
        ]


class TestG2Batch:
    async def test_answers_each(self) -> None:
        """Found and absent side by side, in the order asked for."""
        async with client_of(a_gateway(ManualClock(1_000))) as client:
            answer = await client.post("/v1/price/batch", json={"ids": ["a", "none"]})
        items = answer.json()["items"]
        assert [(item["id"], item["status"]) for item in items] == [
            ("a", "found"),
            ("none", "absent"),
        ]
