"""D1, D2, D3: what test_docs.py and test_guides.py do not run of the pages of these doors."""

import asyncio
import re
import textwrap
from importlib.metadata import version
from pathlib import Path
from typing import Any

import httpx
import pytest
import requests

from stillfresh import Cache, new_key
from stillfresh.integrations.httpx import AsyncCacheTransport
from stillfresh.integrations.requests import CacheAdapter, info_of
from tests.kit.guides import run, write_programs
from tests.kit.http_site import serving_site
from tests.kit.processes import ROOT

PAGE = (ROOT / "docs" / "http-clients.md").read_text()
SHORT = re.compile(r"^```py\n(.*?)^```$", re.MULTILINE | re.DOTALL)
MENTIONED = re.compile(r"(httpx2?|requests(?:-cache)?|hishel) (\d[\w.]*\w)")


def test_the_page_of_http_clients_names_the_versions_that_it_was_tested_with() -> None:
    mentioned = dict(MENTIONED.findall(PAGE))
    libraries = {"httpx", "httpx2", "requests", "hishel", "requests-cache"}
    assert mentioned == {library: version(library) for library in libraries}


class TestD1ShortExamples:
    """The blocks of the page that are no programs."""

    @pytest.fixture
    def blocks(self) -> list[str]:
        blocks = SHORT.findall(PAGE)
        assert len(blocks) == 2
        return blocks

    async def _run(self, block: str, names: dict[str, Any]) -> None:
        function = f"async def example():\n{textwrap.indent(block, '    ')}"
        exec(function, names)  # noqa: S102 (our own page)
        await names["example"]()

    async def test_both_ways_to_give_controls_store_a_response_that_states_no_freshness(
        self, blocks: list[str]
    ) -> None:
        with serving_site() as site, requests.Session() as session:
            site.answer("/items")
            session.mount("http://", CacheAdapter())
            url = f"{site.url}/items"
            async with httpx.AsyncClient(transport=AsyncCacheTransport()) as client:
                await self._run(blocks[0], {"client": client, "session": session, "url": url})
                assert site.count("/items") == 2
                again = await client.get(url)
                assert again.extensions["stillfresh"].from_cache
                assert info_of(await asyncio.to_thread(session.get, url)).from_cache
                assert site.count("/items") == 2

    @pytest.mark.parametrize(
        ("line", "is_there"),
        [
            (0, {"/items", "/items/7", "/itemsets"}),
            (1, {"/itemsets"}),
            (2, {"/items", "/items?page=1", "/items/7", "/itemsets"}),
        ],
    )
    async def test_each_line_invalidates_what_the_page_says(
        self, blocks: list[str], line: int, is_there: set[str]
    ) -> None:
        paths = ("/items", "/items?page=1", "/items/7", "/itemsets", "/tagged")

        def reply(request: httpx.Request) -> httpx.Response:
            tags = {"Cache-Tag": "catalog"} if request.url.path == "/tagged" else {}
            return httpx.Response(200, headers={"Cache-Control": "max-age=60", **tags})

        async with Cache("memory://") as cache:
            transport = AsyncCacheTransport(cache, httpx.MockTransport(reply))
            async with httpx.AsyncClient(transport=transport) as client:
                addresses = {path: f"https://api.example.org{path}" for path in paths}
                for address in addresses.values():
                    await client.get(address)
                await self._run(blocks[1].splitlines()[line], {"transport": transport})
                responses = {path: await client.get(address) for path, address in addresses.items()}
        hits = {
            path
            for path, response in responses.items()
            if response.extensions["stillfresh"].from_cache
        }
        assert hits - {"/tagged"} == is_there
        assert ("/tagged" in hits) == (line != 2)


def test_d3_the_django_settings_of_the_page_about_codecs_encrypt_what_is_stored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_programs("codecs", tmp_path)
    program = (
        "import settings\n"
        "from django.conf import settings as django\n"
        "django.configure(CACHES=settings.CACHES)\n"
        "from django.core.cache import cache\n"
        "cache.set('name', 'Ada Lovelace')\n"
        "print(cache.get('name'))\n"
        "cache.close()\n"
    )
    (tmp_path / "try_it.py").write_text(program)
    monkeypatch.setenv("CACHE_KEY", new_key())
    assert run(tmp_path, "try_it.py") == "Ada Lovelace\n"
    files = [file.read_bytes() for file in tmp_path.glob("django.db*")]
    assert files
    assert not any(b"Lovelace" in data for data in files)
