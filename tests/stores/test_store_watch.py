"""C14: on every store that is shared: what two watch is loaded once, and both hear of it.

The clock is the machine's: a real store is asked over a real network.
"""

import asyncio
from pathlib import Path

import pytest

from stillfresh import Cache, Watch
from tests.kit.engine import Price, Upstream, declare, until, version

KEYS = [f"sku-{number}" for number in range(60)]
LONG = 100.0
"""Seconds that nothing here takes, on the busiest machine."""


@pytest.fixture(params=["sqlite", "redis", "postgres", "dynamodb"])
def url(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    match request.param:
        case "redis":
            return str(request.getfixturevalue("valkey").url(timeout="10s"))
        case "postgres":
            return str(request.getfixturevalue("postgres").new_store())
        case "dynamodb":
            aws = request.getfixturevalue("aws")
            for limit in ("PATIENCE", "READ_TIMEOUT", "CONNECT_TIMEOUT"):  # S5: else it loads
                monkeypatch.setattr(f"stillfresh.stores.aws.{limit}", LONG)
            return str(aws.address(aws.new_table()))
        case _:
            return f"sqlite:///{tmp_path}/cache.db"


async def heard(watch: Watch[str, Price]) -> dict[str, int]:
    """Of every key the first news: its version."""
    news: dict[str, int] = {}
    async with asyncio.timeout(LONG):
        async for update in watch:
            news[update.key] = version(update.answer)
            if len(news) == len(KEYS):
                break
    return news


class TestC14Stores:
    async def test_keys_that_two_caches_watch_are_loaded_once(self, url: str) -> None:
        """E5: whoever has the lease loads, and the other hears of the copy too."""
        upstream = Upstream()
        async with Cache(url) as first, Cache(url) as second:
            terms = {"lease_for": LONG, "fresh_for": 10 * LONG}
            one, two = (declare(cache, upstream, **terms) for cache in (first, second))
            with one.watch(KEYS) as here, two.watch(KEYS) as there:
                upstream.hold()  # a copy that is fresh before the watch looks is no news
                await until(
                    lambda: all(
                        len(it.watched) == len(it.core.loads.under_way) for it in (one, two)
                    )
                )
                upstream.let_go()
                seen = await asyncio.gather(heard(here), heard(there))
        assert [*seen] == [dict.fromkeys(KEYS, 1)] * 2
        assert sorted(key for call in upstream.calls for key in call) == sorted(KEYS)

    async def test_a_watched_key_that_is_invalidated_is_loaded_at_once(self, url: str) -> None:
        """E6: the news is the new value, long before the old one's time was up."""
        upstream = Upstream()
        async with Cache(url) as cache:
            prices = declare(cache, upstream)
            with prices.watch(KEYS) as watch:
                await heard(watch)
                upstream.version = 2
                await prices.invalidate(*KEYS)
                assert await heard(watch) == dict.fromkeys(KEYS, 2)
