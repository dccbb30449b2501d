"""I25, T14: the tests of cache-tests.fyi, from npm, judge `stillfresh serve` at its defaults."""

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
from tests.kit.serve import Proxy

BY_GUESS = "### At the defaults"
"""In the docs: the tests that fail only because freshness is not guessed."""


@pytest.mark.timeout(300)
class TestT14Suite:
    def test_the_public_http_cache_tests_pass_except_the_listed_ones(self, tmp_path: Path) -> None:
        """Required and optimal ones; those that only gather information are not counted."""
        failed = self.judge(tmp_path, listed_tests("## HTTP cache tests", BY_GUESS))
        assert f"at its defaults | {failed}" in PAGE.read_text()

    @pytest.mark.proof
    def test_with_heuristic_the_tests_of_guessed_freshness_pass_too(self, tmp_path: Path) -> None:
        failed = self.judge(tmp_path, listed_tests("## HTTP cache tests"), "--heuristic")
        assert f"with `--heuristic` | {failed}" in PAGE.read_text()

    def judge(self, work: Path, listed: set[str], *options: str) -> str:
        """Exactly the listed tests fail. Returns the counts as the docs write them."""
        folder = fetched_suite()
        with ExitStack() as stack:
            site = serving_suite(stack, folder, work)
            proxy = Proxy(stack, *options, upstream=site)
            ended = judged_by_suite(folder, proxy.url)
        failed = failures(ended)
        assert failed == listed, {id_: ended.get(id_) for id_ in failed ^ listed}
        return f"0.4.5 | {len(ended)} | {len(ended) - len(failed)} | {len(failed)} | 0 |"
