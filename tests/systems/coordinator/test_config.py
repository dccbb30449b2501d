"""C1, C17: every setting is checked, names its variable, and takes effect while it runs."""

import asyncio
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stillfresh import ConfigError
from stillfresh.systems.coordinator import Database, Kind, TtlConfig, TtlController, TtlCoordinator
from stillfresh.testing import ManualClock
from tests.kit.coordinator import START, VIEWER, Nexus, Site, made
from tests.kit.engine import until

COORDINATOR: Any = TtlCoordinator
CONTROLLER: Any = TtlController
KIND: Any = Kind
NUMBERS = [
    "POST_TTL_MS",
    "USER_TTL_MS",
    "BATCH_INTERVAL_MS",
    "POST_MAX_BATCH_SIZE",
    "USER_MAX_BATCH_SIZE",
    "COOLDOWN_MS",
    "MAX_BATCHES_PER_TICK",
]


class TestC1Environment:
    def test_an_empty_environment_gives_the_default_settings(self) -> None:
        """An empty environment gives the defaults of the contract."""
        config = TtlConfig.from_env({})
        assert config == TtlConfig()
        assert (config.post_ttl_ms, config.user_ttl_ms) == (300_000, 600_000)
        assert (config.batch_interval_ms, config.cooldown_ms) == (5_000, 10_000)
        assert (config.post_max_batch_size, config.user_max_batch_size) == (20, 20)
        assert (config.refresh_when_hidden, config.max_batches_per_tick) == (False, 1)

    @pytest.mark.parametrize("name", NUMBERS)
    def test_each_environment_variable_sets_the_field_of_its_name(self, name: str) -> None:
        """The field of the same name has the value."""
        assert getattr(TtlConfig.from_env({name: " 42 "}), name.lower()) == 42

    def test_without_an_argument_the_process_environment_is_read(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Without an argument, os.environ is read."""
        monkeypatch.setitem(os.environ, "POST_TTL_MS", "7")
        assert TtlConfig.from_env().post_ttl_ms == 7

    @pytest.mark.parametrize("name", NUMBERS)
    @pytest.mark.parametrize("text", ["", "five", "5.0", "5m", "-1", "1e3", "٣", "9" * 30])
    def test_a_bad_number_names_its_variable(self, name: str, text: str) -> None:
        """What was given and what is allowed are in the error."""
        with pytest.raises(ConfigError, match=f"^{name}: .*whole number"):
            TtlConfig.from_env({name: text})

    @pytest.mark.parametrize("name", NUMBERS)
    def test_zero_is_refused_for_all_settings_but_the_cooldown(self, name: str) -> None:
        """No interval, TTL or batch of nothing; a cooldown of nothing is a choice."""
        if name == "COOLDOWN_MS":
            assert TtlConfig.from_env({name: "0"}).cooldown_ms == 0
            return
        with pytest.raises(ConfigError, match=name):
            TtlConfig.from_env({name: "0"})

    @pytest.mark.parametrize(("text", "value"), [("true", True), ("OFF", False), ("1", True)])
    def test_a_flag_is_read_as_people_write_it(self, text: str, value: bool) -> None:
        """As people write it."""
        assert TtlConfig.from_env({"REFRESH_WHEN_HIDDEN": text}).refresh_when_hidden is value

    @pytest.mark.parametrize("text", ["", "maybe", "2"])
    def test_a_bad_flag_names_its_variable(self, text: str) -> None:
        """The error names the variable."""
        with pytest.raises(ConfigError, match=r"^REFRESH_WHEN_HIDDEN: .*True or False"):
            TtlConfig.from_env({"REFRESH_WHEN_HIDDEN": text})

    @given(st.dictionaries(st.sampled_from([*NUMBERS, "REFRESH_WHEN_HIDDEN"]), st.text()))
    def test_any_environment_gives_settings_or_a_config_error(
        self, environ: dict[str, str]
    ) -> None:
        """Never anything but a TtlConfig or a ConfigError."""
        try:
            TtlConfig.from_env(environ)
        except ConfigError as exc:
            assert str(exc).partition(":")[0] in environ  # noqa: PT017 (either is right)


class TestC1Code:
    @pytest.mark.parametrize("value", [True, 1.5, "5", None, 0, -1])
    def test_a_bad_value_from_code_is_refused_like_one_of_the_environment(
        self, value: object
    ) -> None:
        """Checked the same way as the environment."""
        with pytest.raises(ConfigError, match="POST_TTL_MS"):
            TtlConfig(post_ttl_ms=value)  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match="REFRESH_WHEN_HIDDEN"):
            TtlConfig(refresh_when_hidden=1)  # type: ignore[arg-type]

    @pytest.mark.parametrize(
        "wrong",
        [
            {"name": "Post"},
            {"name": "post_ttl"},
            {"fresh_for": 0},
            {"max_batch": 0},
            {"max_batch": True},
            {"stale_for": "soon"},
            {"error_for": -1},
            {"absent_for": "never"},
            {"memory_for": None},
            {"fetch": None},
        ],
    )
    def test_a_bad_kind_is_refused_where_it_is_declared(self, wrong: dict[str, object]) -> None:
        """Each mistake is refused where the kind is declared."""

        async def fetch(ids: list[str]) -> dict[str, int]:
            return dict.fromkeys(ids, 1)

        given: dict[str, object] = {"name": "price", "fetch": fetch, "fresh_for": 5, **wrong}
        with pytest.raises(ConfigError):
            Kind(given.pop("name"), **given)  # type: ignore[arg-type]

    async def test_a_kind_declared_twice_and_an_unknown_kind_are_refused(
        self, tmp_path: Path
    ) -> None:
        """One name, one kind; what is not declared is refused with what there is."""

        async def fetch(ids: list[str]) -> dict[str, int]:
            return dict.fromkeys(ids, 1)

        controller = TtlController(
            database=Database(tmp_path / "a.db"), kinds=[Kind("price", fetch=fetch, fresh_for=5)]
        )
        with pytest.raises(ConfigError, match="declared already"):
            controller.declare([Kind("price", fetch=fetch, fresh_for=6)])
        with pytest.raises(ConfigError, match="there are: price"):
            TtlCoordinator(controller).subscribe("post", "a:1")


class TestC17Environment:
    async def test_without_a_config_the_environment_is_read(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Without a TtlConfig the variables apply, and a bad one is refused by its name."""
        monkeypatch.setitem(os.environ, "POST_TTL_MS", "7")
        controller = TtlController(nexus=Nexus(), database=Database(tmp_path / "a.db"))
        TtlCoordinator(controller)
        assert controller.kinds["post"].ttl_ms == 7
        monkeypatch.setitem(os.environ, "POST_TTL_MS", "soon")
        other = TtlController(nexus=Nexus(), database=Database(tmp_path / "b.db"))
        with pytest.raises(ConfigError, match=r"^POST_TTL_MS: .*whole number"):
            TtlCoordinator(other)
        TtlCoordinator(other, TtlConfig())
        assert other.kinds["post"].ttl_ms == 300_000


class TestC1Configure:
    async def test_an_unknown_or_bad_setting_changes_nothing(self, site: Site) -> None:
        """The error says which."""
        with pytest.raises(ConfigError, match="batch_size"):
            site.ttl.configure(batch_size=3)
        with pytest.raises(ConfigError, match="POST_TTL_MS"):
            site.ttl.configure(post_ttl_ms=-1)
        site.ttl.subscribe_post(composite_post_id="a:1")
        await site.ttl.tick()
        assert site.nexus.posts == [["a:1"]]

    async def test_a_new_interval_does_not_put_off_what_is_due_at_once(
        self, tmp_path: Path, clock: ManualClock
    ) -> None:
        """C5: `start` ticks at once, whatever the interval is a moment later."""
        site = made(tmp_path, clock)
        async with site.controller, site.ttl:
            site.ttl.sign_in(VIEWER)
            site.ttl.set_visible(True)
            site.ttl.subscribe_post(composite_post_id="a:1")
            site.ttl.configure(batch_interval_ms=3_600_000)
            await until(lambda: site.nexus.posts == [["a:1"]])

    async def test_a_new_ttl_re_plans_what_is_subscribed(self, site: Site) -> None:
        """Made shorter, what was fresh is stale at the next tick; made longer, it stays fresh."""
        site.ttl.subscribe_post(composite_post_id="a:1")
        await site.ttl.tick()
        site.clock.advance(60)
        await site.ttl.tick()
        assert len(site.nexus.posts) == 1
        site.ttl.configure(post_ttl_ms=59_999)
        await site.ttl.tick()
        assert len(site.nexus.posts) == 2
        site.ttl.configure(TtlConfig(post_ttl_ms=3_600_000))
        site.clock.advance(3600)
        await site.ttl.tick()
        assert len(site.nexus.posts) == 2

    @pytest.mark.parametrize(
        ("name", "wrong"),
        [
            ("config", lambda site: site.ttl.configure({"post_ttl_ms": 1})),
            ("config", lambda site: COORDINATOR(site.controller, {"post_ttl_ms": 1})),
            ("controller", lambda _: COORDINATOR("x")),
            ("counted", lambda site: COORDINATOR(site.controller, counted="no")),
            ("follow_reposts", lambda site: COORDINATOR(site.controller, follow_reposts=1)),
            ("kinds", lambda site: site.controller.declare(None)),
            ("database", lambda _: CONTROLLER(database="app.db")),
            (
                "nexus",
                lambda site: CONTROLLER(nexus=object(), database=site.controller.database),
            ),
            ("per_viewer", lambda _: KIND("a", fetch=print, fresh_for=1, per_viewer="no")),
        ],
    )
    async def test_an_argument_of_a_wrong_type_is_refused_by_its_name(
        self, site: Site, name: str, wrong: Callable[[Any], object]
    ) -> None:
        """Refused where it is given, by its name."""
        with pytest.raises(ConfigError, match=name):
            wrong(site)

    async def test_a_new_batch_size_is_used_at_once(self, site: Site) -> None:
        """The next tick takes no more than that."""
        site.ttl.configure(post_max_batch_size=2, max_batches_per_tick=2)
        for number in range(5):
            site.ttl.subscribe_post(composite_post_id=f"a:{number}")
        await site.ttl.tick()
        assert [len(batch) for batch in site.nexus.posts] == [2, 2]

    async def test_a_new_interval_takes_effect_at_once(self, tmp_path: Path) -> None:
        """A pause of ten years under way is cut short."""
        clock = ManualClock(START)
        site = made(tmp_path, clock, TtlConfig(batch_interval_ms=315_360_000_000))
        async with site.controller, site.ttl:
            site.ttl.sign_in("v")
            site.ttl.set_visible(True)
            await until(lambda: site.ttl.snapshot().last_tick is not None)
            await site.ttl.tick()
            clock.advance(1)
            site.ttl.configure(batch_interval_ms=1)
            async with asyncio.timeout(30):
                while site.ttl.snapshot().last_tick != clock():
                    await asyncio.sleep(0)
