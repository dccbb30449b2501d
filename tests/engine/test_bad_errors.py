"""E25: whatever a loader's exception does, it fails its own key and nothing else."""

import asyncio
import logging
from collections.abc import Mapping, Sequence

import pytest

from stillfresh import Cache, LoadFailed, RetryAfter, StillfreshError, prometheus_text
from stillfresh.errors import error_text
from stillfresh.testing import ManualClock
from tests.kit.engine import Price


class Unprintable(Exception):
    """Its text cannot be had."""

    def __str__(self) -> str:
        raise RuntimeError("no text")


class Cancelling(Exception):
    """Its text is a cancellation."""

    def __str__(self) -> str:
        raise asyncio.CancelledError


class NoText(Exception):
    """Its text is none."""

    def __str__(self) -> str:
        return 5  # type: ignore[return-value]  # noqa: PLE0307 (that is the point)


class Later(RetryAfter):
    """Asks for a pause that is none, in a text that cannot be had."""

    def __init__(self, pause: object) -> None:
        super().__init__(1)
        self.seconds = pause  # type: ignore[assignment]

    def __str__(self) -> str:
        raise RuntimeError("no text")


class Odd(BaseException):
    """No Exception at all."""


ERRORS: dict[str, BaseException] = {
    "unprintable": Unprintable(),
    "cancelling": Cancelling(),
    "no text": NoText(),
    "surrogates": ValueError("half a character: \ud800"),
    "huge": ValueError("x" * 50_000_000),
    "nul": ValueError("a\0b"),
    "group": ExceptionGroup("several \udcff", [Unprintable(), ValueError("\ud800")]),
    "retry after nothing": Later("soon"),
    "retry after nan": Later(float("nan")),
    "odd": Odd("\ud800"),
}


class OddMapping(dict[str, object]):
    """An answer that cannot be looked into."""

    def get(self, _key: str, _default: object = None) -> object:
        raise Unprintable


async def check_failed_alone(cache: Cache, keys: Sequence[str]) -> None:
    """Their leases are released, and what is said of them can be written anywhere."""
    stats = await cache.stats()
    assert stats.store is not None
    assert stats.store.leases == 0
    assert stats.resources["price"].failing == len(keys)
    prometheus_text(stats).encode()
    said = [stats.resources["price"].error or ""]
    said += [entry.error or "" for entry in await cache.entries("price")]
    for text in said:
        text.encode()
        assert len(text) < 10_000


@pytest.mark.parametrize("name", ERRORS)
class TestE25Errors:
    async def test_an_error_mapped_to_a_key_fails_that_key(
        self, cache: Cache, caplog: pytest.LogCaptureFixture, name: str
    ) -> None:
        """It cools down; the others of its batch are served."""
        calls: list[list[str]] = []

        @cache.batched("price", fresh_for=30)
        async def prices(skus: list[str]) -> Mapping[str, Price | BaseException]:
            calls.append(skus)
            return {sku: ERRORS[name] if sku == "bad" else Price(sku, 1) for sku in skus}

        with caplog.at_level(logging.WARNING):
            for _ in range(2):
                answers = await prices.get_many(["good", "bad", "fine"])
                assert [it.found for it in answers.values()] == [True, False, True]
                error = answers["bad"].error
                assert isinstance(error, LoadFailed)
                assert type(ERRORS[name]).__name__ in str(error)
                assert len(str(error).encode()) < 1_000
        assert calls == [["good", "bad", "fine"]]
        assert "itself failed" not in caplog.text
        caplog.text.encode()
        str(await prices.explain("bad")).encode()
        await check_failed_alone(cache, ["bad"])

    async def test_an_error_that_is_raised_fails_its_batch(
        self, cache: Cache, caplog: pytest.LogCaptureFixture, name: str
    ) -> None:
        """All of them cool down, and nothing stays leased."""
        calls: list[list[str]] = []

        @cache.batched("price", fresh_for=30)
        async def prices(skus: list[str]) -> Mapping[str, Price]:
            calls.append(skus)
            raise ERRORS[name]

        with caplog.at_level(logging.WARNING):
            for _ in range(2):
                answers = await prices.get_many(["a", "b"])
                assert all(isinstance(it.error, LoadFailed) for it in answers.values())
        assert calls == [["a", "b"]]
        assert "itself failed" not in caplog.text
        await check_failed_alone(cache, ["a", "b"])

    def test_the_text_of_an_error_is_short_and_can_be_written(self, name: str) -> None:
        """Its type is always named."""
        text = error_text(ERRORS[name])
        assert text.startswith(type(ERRORS[name]).__name__)
        assert len(text.encode()) <= 500 * 6


def test_e25_an_error_of_stillfresh_needs_no_name() -> None:
    """Operators read "host: HTTP 503", not the class that our own loaders raise."""
    assert error_text(LoadFailed("host: HTTP 503")) == "host: HTTP 503"
    assert error_text(RetryAfter("2m")) == "asked to wait 120 s"
    assert error_text(LoadFailed()) == "LoadFailed: "


def test_e25_an_interruption_is_no_text() -> None:
    """Who presses Ctrl-C while a text is made means the program."""

    class Interrupted(Exception):
        def __str__(self) -> str:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        error_text(Interrupted())


class Nameless(type):
    """Its classes do not tell their names."""

    @property
    def __name__(cls) -> str:  # type: ignore[override]
        raise RuntimeError("no name")


class Unnamed(Exception, metaclass=Nameless):
    """Neither its type nor its text can be had."""

    def __str__(self) -> str:
        raise RuntimeError("no text")


class Unbound:
    """A proxy of nothing, as web frameworks have them: even its class cannot be had."""

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        raise RuntimeError("working outside of a request")


class TestE25Answers:
    @pytest.mark.parametrize("name", ["unnamed", "unbound"])
    async def test_whatever_a_key_is_mapped_to_is_its_own(
        self, cache: Cache, caplog: pytest.LogCaptureFixture, name: str
    ) -> None:
        """It fails alone and cools down (E19), also where looking at it fails."""
        calls: list[list[str]] = []
        odd = Unnamed() if name == "unnamed" else Unbound()

        @cache.batched("price", fresh_for=30)
        async def prices(skus: list[str]) -> Mapping[str, object]:
            calls.append(skus)
            return {sku: odd if sku == "bad" else 1 for sku in skus}

        for _ in range(2):
            answers = await prices.get_many(["good", "bad"])
            assert [it.found for it in answers.values()] == [True, False]
        assert calls == [["good", "bad"]]
        assert "itself failed" not in caplog.text
        await check_failed_alone(cache, ["bad"])

    async def test_an_answer_that_cannot_be_looked_into_is_a_failure(
        self, cache: Cache, caplog: pytest.LogCaptureFixture
    ) -> None:
        """The loader's own: it cools down as well."""

        @cache.batched("price", fresh_for=30)
        async def prices(skus: list[str]) -> Mapping[str, Price]:
            return OddMapping(dict.fromkeys(skus, 1))  # type: ignore[return-value]

        with pytest.raises(LoadFailed, match="Unprintable"):
            await prices("a")
        assert "itself failed" not in caplog.text
        await check_failed_alone(cache, ["a"])

    async def test_a_pause_that_can_be_read_is_kept(self, cache: Cache, clock: ManualClock) -> None:
        """E7: as the loader asked, though its text cannot be had."""

        @cache.batched("price", fresh_for=30)
        async def prices(_: list[str]) -> Mapping[str, Price]:
            raise Later(20)

        with pytest.raises(StillfreshError):
            await prices("a")
        assert (await prices.explain("a")).retry_at == pytest.approx(clock() + 20)


class TestE7Log:
    async def test_hundreds_of_failures_a_second_are_a_few_lines(
        self, cache: Cache, clock: ManualClock, caplog: pytest.LogCaptureFixture
    ) -> None:
        """A site that is down fails each page by itself: one line in ten seconds is enough."""

        @cache.batched("page", fresh_for=30, max_batch=1)
        async def pages(_: list[str]) -> Mapping[str, int]:
            raise ConnectionError("the site is down")

        for number in range(500):
            clock.advance(0.1)
            with pytest.raises(LoadFailed):
                await pages(f"/{number}")
        assert len(caplog.messages) <= 20 + 5
        left_out = [line for line in caplog.messages if "more like it were left out" in line]
        assert 4 <= len(left_out) <= 5
