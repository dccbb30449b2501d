"""The documentation site: every page found, every link whole, no other host, search and dark mode.

It is built once, for all workers of a test run.
"""

import fcntl
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Awaitable, Callable
from functools import cache
from pathlib import Path
from urllib.parse import unquote

import pytest
from playwright.async_api import Page, expect

ROOT = Path(__file__).parent.parent.parent
TOOLS = Path(sys.prefix, "docs")
"""An environment of its own."""
OPEN = """const attach = Element.prototype.attachShadow;
Element.prototype.attachShadow = function () { return attach.call(this, { mode: "open" }); };"""
"""A diagram is drawn where scripts cannot look, unless this makes it open."""
NewPage = Callable[..., Awaitable[Page]]


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> Path:
    """Where `make site` would have written it."""
    if not shutil.which("zensical", path=str(TOOLS / "bin")):
        pytest.skip("the tools of the site are not installed: make .venv/.docs")
    if not (TOOLS / "site" / "mermaid.js").exists():
        pytest.skip("the site's scripts come from npm, which is not here")
    base = tmp_path_factory.getbasetemp()
    build = (base if worker_id == "master" else base.parent) / "documentation"
    build.mkdir(exist_ok=True)
    with (build / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (build / "done").exists():
            command = [str(TOOLS / "bin" / "python"), str(ROOT / "scripts" / "site.py"), str(build)]
            made = subprocess.run(command, capture_output=True, text=True, check=False)
            assert made.returncode == 0, made.stdout + made.stderr
            (build / "done").touch()
    return build / "site"


@cache
def text(page: Path) -> str:
    return page.read_text()


@cache
def anchors(page: Path) -> set[str]:
    return set(re.findall(r'\sid="?([^\s">]+)', text(page)))


def test_every_link_of_the_built_docs_leads_somewhere(built: Path) -> None:
    """Each page, picture, script and heading that a page names is there."""
    broken = []
    pages = sorted(built.rglob("*.html"))
    assert len(pages) > 100
    for page in pages:
        if page.name == "404.html":  # served below any path, so its links begin at the root
            continue
        for link in set(re.findall(r'\s(?:href|src)="([^"]+)"', text(page))):
            path, _, anchor = unquote(link).partition("#")
            if ":" in path:
                continue
            target = (page.parent / path).resolve() if path else page
            if not target.is_file() or (anchor and anchor not in anchors(target)):
                broken.append(f"{page.relative_to(built)}: {link}")
    assert broken == []


def test_no_page_of_the_docs_loads_from_another_host(built: Path) -> None:
    """Nothing that a browser loads by itself comes from elsewhere: no fonts, scripts, pictures."""
    loaded = re.compile(
        r'<(?!a\s)[a-z]+\s[^>]*(?:src|href)="(?:https?:)?//[^"]*'
        r"|url\(\W?(?:https?:)?//[^)]*|@import[^;]*"
    )
    found = {
        f"{file.relative_to(built)}: {it}"
        for file in built.rglob("*")
        if file.suffix in {".html", ".css"}
        for it in loaded.findall(text(file))
        if 'rel="canonical"' not in it
    }
    assert found == set()


def test_the_docs_search_knows_every_page(built: Path) -> None:
    """Each page is in the index, except files, histories, and what only helps to change us."""
    known = {
        it["location"].partition("#")[0] for it in json.loads(text(built / "search.json"))["items"]
    }
    pages = {str(it.relative_to(built)) for it in built.rglob("*.html")}
    searched = {page for page in pages if not page.startswith(("files/", "histories/"))}
    unsearched = re.compile(r"404\.|decisions/\d|reference/inside\.|seeds\.|changelog\.|changes/")
    assert all(unsearched.match(page) for page in searched - known)
    assert not any(unsearched.match(page) for page in known)


def test_the_docs_search_lists_public_names_only_and_in_full(built: Path) -> None:
    """A result such as `put` would not say of what; names with an underscore are not for users."""
    entries = json.loads(text(built / "search.json"))["items"]
    names = {
        entry["location"].partition("#")[2]: entry["title"]
        for entry in entries
        if entry["location"].startswith("reference/") and "#stillfresh." in entry["location"]
    }
    assert len(names) > 1_000
    assert all(title == name for name, title in names.items())
    private = [name for name in names if re.search(r"\._[a-z]", name)]
    assert private == []


FIRST = {
    "maximum size": "guides/limiting-memory-and-disk.html",
    "multiple workers": "guides/several-workers.html",
    "jupyter": "guides/notebooks.html",
    "redis down": "guides/when-things-fail.html",
    "encrypt": "guides/codecs.html",
    "httpx": "http-clients.html",
    "fastapi": "fastapi.html",
    "django": "django.html",
    "invalidate": "guides/invalidating.html",
    "read your writes": "guides/read-your-writes.html",
    "nginx": "guides/gateway-recipes.html",
    "memcached": "comparison.html",
    "trio": "comparison.html",
    "rate limit": "comparison.html",
    "ttl": "guides/choosing-times.html",
    "stampede": "guides/several-workers.html",
    "thundering herd": "guides/several-workers.html",
    "invalidate tag": "guides/invalidating.html",
    "tags": "guides/invalidating.html",
    "timeout": "guides/when-things-fail.html",
    "logging": "guides/when-things-fail.html",
    "windows": "versions.html",
    "sqlite": "stores.html",
    "postgres": "stores.html",
    "install": "readme.html",
    "celery": "celery.html",
    "flask": "flask.html",
    "per user": "guides/caching-per-user.html",
    "dogpile": "guides/migrating.html",
}
"""What visitors type, and the page that should be listed first."""
SEARCH = """async ([worker, index, queries]) => {
  let tell;
  const self = { postMessage: (message) => tell(message) };
  new Function("self", worker)(self);
  const ask = (message) => new Promise((resolve) => {
    tell = resolve;
    self.onmessage({ data: message });
  });
  const none = { type: "operator", data: { operator: "and", operands: [] } };
  await ask({ type: 0, data: index });
  const first = {};
  for (const input of queries) {
    const query = { input, filter: { input: none, aggregation: { input: [] } } };
    const reply = await ask({ type: 2, data: query });
    const [best] = reply.data.items;
    first[input] = best ? index.items[best.id].location.split("#")[0] : null;
  }
  return first;
}"""
"""Runs the site's own search worker, without typing."""


class TestInABrowser:
    """Opened from a disk, without a server."""

    async def test_the_docs_search_lists_the_right_page_first(
        self, built: Path, page: Page
    ) -> None:
        """For what visitors type, a guide comes before private names and decisions."""
        [worker] = (built / "assets" / "javascripts" / "workers").glob("search.*.js")
        index = json.loads(text(built / "search.json"))
        found = await page.evaluate(SEARCH, [text(worker), index, list(FIRST)])
        assert found == FIRST

    async def test_the_docs_search_finds_a_page(self, built: Path, page: Page) -> None:
        """The first page that is found for a visitor's words is the page about them."""
        await page.goto((built / "index.html").as_uri())
        await page.get_by_role("button", name="Search").first.click()
        await page.keyboard.type("Longest-Waiting")
        await page.get_by_role("option", name="Longest-Waiting cache").first.click()
        await expect(page).to_have_url(re.compile(r"/waiting\.html"))

    async def test_the_docs_follow_dark_mode_and_draw_diagrams(
        self, built: Path, new_page: NewPage
    ) -> None:
        """The page follows the system until its visitor switches; its diagrams are drawn."""
        page = await new_page(color_scheme="dark")
        await page.add_init_script(OPEN)
        await page.goto((built / "architecture.html").as_uri())
        body = page.locator("body")
        await expect(body).to_have_attribute("data-md-color-scheme", "slate")
        await page.get_by_title("Switch to light mode").click()
        await expect(body).to_have_attribute("data-md-color-scheme", "default")
        diagrams = page.locator(".mermaid svg")
        await expect(diagrams.nth(0).get_by_text("engine")).to_be_visible()
        await expect(diagrams.nth(1).get_by_text("bytes of a request")).to_be_visible()
