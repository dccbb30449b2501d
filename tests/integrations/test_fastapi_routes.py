"""E19 in FastAPI: what a route's callers get, from the cache and without it."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from decimal import Decimal
from typing import Annotated, Any

import httpx2
import pytest
from fastapi import (
    APIRouter,
    BackgroundTasks,
    Body,
    Depends,
    FastAPI,
    Header,
    HTTPException,
    Request,
    Response,
)
from fastapi.responses import HTMLResponse, JSONResponse
from pydantic import BaseModel, Field, computed_field

from stillfresh import Cache, encrypted, new_key, zstd
from stillfresh.errors import BadValue
from stillfresh.integrations.fastapi import fresh, lifespan
from stillfresh.testing import ManualClock
from tests.kit.engine import idle


class Item(BaseModel, extra="forbid"):
    id: int
    name: str = Field("tea", alias="title")
    tries: int = 0

    @computed_field
    def shout(self) -> str:
        return self.name.upper()


class Shop:
    """An app, its cache on a manual clock, and a client."""

    def __init__(self, store: str = "memory://") -> None:
        self.clock = ManualClock(1_000_000.0)
        self.cache = Cache(store, clock=self.clock)
        self.app = FastAPI(lifespan=lifespan(self.cache))
        self.calls: list[Any] = []
        self.error: Exception | None = None

    @asynccontextmanager
    async def client(self) -> AsyncIterator[httpx2.AsyncClient]:
        transport = httpx2.ASGITransport(self.app, raise_app_exceptions=False)
        async with (
            self.app.router.lifespan_context(self.app),
            httpx2.AsyncClient(transport=transport, base_url="http://shop") as client,
        ):
            yield client

    def called(self, what: Any) -> int:
        self.calls.append(what)
        if self.error is not None:
            raise self.error
        return len(self.calls)

    async def settled(self, calls: int) -> None:
        """Until the function was called so often, and what it returned is stored."""
        async with asyncio.timeout(5):
            while len(self.calls) < calls:
                await asyncio.sleep(0)
            await idle(self.cache)


@pytest.fixture
def shop() -> Shop:
    return Shop()


class TestE19Route:
    async def test_a_second_request_of_a_route_is_a_hit(self, shop: Shop) -> None:
        """The function runs once; the second response is the same, and says that it is a hit."""

        @shop.app.get("/items/{id}")
        @fresh(shop.cache, "10m")
        async def item(id: int, q: str = "x") -> Item:  # noqa: A002
            return Item(id=id, title=q, tries=shop.called(id))

        async with shop.client() as client:
            first = await client.get("/items/1")
            shop.clock.advance(7)
            second = await client.get("/items/1?q=x")
        assert first.json() == second.json() == {"id": 1, "title": "x", "tries": 1, "shout": "X"}
        assert (
            first.headers["cache-status"] == "stillfresh; fwd=miss; stored; ttl=600; detail=fresh"
        )
        assert second.headers["cache-status"] == "stillfresh; hit; ttl=593; detail=fresh"
        assert (first.headers["age"], second.headers["age"]) == ("0", "7")

    async def test_every_declared_parameter_is_in_the_key(self, shop: Shop) -> None:
        """Path, query, header and body: another value is another entry."""

        @shop.app.post("/search/{kind}")
        @fresh(shop.cache, "10m")
        async def search(
            kind: str,
            q: Annotated[str, Body()],
            page: int = 1,
            lang: Annotated[str, Header()] = "en",
        ) -> list[str]:
            return [kind, q, str(page), lang, str(shop.called(kind))]

        async with shop.client() as client:

            async def asked(path: str, q: str, **headers: str) -> str:
                answer = await client.post(f"/search/{path}", json=q, headers=headers)
                return str(answer.json()[-1])

            seen = [
                await asked("a", "tea"), await asked("b", "tea"), await asked("a", "rum"),
                await asked("a?page=2", "tea"), await asked("a", "tea", lang="de"),
                await asked("a?page=1", "tea", lang="en"),
            ]  # fmt: skip
        assert seen == ["1", "2", "3", "4", "5", "1"]

    async def test_nan_and_none_have_different_keys(self, shop: Shop) -> None:
        """JSON has one word for both; a caller cannot store an answer under another's key."""

        @shop.app.get("/near")
        @fresh(shop.cache, "10m")
        async def near(x: float | None = None) -> str:
            return f"{x} {shop.called(x)}"

        async with shop.client() as client:
            seen = [(await client.get(f"/near{it}")).json() for it in ("?x=nan", "", "?x=inf", "")]
        assert seen == ["nan 1", "None 2", "inf 3", "None 2"]

    async def test_the_openapi_description_is_as_without_the_cache(self, shop: Shop) -> None:
        """Parameters, response models, names and descriptions are the function's own."""

        def token(authorization: Annotated[str, Header()]) -> str:
            return authorization

        async def item(id: int, q: str = "x", who: str = Depends(token)) -> Item:  # noqa: A002
            """One item."""
            raise AssertionError

        plain = FastAPI()
        plain.get("/items/{id}")(item)
        shop.app.get("/items/{id}")(fresh(shop.cache, "10m", per="who")(item))
        assert shop.app.openapi() == plain.openapi()

    async def test_sixteen_requests_of_a_cold_route_cause_one_call(self, shop: Shop) -> None:
        """Sixteen requests, one load; each is answered, and the others say that they shared it."""
        begun, go = asyncio.Event(), asyncio.Event()

        @shop.app.get("/slow")
        @fresh(shop.cache, "10m")
        async def slow() -> int:
            begun.set()
            await go.wait()
            return shop.called(0)

        async with shop.client() as client, asyncio.TaskGroup() as group:
            asked = [group.create_task(client.get("/slow")) for _ in range(16)]
            await begun.wait()
            while (await shop.cache.stats()).resources["slow"].coalesced < 15:
                await asyncio.sleep(0)
            go.set()
        assert [it.result().json() for it in asked] == [1] * 16
        assert sum("collapsed" in it.result().headers["cache-status"] for it in asked) == 15

    async def test_a_def_route_runs_in_a_thread(self, shop: Shop) -> None:
        """As FastAPI runs it without the cache, the event loop stays free."""

        @shop.app.get("/thread")
        @fresh(shop.cache, "10m")
        def thread() -> int:
            with pytest.raises(RuntimeError):
                asyncio.get_running_loop()
            return shop.called(0)

        async with shop.client() as client:
            assert [(await client.get("/thread")).json() for _ in range(2)] == [1, 1]

    async def test_a_cached_route_called_by_hand_is_the_function(self, shop: Shop) -> None:
        """A test may call the route without a request; nothing is kept."""

        @fresh(shop.cache, "10m")
        async def item(id: int) -> int:  # noqa: A002
            return shop.called(id)

        assert [await item(1), await item(id=1)] == [1, 2]
        assert (vars(item)["__name__"], item.__module__) == ("item", __name__)

    async def test_a_route_entry_is_invalidated_by_arguments_or_tag(self, shop: Shop) -> None:
        """By its arguments, or by a tag that was made of them."""

        @shop.app.get("/items/{id}")
        @fresh(shop.cache, "10m", tags=lambda id: [f"item:{id}"])  # noqa: A006
        async def item(id: int, q: str = "x") -> int:  # noqa: A002
            return shop.called(id)

        async with shop.client() as client:
            seen = [(await client.get("/items/1")).json(), (await client.get("/items/2")).json()]
            await item.of(id=1).invalidate()
            seen.append((await client.get("/items/1")).json())
            await shop.cache.invalidate_tag("item:2")
            seen += [(await client.get(f"/items/{it}")).json() for it in (1, 2)]
        assert seen == [1, 2, 3, 3, 4]

    async def test_a_cached_pydantic_model_survives_a_restart(
        self, shop: Shop, tmp_path: Any
    ) -> None:
        """A Pydantic model comes back from SQLite as it was, aliases and computed fields too."""

        def again() -> Shop:
            new = Shop(f"sqlite:///{tmp_path}/shop.db")

            @new.app.get("/rows/{id}")
            @fresh(new.cache, "10m", model=Item)
            async def row(id: int) -> Any:  # noqa: A002
                new.called(id)
                return {"id": id, "title": "tea"}

            return new

        first, second = again(), again()
        async with first.client() as client:
            told = (await client.get("/rows/1")).json()
        async with second.client() as client:
            answer = await client.get("/rows/1")
        assert (answer.json(), second.calls) == (told, [])
        assert answer.headers["cache-status"].startswith("stillfresh; hit")

    @pytest.mark.parametrize("hint", [{}, {"return": Any}])
    async def test_a_route_without_a_type_returns_the_json_of_fastapi(
        self, shop: Shop, hint: dict[str, Any]
    ) -> None:
        """Names, computed fields and numbers are as without the cache, on a hit as well."""

        async def plain():  # type: ignore[no-untyped-def]  # noqa: ANN202
            return {"item": Item(id=1, title="jam"), "price": Decimal("1.10")}

        plain.__annotations__ = hint
        shop.app.get("/plain")(plain)
        shop.app.get("/kept")(fresh(shop.cache, "1m")(plain))
        async with shop.client() as client:
            paths = ("/plain", "/kept", "/kept")
            assert len({(await client.get(path)).text for path in paths}) == 1

    async def test_a_returned_row_becomes_the_declared_model(self, shop: Shop) -> None:
        """`response_model` routes return rows of an ORM: `model=` says what is kept of them."""

        class Row:
            id, title, secret = 1, "tea", "hash"

        @shop.app.get("/row", response_model=Item)
        @fresh(shop.cache, "10m", model=Item)
        async def row() -> Any:
            return Row()

        async with shop.client() as client:
            told = [(await client.get("/row")).json() for _ in range(2)]
            value = row.of().peek()
        assert told == [{"id": 1, "title": "tea", "tries": 0, "shout": "TEA"}] * 2
        assert value is not None
        assert not hasattr(value.value, "secret")


class TestE2RouteStale:
    """A stale answer is served at once; the refresh runs behind it, as a request of its own."""

    async def test_a_stale_route_is_served_and_refreshed(self, shop: Shop) -> None:
        """The caller gets the old value, the next one the new."""

        @shop.app.get("/items/{id}")
        @fresh(shop.cache, "10s", stale_for="1h")
        async def item(id: int) -> int:  # noqa: A002
            return shop.called(id)

        async with shop.client() as client:
            seen = [(await client.get("/items/1")).json()]
            shop.clock.advance(11)
            stale = await client.get("/items/1")
            await shop.settled(2)
            seen += [stale.json(), (await client.get("/items/1")).json()]
        assert seen == [1, 1, 2]
        assert stale.headers["cache-status"] == "stillfresh; hit; ttl=-1; detail=stale"

    @pytest.mark.parametrize("method", ["get", "post"])
    async def test_a_background_refresh_has_dependencies_of_its_own(
        self, shop: Shop, method: str
    ) -> None:
        """A session that is closed after each request is open in the refresh, and closed after."""
        sessions: list[dict[str, bool]] = []

        async def session() -> AsyncIterator[dict[str, bool]]:
            made = {"open": True}
            sessions.append(made)
            yield made
            made["open"] = False

        @fresh(shop.cache, "10s", stale_for="1h", ignore="db")
        async def item(
            id: int,  # noqa: A002
            what: Annotated[str, Body()],
            db: Annotated[dict[str, bool], Depends(session)],
        ) -> str:
            await asyncio.sleep(0)
            return f"{what} {id} {db['open']} {shop.called(db)}"

        getattr(shop.app, method)("/items/{id}")(item)
        async with shop.client() as client:
            content = {"content": '"rum"', "headers": {"content-type": "application/json"}}
            seen = [(await client.request(method.upper(), "/items/1", **content)).json()]  # type: ignore[arg-type]
            shop.clock.advance(11)
            seen.append((await client.request(method.upper(), "/items/1", **content)).json())  # type: ignore[arg-type]
            await shop.settled(2)
            seen.append((await client.request(method.upper(), "/items/1", **content)).json())  # type: ignore[arg-type]
        assert seen == ["rum 1 True 1", "rum 1 True 1", "rum 1 True 2"]
        assert shop.calls[1] is not sessions[1]
        assert [it["open"] for it in sessions] == [False] * 4

    async def test_a_background_refresh_passes_through_middleware(self, shop: Shop) -> None:
        """What a middleware puts into the request's state is made anew, and marked as a refresh."""
        marks: list[bool] = []

        @shop.app.middleware("http")
        async def connected(request: Request, call_next: Callable[[Request], Any]) -> Any:
            request.state.connection = {"open": True}
            marks.append("stillfresh.refresh" in request.scope)
            try:
                return await call_next(request)
            finally:
                request.state.connection["open"] = False

        @shop.app.get("/items/{id}")
        @fresh(shop.cache, "10s", stale_for="1h", ignore="request")
        async def item(id: int, request: Request) -> str:  # noqa: A002
            return f"{request.state.connection['open']} {shop.called(id)}"

        async with shop.client() as client:
            await client.get("/items/1")
            shop.clock.advance(11)
            await client.get("/items/1")
            await shop.settled(2)
            assert (await client.get("/items/1")).json() == "True 2"
        assert marks == [False, False, True, False]

    @pytest.mark.parametrize("place", ["router", "nested", "app", "root_path"])
    async def test_a_background_refresh_finds_its_route_in_routers_and_mounts(
        self, shop: Shop, place: str
    ) -> None:
        """In a router, a router of a router, a mounted app, and behind a proxy's prefix."""
        router = APIRouter(prefix="/api")

        @router.get("/items/{id}")
        @fresh(shop.cache, "10s", stale_for="1h")
        async def item(id: int, request_id: Annotated[str, Header()]) -> int:  # noqa: A002
            return shop.called(request_id)

        path = "/api/items/1"
        match place:
            case "router":
                shop.app.include_router(router)
            case "nested":
                outer = APIRouter(prefix="/v2")
                outer.include_router(router)
                shop.app.include_router(outer)
                path = f"/v2{path}"
            case "app":
                inner = FastAPI()
                inner.include_router(router)
                shop.app.mount("/inner", inner)
                path = f"/inner{path}"
            case "root_path":
                shop.app.include_router(router)
                shop.app.root_path = "/proxied"
        async with shop.client() as client:
            client.headers["request-id"] = "r1"
            await client.get(path)
            shop.clock.advance(11)
            await client.get(path)
            await shop.settled(2)
            assert (await client.get(path)).json() == 2
        assert shop.calls == ["r1", "r1"]

    async def test_a_refresh_for_another_user_is_not_stored(self, shop: Shop) -> None:
        """If the dependency names another user by then, nothing is stored under the first."""
        users = iter(["ann", "ann", "bob", "ann"])

        async def user() -> str:
            return next(users)

        @shop.app.get("/me")
        @fresh(shop.cache, "10s", stale_for="1h", per="who")
        async def me(who: str = Depends(user)) -> str:
            shop.called(who)
            return who

        async with shop.client() as client:
            await client.get("/me")
            shop.clock.advance(11)
            await client.get("/me")
            await idle(shop.cache)
            last = await client.get("/me")
        assert (last.json(), shop.calls) == ("ann", ["ann"])
        assert last.headers["cache-status"].endswith("detail=refresh-failed")

    async def test_a_cancelled_request_does_not_cancel_the_load_of_others(self, shop: Shop) -> None:
        """Its own run ends with its session; the other caller's load goes on by a replay."""
        states: list[list[str]] = []
        go = asyncio.Event()

        async def session() -> AsyncIterator[list[str]]:
            made = ["open"]
            states.append(made)
            yield made
            made.append("closed")

        @shop.app.get("/slow")
        @fresh(shop.cache, "10m", ignore="db")
        async def slow(db: Annotated[list[str], Depends(session)]) -> str:
            shop.called(db)
            try:
                await go.wait()
            finally:
                db.append("used")
            return "done"

        async with shop.client() as client:
            first = asyncio.create_task(client.get("/slow"))
            while not shop.calls:
                await asyncio.sleep(0)
            second = asyncio.create_task(client.get("/slow"))
            while len(states) < 2:
                await asyncio.sleep(0)
            first.cancel()
            await asyncio.wait([first])
            await shop_called(shop, 2)
            go.set()
            assert (await second).json() == "done"
        assert states[0] == ["open", "used"]  # the session was closed by the cancellation
        assert shop.calls[1] is states[2]
        assert states[2] == ["open", "used", "closed"]


async def shop_called(shop: Shop, calls: int) -> None:
    async with asyncio.timeout(5):
        while len(shop.calls) < calls:
            await asyncio.sleep(0)


class TestE7RouteFailing:
    """An exception is never kept."""

    async def test_the_old_response_is_served_while_the_route_fails(self, shop: Shop) -> None:
        """Within `error_for`, and the header says so."""

        @shop.app.get("/items")
        @fresh(shop.cache, "10s", error_for="1h")
        async def items() -> int:
            return shop.called(0)

        async with shop.client() as client:
            await client.get("/items")
            shop.clock.advance(11)
            shop.error = ConnectionError("away")
            old = [await client.get("/items") for _ in range(2)]
        assert [(it.status_code, it.json()) for it in old] == [(200, 1)] * 2
        assert {it.headers["cache-status"] for it in old} == {
            "stillfresh; hit; ttl=-1; detail=refresh-failed"
        }
        assert len(shop.calls) == 2

    async def test_an_unhandled_exception_is_500_and_then_503(self, shop: Shop) -> None:
        """First what the function raised; during the cooldown, when to come back."""

        @shop.app.get("/items")
        @fresh(shop.cache, "10s")
        async def items() -> int:
            return shop.called(0)

        shop.error = ConnectionError("away")
        async with shop.client() as client:
            told = [await client.get("/items") for _ in range(2)]
            shop.clock.advance(2)
            shop.error = None
            mended = await client.get("/items")
        assert [it.status_code for it in told] == [500, 503]
        assert (told[1].headers["retry-after"], mended.json()) == ("1", 2)

    @pytest.mark.parametrize("status", [404, 403, 418])
    async def test_an_http_exception_below_500_is_passed_on_without_a_cooldown(
        self, shop: Shop, status: int
    ) -> None:
        """HTTPException below 500 reaches every caller as it is; the next request asks again."""

        @shop.app.get("/items")
        @fresh(shop.cache, "10s", stale_for="1h", error_for="1d")
        async def items() -> int:
            return shop.called(0)

        shop.error = HTTPException(status, "not here", {"X-Why": "gone"})
        async with shop.client() as client:
            told = [await client.get("/items") for _ in range(3)]
        assert {(it.status_code, it.text, it.headers["x-why"]) for it in told} == {
            (status, '{"detail":"not here"}', "gone")
        }
        assert len(shop.calls) == 3

    @pytest.mark.parametrize("age", [11, 4_000])
    async def test_an_http_exception_below_500_replaces_the_old_response(
        self, shop: Shop, age: int
    ) -> None:
        """What the function says is not there any more is not served again, stale or expired."""

        @shop.app.get("/items")
        @fresh(shop.cache, "10s", stale_for="1h", error_for="1d")
        async def items() -> int:
            return shop.called(0)

        async with shop.client() as client:
            await client.get("/items")
            shop.clock.advance(age)
            shop.error = HTTPException(404)
            await client.get("/items")
            await shop.settled(2)
            assert [(await client.get("/items")).status_code for _ in range(2)] == [404, 404]

    async def test_an_exception_with_a_handler_is_answered_by_it(self, shop: Shop) -> None:
        """No cooldown: each request gets the handler's response, as without the cache."""

        class NoSuchItem(Exception):
            pass

        @shop.app.exception_handler(NoSuchItem)
        async def missing(request: Request, exc: Exception) -> JSONResponse:
            return JSONResponse({"missing": str(exc)}, 404)

        @shop.app.get("/items")
        @fresh(shop.cache, "10s")
        async def items() -> int:
            return shop.called(0)

        shop.error = NoSuchItem("tea")
        async with shop.client() as client:
            told = [await client.get("/items") for _ in range(3)]
        assert [(it.status_code, it.json()) for it in told] == [(404, {"missing": "tea"})] * 3

    async def test_a_value_of_another_type_is_500_and_cools_down(self, shop: Shop) -> None:
        """500 each time, with an error that says what to do; it is called once in a cooldown."""
        errors: list[Exception] = []

        @shop.app.exception_handler(Exception)
        async def noted(request: Request, exc: Exception) -> JSONResponse:
            errors.append(exc)
            return JSONResponse(None, 500)

        @shop.app.get("/items")
        @fresh(shop.cache, "10s")
        async def items() -> Item:
            return f"tea {shop.called(0)}"  # type: ignore[return-value]

        async with shop.client() as client:
            told = [await client.get("/items") for _ in range(2)]
        assert ([it.status_code for it in told], len(shop.calls)) == ([500, 500], 1)
        assert [type(it) for it in errors] == [BadValue, BadValue]

    async def test_a_route_works_though_its_store_cannot_be_opened(self, tmp_path: Any) -> None:
        """The app starts, and its routes work without a cache."""
        (tmp_path / "file").touch()
        shop = Shop(f"sqlite:///{tmp_path}/file/shop.db")

        @shop.app.get("/items")
        @fresh(shop.cache, "10s")
        async def items() -> int:
            return shop.called(0)

        async with shop.client() as client:
            assert [(await client.get("/items")).json() for _ in range(2)] == [1, 2]


class TestE19RouteResponses:
    """A route that returns a whole response."""

    async def test_a_plain_response_of_a_route_is_cached(self, shop: Shop) -> None:
        """Status 200, its headers and its body, for every caller."""

        @shop.app.get("/page", response_class=HTMLResponse)
        @fresh(shop.cache, "10m")
        async def page() -> HTMLResponse:
            return HTMLResponse(f"<p>{shop.called(0)}", headers={"X-Shop": "tea"})

        async with shop.client() as client:
            told = [await client.get("/page") for _ in range(2)]
        assert [(it.text, it.headers["x-shop"]) for it in told] == [("<p>1", "tea")] * 2
        assert [it.headers["content-type"] for it in told] == ["text/html; charset=utf-8"] * 2
        assert [len(it.headers.get_list("cache-status")) for it in told] == [1, 1]
        assert "hit" in told[1].headers["cache-status"]

    @pytest.mark.parametrize("which", ["cookie", "status", "private", "large", "background"])
    async def test_a_personal_response_of_a_route_is_not_cached(
        self, shop: Shop, which: str
    ) -> None:
        """With a cookie, another status, `private`, too large, or work behind it."""

        @shop.app.get("/page")
        @fresh(shop.cache, "10m")
        async def page() -> HTMLResponse:
            answer = HTMLResponse(f"<p>{shop.called(0)}")
            match which:
                case "cookie":
                    answer.set_cookie("session", "ann")
                case "status":
                    answer.status_code = 203
                case "private":
                    answer.headers["cache-control"] = "private, max-age=60"
                case "large":
                    answer.body = b"<p>%d" % len(shop.calls) + b" " * 1_048_576
                    answer.headers["content-length"] = str(len(answer.body))
                case "background":
                    answer.background = BackgroundTasks()
            return answer

        async with shop.client() as client:
            told = [(await client.get("/page")).text.strip() for _ in range(2)]
        assert told == ["<p>1", "<p>2"]

    @pytest.mark.parametrize("which", ["cookie", "status", "private"])
    async def test_a_cookie_set_on_fastapis_response_is_not_cached(
        self, shop: Shop, which: str
    ) -> None:
        """A cookie of a dependency does not: it is set for every caller."""

        def rolling(response: Response) -> None:
            response.set_cookie("seen", "now")

        @shop.app.get("/basket")
        @fresh(shop.cache, "10m", stale_for="1h", ignore=("response", "seen"))
        async def basket(
            response: Response, seen: Annotated[None, Depends(rolling)], of: str = "ann"
        ) -> int:
            if of == "ann" and which == "cookie":
                response.set_cookie("basket", "of-ann")
            elif of == "ann" and which == "status":
                response.status_code = 202
            elif of == "ann":
                response.headers["cache-control"] = "private"
            return shop.called(of)

        async with shop.client() as client:
            told = [(await client.get("/basket")).json() for _ in range(2)]
            others = [await client.get("/basket?of=bob") for _ in range(2)]
            shop.clock.advance(700)
            await client.get("/basket?of=bob")
            await shop.settled(4)
        assert told == [1, 2]
        assert [it.json() for it in others] == [3, 3]
        assert [it.headers["set-cookie"][:9] for it in others] == ["seen=now;"] * 2

    async def test_a_bypassed_route_has_no_cache_status(self, shop: Shop) -> None:
        """E22: inside `bypassed()` the route is as without the cache."""

        @shop.app.get("/number")
        @fresh(shop.cache, "10m")
        async def number() -> int:
            return shop.called(0)

        async with shop.client() as client:
            await client.get("/number")
            with shop.cache.bypassed():
                told = await client.get("/number")
        assert told.json() == 2
        assert "cache-status" not in told.headers

    async def test_a_response_returned_instead_of_a_value_is_passed_on(self, shop: Shop) -> None:
        """Each caller gets its own."""

        @shop.app.get("/item", response_model=None)
        @fresh(shop.cache, "10m")
        async def item() -> Any:
            return JSONResponse(shop.called(0), 202)

        async with shop.client() as client:
            told = [await client.get("/item") for _ in range(2)]
        assert [(it.status_code, it.json()) for it in told] == [(202, 1), (202, 2)]


class TestD3Codecs:
    async def test_a_route_of_models_or_responses_can_be_encrypted(self, shop: Shop) -> None:
        """Around the codec of the route: a model comes back as one, and a response as it was."""

        @shop.app.get("/items/{id}")
        @fresh(shop.cache, "10m", codec=encrypted(new_key(), zstd()))
        async def item(id: int) -> Item:  # noqa: A002
            return Item(id=id, title="secret", tries=shop.called(id))

        @shop.app.get("/text")
        @fresh(shop.cache, "10m", codec=zstd(above=0))
        async def text() -> HTMLResponse:
            return HTMLResponse(f"text {shop.called('text')}")

        async with shop.client() as client:
            for path in ("/items/1", "/text"):
                first = await client.get(path)
                second = await client.get(path)
                assert first.status_code == 200
                assert first.text == second.text
            store = await shop.cache.store()
            (stored,) = await shop.cache.entries("item")
            copy = (await store.read("item", [stored.id]))[stored.id].copy
            assert copy is not None
            assert isinstance(copy.value, bytes)
            assert b"secret" not in copy.value
        assert len(shop.calls) == 2
