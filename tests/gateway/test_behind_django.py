"""I35: a real Django behind `stillfresh serve`, as docs/guides/behind-django.md says."""

import re
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest
from playwright.async_api import Page, expect

from tests.kit.processes import command
from tests.kit.serve import Proxy, started

pytest.importorskip("django")
NewPage = Callable[..., Awaitable[Page]]
FORM = re.compile(r'name="csrfmiddlewaretoken" value="(\w+)"')


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with ExitStack() as stack:
        folder: Path = tmp_path_factory.mktemp("django")
        _, port = started(stack, command("django_site", str(folder)))
        yield f"http://127.0.0.1:{port}"


@pytest.fixture(scope="module")
def proxy(site: str) -> Iterator[Proxy]:
    """With the command of the README: its route is not one of the site's."""
    with ExitStack() as stack:
        yield Proxy(stack, "--route", "/blog/*=10m", upstream=site)


def signed_in(url: str, **headers: str) -> httpx.Response:
    """The answer to the form of the admin's sign-in."""
    with httpx.Client(base_url=url, timeout=30) as client:
        form = client.get("/admin/login/?next=/admin/", headers=headers)
        token = FORM.search(form.text)
        assert token is not None, form.text
        fields = {"username": "ann", "password": "secret-of-ann", "next": "/admin/"}
        sent = {"csrfmiddlewaretoken": token[1], **fields}
        headers = {"origin": url, **headers}
        return client.post("/admin/login/?next=/admin/", data=sent, headers=headers)


@pytest.mark.asyncio(loop_scope="session")
class TestI35DjangoInABrowser:
    async def test_a_visitor_signs_in_to_the_admin_changes_something_and_signs_out(
        self, proxy: Proxy, new_page: NewPage
    ) -> None:
        """CSRF compares `Origin` with the Host that the site receives: the visitor's."""
        page = await new_page()
        await page.goto(f"{proxy.url}/admin/")
        await page.fill("#id_username", "ann")
        await page.fill("#id_password", "secret-of-ann")
        await page.click("input[type=submit]")
        await expect(page.locator("#user-tools")).to_contain_text("ann")
        await page.goto(f"{proxy.url}/admin/auth/group/add/")
        await page.fill("#id_name", "editors")
        await page.click("input[name=_save]")
        await expect(page.locator(".messagelist")).to_contain_text("editors")
        await page.click("#logout-form button")
        await expect(page.locator("body")).to_contain_text("Logged out")
        await page.goto(f"{proxy.url}/admin/")
        await expect(page.locator("#id_username")).to_be_visible()


class TestI35Django:
    def test_a_page_that_django_calls_public_is_cached_under_the_visitors_host(
        self, proxy: Proxy
    ) -> None:
        texts = {proxy.get("/news").text for _ in range(3)}
        host = proxy.url.removeprefix("http://")
        assert texts == {f"news 1 for {host}"}

    def test_a_sign_in_from_another_origin_is_refused_by_django(self, proxy: Proxy) -> None:
        """The gateway takes nothing from that check."""
        assert signed_in(proxy.url, origin="http://evil.example").status_code == 403
        assert signed_in(proxy.url).status_code == 302

    def test_a_site_that_receives_its_own_name_refuses_the_form_unless_it_is_told(
        self, site: str
    ) -> None:
        """`pages.host = "site"` is for sites on the internet; the page says what Django needs."""
        with ExitStack() as stack:
            stack.enter_context(pytest.MonkeyPatch.context()).setenv(
                "STILLFRESH_PAGES__HOST", "site"
            )
            proxy = Proxy(stack, upstream=site)
            assert signed_in(proxy.url).status_code == 403
