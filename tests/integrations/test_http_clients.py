"""D1: an HTTP cache for httpx, httpx2 and requests, against a real site."""

import asyncio
import gzip
import io
import logging
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import apsw
import httpx
import pytest
import requests
from requests import PreparedRequest
from requests.adapters import HTTPAdapter
from urllib3 import HTTPResponse

from stillfresh.engine import Origin
from stillfresh.errors import ConfigError
from stillfresh.freshness import Verdict
from stillfresh.http.sharing import Reason
from stillfresh.integrations.http_cache import responses
from stillfresh.integrations.http_cache.keys import clean_url
from stillfresh.integrations.http_cache.model import Controls, HttpRequest
from stillfresh.integrations.http_cache.rules import HttpSettings, plan_request
from stillfresh.integrations.httpx import AsyncCacheTransport, CacheTransport
from stillfresh.integrations.requests import CacheAdapter, info_of
from tests.kit.http_clients import NAMES, Client
from tests.kit.http_site import Site, SiteAnswer, SiteRequest, serving_site
from tests.kit.servers.valkey import Server, free_port

Make = Callable[..., Client]


@pytest.fixture(scope="module")
def shared_site() -> Iterator[Site]:
    with serving_site() as site:
        yield site


@pytest.fixture
def site(shared_site: Site) -> Site:
    shared_site.requests.clear()
    shared_site.answers.clear()
    shared_site.gate.set()
    shared_site.arrived.clear()
    return shared_site


@pytest.fixture(params=NAMES)
def make(request: pytest.FixtureRequest, site: Site) -> Iterator[Make]:
    """Makes clients of each kind; they are closed when the test is over."""
    clients: list[Client] = []

    def new_client(store: Any = "memory://", **options: Any) -> Client:
        client = Client(request.param, store, site.url, **options)
        clients.append(client)
        return client

    yield new_client
    for client in clients:
        client.close()


class TestD1Freshness:
    def test_a_fresh_response_is_served_without_a_request(self, site: Site, make: Make) -> None:
        """Its age and where it came from are told."""
        site.answer("/a", b"one", cache_control="max-age=60")
        client = make()
        first = client.get("/a")
        assert (first.body, first.info.from_cache, first.info.origin) == (b"one", False, "loaded")
        assert first.cache_status == "stillfresh; fwd=uri-miss; stored; ttl=60"
        client.clock.advance(20)
        again = client.get("/a")
        assert (again.status, again.body) == (200, b"one")
        assert again.cache_status == "stillfresh; hit; ttl=40"
        assert again.headers["age"] == "20"
        assert again.info.from_cache
        assert again.info.is_stored
        assert again.info.age == 20
        assert again.info.verdict is Verdict.FRESH
        assert again.info.origin is Origin.MEMORY
        assert again.info.fetched_at == 1_000_000.0
        assert site.count("/a") == 1

    def test_a_response_without_freshness_is_not_stored(self, site: Site, make: Make) -> None:
        site.answer("/a")
        client = make()
        assert client.get("/a").info.reason is Reason.NO_FRESHNESS
        assert not client.get("/a").info.is_stored
        assert site.count("/a") == 2

    def test_fresh_for_replaces_what_a_response_says(self, site: Site, make: Make) -> None:
        """Of the cache, or of one request; `no-store` counts all the same."""
        site.answer("/a", cache_control="max-age=0")
        site.answer("/b")
        site.answer("/never", cache_control="no-store")
        client = make(fresh_for="1m")
        for path in ("/a", "/a", "/never", "/never"):
            client.get(path)
        assert site.count("/a") == 1
        assert site.count("/never") == 2
        plain = make()
        plain.get("/b", fresh_for=30)
        assert plain.get("/b").is_hit
        plain.clock.advance(31)
        assert not plain.get("/b").is_hit

    def test_freshness_is_estimated_only_if_asked_for(self, site: Site, make: Make) -> None:
        site.answer(
            "/a",
            date="Mon, 12 Jan 1970 13:46:40 GMT",  # the clock's
            last_modified="Mon, 12 Jan 1970 13:30:00 GMT",
        )
        client = make(heuristic=True)
        client.get("/a")
        client.clock.advance(99)
        assert client.get("/a").is_hit
        client.clock.advance(2)
        assert not client.get("/a").is_hit

    def test_a_private_cache_ignores_what_is_said_to_shared_ones(
        self, site: Site, make: Make
    ) -> None:
        site.answer("/a", cache_control="s-maxage=600, max-age=10, proxy-revalidate")
        client = make()
        client.get("/a")
        client.clock.advance(11)
        assert not client.get("/a").is_hit
        other = make(shared=True)
        other.get("/a")
        other.clock.advance(11)
        assert other.get("/a").is_hit


class TestD1Validation:
    def test_a_304_freshens_the_stored_response(self, site: Site, make: Make) -> None:
        """The condition is the stored validator; new header fields replace old ones."""

        def answer(request: SiteRequest) -> SiteAnswer:
            if request.headers.get("if-none-match") == '"v1"':
                return SiteAnswer(
                    b"", 304, {"ETag": '"v1"', "Cache-Control": "max-age=9", "X": "2"}
                )
            return SiteAnswer(b"one", 200, {"ETag": '"v1"', "Cache-Control": "max-age=5", "X": "1"})

        site.answers["/a"] = answer
        client = make()
        client.get("/a")
        client.clock.advance(6)
        second = client.get("/a")
        assert (second.status, second.body, second.headers["x"]) == (200, b"one", "2")
        assert second.cache_status == "stillfresh; fwd=stale; stored; ttl=9"
        client.clock.advance(8)
        assert client.get("/a").is_hit
        assert site.count("/a") == 2

    def test_a_304_about_another_response_is_asked_again(self, site: Site, make: Make) -> None:
        def answer(request: SiteRequest) -> SiteAnswer:
            if "if-none-match" in request.headers:
                return SiteAnswer(b"", 304, {"ETag": '"other"'})
            return SiteAnswer(b"whole", 200, {"ETag": '"v1"', "Cache-Control": "max-age=5"})

        site.answers["/a"] = answer
        client = make()
        client.get("/a")
        client.clock.advance(6)
        assert client.get("/a").body == b"whole"
        assert site.count("/a") == 3

    def test_a_response_with_a_validator_only_is_stored_and_validated(
        self, site: Site, make: Make
    ) -> None:
        def answer(request: SiteRequest) -> SiteAnswer:
            is_same = request.headers.get("if-modified-since") == "Mon, 12 Jan 1970 13:30:00 GMT"
            headers = {"Last-Modified": "Mon, 12 Jan 1970 13:30:00 GMT"}
            return SiteAnswer(b"" if is_same else b"one", 304 if is_same else 200, headers)

        site.answers["/a"] = answer
        client = make()
        client.get("/a")
        assert client.get("/a").body == b"one"
        assert site.last("/a").headers["if-modified-since"]

    def test_a_callers_own_condition_is_answered_from_a_fresh_copy(
        self, site: Site, make: Make
    ) -> None:
        """Otherwise the site answers it, and its 304 is not stored."""
        site.answer("/a", b"one", cache_control="max-age=60", etag='"v1"')
        client = make()
        client.get("/a")
        assert client.get("/a", {"If-None-Match": '"v1"'}).status == 304
        assert client.get("/a", {"If-None-Match": '"v0"'}).body == b"one"
        assert site.count("/a") == 1
        client.clock.advance(61)
        assert client.get("/a", {"If-None-Match": '"v1"'}).info.reason is Reason.CONDITION

    def test_a_range_is_cut_from_a_fresh_copy(self, site: Site, make: Make) -> None:
        """Otherwise the site is asked, and its part is not stored."""
        site.answer("/a", b"0123456789", cache_control="max-age=60")
        client = make()
        assert client.get("/a", {"Range": "bytes=2-4"}).info.reason is Reason.RANGE
        client.get("/a")
        part = client.get("/a", {"Range": "bytes=2-4"})
        assert (part.status, part.body, part.headers["content-range"]) == (
            206,
            b"234",
            "bytes 2-4/10",
        )
        assert client.get("/a", {"Range": "bytes=20-"}).status == 416
        assert site.count("/a") == 2

    def test_a_head_is_answered_by_a_stored_get(self, site: Site, make: Make) -> None:
        site.answer("/a", b"12345", cache_control="max-age=60")
        client = make()
        assert client.send("HEAD", "/a").info.reason is Reason.METHOD
        client.get("/a")
        head = client.send("HEAD", "/a")
        assert head.is_hit
        assert (head.body, head.headers["content-length"]) == (b"", "5")


class TestD1Variants:
    def test_each_variant_is_stored_on_its_own(self, site: Site, make: Make) -> None:
        def answer(request: SiteRequest) -> SiteAnswer:
            language = request.headers.get("accept-language", "none")
            headers = {"Vary": "Accept-Language", "Cache-Control": "max-age=60"}
            return SiteAnswer(language.encode(), 200, headers)

        site.answers["/a"] = answer
        client = make()
        for _ in range(2):
            for language in ("de", "en", "fr"):
                assert client.get("/a", {"Accept-Language": language}).body == language.encode()
        assert site.count("/a") == 3

    def test_a_stale_variant_is_refreshed_for_its_own_readers(self, site: Site, make: Make) -> None:
        """A request for another variant does not replace it."""

        def answer(request: SiteRequest) -> SiteAnswer:
            language = request.headers.get("accept-language", "none")
            return SiteAnswer(
                language.encode(), 200, {"Vary": "Accept-Language", "Cache-Control": "max-age=5"}
            )

        site.answers["/a"] = answer
        client = make(stale_for=60)
        client.get("/a", {"Accept-Language": "de"})
        client.clock.advance(10)
        assert client.get("/a", {"Accept-Language": "en"}).body == b"en"
        assert client.get("/a", {"Accept-Language": "de"}).body == b"de"
        client.settle()
        assert site.last("/a").headers["accept-language"] == "de"

    def test_a_response_that_varies_by_everything_is_not_stored(
        self, site: Site, make: Make
    ) -> None:
        site.answer("/a", vary="*", cache_control="max-age=60")
        client = make()
        assert client.get("/a").info.reason is Reason.VARY
        assert not client.get("/a").is_hit

    def test_a_compressed_body_is_stored_as_it_came(self, site: Site, make: Make) -> None:
        """And only for requests that accept its coding."""
        body = gzip.compress(b"words " * 1000)
        site.answer("/a", body, content_encoding="gzip", cache_control="max-age=60")
        client = make()
        assert client.get("/a").body == b"words " * 1000
        assert client.get("/a").body == b"words " * 1000
        assert site.count("/a") == 1
        assert not client.get("/a", {"Accept-Encoding": "identity"}).is_hit


class TestD1OneRequest:
    @pytest.mark.parametrize("place", ["memory", "sqlite", "valkey"])
    def test_callers_at_once_cause_one_request(
        self, site: Site, make: Make, place: str, tmp_path: Path, request: pytest.FixtureRequest
    ) -> None:
        """Tasks or threads; on each kind of store."""
        store = "memory://"
        if place == "sqlite":
            store = f"sqlite:///{tmp_path}/http.db"
        elif place == "valkey":
            server: Server = request.getfixturevalue("valkey")
            store = server.url()
        path = f"/one-{place}"
        site.answer(path, b"one", cache_control="max-age=60")
        client = make(store, name=f"h_{make_name(request)}")
        answers = client.many(path, 8)
        assert {answer.body for answer in answers} == {b"one"}
        assert site.count(path) == 1
        assert client.get(path).is_hit

    def test_a_response_that_is_not_stored_goes_to_its_caller_only(
        self, site: Site, make: Make
    ) -> None:
        """The others send their own requests."""
        site.answer("/a", cache_control="no-store")
        client = make()
        answers = client.many("/a", 4)
        assert {answer.body for answer in answers} == {b"hello"}
        assert site.count("/a") == 4

    def test_callers_at_once_share_an_error_of_the_site(self, site: Site, make: Make) -> None:
        """It is not stored: the next request asks again at once."""
        site.answer("/a", b"broken", 503)
        client = make()
        site.gate.clear()
        answers = gated(site, client, "/a", 4)
        assert {(answer.status, answer.body) for answer in answers} == {(503, b"broken")}
        assert site.count("/a") == 1
        site.answer("/a", b"good", cache_control="max-age=60")
        assert client.get("/a").body == b"good"

    def test_two_clients_share_a_store(self, site: Site, make: Make, tmp_path: Path) -> None:
        site.answer("/a", b"one", cache_control="max-age=60")
        store = f"sqlite:///{tmp_path}/http.db"
        make(store).get("/a")
        again = make(store).get("/a")
        assert again.is_hit
        assert again.info.origin is Origin.STORE


class TestD1Stale:
    def test_a_stale_response_is_served_while_it_is_refreshed(self, site: Site, make: Make) -> None:
        site.answer("/a", b"one", cache_control="max-age=5, stale-while-revalidate=60")
        client = make()
        client.get("/a")
        site.answer("/a", b"two", cache_control="max-age=5")
        client.clock.advance(10)
        stale = client.get("/a")
        assert (stale.body, stale.info.verdict) == (b"one", Verdict.STALE)
        assert stale.cache_status == "stillfresh; hit; ttl=-5"
        client.settle()
        assert client.get("/a").body == b"two"
        assert site.count("/a") == 2

    def test_the_refresh_of_a_response_that_may_no_longer_be_stored_removes_it(
        self, site: Site, make: Make
    ) -> None:
        site.answer("/a", b"one", cache_control="max-age=5, stale-while-revalidate=60")
        client = make()
        client.get("/a")
        site.answer("/a", b"secret", cache_control="no-store")
        client.clock.advance(10)
        assert client.get("/a").body == b"one"
        client.settle()
        assert client.get("/a").body == b"secret"

    @pytest.mark.parametrize("failure", ["closed", "cut", "status"])
    def test_an_old_response_is_served_if_the_site_fails(
        self, site: Site, make: Make, failure: str
    ) -> None:
        """By `stale-if-error`, or by `error_for`. The error is told."""
        site.answer("/a", b"one", cache_control="max-age=5, stale-if-error=60")
        site.answer("/b", b"one", cache_control="max-age=5")
        client = make(error_for=60)
        for path in ("/a", "/b"):
            client.get(path)
            break_site(site, path, failure)
        client.clock.advance(10)
        for path in ("/a", "/b"):
            served = client.get(path)
            assert (served.status, served.body) == (200, b"one")
            assert served.cache_status == "stillfresh; hit; ttl=-5; detail=refresh-failed"
            assert served.info.from_cache
            assert served.info.error is not None
            assert client.get(path).body == b"one"
            assert site.count(path) == 2  # then it cools down
        client.clock.advance(120)
        for path in ("/a", "/b"):
            assert_fails(client, path, failure)

    @pytest.mark.parametrize(("waits", "is_served"), [(19, True), (21, False)])
    def test_error_for_counts_from_the_end_of_a_lifetime_that_was_over(
        self, site: Site, make: Make, waits: float, *, is_served: bool
    ) -> None:
        """The response came 40 s after it, so 20 of 60 s are left."""
        site.answer("/a", b"one", cache_control="max-age=5", age=45, etag='"v1"')
        client = make(error_for=60)
        client.get("/a")
        break_site(site, "/a", "closed")
        client.clock.advance(waits)
        if is_served:
            served = client.get("/a")
            assert served.cache_status == "stillfresh; hit; ttl=-59; detail=refresh-failed"
        else:
            assert_fails(client, "/a", "closed")

    @pytest.mark.parametrize(("waits", "is_hit"), [(19, True), (21, False)])
    def test_stale_for_counts_from_the_end_of_a_lifetime_that_was_over(
        self, site: Site, make: Make, waits: float, *, is_hit: bool
    ) -> None:
        """As `error_for`."""
        site.answer("/a", b"one", cache_control="max-age=5", age=45, etag='"v1"')
        client = make(stale_for=60)
        client.get("/a")
        client.clock.advance(waits)
        assert client.get("/a").is_hit is is_hit

    def test_own_times_count_from_the_request_if_a_response_states_no_lifetime(
        self, site: Site, make: Make
    ) -> None:
        """Nobody knows when it stopped being fresh, and the site has just sent it."""
        site.answer("/a", b"one", age=45, etag='"v1"')
        client = make(error_for=40)
        client.get("/a")
        break_site(site, "/a", "closed")
        client.clock.advance(39)
        assert client.get("/a").body == b"one"
        client.clock.advance(60)
        assert_fails(client, "/a", "closed")

    def test_must_revalidate_forbids_it(self, site: Site, make: Make) -> None:
        site.answer("/a", b"one", cache_control="max-age=5, must-revalidate", etag='"a"')
        client = make(stale_for=60, error_for=60)
        client.get("/a")
        break_site(site, "/a", "closed")
        client.clock.advance(10)
        with pytest.raises(client.errors):
            client.get("/a")
        site.answer("/a", b"two", cache_control="max-age=5")
        assert client.get("/a").body == b"two"  # no cooldown without something to serve

    def test_retry_after_is_obeyed_while_an_old_response_is_served(
        self, site: Site, make: Make
    ) -> None:
        site.answer("/a", b"one", cache_control="max-age=5, stale-if-error=600")
        client = make()
        client.get("/a")
        site.answer("/a", b"", 429, retry_after="100")
        client.clock.advance(10)
        assert client.get("/a").body == b"one"
        client.clock.advance(90)
        assert client.get("/a").body == b"one"
        assert site.count("/a") == 2
        client.clock.advance(20)
        assert client.get("/a").body == b"one"
        assert site.count("/a") == 3

    def test_an_invalidated_response_is_not_served_if_the_site_fails(
        self, site: Site, make: Make
    ) -> None:
        """It is known to be wrong."""
        site.answer("/a", b"one", cache_control="max-age=60, stale-if-error=600")
        client = make()
        client.get("/a")
        client.run(client.door.invalidate(f"{site.url}/a"))
        break_site(site, "/a", "closed")
        with pytest.raises(client.errors):
            client.get("/a")

    def test_a_cooldown_ends_when_there_is_nothing_to_serve(self, site: Site, make: Make) -> None:
        """The site asked for a long pause, and the old response is too old by then."""
        site.answer("/a", b"one", cache_control="max-age=5, stale-if-error=100")
        client = make()
        client.get("/a")
        site.answer("/a", b"", 503, retry_after="1000")
        client.clock.advance(10)
        assert client.get("/a").body == b"one"
        site.answer("/a", b"two", cache_control="max-age=5")
        client.clock.advance(200)
        assert client.get("/a").body == b"two"
        assert client.get("/a").is_hit


class TestD1Controls:
    def test_no_cache_asks_the_site_and_stores_the_answer(self, site: Site, make: Make) -> None:
        """As a field of HTTP, or as a control."""
        bodies = iter([b"1", b"2", b"3"])
        site.answers["/a"] = lambda _: SiteAnswer(
            next(bodies), 200, {"Cache-Control": "max-age=60"}
        )
        client = make()
        client.get("/a")
        assert client.get("/a", {"Cache-Control": "no-cache"}).body == b"2"
        assert client.get("/a").body == b"2"
        assert client.get("/a", no_cache=True).body == b"3"
        assert client.get("/a").body == b"3"

    def test_no_cache_never_serves_an_old_response(self, site: Site, make: Make) -> None:
        site.answer("/a", cache_control="max-age=60, stale-if-error=600")
        client = make()
        client.get("/a")
        break_site(site, "/a", "closed")
        with pytest.raises(client.errors):
            client.get("/a", no_cache=True)
        assert client.get("/a").is_hit
        client.clock.advance(70)
        with pytest.raises(client.errors):
            client.get("/a", no_cache=True)
        assert client.get("/a").body == b"hello"

    def test_no_store_passes_the_cache(self, site: Site, make: Make) -> None:
        site.answer("/a", cache_control="max-age=60")
        client = make()
        client.get("/a", {"Cache-Control": "no-store"})
        client.get("/a", no_store=True)
        assert not client.get("/a").is_hit
        assert site.count("/a") == 3

    def test_max_age_and_min_fresh_of_a_request_count(self, site: Site, make: Make) -> None:
        site.answer("/a", cache_control="max-age=60")
        client = make()
        client.get("/a")
        client.clock.advance(20)
        assert client.get("/a", {"Cache-Control": "max-age=30"}).is_hit
        assert not client.get("/a", {"Cache-Control": "min-fresh=50"}).is_hit
        client.clock.advance(20)
        assert not client.get("/a", {"Cache-Control": "max-age=10"}).is_hit

    @pytest.mark.parametrize(("age", "waits"), [(300, 0), (100, 200), (0, 300)])
    def test_max_stale_counts_the_age_that_a_response_came_with(
        self, site: Site, make: Make, age: int, waits: float
    ) -> None:
        """RFC 9111 §5.2.1.2: past its lifetime by 240 s, wherever it grew old."""
        site.answer("/a", cache_control="max-age=60", etag='"v1"', age=age)
        client = make()
        client.get("/a")
        client.clock.advance(waits)
        accepted = client.get("/a", {"Cache-Control": "max-stale=240"})
        assert accepted.cache_status == "stillfresh; hit; ttl=-240"
        asked = client.get("/a", {"Cache-Control": "max-stale=239"})
        assert "fwd=stale" in asked.cache_status
        assert site.count("/a") == 2

    def test_a_response_without_a_lifetime_is_stale_by_all_of_its_age(
        self, site: Site, make: Make
    ) -> None:
        """It is stored to be validated; `max-stale` says how old it may be."""
        site.answer("/a", etag='"v1"', age=300)
        client = make()
        client.get("/a")
        assert not client.get("/a", {"Cache-Control": "max-stale=299"}).is_hit
        accepted = client.get("/a", {"Cache-Control": "max-stale=300"})
        assert accepted.cache_status == "stillfresh; hit; ttl=-300"

    def test_only_if_cached_never_asks_the_site(self, site: Site, make: Make) -> None:
        """Offline reading: with `max-stale`, an old response will do."""
        site.answer("/a", b"one", cache_control="max-age=5")
        client = make()
        missing = client.get("/a", only_if_cached=True)
        assert (missing.status, missing.info.is_stored) == (504, False)
        client.get("/a")
        assert client.get("/a", {"Cache-Control": "only-if-cached"}).body == b"one"
        client.clock.advance(600)
        assert client.get("/a", {"Cache-Control": "only-if-cached"}).status == 504
        assert client.get("/a", {"Cache-Control": "only-if-cached, max-stale"}).body == b"one"
        assert site.count("/a") == 1

    @pytest.mark.parametrize(
        ("method", "headers"),
        [
            ("GET", {"If-Match": '"1"'}),
            ("GET", {"Cache-Control": "only-if-cached, no-store"}),
            ("POST", {}),
        ],
    )
    def test_only_if_cached_counts_for_requests_that_pass_the_cache(
        self, site: Site, make: Make, method: str, headers: dict[str, str]
    ) -> None:
        client = make()
        answer = client.send(method, "/a", {"Cache-Control": "only-if-cached"} | headers)
        assert (answer.status, answer.is_hit) == (504, False)
        assert client.send(method, "/a", headers, only_if_cached=True).status == 504
        assert client.get(f"/{'a' * 9_000}", only_if_cached=True).status == 504
        client.run(client.cache.close())
        assert client.get("/a", only_if_cached=True).status == 504
        assert not site.requests

    def test_force_cache_takes_any_stored_response(self, site: Site, make: Make) -> None:
        """And asks the site if there is none, or if it was invalidated."""
        site.answer("/a", b"one", cache_control="max-age=5, must-revalidate")
        client = make()
        assert client.get("/a", force_cache=True).body == b"one"
        client.clock.advance(86_400)
        assert client.get("/a", force_cache=True).is_hit
        client.run(client.door.invalidate(f"{site.url}/a"))
        assert not client.get("/a", force_cache=True).is_hit

    def test_controls_never_reach_the_site(self, site: Site, make: Make) -> None:
        site.answer("/a", cache_control="max-age=5")
        client = make()
        client.get("/a", {"X-Stillfresh": 'fresh-for=60, tags="a b"'})
        assert "x-stillfresh" not in site.last("/a").headers
        client.clock.advance(30)
        assert client.get("/a").is_hit

    def test_an_unknown_control_is_refused(self, make: Make) -> None:
        with pytest.raises(ConfigError, match="no control 'fresh'"):
            make().get("/a", fresh=True)

    def test_the_field_holds_for_redirects_and_the_site_never_sees_it(self, site: Site) -> None:
        """Also beside the extension of httpx."""
        site.answer("/a", b"", 302, location="/b")
        site.answer("/b", cache_control="max-age=60")
        field = {"X-Stillfresh": "no-store"}
        transport = CacheTransport()
        with httpx.Client(transport=transport, follow_redirects=True) as client:
            followed = client.get(f"{site.url}/a", headers=field)
            assert not followed.extensions["stillfresh"].is_stored
            controls = {"stillfresh": {"no_cache": True}}
            client.get(f"{site.url}/b", headers=field, extensions=controls)
        with requests.Session() as session:
            session.mount("http://", CacheAdapter())
            assert not info_of(session.get(f"{site.url}/a", headers=field)).is_stored
        assert len(site.requests) == 5
        assert not any("x-stillfresh" in request.headers for request in site.requests)


class TestD1Bodies:
    def test_a_post_is_stored_by_its_body_if_asked_for(self, site: Site, make: Make) -> None:
        site.answers["/q"] = lambda request: SiteAnswer(
            request.body.upper(), 200, {"Cache-Control": "max-age=60"}
        )
        client = make()
        for _ in range(2):
            assert client.send("POST", "/q", content=b"one", by_body=True).body == b"ONE"
            assert client.send("POST", "/q", content=b"two", by_body=True).body == b"TWO"
        assert site.count("/q") == 2
        assert not client.send("POST", "/q", content=b"one").is_hit
        by_default = make(by_body=True)
        by_default.send("POST", "/q", content=b"one")
        assert by_default.send("POST", "/q", content=b"one").is_hit

    @pytest.mark.parametrize("is_sized", [True, False])
    def test_a_large_body_is_streamed_and_not_stored(
        self, site: Site, make: Make, is_sized: bool
    ) -> None:
        """Whether its length is known before or not."""
        body = bytes(range(256)) * 2_000
        if is_sized:
            site.answer("/big", body, cache_control="max-age=60")
        else:
            chunked = b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in (body[:9], body[9:]))
            site.answers["/big"] = lambda _: SiteAnswer(
                chunked + b"0\r\n\r\n",
                200,
                {"Transfer-Encoding": "chunked", "Cache-Control": "max-age=60"},
            )
        client = make(max_body=100_000)
        for _ in range(2):
            parts: list[bytes] = []
            info = client.stream("/big", parts.append)
            assert b"".join(parts) == body
            assert info.reason is Reason.SIZE
        assert site.count("/big") == 2

    def test_a_large_body_that_is_not_read_to_its_end_frees_its_place(self, site: Site) -> None:
        """A pool with `pool_block` waits for ever for a connection that is not given back."""
        parts = (b"a" * 70_000, b"b" * 70_000, b"c" * 70_000)
        chunked = b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in parts)
        site.answers["/big"] = lambda _: SiteAnswer(
            chunked + b"0\r\n\r\n", 200, {"Transfer-Encoding": "chunked"}
        )
        adapter = HTTPAdapter(pool_maxsize=1, pool_block=True)
        options: Any = {"fresh_for": 60, "max_body": 100_000}
        with requests.Session() as session:
            session.mount("http://", CacheAdapter("memory://", adapter=adapter, **options))
            with session.get(f"{site.url}/big", stream=True) as response:
                assert next(response.iter_content(100)) == b"a" * 100
            pools = adapter.poolmanager.pools
            free: list[Any] = [pools[key].pool for key in pools.keys()]  # noqa: SIM118 (no mapping)
            assert [places.qsize() for places in free] == [1]
            assert len(session.get(f"{site.url}/big").content) == 210_000

    def test_a_response_that_is_not_stored_is_not_read_before_its_caller_reads_it(
        self, site: Site, make: Make
    ) -> None:
        """Its head is enough. A caller that does not read the rest gives the connection back."""
        site.answer("/a", b"x" * 1_000_000, cache_control="no-store")
        client = make()
        for _ in range(3):
            assert len(client.get("/a").body) == 1_000_000

    def test_cookies_reach_the_caller_whose_request_it_was(self, site: Site, make: Make) -> None:
        """A stored response sets none: an old session would come back."""
        site.answer("/a", cache_control="max-age=60", set_cookie="s=1; Path=/none")
        client = make()
        assert client.get("/a").headers["set-cookie"].startswith("s=1")
        assert "set-cookie" not in client.get("/a").headers

    @pytest.mark.parametrize("is_large", [False, True])
    def test_cookies_reach_the_jar_of_the_client(
        self, site: Site, make: Make, is_large: bool
    ) -> None:
        """As without a cache, whether the response is stored or too large for that."""
        headers = {
            "Transfer-Encoding": "chunked",
            "Cache-Control": "max-age=60",
            "Set-Cookie": "s=1",
        }
        site.answers["/a"] = lambda _: SiteAnswer(b"5\r\nwords\r\n0\r\n\r\n", 200, headers)
        client = make(max_body=2 if is_large else 100)
        got = client.get("/a")
        assert got.body == b"words"
        assert got.info.is_stored is not is_large
        assert client.cookies == {"s": "1"}

    def test_a_stored_response_has_the_reason_of_its_status(self, site: Site, make: Make) -> None:
        """Clients show it in their errors."""
        site.answer("/a", b"", 404, cache_control="max-age=60")
        client = make()
        for _ in range(2):
            response = client.get("/a").response
            with pytest.raises(Exception, match="Not Found"):
                response.raise_for_status()

    def test_a_stored_post_is_asked_for_again_without_a_condition(
        self, site: Site, make: Make
    ) -> None:
        """RFC 9110 §13.1.2: a site answers a POST whose condition fails with 412."""
        site.answer("/q", etag='"1"', cache_control="max-age=1")
        client = make(by_body=True)
        client.send("POST", "/q", content=b"one")
        client.clock.advance(2)
        client.send("POST", "/q", content=b"one")
        assert site.count("/q") == 2
        assert "if-none-match" not in site.last("/q").headers

    async def test_a_streamed_request_is_sent_as_it_comes(self) -> None:
        """It is not read into memory to be compared, however it is asked for."""
        is_sent = False

        async def parts() -> AsyncIterator[bytes]:
            assert is_sent
            yield b"part"

        class ReadingTransport(httpx.AsyncBaseTransport):
            async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
                nonlocal is_sent
                is_sent = True
                return httpx.Response(200, content=await request.aread())

        transport = AsyncCacheTransport("memory://", ReadingTransport(), by_body=True)
        async with httpx.AsyncClient(transport=transport) as client:
            response = await client.post("http://site.example/", content=parts())
        assert response.content == b"part"
        assert response.extensions["stillfresh"].reason is Reason.BODY


class TestD1Invalidation:
    @pytest.mark.parametrize("method", ["POST", "PUT", "DELETE"])
    def test_an_unsafe_method_invalidates_its_address(
        self, site: Site, make: Make, method: str
    ) -> None:
        """Each variant; and where `Location` says, on the same site."""
        site.answer("/a", cache_control="max-age=60", location="/b", vary="accept-language")
        site.answer("/b", cache_control="max-age=60")
        client = make()
        client.get("/a", {"Accept-Language": "de"})
        client.get("/a", {"Accept-Language": "en"})
        client.get("/b")
        client.send(method, "/a", content=b"x")
        assert not client.get("/a", {"Accept-Language": "de"}).is_hit
        assert not client.get("/a", {"Accept-Language": "en"}).is_hit
        assert not client.get("/b").is_hit

    def test_a_failed_one_invalidates_nothing(self, site: Site, make: Make) -> None:
        def answer(request: SiteRequest) -> SiteAnswer:
            status = 200 if request.method == "GET" else 500
            return SiteAnswer(b"x", status, {"Cache-Control": "max-age=60"})

        site.answers["/a"] = answer
        client = make()
        client.get("/a")
        client.send("POST", "/a")
        assert client.get("/a").is_hit

    def test_by_address_prefix_and_tag(self, site: Site, make: Make) -> None:
        """Tags come from the response (`Cache-Tag`, `Surrogate-Key`) and from the request."""
        paths = ["/shop/a?x=1", "/shop/a?x=2", "/shop/b", "/shopping"]
        for path in paths:
            site.answer(path, cache_control="max-age=60", cache_tag="t1, t2")
        site.answer("/tagged", cache_control="max-age=60")
        client = make()

        def fill() -> None:
            for path in paths:
                client.get(path)
            client.get("/tagged", tags=["mine"])

        def hits() -> list[str]:
            is_only = {"Cache-Control": "only-if-cached"}
            return [path for path in [*paths, "/tagged"] if client.get(path, is_only).is_hit]

        fill()
        client.run(client.door.invalidate(f"{site.url}/shop/a?x=1"))
        assert hits() == ["/shop/a?x=2", "/shop/b", "/shopping", "/tagged"]
        fill()
        client.run(client.door.invalidate_prefix(f"{site.url}/shop"))
        assert hits() == ["/shopping", "/tagged"]
        fill()
        client.run(client.door.invalidate_tag("t2"))
        assert hits() == ["/tagged"]
        fill()
        client.run(client.door.invalidate_tag("mine"))
        assert hits() == paths

    def test_a_change_that_the_store_does_not_confirm_is_not_forgotten(
        self, site: Site, make: Make
    ) -> None:
        """The address passes the cache until the store has confirmed it."""
        site.answer("/a", cache_control="max-age=600")
        client = make()
        client.get("/a")
        broken = client.door._responses.cache
        invalidate = broken.invalidate_tag

        async def fail(tag: str, *, soft: bool = False) -> None:
            raise ConfigError("the store is away")

        broken.invalidate_tag = fail
        client.send("POST", "/a")
        assert client.get("/a").info.reason is Reason.CHANGED
        broken.invalidate_tag = invalidate
        assert not client.get("/a").is_hit
        assert client.get("/a").is_hit

    @pytest.mark.parametrize("location", ["http://[bad", "http://host:port/", "//[", "\xff"])
    def test_a_location_that_is_no_address_is_ignored(
        self, site: Site, make: Make, location: str
    ) -> None:
        """The answer reaches the caller, and its own address is invalidated."""
        site.answer("/a", cache_control="max-age=60", location=location, content_location=location)
        client = make()
        client.get("/a")
        assert client.send("POST", "/a").status == 200
        assert not client.get("/a").is_hit

    @pytest.mark.parametrize(
        "path",
        ["/ä", "/a b", "/%7Eme", "/%c3%a4", "/a/../b", "/x?q=a b", "/x?q=ä&r=[1]|'"],
    )
    def test_an_address_is_invalidated_as_people_write_it(
        self, site: Site, make: Make, path: str
    ) -> None:
        """Clients encode it before they send it."""
        numbers = iter(b"123456")
        client = make()
        client.get(path, fresh_for=60)
        sent = site.requests[-1].path
        site.answers[sent] = lambda _: SiteAnswer(
            bytes([next(numbers)]), 200, {"Cache-Control": "max-age=60"}
        )
        client.get(path, no_cache=True)
        assert client.get(path).is_hit
        client.run(client.door.invalidate(f"{site.url}{path}"))
        assert not client.get(path).is_hit

    def test_encoded_and_reserved_characters_are_two_addresses(self, site: Site) -> None:
        assert clean_url("http://h/a%2Fb?x=%26") == "http://h/a%2Fb?x=%26"
        assert clean_url("http://h/a/b?x=&") == "http://h/a/b?x=&"
        assert clean_url("http://h/a+b?x=%2b+100%") == "http://h/a+b?x=%2B+100%25"

    def test_a_change_is_not_forgotten_if_there_are_many_while_the_store_is_away(
        self, site: Site, make: Make, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Everything passes the cache until the store has confirmed that all is invalidated."""
        monkeypatch.setattr(responses, "MOST_PENDING", 2)
        client = make()
        paths = ["/a", "/b", "/c", "/d"]
        for path in paths:
            site.answer(path, cache_control="max-age=600")
            client.get(path)
        resource = client.door._responses.resource
        cache = client.door._responses.cache

        async def fail(*_: object, **__: object) -> None:
            raise ConfigError("the store is away")

        with monkeypatch.context() as away:
            away.setattr(cache, "invalidate_tag", fail)
            away.setattr(type(resource), "invalidate_all", fail)
            for path in paths:
                client.send("POST", path)
            for path in paths:
                assert client.get(path).info.reason is Reason.CHANGED
        for path in paths:
            assert not client.get(path).is_hit
            assert client.get(path).is_hit

    async def test_a_change_counts_whose_caller_is_cancelled(self, site: Site) -> None:
        """Its answer has come. The connection is given back."""
        site.answer("/a", cache_control="max-age=600")
        limits = httpx.Limits(max_connections=1)
        transport = AsyncCacheTransport("memory://", httpx.AsyncHTTPTransport(limits=limits))
        is_called = asyncio.Event()

        async def wait(tag: str) -> None:
            is_called.set()
            await asyncio.Event().wait()

        async with httpx.AsyncClient(transport=transport) as client:
            await client.get(f"{site.url}/a")
            with pytest.MonkeyPatch.context() as slow:
                slow.setattr(transport.cache, "invalidate_tag", wait)
                post = asyncio.create_task(client.post(f"{site.url}/a"))
                await is_called.wait()
                post.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await post
            response = await client.get(f"{site.url}/a")
            assert not response.extensions["stillfresh"].from_cache

    def test_a_location_in_utf_8_is_invalidated(self, site: Site, make: Make) -> None:
        site.answer("/caf%C3%A9", cache_control="max-age=60")
        site.answer("/new", b"", 201, location="/café".encode().decode("latin-1"))
        client = make()
        client.get("/café")
        client.send("POST", "/new")
        assert not client.get("/café").is_hit


def answer_with_name(site: Site, path: str, cache_control: str) -> None:
    """The site answers with the credentials that it was asked with."""
    site.answers[path] = lambda request: SiteAnswer(
        request.headers.get("authorization", "nobody").encode(),
        200,
        {"Cache-Control": cache_control, "ETag": '"1"'},
    )


class TestD1Senders:
    def test_a_private_response_is_for_its_sender_only(self, site: Site, make: Make) -> None:
        """By Authorization, Cookie or an API key; also with `private`."""
        site.answers["/me"] = lambda request: SiteAnswer(
            request.headers.get("authorization", "nobody").encode(),
            200,
            {"Cache-Control": "private, max-age=60"},
        )
        client = make()
        for _ in range(2):
            for name in ("Bearer a", "Bearer b"):
                assert client.get("/me", {"Authorization": name}).body == name.encode()
            assert client.get("/me").body == b"nobody"
        assert site.count("/me") == 3
        client.get("/me", {"X-Api-Key": "k"})
        client.get("/me", {"Cookie": "s=1"})
        assert site.count("/me") == 5

    @pytest.mark.parametrize(
        "field",
        ["Private-Token", "X-Goog-Api-Key", "X-Functions-Key", "X-Amz-Signature", "X-Session-Id"],
    )
    def test_a_field_that_sounds_like_a_credential_is_one(
        self, site: Site, make: Make, field: str
    ) -> None:
        """So that nobody is given another sender's response because a name was not listed."""
        site.answers["/me"] = lambda request: SiteAnswer(
            request.headers[field.lower()].encode(), 200, {"Cache-Control": "private, max-age=60"}
        )
        site.answer("/open", cache_control="max-age=60")
        client = make()
        for _ in range(2):
            for name in ("a", "b"):
                assert client.get("/me", {field: name}).body == name.encode()
        assert site.count("/me") == 2
        shared = make(shared=True)
        shared.get("/open", {field: "a"})
        assert shared.get("/open", {field: "a"}).info.reason is Reason.AUTHORIZATION

    def test_a_shared_cache_stores_nothing_personal(self, site: Site, make: Make) -> None:
        site.answer("/private", cache_control="private, max-age=60")
        site.answer("/cookie", cache_control="max-age=60", set_cookie="s=1; Path=/cookie")
        site.answer("/authorized", cache_control="max-age=60")
        site.answer("/public", cache_control="public, max-age=60")
        client = make(shared=True)
        token = {"Authorization": "Bearer a"}
        for _ in range(2):
            assert client.get("/private").info.reason is Reason.PRIVATE
            assert client.get("/cookie").info.reason is Reason.SET_COOKIE
            assert client.get("/authorized", token).info.reason is Reason.AUTHORIZATION
        client.get("/authorized")
        assert client.get("/authorized").is_hit
        assert client.get("/authorized", token).info.reason is Reason.AUTHORIZATION
        client.get("/public", token)
        assert client.get("/public").is_hit
        assert client.get("/public", {"Authorization": "Bearer b"}).is_hit

    @pytest.mark.parametrize("says", ["max-age=0, must-revalidate", "s-maxage=0"])
    @pytest.mark.parametrize("options", [{}, {"fresh_for": 600, "stale_for": 60, "error_for": 60}])
    def test_what_each_sender_must_validate_is_never_shown_to_another(
        self, site: Site, make: Make, says: str, options: dict[str, Any]
    ) -> None:
        """These directives let a shared cache store it, so that the site decides each time."""
        answer_with_name(site, "/me", says)
        client = make(shared=True, **options)
        for name in ("Bearer a", "Bearer b"):
            assert client.get("/me", {"Authorization": name}).body == name.encode()
        assert (
            client.get("/me", {"Authorization": "Bearer c"}, force_cache=True).body == b"Bearer c"
        )
        assert client.get("/me", force_cache=True).body == b"nobody"
        assert client.get("/me", {"Authorization": "Bearer d"}, stale_for=60).body == b"Bearer d"
        offline = {"Authorization": "Bearer e", "Cache-Control": "only-if-cached, max-stale"}
        assert client.get("/me", offline).status == 504
        break_site(site, "/me", "closed")
        with pytest.raises(client.errors):
            client.get("/me", {"Authorization": "Bearer f"})
        with pytest.raises(client.errors):
            client.get("/me")

    @pytest.mark.parametrize("says", ["max-age=0, must-revalidate", "s-maxage=0"])
    def test_callers_at_once_never_get_what_another_sender_must_validate(
        self, site: Site, make: Make, says: str
    ) -> None:
        answer_with_name(site, "/me", says)
        client = make(shared=True)
        names = ["Bearer a", "Bearer b", "Bearer c"]
        senders = [{"Authorization": name} for name in names]
        answers = client.each("/me", [*senders, {}])
        assert [answer.body.decode() for answer in answers] == [*names, "nobody"]

    def test_senders_share_a_response_while_it_is_fresh_by_its_own_fields(
        self, site: Site, make: Make
    ) -> None:
        """RFC 9111 §3.5: `s-maxage` and `must-revalidate` say so."""
        answer_with_name(site, "/all", "max-age=60, must-revalidate")
        client = make(shared=True, fresh_for=600)
        client.get("/all", {"Authorization": "Bearer a"})
        assert client.get("/all", {"Authorization": "Bearer b"}).is_hit
        assert client.get("/all").is_hit
        client.clock.advance(61)
        assert client.get("/all").body == b"nobody"
        client.clock.advance(61)
        assert client.get("/all").is_hit  # nobody's own, for as long as the cache says
        assert client.get("/all", {"Authorization": "Bearer b"}).body == b"Bearer b"

    def test_a_shared_cache_never_reads_what_a_private_one_stored(
        self, site: Site, make: Make, tmp_path: Path
    ) -> None:
        site.answer("/a", cache_control="private, max-age=60")
        store = f"sqlite:///{tmp_path}/http.db"
        make(store).get("/a")
        assert not make(store, shared=True).get("/a").is_hit

    def test_no_secret_is_in_a_key_or_a_log(
        self, site: Site, make: Make, caplog: pytest.LogCaptureFixture, tmp_path: Path
    ) -> None:
        """Neither of a field nor of the query, also when requests fail."""
        caplog.set_level(logging.DEBUG, logger="stillfresh")
        path = "/a?api_key=S3CRET&q=1&token=S3CRET"
        site.answer("/a", cache_control="max-age=1, stale-if-error=100")
        client = make(f"sqlite:///{tmp_path}/http.db")
        address = site.url.replace("http://", "http://user:S3CRET@")
        headers = {"X-Api-Key": "S3CRET", "Cookie": "s=S3CRET"}
        client.get(path, headers)
        client.get(f"{address}/a")
        break_site(site, "/a", "closed")
        client.clock.advance(10)
        client.get(path, headers)
        with pytest.raises(client.errors):
            client.get("/a?key=S3CRET2")
        listed = client.run(client.cache.entries())
        assert len(listed) == 2
        assert "S3CRET" not in repr(listed)
        assert "S3CRET" not in caplog.text
        assert (
            client.get(path.replace("S3CRET", "OTHER"), {"Cache-Control": "only-if-cached"}).status
            == 504
        )

    def test_no_secret_is_in_the_text_of_a_request(self) -> None:
        """Error reports show the variables of each function."""
        fields = ((b"authorization", b"S3CRET"),)
        url = "https://user:S3CRET@site/?key=S3CRET"
        request = HttpRequest("POST", url, fields, b"S3CRET", certificate="S3CRET")
        lookup = plan_request(request, Controls(by_body=True), HttpSettings())
        assert "S3CRET" not in repr(request) + repr(lookup)

    def test_named_credentials_come_besides_the_usual_ones(self, site: Site, make: Make) -> None:
        site.answers["/me"] = lambda request: SiteAnswer(
            f"{request.headers.get('x-api-key')} {request.headers.get('x-user')}".encode(),
            200,
            {"Cache-Control": "private, max-age=60"},
        )
        client = make(credentials=["X-User"])
        assert client.get("/me", {"X-Api-Key": "a"}).body == b"a None"
        assert client.get("/me", {"X-Api-Key": "b"}).body == b"b None"
        assert client.get("/me", {"X-User": "c"}).body == b"None c"

    def test_sites_at_one_address_do_not_share_responses(self, site: Site, make: Make) -> None:
        """The request's own `Host` says which site it asks."""
        site.answers["/a"] = lambda request: SiteAnswer(
            request.headers["host"].encode(), 200, {"Cache-Control": "max-age=60"}
        )
        client = make()
        plain = client.get("/a").body
        for _ in range(2):
            assert client.get("/a", {"Host": "one.example"}).body == b"one.example"
            assert client.get("/a", {"Host": "two.example"}).body == b"two.example"
        assert client.get("/a").body == plain
        assert site.count("/a") == 3
        client.send("POST", "/a")
        assert not client.get("/a", {"Host": "one.example"}).is_hit

    def test_a_private_cache_never_has_the_name_of_a_shared_one(self, make: Make) -> None:
        with pytest.raises(ConfigError, match="http_shared"):
            make(name="http_shared")

    def test_a_cookie_of_an_error_is_for_one_caller(self, site: Site, make: Make) -> None:
        numbers = iter(range(100))
        site.answers["/a"] = lambda _: SiteAnswer(
            b"", 429, {"Set-Cookie": f"sid={next(numbers)}; Path=/elsewhere"}
        )
        cookies = [got.headers["set-cookie"] for got in make().many("/a", 4)]
        assert len(set(cookies)) == 4

    @pytest.mark.parametrize("is_shared", [False, True])
    def test_client_certificates_identify_senders(self, is_shared: bool) -> None:
        """An answer that came without checking the site's certificate is for such requests only."""

        class NumberingAdapter(HTTPAdapter):
            sent = 0

            def send(self, request: PreparedRequest, *_: Any, **__: Any) -> requests.Response:
                self.sent += 1
                body = io.BytesIO(str(self.sent).encode())
                fields = {"Cache-Control": "max-age=60"}
                raw = HTTPResponse(body, fields, 200, preload_content=False)
                return self.build_response(request, raw)

        session = requests.Session()
        session.mount("https://", CacheAdapter("memory://", NumberingAdapter(), shared=is_shared))

        def get(**settings: Any) -> str:
            return session.get("https://site.example/", **settings).text

        with session:
            assert get() == get() == "1"
            assert get(verify=False) == get(verify=False) == "2"
            assert get(cert="a.pem") == "3"
            assert get(cert=("b.pem", "b.key")) == "4"
            assert get(cert="a.pem") == ("5" if is_shared else "3")
            assert get() == "1"

    @pytest.mark.parametrize(
        "name",
        [
            "oauth_token",
            "access-token",
            "X-Api-Key",
            "AWSAccessKeyId",
            "oauth_signature",
            "Authorization",
            "client_assertion",
            "filter[api_key]",
            "login%5Bpass%5D",
            "page=1;token",
        ],
    )
    def test_parameters_that_sound_like_secrets_are_secrets(self, name: str) -> None:
        address = clean_url(f"http://h/a?{name}=S3CRET&q=1")
        assert "S3CRET" not in address
        assert address.endswith("&q=1")
        assert address != clean_url(f"http://h/a?{name}=OTHER&q=1")

    def test_a_secret_is_hidden_to_its_end(self) -> None:
        address = clean_url("http://h/a?token=A;S3CRET=S3CRET;q&q=1;r=2")
        assert "S3CRET" not in address
        assert address.endswith("&q=1;r=2")


class TestD1BadInput:
    @pytest.mark.parametrize("failure", ["closed", "cut"])
    def test_a_response_that_breaks_off_is_an_error_and_not_stored(
        self, site: Site, make: Make, failure: str
    ) -> None:
        """As without a cache. The next request is sent at once."""
        break_site(site, "/a", failure)
        client = make()
        for _ in range(2):
            with pytest.raises(client.errors):
                client.get("/a")
        assert site.count("/a") == 2
        site.answer("/a", b"whole", cache_control="max-age=60")
        assert client.get("/a").body == b"whole"

    def test_callers_at_once_get_errors_of_their_own(self, site: Site, make: Make) -> None:
        break_site(site, "/a", "closed")
        client = make()
        with pytest.raises(client.errors):
            client.many("/a", 4)

    def test_an_error_has_the_request_of_its_own_caller(self, site: Site) -> None:
        """Not that of the caller whose request was sent, with the credentials of that."""
        site.answer("/a", is_closed=True)
        names = [f"Bearer {number}" for number in range(4)]
        client = Client("requests", "memory://", site.url, shared=True)
        with ThreadPoolExecutor(len(names)) as pool:
            calls = [pool.submit(client.get, "/a", {"Authorization": name}) for name in names]
        errors = [call.exception() for call in calls]
        client.close()
        assert [getattr(error, "request").headers["Authorization"] for error in errors] == names  # noqa: B009

    def test_a_response_with_a_wrong_length_is_not_stored(self, site: Site, make: Make) -> None:
        site.answer("/a", b"12345", cache_control="max-age=60", length=10)
        client = make()
        with pytest.raises(client.errors):
            client.get("/a")
        site.answer("/a", b"12345", cache_control="max-age=60")
        assert client.get("/a").body == b"12345"

    def test_a_response_whose_length_is_no_number_is_not_stored(
        self, site: Site, make: Make
    ) -> None:
        """Some clients refuse it, and some read to the end of the connection."""
        site.answer("/a", b"12345", cache_control="max-age=60", length=-5)
        client = make()
        for _ in range(2):
            with suppress(*client.errors):
                assert client.get("/a").info.reason is Reason.HEADERS
        assert site.count("/a") == 2

    @pytest.mark.parametrize(
        "headers",
        [
            {"expires": "tomorrow", "date": "yesterday"},
            {"cache_control": "max-age=soon"},
            {"cache_control": "max-age=-1"},
            {"cache_control": '"', "age": "young"},
            {"last_modified": "1970", "etag": "no quotes"},
        ],
    )
    def test_malformed_fields_are_read_as_the_rfc_says(
        self, site: Site, make: Make, headers: dict[str, Any]
    ) -> None:
        """Nothing is fresh by a field that cannot be read."""
        site.answer("/a", b"one", **headers)
        client = make()
        for count in (1, 2):
            assert client.get("/a").body == b"one"
            assert site.count("/a") == count

    def test_a_redirect_is_stored_and_never_followed_by_the_cache(
        self, site: Site, make: Make
    ) -> None:
        """The client follows it, and finds a loop as without a cache."""
        site.answer("/loop", b"", 301, location="/loop", cache_control="max-age=60")
        client = make()
        assert client.get("/loop").status == 301
        again = client.get("/loop")
        assert (again.status, again.is_hit, again.headers["location"]) == (301, True, "/loop")

    def test_a_store_that_is_down_is_passed(self, site: Site, make: Make) -> None:
        site.answer("/a", b"one", cache_control="max-age=60")
        client = make(f"redis://127.0.0.1:{free_port()}/0?timeout=100ms")
        for _ in range(2):
            assert client.get("/a").body == b"one"
        assert client.send("POST", "/a").status == 200

    def test_a_closed_cache_is_passed(self, site: Site, make: Make) -> None:
        """A session of requests may be used again after `close`, and so may a shared cache end."""
        site.answer("/a", b"one", cache_control="max-age=60")
        client = make()
        client.get("/a")
        client.run(client.cache.close())
        for _ in range(2):
            assert client.get("/a").body == b"one"
        assert client.send("POST", "/a").status == 200
        assert site.count("/a") == 4

    def test_a_damaged_copy_is_loaded_again(self, site: Site, make: Make, tmp_path: Path) -> None:
        site.answer("/a", b"one", cache_control="max-age=60")
        store = f"sqlite:///{tmp_path}/http.db"
        client = make(store)
        client.get("/a")
        client.close()
        database = tmp_path / "http.db"
        spoil(database)
        assert make(store).get("/a").body == b"one"
        assert site.count("/a") == 2

    @pytest.mark.parametrize("field", ["no-store; max-age=60", "max-age=60 no-store", "no-store;"])
    def test_a_refusal_with_a_mistake_is_a_refusal(
        self, site: Site, make: Make, field: str
    ) -> None:
        site.answer("/a", cache_control=field, etag='"1"')
        assert make(fresh_for="1m").get("/a").info.reason is Reason.NO_STORE

    @pytest.mark.parametrize("failures", [1, 10])
    async def test_a_caller_without_patience_does_not_decide_for_the_others(
        self, failures: int
    ) -> None:
        """Its time-out is its own. The others ask once more, together."""

        class ImpatientTransport(httpx.AsyncBaseTransport):
            calls = 0

            async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
                self.calls += 1
                is_failing = self.calls <= failures
                await asyncio.sleep(0)
                if is_failing:
                    raise httpx.ReadTimeout("too slow", request=request)
                return httpx.Response(200, headers={"Cache-Control": "max-age=60"}, content=b"tea")

        site = ImpatientTransport()
        transport = AsyncCacheTransport("memory://", site)
        async with httpx.AsyncClient(transport=transport) as client:
            calls = (client.get("http://site.example/") for _ in range(8))
            first, *others = await asyncio.gather(*calls, return_exceptions=True)
        assert isinstance(first, httpx.ReadTimeout)
        assert site.calls == 2
        for other in others:
            if failures == 1:
                assert isinstance(other, httpx.Response)
                assert other.content == b"tea"
            else:
                assert isinstance(other, httpx.ReadTimeout)

    def test_a_stored_body_that_was_cut_short_is_loaded_again(
        self, site: Site, make: Make, tmp_path: Path
    ) -> None:
        site.answer("/a", b"whole body", cache_control="max-age=60")
        store = f"sqlite:///{tmp_path}/http.db"
        client = make(store)
        client.get("/a")
        client.close()
        spoil(tmp_path / "http.db", "length(value) - 1")
        assert make(store).get("/a").body == b"whole body"
        assert site.count("/a") == 2

    async def test_an_error_that_cannot_be_copied_reaches_every_caller(self) -> None:
        class OddError(Exception):
            def __init__(self, number: int, *, text: str) -> None:
                super().__init__(number, text)

        class FailingTransport(httpx.AsyncBaseTransport):
            async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
                await asyncio.sleep(0)
                raise OddError(1, text="odd")

        transport = AsyncCacheTransport("memory://", FailingTransport())
        async with httpx.AsyncClient(transport=transport) as client:
            calls = (client.get("http://site.example/") for _ in range(3))
            errors = await asyncio.gather(*calls, return_exceptions=True)
        assert [type(error) for error in errors] == [OddError] * 3


class TestD1Resource:
    def test_reads_are_counted_as_of_any_resource(self, site: Site, make: Make) -> None:
        site.answer("/a", cache_control="max-age=60")
        client = make()
        for _ in range(5):
            client.get("/a")
        stats = client.run(client.door.stats())
        counts = stats.resources["http"]
        assert counts.loads == 1
        assert sum(counts.reads.values()) == 5

    def test_bypassed_sends_every_request(self, site: Site, make: Make) -> None:
        site.answer("/a", cache_control="max-age=60")
        client = make()
        client.get("/a")
        with client.cache.bypassed():
            assert not client.get("/a").is_hit
        assert client.get("/a").is_hit

    def test_options_are_checked(self, make: Make) -> None:
        with pytest.raises(ConfigError, match="max_body"):
            make(max_body="large")
        with pytest.raises(ConfigError, match="shared"):
            make(shared="yes")
        with pytest.raises(ConfigError, match="secrets"):
            make(secrets="token")

    async def test_a_client_of_the_other_kind_is_told_what_to_write(self) -> None:
        """With `with` and without it."""
        with pytest.raises(AttributeError, match=r"httpx.AsyncClient; write transport=CacheTransp"):
            httpx.Client(transport=AsyncCacheTransport()).get("http://site.example")  # type: ignore[arg-type]
        with (
            pytest.raises(AttributeError, match=r"write transport=CacheTransport"),
            httpx.Client(transport=AsyncCacheTransport()),  # type: ignore[arg-type]
        ):
            pass
        client = httpx.AsyncClient(transport=CacheTransport())  # type: ignore[arg-type]
        with pytest.raises(AttributeError, match=r"write transport=AsyncCacheTransport"):
            await client.get("http://site.example")
        with pytest.raises(AttributeError, match=r"write transport=AsyncCacheTransport"):
            async with httpx.AsyncClient(transport=CacheTransport()):  # type: ignore[arg-type]
                pass


def make_name(request: pytest.FixtureRequest) -> str:
    """A name for each test on the server that all share."""
    return "".join(letter for letter in request.node.callspec.id if letter.isalnum()).lower()


def gated(site: Site, client: Client, path: str, count: int) -> list[Any]:
    """Send requests at once; the site answers when the first one has come and a moment is over."""

    def open_gate() -> None:
        site.arrived.wait(10)
        time.sleep(0.3)  # others come meanwhile; if they do not, the test still passes
        site.gate.set()

    thread = threading.Thread(target=open_gate)
    thread.start()
    try:
        return client.many(path, count)
    finally:
        thread.join()


def break_site(site: Site, path: str, failure: str) -> None:
    if failure == "status":
        site.answer(path, b"broken", 503)
    elif failure == "cut":
        site.answer(path, b"half of this", cache_control="max-age=60", is_cut=True)
    else:
        site.answer(path, is_closed=True)


def assert_fails(client: Client, path: str, failure: str) -> None:
    if failure == "status":
        assert client.get(path).status == 503
    else:
        with pytest.raises(client.errors):
            client.get(path)


def spoil(database: Path, length: str = "20") -> None:
    """The end of each value is lost."""
    connection = apsw.Connection(str(database))
    connection.execute(f"UPDATE http SET value = substr(value, 1, {length})")
    connection.close()
