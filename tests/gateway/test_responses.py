"""G14: HTTP responses by part of the gateway and status, and their bytes."""

import re
from typing import Any

import httpx
import pytest
from starlette.types import Receive, Scope, Send

from stillfresh.errors import ConfigError
from stillfresh.gateway import gateway
from stillfresh.pages import IsrMiddleware, PageCache
from stillfresh.systems.coordinator import Kind
from tests.kit.gateway import client_of

SAMPLE = re.compile(r"stillfresh_http_(\w+)_total\{(.*)\} (\d+)")


async def fetch(ids: list[str]) -> dict[str, Any]:
    return {id_: {"id": id_} for id_ in ids if id_ != "none"}


async def site(scope: Scope, receive: Receive, send: Send) -> None:
    """`/418` is answered by that status, `/raise` by nobody; a body has eight bytes."""
    del receive
    if scope["type"] != "http":
        raise ValueError("no lifespan")
    if scope["path"] == "/raise":
        raise RuntimeError("a mistake of the site")
    status = int(scope["path"].removeprefix("/"))
    fields = [(b"cache-control", b"max-age=600"), (b"content-length", b"8")]
    await send({"type": "http.response.start", "status": status, "headers": fields})
    await send({"type": "http.response.body", "body": b"four", "more_body": True})
    await send({"type": "http.response.body", "body": b"four"})


async def told(client: httpx.AsyncClient) -> dict[str, int]:
    lines = (await client.get("/metrics")).text.splitlines()
    found = (SAMPLE.fullmatch(line) for line in lines)
    return {f"{it[1]} {it[2]}": int(it[3]) for it in found if it is not None}


class TestG14Responses:
    async def test_responses_are_counted_by_part_and_status(self) -> None:
        """Pages, kinds and the gateway's own paths each count for themselves."""
        app = gateway(kinds=[Kind("price", fetch=fetch, fresh_for="1m")], pages=site)
        async with client_of(app) as client:
            for path in ("/200", "/200", "/404", "/v1/price/a", "/v1/price/none", "/healthz"):
                await client.get(path)
            await client.head("/200")
            found = await told(client)
        assert found['responses part="pages",status="200"'] == 3
        assert found['responses part="pages",status="404"'] == 1
        assert found['response_bytes part="pages"'] == 3 * 8
        assert found['responses part="kinds",status="200"'] == 1
        assert found['responses part="kinds",status="404"'] == 1
        assert found['responses part="own",status="200"'] == 1  # this one is not answered yet

    async def test_unknown_statuses_are_counted_as_other(self) -> None:
        """A site that makes them up makes no labels up."""
        async with client_of(gateway(pages=site)) as client:
            for status in (299, 418, 498, 599):
                await client.get(f"/{status}")
            found = await told(client)
        assert found['responses part="pages",status="other"'] == 3
        assert found['responses part="pages",status="418"'] == 1

    async def test_an_app_that_raises_is_counted_as_500(self) -> None:
        """As the server tells its visitor."""
        async with client_of(gateway(pages=site)) as client:
            assert (await client.get("/raise")).status_code == 500
            found = await told(client)
        assert found['responses part="pages",status="500"'] == 1

    async def test_a_page_that_the_server_sends_again_counts_each_time(self) -> None:
        """I29: the app is not called for it, and its bytes are those of the page."""
        calls = 0

        async with PageCache("memory://") as pages:
            isr = IsrMiddleware(site, pages)

            async def counted(scope: Scope, receive: Receive, send: Send) -> None:
                nonlocal calls
                calls += scope["type"] == "http"
                await isr(scope, receive, send)

            app = gateway(pages=counted, page_cache=pages)
            async with client_of(app) as client:
                for _ in range(20):
                    assert (await client.get("/200")).text == "fourfour"
                found = await told(client)
        assert calls < 10
        assert found['responses part="pages",status="200"'] == 20
        assert found['response_bytes part="pages"'] == 20 * 8


class TestG14ObjectiveOfAGateway:
    async def test_objectives_of_kinds_and_pages_are_in_metrics_and_numbers(self) -> None:
        """In `/metrics` and in the numbers of the dashboard."""
        wanted = "99% of reads younger than 1m"
        kind = Kind("price", fetch=fetch, fresh_for="30s", objective=wanted)
        async with PageCache("memory://", objective="90% of reads younger than 10m") as pages:
            app = gateway(kinds=[kind], pages=IsrMiddleware(site, pages), page_cache=pages)
            async with client_of(app) as client:
                for path in ("/v1/price/a", "/v1/price/a", "/200"):
                    await client.get(path)
                lines = (await client.get("/metrics")).text.splitlines()
                rows = (await client.get("/_stillfresh/api/stats")).json()["resources"]
        assert 'stillfresh_objective_met_total{resource="price"} 2' in lines
        assert 'stillfresh_objective_share{resource="page"} 0.9' in lines
        assert 'stillfresh_objective_met_total{resource="page"} 1' in lines
        price = next(row for row in rows if row["kind"] == "price")
        assert price["objective"] == {"share": 0.99, "age": 60.0}
        assert (price["objective_met"], price["objective_missed"]) == (2, 0)

    def test_a_kind_with_a_wrong_objective_is_refused(self) -> None:
        """When it is made, by its name."""
        with pytest.raises(ConfigError, match=r"^price: objective: cannot read 'often'"):
            Kind("price", fetch=fetch, fresh_for="30s", objective="often")
