"""E20: the dashboard of a SyncCache, in ASGI apps, in Flask and in Django (a part of G21)."""

import asyncio
import json
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from flask import Flask

from stillfresh import ConfigError, SyncCache
from stillfresh.gateway.dashboard import Dashboard
from stillfresh.integrations.flask import Fresh
from tests.kit import shop
from tests.kit.gateway import client_of

shop.configure()

from django.core.cache import cache  # noqa: E402 (after settings)
from django.test import Client, override_settings  # noqa: E402
from django.urls import URLPattern  # noqa: E402

from stillfresh.integrations.django import dashboard  # noqa: E402

LOCAL = {"HTTP_HOST": "localhost", "REMOTE_ADDR": "127.0.0.1"}
TOKEN = "sesame"  # noqa: S105 (of a test)
OWN = {"X-Stillfresh": "1"}


class Patterns:
    """Stands for a `urls.py`."""

    urlpatterns: list[URLPattern] = []  # noqa: RUF012 (Django's name)


def prices(cache: SyncCache) -> Any:
    @cache.cached("price", fresh_for="1h")
    def price(sku: str) -> int:
        return len(sku)

    return price


def loads_of(stats: Any) -> int:
    """How often the price was loaded."""
    [row] = [it for it in stats["resources"] if it["kind"] == "price"]
    loads: int = row["loads"]
    return loads


class TestE20DashboardAsgi:
    async def test_the_asgi_dashboard_shows_a_sync_cache(self) -> None:
        """Mounted in any ASGI app; numbers and entries are those of the cache."""
        with_cache = SyncCache("memory://")
        price = prices(with_cache)
        await asyncio.to_thread(price, "tea")
        async with client_of(Dashboard(with_cache)) as client:
            stats = (await client.get("/api/stats")).json()
            entries = (await client.get("/api/entries")).json()
            page = await client.get("/")
            long = await client.post("/api/purge", content=b"x" * 2_000_000, headers=OWN)
        await asyncio.to_thread(with_cache.close)
        assert loads_of(stats) == 1
        assert [it["kind"] for it in entries["entries"]] == ["price"]
        assert "text/html" in page.headers["content-type"]
        assert long.status_code == 413

    def test_the_dashboard_refuses_anything_but_a_cache(self) -> None:
        """The error says what it takes."""
        with pytest.raises(ConfigError, match="must be a Cache or a SyncCache"):
            Dashboard("memory://")  # type: ignore[arg-type]


class TestE20DashboardFlask:
    @pytest.fixture
    def app(self, tmp_path: Path) -> Flask:
        app = Flask("shop")
        app.config["STILLFRESH_STORE"] = f"sqlite:///{tmp_path}/app.db"
        return app

    def test_one_line_mounts_the_dashboard_in_flask(self, app: Flask) -> None:
        """The page, its numbers, its entries and its actions."""
        fresh = Fresh(app)
        fresh.dashboard(app)
        price = prices(fresh.cache)
        price("tea")
        client = app.test_client()
        assert client.get("/_stillfresh").status_code == 308
        assert b"<html" in client.get("/_stillfresh/").data
        assert client.get("/_stillfresh/dashboard.js").status_code == 200
        stats = client.get("/_stillfresh/api/stats").json
        assert stats is not None
        assert loads_of(stats) == 1
        [entry] = client.get("/_stillfresh/api/entries").json["entries"]  # type: ignore[index]
        address = f"/_stillfresh/api/entries/price/{entry['id']}/invalidate"
        assert client.post(address).status_code == 403
        assert client.post(address, headers=OWN).status_code == 200
        price("tea")
        fresh.cache.close()

    def test_the_flask_dashboard_needs_this_machine_or_the_token(self, app: Flask) -> None:
        """As the dashboard of a gateway."""
        fresh = Fresh(app)
        fresh.dashboard(app, "/ops/cache", token=TOKEN)
        client = app.test_client()
        signed = {"Authorization": f"Bearer {TOKEN}"}
        assert client.get("/ops/cache/api/stats").status_code == 401
        assert client.get("/ops/cache/api/stats", headers=signed).status_code == 200
        other = Flask("other")
        other.config["STILLFRESH_STORE"] = "memory://"
        Fresh(other).dashboard(other)
        far = other.test_client().get(
            "/_stillfresh/api/stats", environ_overrides={"REMOTE_ADDR": "192.0.2.1"}
        )
        assert far.status_code == 403

    def test_the_flask_dashboard_needs_an_initialised_app(self, app: Flask) -> None:
        with pytest.raises(ConfigError, match="init_app"):
            Fresh().dashboard(app)


class TestE20DashboardDjango:
    def test_one_line_mounts_the_dashboard_in_django(self) -> None:
        """In `urlpatterns`, with a SyncCache of one's own or an alias of CACHES."""
        own = SyncCache("memory://")
        price = prices(own)
        price("tea")
        Patterns.urlpatterns = [dashboard(cache=own)]
        client = Client(enforce_csrf_checks=True)
        with override_settings(ROOT_URLCONF=Patterns, ALLOWED_HOSTS=["*"]):
            assert b"<html" in client.get("/_stillfresh/", **LOCAL).content
            stats = json.loads(client.get("/_stillfresh/api/stats", **LOCAL).content)
            found = json.loads(client.get("/_stillfresh/api/entries", **LOCAL).content)
            [entry] = found["entries"]
            address = f"/_stillfresh/api/entries/price/{entry['id']}/delete"
            assert client.post(address, **LOCAL).status_code == 403
            done = client.post(address, **LOCAL, HTTP_X_STILLFRESH="1")
        own.close()
        assert loads_of(stats) == 1
        assert done.status_code == 200

    def test_the_django_dashboard_shows_an_alias_of_caches(self, tmp_path: Path) -> None:
        """The entries of Django's own cache; another machine needs the token."""
        caches = {
            "default": {
                "BACKEND": "stillfresh.integrations.django.StillfreshCache",
                "LOCATION": f"sqlite:///{tmp_path}/cache.db",
            }
        }
        with override_settings(CACHES=caches, ROOT_URLCONF=Patterns, ALLOWED_HOSTS=["*"]):
            cache.set("greeting", "hello")
            Patterns.urlpatterns = [dashboard("ops/", token=TOKEN)]
            refused = Client().get("/ops/api/entries")
            told = Client().get("/ops/api/entries", HTTP_AUTHORIZATION=f"Bearer {TOKEN}")
        assert refused.status_code == 401
        assert "greeting" in told.content.decode()

    @pytest.mark.parametrize("name", ["tea", "th\u00e9", "\u8336"])
    def test_the_django_dashboard_handles_ids_beyond_ascii(self, name: str) -> None:
        """Django has decoded the path already."""
        own = SyncCache("memory://")
        prices(own)(name)
        Patterns.urlpatterns = [dashboard(cache=own)]
        with override_settings(ROOT_URLCONF=Patterns, ALLOWED_HOSTS=["*"]):
            found = json.loads(Client().get("/_stillfresh/api/entries", **LOCAL).content)
            [entry] = found["entries"]
            address = f"/_stillfresh/api/entries/price/{quote(entry['id'])}/delete"
            done = Client().post(address, **LOCAL, HTTP_X_STILLFRESH="1")
        own.close()
        assert done.status_code == 200

    def test_the_django_dashboard_refuses_a_malformed_route(self) -> None:
        with pytest.raises(ConfigError, match="_stillfresh/"):
            dashboard("/ops")
