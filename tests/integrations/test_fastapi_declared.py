"""E15 and E19 in FastAPI: what `@fresh` refuses at declaration, and whose answer is whose."""

from collections.abc import AsyncIterator, Callable, Iterator
from typing import Annotated, Any

import httpx2
import pytest
from fastapi import (
    APIRouter,
    BackgroundTasks,
    Depends,
    FastAPI,
    File,
    Form,
    Header,
    Query,
    Request,
    Response,
    Security,
    UploadFile,
)
from fastapi.responses import StreamingResponse
from fastapi.security import HTTPBearer
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel

from stillfresh import Cache, ConfigError, SyncCache
from stillfresh.integrations.fastapi import fresh, lifespan


class User(BaseModel):
    id: int
    name: str


def current_user(x_user: Annotated[str, Header()]) -> User:
    return User(id=len(x_user), name=x_user)


CurrentUser = Annotated[User, Depends(current_user)]


async def by_default(user: User = Depends(current_user)) -> None: ...  # noqa: B008 (as many do)
async def by_annotation(user: CurrentUser) -> None: ...
async def by_scheme(user: Annotated[Any, Security(HTTPBearer())]) -> None: ...
async def the_request(user: Request) -> None: ...
async def the_response(user: Response) -> None: ...
async def the_tasks(user: BackgroundTasks) -> None: ...
async def a_form(user: Annotated[str, Form()]) -> None: ...
async def a_file(user: UploadFile) -> None: ...
async def some_bytes(user: bytes = File()) -> None: ...
async def open_ended(**more: str) -> None: ...
async def a_stream() -> AsyncIterator[int]:
    yield 1


def an_iterator() -> Iterator[int]:
    yield 1


async def streamed() -> StreamingResponse: ...  # type: ignore[empty-body]
async def unknown() -> Callable[[], None]: ...  # type: ignore[empty-body]
async def some_files(user: list[UploadFile]) -> int: ...  # type: ignore[empty-body]
async def maybe_a_file(user: UploadFile | None = None) -> int: ...  # type: ignore[empty-body]
async def plain_route(id: int, q: str = Query("x")) -> int: ...  # type: ignore[empty-body]  # noqa: A002


class TestE15RouteDeclaration:
    @pytest.mark.parametrize(
        ("function", "what"),
        [
            (by_default, "a dependency"),
            (by_annotation, "a dependency"),
            (by_scheme, "a dependency"),
            (the_request, "the Request"),
            (the_response, "the Response"),
            (the_tasks, "the BackgroundTasks"),
        ],
    )
    def test_a_parameter_that_may_be_personal_is_refused_at_declaration(
        self, function: Callable[..., Any], what: str
    ) -> None:
        """The error names the parameter, and the two ways out; each of them is taken."""
        with pytest.raises(ConfigError) as refused:
            fresh(Cache("memory://"), "10m")(function)
        assert f"'user' is {what}, which may differ from caller to caller" in str(refused.value)
        part = "headers.get('accept-language')" if what == "the Request" else "id"
        assert f"per={{'user': lambda user: user.{part}}}" in str(refused.value)
        assert "ignore=('user',)" in str(refused.value)
        fresh(Cache("memory://"), "10m", ignore=("user",))(function)
        fresh(Cache("memory://"), "10m", per={"user": id})(function)

    @pytest.mark.parametrize(
        ("function", "options", "said"),
        [
            (a_form, {"ignore": "user"}, "the form or file 'user' cannot be cached"),
            (a_file, {}, "the form or file 'user' cannot be cached"),
            (some_bytes, {}, "the form or file 'user' cannot be cached"),
            (some_files, {}, "the form or file 'user' cannot be cached"),
            (maybe_a_file, {}, "the form or file 'user' cannot be cached"),
            (open_ended, {}, "more has no name in a request; write each parameter out"),
            (a_stream, {}, "a stream cannot be kept"),
            (an_iterator, {}, "a stream cannot be kept"),
            (streamed, {}, "is a stream, which cannot be kept"),
            (unknown, {"model": Request}, "cannot store values of type"),
            (plain_route, {"per": "user"}, "no parameter 'user'; there are: id, q"),
            (plain_route, {"per": "id", "ignore": "id"}, "'id' is in per= and in ignore="),
            (plain_route, {"tags": lambda user: [user]}, "tags= names 'user'"),
            (plain_route, {"ignore": "id", "tags": lambda id: [id]}, "tags= names 'id'"),  # noqa: A006
            (plain_route, {"name": "Plain"}, "resource name 'Plain'"),
            (plain_route, {"stale_for": "soon"}, "stale_for"),
        ],
    )
    def test_a_mistake_in_a_route_declaration_says_what_to_do(
        self, function: Callable[..., Any], options: dict[str, Any], said: str
    ) -> None:
        """At declaration, not at the first request."""
        with pytest.raises(ConfigError, match=said.replace("(", r"\(")):
            fresh(Cache("memory://"), "10m", **options)(function)

    @pytest.mark.parametrize("is_included", [False, True])
    async def test_fresh_above_the_route_decorator_is_refused_at_the_start(
        self, is_included: bool
    ) -> None:
        """FastAPI would have the function without its cache; one that has both is as meant."""
        cache, router = Cache("memory://"), APIRouter()
        app = FastAPI(lifespan=lifespan(cache))

        async def number() -> int:
            return 1

        kept = fresh(cache, "10m")((router if is_included else app).get("/number")(number))
        app.include_router(router)
        with pytest.raises(ConfigError, match=r"number: @fresh .* above the route"):
            async with app.router.lifespan_context(app):
                pass
        router.get("/kept")(kept)
        app.include_router(router, prefix="/again")
        async with app.router.lifespan_context(app):
            pass

    @pytest.mark.parametrize("given", [SyncCache("memory://"), "memory://"])
    def test_fresh_and_lifespan_refuse_anything_but_a_cache(self, given: Any) -> None:
        """By the route and by the lifespan, at declaration, with what to write."""
        with pytest.raises(ConfigError, match="a Cache is needed here"):
            fresh(given, "10m")
        with pytest.raises(ConfigError, match="a Cache is needed here"):
            lifespan(given)

    def test_two_routes_of_one_function_name_need_two_names(self) -> None:
        """The error says so; `name=` gives another one."""
        cache = Cache("memory://")
        fresh(cache, "10m")(plain_route)
        with pytest.raises(ConfigError, match="taken already"):
            fresh(cache, "10m")(plain_route)
        fresh(cache, "10m", name="plain_again")(plain_route)

    def test_of_fills_in_defaults_and_refuses_other_arguments(self) -> None:
        """`of` takes what is in the key, and refuses what is not."""
        route = fresh(Cache("memory://"), "10m")(plain_route)
        assert route.of(id=1)._key == route.of(id=1, q="x")._key != route.of(id=1, q="y")._key
        with pytest.raises(ConfigError, match="'id' is in the key, and has no default"):
            route.of(q="x")
        with pytest.raises(ConfigError, match=r"'user' is not in the key.*id, q"):
            route.of(id=1, user=2)

    def test_of_takes_no_default_from_a_factory(self) -> None:
        """It may be another one for each request, so it has to be said."""

        async def made(id: int = Query(default_factory=lambda: 7)) -> int:  # noqa: A002
            return id

        route = fresh(Cache("memory://"), "10m")(made)
        with pytest.raises(ConfigError, match="'id' is in the key, and has no default"):
            route.of()


class TestE19RoutePersonal:
    async def test_per_keeps_a_copy_for_each_user(self) -> None:
        """`per` puts the user's id into the key; no shared cache in front may keep the answer."""
        cache, app, calls = Cache("memory://"), FastAPI(), list[str]()

        @app.get("/me")
        @fresh(cache, "10m", per={"user": lambda user: user.name})
        async def me(user: CurrentUser) -> str:
            calls.append(user.name)
            return user.name

        async with cache, asking(app) as client:
            told = [await client.get("/me", headers={"x-user": it}) for it in ("ann", "bob", "ann")]
            refused = await client.get("/me")
            await me.of(user="ann").invalidate()
            await client.get("/me", headers={"x-user": "ann"})
        assert [it.json() for it in told] == ["ann", "bob", "ann"]
        assert {it.headers["cache-control"] for it in told} == {"private, no-cache"}
        assert (calls, refused.status_code) == (["ann", "bob", "ann"], 422)

    async def test_a_dependency_of_plain_data_is_part_of_the_key(self) -> None:
        """A Pydantic model or a plain value is the key by itself."""
        cache, app, calls = Cache("memory://"), FastAPI(), list[User]()

        @app.get("/me")
        @fresh(cache, "10m", per=("user",))
        async def me(user: CurrentUser) -> int:
            calls.append(user)
            return len(calls)

        async with cache, asking(app) as client:
            told = [await client.get("/me", headers={"x-user": it}) for it in ("ann", "bob", "ann")]
        assert [it.json() for it in told] == [1, 2, 1]

    async def test_dependencies_of_a_route_run_on_every_hit(self) -> None:
        """A caller without the right to ask is refused, also if the answer is kept."""
        cache, app = Cache("memory://"), FastAPI()

        @app.get("/shared")
        @fresh(cache, "10m", ignore=("user",))
        async def shared(user: CurrentUser) -> str:
            return "for all"

        async with cache, asking(app) as client:
            first = await client.get("/shared", headers={"x-user": "ann"})
            hit = await client.get("/shared", headers={"x-user": "bob"})
            refused = await client.get("/shared")
        assert (first.text, hit.text, refused.status_code) == ('"for all"', '"for all"', 422)
        assert "hit" in hit.headers["cache-status"]
        assert "cache-control" not in hit.headers


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=5,
)


class TestE15RouteKey:
    @given(VALUES, VALUES)
    def test_two_arguments_have_one_key_only_if_they_are_equal(self, one: Any, other: Any) -> None:
        """Whatever callers send, an answer is under the key of its own arguments."""
        keys = [ROUTE.of(value=it)._key for it in (one, other)]
        assert (keys[0] == keys[1]) == (shape(one) == shape(other))


def shape(value: Any) -> Any:
    """Equal if the values are the same; NaN is itself, and a dict has no order."""
    match value:
        case dict():
            return {name: shape(it) for name, it in value.items()}
        case list():
            return [shape(it) for it in value]
        case _:
            return repr(value)


async def anything(value: Any) -> None: ...


ROUTE = fresh(Cache("memory://"), "10m")(anything)


def asking(app: FastAPI) -> httpx2.AsyncClient:
    return httpx2.AsyncClient(transport=httpx2.ASGITransport(app), base_url="http://shop")
