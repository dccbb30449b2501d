"""T9: Django's own cache and session tests, from its source distribution, judge the backend."""

import re
import subprocess
import sys
from pathlib import Path

import django
import pytest

from tests.kit.processes import ROOT
from tests.kit.servers.valkey import Server

PAGE = ROOT / "docs" / "conformance.md"
ROW = re.compile(r"^\| `(\w+\.test_\w+)` \| .{20,} \|$", re.MULTILINE)


@pytest.fixture
def folder() -> Path:
    """Django's tests; fetched if they are not there yet."""
    fetch = [str(ROOT / "scripts" / "django_tests"), sys.prefix]
    found = subprocess.run(fetch, capture_output=True, text=True, check=False)
    if found.returncode:
        pytest.skip(f"Django's source distribution could not be fetched: {found.stderr[-200:]}")
    return Path(found.stdout.strip())


@pytest.mark.timeout(240)
class TestT9Django:
    def test_djangos_own_cache_tests_pass_except_the_listed_ones(self, folder: Path) -> None:
        """In memory; the page says how many there are."""
        self.judge(folder, ["memory://"])

    @pytest.mark.proof
    def test_djangos_own_cache_tests_pass_on_a_file_and_on_a_server(
        self, folder: Path, tmp_path: Path, valkey: Server
    ) -> None:
        """Except for the same tests as in memory."""
        self.judge(folder, [f"sqlite:///{tmp_path}/cache.db", valkey.url(timeout="10s")])

    def judge(self, folder: Path, urls: list[str]) -> None:
        """Run Django's tests on each of these stores, at the same time."""
        command = [sys.executable, "-m", "tests.kit.workers.django_suite", str(folder)]
        running = [
            subprocess.Popen(
                [*command, url],
                cwd=ROOT,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for url in urls
        ]
        try:
            said = [process.communicate(timeout=200) for process in running]
        finally:
            for process in running:
                process.kill()
                process.wait()
        listed = set(ROW.findall(PAGE.read_text()))
        for url, (lines, complaints) in zip(urls, said, strict=True):
            ended = dict(line.split() for line in lines.splitlines())
            failed = {name.split(".", 2)[2] for name, how in ended.items() if how == "failed"}
            assert failed == listed, f"{url}: {failed ^ listed}\n{complaints[-20_000:]}"
            assert "skipped" not in ended.values()
            passed = len(ended) - len(failed)
            row = f"| {django.__version__} | {len(ended)} | {passed} | {len(failed)} | 0 |"
            assert row in PAGE.read_text()
