"""T5: any request before a page cache: methods, paths, queries, header bytes, scopes.

The app behind says what it was asked for: a page that is another request's would say so.
"""

import ast
import asyncio
import re
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeAlias
from urllib.parse import unquote_to_bytes

from hypothesis import given, settings
from hypothesis import strategies as st

from stillfresh.errors import ConfigError
from stillfresh.pages import IsrMiddleware, Page, PageCache, Route
from stillfresh.testing import ManualClock
from tests.kit.asgi_client import Heard, ask, http_scope
from tests.kit.examples import examples

MODEST = settings(max_examples=examples(80), deadline=None)
FEW = settings(max_examples=examples(30), deadline=None)

ODD_PATHS = [
    b"/a%2Fb",
    b"/a%2fb",
    b"/a%252Fb",
    b"/a%2F%2e%2e",
    b"/a/b",
    b"/a/%2e%2e/b",
    b"/a/../b",
    b"//a/b",
    b"/a%",
    b"/a%zz",
    b"/a%00",
    b"/%61/b",
    b"/a;x/b",
    b"/a?b",
    b"/\xff",
    b"/%ff",
    b"/%C3%A9",
    b"*",
    b"",
    b"http://other.test/a",
    b"/" + b"a" * 9_000,
    b"/a\\b",
    b"/a b",
]
ODD_QUERIES = [
    b"",
    b"x=1",
    b"x=%31",
    b"x=1&x=2",
    b"y=1",
    b"y=1&x=1",
    b"x=1&y=1",
    b"&&",
    b"=",
    b"x",
    b"x=1;y=2",
    b"\xff",
]
NAMES = [
    b"accept-encoding",
    b"accept-language",
    b"authorization",
    b"cache-control",
    b"content-length",
    b"cookie",
    b"host",
    b"if-match",
    b"if-modified-since",
    b"if-none-match",
    b"if-range",
    b"pragma",
    b"range",
    b"x-kind",
]
OPTIONAL = ["raw_path", "root_path", "client", "state", "scheme"]
DECODERS = ["replace", "surrogateescape"]
PORTS = {"http": b":80", "https": b":443"}
CONDITIONS = {b"cache-control"}
SLASH = re.compile(rb"(%2[Ff])")
"""I32: encoded, it is not a slash."""
VALUES = st.binary(max_size=12) | st.sampled_from(
    [
        b"",
        b"\xff\xfe",
        b"no-cache",
        b"max-age=" + b"9" * 5_000,
        b"max-age=\xb2",
        b"only-if-cached",
        b"max-stale, min-fresh=1",
        b"bytes=0-1",
        b"bytes=-0,\xb9-",
        b"bytes=" + b"9" * 5_000 + b"-",
        b'"a", W/"b"',
        b"*",
        b"Mon, 99 Jan 2024 00:00:00 +99999999999999",
        b"gzip;q=9, br;q=\xb2, *;q=0",
        b"other.test",
        b"[::1]:99999",
        b"a\nb: c",
        b"a" * 9_000,
    ]
)
PATHS = (
    st.just(b"/a/b")
    | st.sampled_from(ODD_PATHS)
    | st.binary(max_size=6).map(lambda raw: b"/" + raw)
)
HEADERS: st.SearchStrategy[list[tuple[bytes, bytes]]] = st.just([]) | st.lists(
    st.tuples(st.sampled_from(NAMES) | st.binary(max_size=6), VALUES), max_size=4
)
METHODS = st.sampled_from(
    ["GET"] * 20 + ["HEAD", "POST", "OPTIONS", "TRACE", "get", "", "é", "A B"]
)
QUERIES = st.just(b"x=1") | st.sampled_from(ODD_QUERIES) | st.binary(max_size=6)


@st.composite
def scopes(draw: st.DrawFn) -> dict[str, Any]:
    """As servers hand them over: with `raw_path` or without, decoded in their way."""
    raw = draw(PATHS)
    hosts = [*[b"site.test"] * 9, b"SITE.test:80", b"other.test", b"", b"\xff", None]
    own = [] if (host := draw(st.sampled_from(hosts))) is None else [(b"host", host)]
    decoded = unquote_to_bytes(raw).decode("utf-8", draw(st.sampled_from(DECODERS)))
    scope = http_scope(
        draw(st.sampled_from([decoded] * 3 + ["/rewritten"])),
        method=draw(METHODS),
        raw_path=raw,
        query_string=draw(QUERIES),
        scheme=draw(st.sampled_from(["http", "https"])),
        root_path=draw(st.sampled_from(["", "", "/root", "/é", "\ud800"])),
    )
    scope["headers"] = [*own, *draw(HEADERS)]
    for name in draw(st.sets(st.sampled_from(OPTIONAL), max_size=2)):
        del scope[name]
    return scope


@st.composite
def alike(draw: st.DrawFn) -> list[dict[str, Any]]:
    """Requests of which each differs from the first in one thing."""
    first, others = draw(scopes()), draw(st.lists(scopes(), max_size=3))
    names = st.sampled_from(["root_path", "raw_path", "path", "query_string", "headers", "scheme"])
    return [first, *({**first, name: it[name]} for it in others if (name := draw(names)) in it)]


Seen: TypeAlias = dict[str, Any]


def seen_of(scope: Mapping[str, Any]) -> Seen:
    """What makes a page another one, however it is spelt."""
    scheme = scope.get("scheme", "http")
    hosts = [value.lower() for name, value in scope["headers"] if name == b"host"]
    kinds = b",".join(value for name, value in scope["headers"] if name == b"x-kind")
    given = (scope.get("raw_path") or b"").partition(b"?")[0]  # some servers leave the query in it
    raw = given or scope["path"].encode("utf-8", "surrogatepass")
    return {
        "scheme": scheme,
        "hosts": [host.removesuffix(PORTS[scheme]) for host in hosts],
        "root": scope.get("root_path", ""),
        "path": scope["path"],
        "raw": [it if SLASH.match(it) else unquote_to_bytes(it) for it in SLASH.split(raw)],
        "query": scope["query_string"],
        "kinds": [b" ".join(it.split()) for it in kinds.split(b",") if it.strip()],
    }


async def echo(scope: Any, _: Any, send: Any) -> None:
    """Says what it was asked for, to everybody."""
    headers = [(b"cache-control", b"max-age=60"), (b"vary", b"x-kind"), (b"etag", b'"a"')]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    body = b"" if scope["method"] == "HEAD" else ascii(seen_of(scope)).encode()
    await send({"type": "http.response.body", "body": body})


def is_own(heard: Heard, scope: Mapping[str, Any]) -> bool:
    """This request's page, a part of it, that it has not changed, or that it is not there."""
    if heard.status == 200 and scope["method"] != "HEAD":
        return bool(ast.literal_eval(heard.body.decode()) == seen_of(scope))
    lengths = heard.field(b"content-length")
    if heard.status == 206:
        return int(lengths) == heard.size
    is_asked = any(name in CONDITIONS for name, _ in scope["headers"])
    return not heard.body if heard.status in {200, 304, 416} else is_asked and heard.status == 504


async def visited(many: list[dict[str, Any]], routes: Any) -> None:
    async with PageCache("memory://", clock=ManualClock(start=1_700_000_000.0)) as pages:
        app = IsrMiddleware(echo, pages, routes)
        for scope in [*many, *many]:  # the second time from the cache
            heard = await ask(app, scope)
            assert heard.is_whole
            assert is_own(heard, scope), (heard, scope)


ANYTHING = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9) | PATHS


class TestT5Pages:
    @MODEST
    @given(alike(), st.booleans())
    def test_any_request_has_its_own_page(
        self, many: list[dict[str, Any]], is_declared: bool
    ) -> None:
        """Of any method, path, query and headers; never a mistake of ours."""
        routes = {"*": Route(60, query=None, vary=["x-kind"])} if is_declared else None
        asyncio.run(visited(many, routes))

    @FEW
    @given(ANYTHING, ANYTHING, st.lists(ANYTHING, max_size=2) | ANYTHING)
    def test_any_path_has_its_own_page_or_is_refused(
        self, path: Any, fresh: Any, tags: Any
    ) -> None:
        """By name; so are durations and tags."""
        asyncio.run(self._got(path, fresh, tags))

    async def _got(self, path: Any, fresh: Any, tags: Any) -> None:
        async with PageCache("memory://") as pages:
            await pages.get("/other", made("other"), "1h")
            try:
                for _ in range(2):
                    page = await pages.get(path, made("own"), fresh, tags=tags)
                    assert page.body == (b"other" if path == "/other" else b"own")
            except ConfigError as exc:
                assert is_a_sentence(str(exc)), exc  # noqa: PT017 (or it works)


def made(text: str) -> Callable[[], Awaitable[Page]]:
    async def render() -> Page:
        return Page(text)

    return render


def is_a_sentence(said: str) -> bool:
    return 0 < len(said) < 600 and "\n" not in said
