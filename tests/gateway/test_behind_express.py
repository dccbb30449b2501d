"""I35: a real Express behind `stillfresh serve`, as docs/guides/behind-express.md says."""

import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack

import httpx
import pytest

from tests.kit.processes import ROOT
from tests.kit.serve import Proxy, started


@pytest.fixture(scope="module")
def proxy() -> Iterator[Proxy]:
    if shutil.which("npm") is None:
        pytest.skip("npm is not installed")
    fetch = [str(ROOT / "scripts" / "express"), sys.prefix]
    fetched = subprocess.run(fetch, capture_output=True, text=True, check=False)
    if fetched.returncode:
        pytest.skip(f"express could not be fetched: {fetched.stderr[-200:]}")
    program = str(ROOT / "tests" / "kit" / "workers" / "express_site.cjs")
    with ExitStack() as stack:
        _, port = started(stack, ["node", program, fetched.stdout.strip()])
        yield Proxy(stack, "--ignore-cookie", "_ga*", upstream=f"http://127.0.0.1:{port}")


class TestI35Express:
    def test_a_public_page_is_cached_for_visitors_with_ignored_cookies(self, proxy: Proxy) -> None:
        texts = {proxy.get("/news", {"cookie": f"_ga={number}"}).text for number in range(3)}
        assert texts == {f"news 1 for {proxy.url}"}

    def test_a_visitor_signs_in_by_a_form_that_checks_origin_and_host(self, proxy: Proxy) -> None:
        with httpx.Client(base_url=proxy.url, timeout=30) as ann:
            form = {"name": "ann"}
            answer = ann.post("/sign-in", data=form, headers={"origin": proxy.url})
            assert (answer.status_code, answer.headers["location"]) == (302, "/account")
            assert ann.get("/account").text == "account of ann"
        assert proxy.get("/account").text == "nobody"

    def test_a_form_of_another_origin_is_refused_by_the_site(self, proxy: Proxy) -> None:
        headers = {"origin": "http://evil.example"}
        answer = proxy.client.post("/sign-in", data={"name": "eve"}, headers=headers)
        assert (answer.status_code, answer.text) == (403, "another origin")
