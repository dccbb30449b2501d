"""examples/site.py runs: rendered once, changed by a POST (I12)."""

import importlib.util
from pathlib import Path
from typing import Any

from isr_kit import Visitor


def example() -> Any:
    path = Path(__file__).parent.parent.parent / "examples" / "site.py"
    spec = importlib.util.spec_from_file_location("example_site", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


async def test_the_site_shows_what_it_says() -> None:
    """Twice the same page; after a change, and after `publish`, another."""
    module = example()
    visit = Visitor(module.site)
    async with module.pages:
        first, again = await visit(), await visit()
        assert first.text == again.text
        assert "10 a month" in first.text
        await visit("/pricing?basic=12", method="POST")
        assert "12 a month" in (await visit()).text
        await visit("/blog/a?page=2&utm=x")
        await visit("/admin/publish", method="POST")
        stale = await visit("/blog/a?page=2")
        assert "page 2" in stale.text
        assert stale.headers["cache-status"] == "stillfresh; hit; ttl=0"
