"""examples/slow_site.py runs: rendered once, changed by a POST (I12)."""

import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx

from tests.kit.isr import Visitor

ROOT = Path(__file__).parent.parent.parent
EXAMPLE = ROOT / "examples" / "slow_site.py"


def example() -> Any:
    spec = importlib.util.spec_from_file_location("example_site", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


async def test_the_example_site_behaves_as_its_docstring_says() -> None:
    """Twice the same page; after a change, and after `publish`, another."""
    module = example()
    editor = Visitor(module.site)
    reader = Visitor(module.site)
    async with module.pages:
        first = await editor()
        again = await editor()
        assert first.text == again.text
        assert "10 a month" in first.text
        await editor("/pricing?basic=12", method="POST")
        assert "12 a month" in (await editor()).text
        await editor("/blog/a?page=2&utm=x")
        # The visitor whose request renders a page has it before it is stored.
        await module.pages.settled()
        await editor("/admin/publish", method="POST")
        stale = await reader("/blog/a?page=2")
        assert "page 2" in stale.text
        assert stale.headers["cache-status"] == "stillfresh; hit; ttl=0"


async def test_the_editor_of_the_example_site_sees_the_article_as_it_is_after_publishing() -> None:
    """E37: other readers get the old page meanwhile."""
    module = example()
    editor = Visitor(module.site)
    async with module.pages:
        await editor("/blog/a?page=2")
        await module.pages.settled()
        await editor("/admin/publish", method="POST")
        article = await editor("/blog/a?page=2")
        assert article.headers["cache-status"].startswith("stillfresh; fwd=miss; stored")


def test_the_example_site_starts_by_the_command_in_its_docstring() -> None:
    """By the very command in its docstring, on any free port."""
    found = re.search("`uvicorn (.+?)`", EXAMPLE.read_text())
    assert found is not None
    program = Path(sys.executable).parent / "uvicorn"
    command = [str(program), *found[1].split(), "--port", "0"]
    with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            said = next(line for line in process.stderr if "running on" in line)
            url = re.search(r"http://[0-9.:]+", said)
            assert url is not None
            page = httpx.get(f"{url[0]}/pricing", timeout=30)
            assert "10 a month" in page.text
            assert "stillfresh" in page.headers["cache-status"]
        finally:
            process.terminate()
            process.communicate(timeout=30)
