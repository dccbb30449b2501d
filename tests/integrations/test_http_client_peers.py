"""D1: what hishel and requests-cache document, done by them and by us on the same site.

`docs/guides/migrating-http-clients.md` lists the examples, and those that differ with the reason.
"""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from typing import Any

import hishel
import hishel.httpx
import hishel.requests
import httpx
import pytest
import requests
from requests_cache import CachedSession

from stillfresh.integrations.httpx import AsyncCacheTransport, CacheTransport
from stillfresh.integrations.requests import CacheAdapter, info_of
from tests.kit.http_site import Site, SiteAnswer, serving_site
from tests.kit.processes import Process


@pytest.fixture
def site() -> Iterator[Site]:
    with serving_site() as site:
        site.answer("/fresh", cache_control="max-age=60")
        site.answer("/plain")
        yield site


Pair = Callable[[dict[str, Any], dict[str, Any]], tuple[CachedSession, requests.Session]]


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    """Makes their session and ours, with the options of each."""
    with ExitStack() as stack:

        def make(
            theirs: dict[str, Any], ours: dict[str, Any]
        ) -> tuple[CachedSession, requests.Session]:
            their_session = CachedSession(str(tmp_path / "theirs"), **theirs)
            session = requests.Session()
            session.mount("http://", CacheAdapter(f"sqlite:///{tmp_path}/ours.db", **ours))
            for end in (their_session.cache.close, their_session.close, session.close):
                stack.callback(end)
            return their_session, session

        yield make


class TestD1Hishel:
    """The examples of its pages on httpx and requests."""

    def test_the_second_request_of_a_sync_client_is_from_the_cache(
        self, site: Site, tmp_path: Path
    ) -> None:
        storage = hishel.SqliteStorage(database_path=tmp_path / "hishel.db")
        theirs = hishel.httpx.CacheTransport(httpx.HTTPTransport(), storage, rfc=True)
        ours = CacheTransport(f"sqlite:///{tmp_path}/ours.db")
        seen = []
        for transport in (theirs, ours):
            with httpx.Client(transport=transport) as client:
                answers = [client.get(f"{site.url}/fresh") for _ in range(2)]
            seen.append([from_cache(answer) for answer in answers])
        storage.close()
        assert seen == [[False, True]] * 2
        assert site.count("/fresh") == 2

    def test_the_second_request_of_an_async_client_is_from_the_cache(
        self, site: Site, tmp_path: Path
    ) -> None:
        async def asked(transport: Any) -> list[bool]:
            async with httpx.AsyncClient(transport=transport) as client:
                return [from_cache(await client.get(f"{site.url}/fresh")) for _ in range(2)]

        async def compare() -> list[list[bool]]:
            storage = hishel.AsyncSqliteStorage(database_path=tmp_path / "hishel.db")
            theirs = hishel.httpx.AsyncCacheTransport(httpx.AsyncHTTPTransport(), storage, rfc=True)
            ours = AsyncCacheTransport(f"sqlite:///{tmp_path}/ours.db")
            seen = [await asked(theirs), await asked(ours)]
            await storage.close()
            return seen

        assert asyncio.run(compare()) == [[False, True]] * 2

    def test_a_session_with_an_adapter_for_each_scheme(self, site: Site, tmp_path: Path) -> None:
        storage = hishel.SqliteStorage(database_path=tmp_path / "hishel.db")
        seen = []
        ours = CacheAdapter(f"sqlite:///{tmp_path}/ours.db")
        for adapter in (hishel.requests.CacheAdapter(storage=storage, rfc=True), ours):
            with requests.Session() as session:
                session.mount("https://", adapter)
                session.mount("http://", adapter)
                seen.append([session.get(f"{site.url}/fresh").text for _ in range(2)])
                session.post(f"{site.url}/fresh", json={"key": "value"})
                session.get(f"{site.url}/fresh")
        storage.close()
        assert seen == [["hello", "hello"]] * 2
        assert site.count("/fresh") == 6  # GET, POST and GET for each

    def test_a_time_to_live_for_one_request(self, site: Site, tmp_path: Path) -> None:
        """hishel without `rfc`: by its own limits."""
        storage = hishel.SqliteStorage(database_path=tmp_path / "hishel.db")
        theirs = hishel.httpx.CacheTransport(httpx.HTTPTransport(), storage)
        ours = CacheTransport(f"sqlite:///{tmp_path}/ours.db")
        url = f"{site.url}/plain"
        seen = []
        for transport, extensions in (
            (theirs, {"caching": {"ttl": 60}}),
            (ours, {"stillfresh": {"fresh_for": 60}}),
        ):
            with httpx.Client(transport=transport) as client:
                answers = [client.get(url, extensions=extensions) for _ in range(2)]
            seen.append([from_cache(answer) for answer in answers])
        storage.close()
        assert seen == [[False, True]] * 2


class TestD1RequestsCache:
    """The examples of its first page, and of its settings."""

    def test_sixty_requests_are_one(self, site: Site, pair: Pair) -> None:
        for session in pair({"expire_after": -1}, {"fresh_for": "3650d"}):
            for _ in range(60):
                assert session.get(f"{site.url}/plain").text == "hello"
        assert site.count("/plain") == 2

    @pytest.mark.parametrize("expire_after", [360, timedelta(hours=1)])
    def test_a_fixed_time(self, site: Site, pair: Pair, expire_after: Any) -> None:
        given = {"fresh_for": expire_after}
        for session in pair({"expire_after": expire_after}, given):
            assert [is_cached(session.get(f"{site.url}/plain")) for _ in range(2)] == [False, True]

    def test_by_header_fields(self, site: Site, pair: Pair) -> None:
        for session in pair({"cache_control": True}, {}):
            assert [is_cached(session.get(f"{site.url}/fresh")) for _ in range(2)] == [False, True]

    def test_no_store_counts_only_with_cache_control_there_and_always_here(
        self, site: Site, pair: Pair
    ) -> None:
        """A difference that the guide names."""
        site.answer("/never", cache_control="no-store")
        theirs, ours = pair({"expire_after": 60}, {"fresh_for": 60})
        assert [is_cached(theirs.get(f"{site.url}/never")) for _ in range(2)] == [False, True]
        assert [is_cached(ours.get(f"{site.url}/never")) for _ in range(2)] == [False, False]

    def test_a_post_by_its_body(self, site: Site, pair: Pair) -> None:
        site.answers["/q"] = lambda request: SiteAnswer(request.body)
        theirs = {"expire_after": 60, "allowable_methods": ["GET", "POST"]}
        for session in pair(theirs, {"fresh_for": 60, "by_body": True}):
            bodies = [session.post(f"{site.url}/q", data=data).text for data in ("a", "b", "a")]
            assert bodies == ["a", "b", "a"]
        assert site.count("/q") == 4

    def test_a_stale_response_if_the_site_fails(self, site: Site, pair: Pair) -> None:
        theirs = {"expire_after": 3600, "stale_if_error": True}
        for session in pair(theirs, {"fresh_for": 0, "error_for": "1d"}):
            site.answer("/a", b"old")
            session.get(f"{site.url}/a")
            expire(session)
            site.answer("/a", b"broken", 503)
            assert session.get(f"{site.url}/a").text == "old"

    def test_a_response_for_each_language(self, site: Site, pair: Pair) -> None:
        """They match the fields that they are told; here the site's `Vary` says it."""
        site.answers["/l"] = lambda request: SiteAnswer(
            request.headers["accept-language"].encode(), 200, {"Vary": "Accept-Language"}
        )
        theirs = {"expire_after": 60, "match_headers": ["Accept-Language"]}
        for session in pair(theirs, {"fresh_for": 60}):
            for language in ("de", "en", "de", "en"):
                headers = {"Accept-Language": language}
                assert session.get(f"{site.url}/l", headers=headers).text == language
        assert site.count("/l") == 4

    def test_only_if_cached_and_refresh(self, site: Site, pair: Pair) -> None:
        theirs, ours = pair({"cache_control": True}, {})
        url = f"{site.url}/fresh"
        assert theirs.get(url, only_if_cached=True).status_code == 504
        assert ours.get(url, headers={"Cache-Control": "only-if-cached"}).status_code == 504
        for session in (theirs, ours):
            session.get(url)
        theirs.get(url, force_refresh=True)
        ours.get(url, headers={"Cache-Control": "no-cache"})
        assert site.count("/fresh") == 4

    def test_no_secret_parameter_is_in_the_keys(self, site: Site, pair: Pair) -> None:
        """They ignore it; here another key of the API has another entry."""
        theirs, ours = pair(
            {"cache_control": True, "ignored_parameters": ["license"]},
            {"secrets": ["license"]},
        )
        for session in (theirs, ours):
            session.get(f"{site.url}/fresh?license=S3CRET")
            assert is_cached(session.get(f"{site.url}/fresh?license=S3CRET"))
        adapter: Any = ours.get_adapter(site.url)
        assert "S3CRET" not in repr(adapter.cache.entries())
        assert is_cached(theirs.get(f"{site.url}/fresh?license=OTHER"))
        assert not is_cached(ours.get(f"{site.url}/fresh?license=OTHER"))


class TestD1Processes:
    def test_processes_at_once_cause_one_request(self, site: Site, tmp_path: Path) -> None:
        """The others wait for it, and read its response from the store."""
        site.gate.clear()
        with ExitStack() as stack:
            place = f"sqlite:///{tmp_path}/http.db"
            askers = [
                Process(stack, "http_asker", place, f"{site.url}/fresh", is_ready=False)
                for _ in range(4)
            ]
            for asker in askers:
                assert asker.line() == "ready"
            for asker in askers:
                asker.go()
            assert site.arrived.wait(20)
            site.gate.set()
            said = sorted(asker.line() for asker in askers)
        assert {line.split()[0] for line in said} == {"hello"}
        assert [line for line in said if line.endswith("loaded")] == ["hello loaded"]
        assert site.count("/fresh") == 1


def from_cache(response: httpx.Response) -> bool:
    if "stillfresh" in response.extensions:
        return bool(response.extensions["stillfresh"].from_cache)
    return bool(response.extensions["caching"]["from_cache"])


def is_cached(response: Any) -> bool:
    if hasattr(response, "from_cache"):
        return bool(response.from_cache)
    return info_of(response).from_cache


def expire(session: requests.Session) -> None:
    """For them; ours has `fresh_for=0`."""
    if isinstance(session, CachedSession):
        session.cache.reset_expiration(timedelta(microseconds=1))
