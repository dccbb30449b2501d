"""Sentences of the documentation that once contradicted the code: each is tried."""

import contextlib
import io
import re
from pathlib import Path

import pytest

from stillfresh import Cache, StoreError, SyncCache
from stillfresh.gateway import gateway
from stillfresh.gateway.config import PagesSettings
from tests.kit.cli import said
from tests.kit.gateway import client_of

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
WEEK = 7 * 86_400


def page(name: str) -> str:
    return (ROOT / "docs" / name).read_text()


def test_the_program_in_the_live_docs_prints_its_comment() -> None:
    """The first program of docs/live.md: what it prints is in the comment below."""
    [program] = re.findall(
        r"```python\n((?:(?!```).)*live\.snapshot.*?)```", page("live.md"), re.DOTALL
    )
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        exec(program, {})  # noqa: S102 (our own page)
    assert f"# {out.getvalue().strip()}\n" in program


@pytest.mark.parametrize(("token", "status"), [("sesame", 401), (None, 200)])
async def test_the_docs_say_that_this_machine_needs_the_token_too(
    token: str | None, status: int
) -> None:
    """G6: as docs/gateway.md and docs/dashboard.md both say."""
    async with client_of(gateway(token=token)) as client:
        answer = await client.get("/_stillfresh/api/stats")
    assert answer.status_code == status
    assert "Users of this machine need it too." in page("dashboard.md")
    [row] = [it for it in page("gateway.md").splitlines() if it.startswith("| `server.token` |")]
    assert "also from this machine" in row


def test_pages_of_a_route_stay_a_week_as_the_readme_says() -> None:
    """The README says so."""
    settings = PagesSettings(("http://127.0.0.1:1",))
    assert (settings.stale_for, settings.error_for) == (WEEK, WEEK)
    assert "A page of a route stays stored for 7 more days" in README


async def test_reads_continue_without_a_server_but_not_with_a_wrong_path() -> None:
    """The guide tells an outage from a mistake."""
    assert "A SQLite file that cannot be opened" in page("guides/when-things-fail.md")
    wrong = Cache("sqlite:////dev/null/x.db")

    @wrong.cached("price", fresh_for="1m")
    async def price(sku: str) -> int:
        return len(sku)

    with pytest.raises(StoreError):
        await wrong.open()
    with pytest.raises(StoreError):
        await price("tea")
    async with Cache("redis://127.0.0.1:1") as away:

        @away.cached("price", fresh_for="1m")
        async def other(sku: str) -> int:
            return len(sku)

        assert await other("tea") == 3


def test_a_sync_read_with_a_wrong_path_raises() -> None:
    wrong = SyncCache("sqlite:////dev/null/x.db")

    @wrong.cached("price", fresh_for="1m")
    def price(sku: str) -> int:
        return len(sku)

    with pytest.raises(StoreError):
        price("tea")
    wrong.close()


def test_the_docs_and_the_help_mention_sighup() -> None:
    """G17: in the guide, beside the settings, and in the help."""
    assert "SIGHUP" in page("guides/deploying.md")
    assert "SIGHUP" in page("gateway.md").partition("## Settings")[2][:1_000]
    assert "SIGHUP" in said("serve", "--help")
