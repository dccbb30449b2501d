"""What a put returns, and versions: E35."""

from typing import Any

import pytest

from stillfresh import DELETE, Cache, ConfigError, Loaded, Stored, Verdict
from stillfresh.stores.memory import MemoryStore
from stillfresh.testing import ManualClock
from tests.kit.engine import Price, Prices, version


class TestE35Versions:
    async def test_a_put_says_that_it_was_stored(self, prices: Prices) -> None:
        """Without a version, there is none to tell."""
        assert await prices.put("a", Price("a", 7)) == Stored(stored=True, version=None)
        many = await prices.put_many({"a": Price("a", 8), "b": Price("b", 8)}, version=3)
        assert many == dict.fromkeys("ab", Stored(stored=True, version=3))

    @pytest.mark.parametrize(("old", "same", "new"), [(7, 7, 10), ("a", "a", "b"), (-5, -5, 0)])
    async def test_a_smaller_version_is_not_stored(
        self, prices: Prices, old: Any, same: Any, new: Any
    ) -> None:
        """An equal one is; the result says which version is stored."""
        assert (await prices.put("a", Price("a", 1), version=old)).stored
        assert await prices.put("a", Price("a", 2), version=same) == Stored(
            stored=True, version=same
        )
        assert await prices.put("a", Price("a", 3), version=new) == Stored(stored=True, version=new)
        assert await prices.put("a", Price("a", 4), version=old) == Stored(
            stored=False, version=new
        )
        assert version(await prices.get("a")) == 3

    async def test_a_put_without_a_version_is_stored_and_keeps_it(self, prices: Prices) -> None:
        """The caller did not say how old its value is."""
        await prices.put("a", Price("a", 1), version=5)
        assert await prices.put("a", Price("a", 2)) == Stored(stored=True, version=5)
        assert await prices.put("a", Price("a", 3), version=4) == Stored(stored=False, version=5)
        assert version(await prices.get("a")) == 2

    async def test_an_invalidation_keeps_the_version_and_a_deletion_does_not(
        self, prices: Prices
    ) -> None:
        """An older value may not come back because the newer one was invalidated."""
        await prices.put("a", Price("a", 1), version=5)
        await prices.invalidate("a")
        assert await prices.put("a", Price("a", 2), version=4) == Stored(stored=False, version=5)
        await prices.delete("a")
        assert await prices.put("a", Price("a", 3), version=4) == Stored(stored=True, version=4)

    async def test_a_load_may_give_a_version(self, cache: Cache, clock: ManualClock) -> None:
        """A load without one keeps the version that was stored."""
        given: list[int | None] = [5, None]

        @cache.batched("item", fresh_for=30)
        async def items(ids: list[str]) -> dict[str, int | Loaded[int]]:
            return {id_: Loaded(1, version=given.pop(0)) for id_ in ids}

        for _ in range(2):
            await items.refresh("a")
            assert await items.put("a", 7, version=4) == Stored(stored=False, version=5)

    async def test_of_many_values_one_may_have_its_own_version(self, prices: Prices) -> None:
        """It comes before the version of the call."""
        values: dict[str, Price | Loaded[Price]] = {
            "a": Loaded(Price("a", 1), version=9),
            "b": Price("b", 1),
        }
        results = await prices.put_many(values, version=2, fresh_for=5)
        assert {key: it.version for key, it in results.items()} == {"a": 9, "b": 2}

    async def test_of_many_values_a_version_of_another_kind_stops_no_other(
        self, prices: Prices
    ) -> None:
        """All others are stored, in whichever step they are; then the mistake is raised."""
        await prices.put("k5", Price("k5", 1), version="text")
        values = {f"k{number}": Price(f"k{number}", 2) for number in range(250)}
        with pytest.raises(ConfigError, match="'k5': version: 1 cannot be compared with 'text'"):
            await prices.put_many(values, version=1)
        found = await prices.known(list(values))
        versions = {key: version(answer) for key, answer in found.items() if answer is not None}
        assert versions == dict.fromkeys(values, 2) | {"k5": 1}

    async def test_an_update_that_deletes_leaves_no_version(self, prices: Prices) -> None:
        """As a deletion does."""
        await prices.put("a", Price("a", 1), version=5)
        await prices.update("a", lambda _: DELETE)
        assert await prices.put("a", Price("a", 3), version=4) == Stored(stored=True, version=4)

    async def test_a_handle_can_put_a_version(self, prices: Prices) -> None:
        """As by the resource."""
        assert await prices.of("a").put(Price("a", 1), version="x") == Stored(
            stored=True, version="x"
        )

    @pytest.mark.parametrize(
        ("wrong", "why"),
        [
            (1.5, "must be an int or a str, not float"),
            (True, "must be an int or a str, not bool"),
            (b"1", "must be an int or a str, not bytes"),
            (2**63, "below 2\\*\\*63"),
            (-(2**63) - 1, "at least -2\\*\\*63"),
            ("x" * 256, "at most 255 bytes"),
            ("\ud800", "cannot be written in UTF-8"),
        ],
    )
    async def test_a_version_that_cannot_be_is_refused(
        self, prices: Prices, wrong: Any, why: str
    ) -> None:
        """With what is allowed, before anything is stored."""
        with pytest.raises(ConfigError, match=f"price: version: .*{why}"):
            await prices.put("a", Price("a", 7), version=wrong)
        with pytest.raises(ConfigError, match=f"version: .*{why}"):
            Loaded(1, version=wrong)
        assert prices.peek("a") is None

    async def test_integers_and_texts_cannot_be_compared(self, prices: Prices) -> None:
        """The error names both; what was stored stays, and other keys of the call are stored."""
        await prices.put("a", Price("a", 1), version=7)
        with pytest.raises(ConfigError, match="'a': version: '8' cannot be compared with 7"):
            await prices.put_many({"a": Price("a", 2), "b": Price("b", 2)}, version="8")
        assert [version(await prices.get(key)) for key in "ab"] == [1, 2]

    async def test_a_kept_version_leaves_memory_right(self, prices: Prices) -> None:
        """The next read has what is stored, fresh."""
        await prices.put("a", Price("a", 1), version=7)
        await prices.put("a", Price("a", 2), version=6)
        answer = await prices.get("a")
        assert (version(answer), answer.verdict) == (1, Verdict.FRESH)


class TestS13Lacking:
    def test_a_store_that_lacks_the_step_is_refused(self) -> None:
        """With what it lacks, before anything is cached in it."""

        class Older:
            """A store of the first release."""

            open = close = read = acquire = publish = new_generation = MemoryStore.open
            renew = release = invalidate = invalidate_tag = delete = MemoryStore.open

        with pytest.raises(ConfigError, match=r"Older: lacks put; .*StoreConformance"):
            Cache(Older())  # type: ignore[arg-type]
