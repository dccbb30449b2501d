"""D1: the tests of cache-tests.fyi, from npm, judge the cache of a client.

They judge proxies, so a server without a cache of its own passes each request to a client.
"""

from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.kit.http_suite import (
    PAGE,
    failures,
    fetched_suite,
    judged_by_suite,
    listed_tests,
    serving_suite,
)
from tests.kit.processes import command
from tests.kit.serve import started

COMMON = "## HTTP cache tests of a client"


@pytest.mark.timeout(300)
class TestD1Suite:
    def test_a_private_cache_passes_the_tests_except_the_listed_ones(self, tmp_path: Path) -> None:
        self.judge("private", "### As a private cache", tmp_path)

    @pytest.mark.proof
    def test_a_shared_cache_passes_the_tests_except_the_listed_ones(self, tmp_path: Path) -> None:
        self.judge("shared", "### As a shared cache", tmp_path)

    def judge(self, mode: str, title: str, work: Path) -> None:
        folder = fetched_suite()
        listed = listed_tests(COMMON, title)
        with ExitStack() as stack:
            site = serving_suite(stack, folder, work)
            _, url = started(stack, command("client_proxy", site, mode, "httpx2"))
            ended = judged_by_suite(folder, url)
        failed = failures(ended)
        assert failed == listed, {id_: ended.get(id_) for id_ in failed ^ listed}
        said = f"{mode} cache of a client | 0.4.5 | {len(ended)} | {len(ended) - len(failed)} | "
        assert f"{said}{len(failed)} | 0 |" in PAGE.read_text()
