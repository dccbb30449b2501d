"""E22, E32: fixtures for the tests of users, for each framework. The tests run in any order."""

import subprocess
import sys
from pathlib import Path

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient
from flask import Flask

from stillfresh import Cache, ConfigError
from stillfresh.integrations import fastapi
from stillfresh.integrations.flask import Fresh
from stillfresh.testing import cache_fixture, django_fixture, flask_fixture
from tests.kit import shop

shop.configure()

from django.core.cache import caches  # noqa: E402 (after settings)
from django.test import override_settings  # noqa: E402

NOWHERE = "redis://127.0.0.1:1"
"""The applications' own store: a test that asked it would log that it is unavailable."""

calls: list[str] = []

fresh = Fresh()
flask_app = Flask("shop")
for app in (flask_app, Flask("other")):
    app.config["STILLFRESH_STORE"] = NOWHERE
    fresh.init_app(app)


@flask_app.get("/items")
@fresh.view("10m")
def items() -> str:
    calls.append("flask")
    return "tea"


cache = Cache(NOWHERE)
fastapi_app = FastAPI(lifespan=fastapi.lifespan(cache))


@fastapi_app.get("/items")
@fastapi.fresh(cache, "10m")
async def async_items() -> list[str]:
    calls.append("fastapi")
    return ["tea"]


empty_flask_cache = flask_fixture(fresh, flask_app)
empty_fastapi_cache = cache_fixture(cache)


@pytest.mark.parametrize("turn", [1, 2])
class TestE22EmptyCaches:
    def test_each_test_of_a_flask_app_begins_with_an_empty_cache(
        self, turn: int, caplog: pytest.LogCaptureFixture
    ) -> None:
        calls.clear()
        client = flask_app.test_client()
        assert [client.get("/items").text for _ in range(2)] == ["tea", "tea"]
        assert calls == ["flask"]
        assert not caplog.records

    def test_each_test_of_a_fastapi_app_begins_with_an_empty_cache(
        self, turn: int, caplog: pytest.LogCaptureFixture
    ) -> None:
        calls.clear()
        with TestClient(fastapi_app) as client:
            assert [client.get("/items").json() for _ in range(2)] == [["tea"], ["tea"]]
        assert calls == ["fastapi"]
        assert "unavailable" not in caplog.text


DJANGO_CACHES = {
    "default": {"BACKEND": shop.BACKEND, "LOCATION": NOWHERE},
    "again": {"BACKEND": shop.BACKEND, "LOCATION": NOWHERE},
    "plain": {"BACKEND": "django.core.cache.backends.dummy.DummyCache"},
}


class TestE22Django:
    @pytest.fixture(autouse=True)
    def settings(self) -> object:
        with override_settings(CACHES=DJANGO_CACHES):
            yield

    @pytest.fixture(autouse=True, params=[(), ("default",)])
    def empty(self, settings: object, request: pytest.FixtureRequest) -> object:
        """As pytest runs the fixture; the settings come first."""
        yield from django_fixture(*request.param)._get_wrapped_function()()

    @pytest.mark.parametrize("turn", [1, 2])
    def test_each_test_of_a_django_project_begins_with_an_empty_cache(
        self, turn: int, caplog: pytest.LogCaptureFixture
    ) -> None:
        assert caches["default"].get("tea") is None
        caches["default"].set("tea", 300)
        assert caches["default"].get("tea") == 300
        assert not caplog.records


class TestE32Fixtures:
    def test_a_test_that_changes_a_shared_value_fails(self, tmp_path: Path) -> None:
        program = (
            "from stillfresh import SyncCache\n"
            "from stillfresh.testing import cache_fixture\n"
            "cache = SyncCache('memory://')\n"
            "empty_cache = cache_fixture(cache)\n"
            "@cache.cached('basket', fresh_for='1m')\n"
            "def basket(user: int) -> list[str]:\n"
            "    return ['tea']\n"
            "def test_careless():\n"
            "    basket(7).append('coffee')\n"
        )
        (tmp_path / "test_shop.py").write_text(program)
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_shop.py"]
        ended = subprocess.run(command, check=False, cwd=tmp_path, capture_output=True, text=True)
        assert "basket: a caller changed a value that all callers share" in ended.stdout

    def test_what_is_no_cache_is_refused(self) -> None:
        with pytest.raises(ConfigError, match="give it a Cache or a SyncCache"):
            cache_fixture(fresh)  # type: ignore[arg-type]

    def test_an_alias_of_another_backend_is_refused(self) -> None:
        with override_settings(CACHES=DJANGO_CACHES):
            fixture = django_fixture("plain")._get_wrapped_function()
            with pytest.raises(ConfigError, match="must have the BACKEND"):
                next(fixture())
