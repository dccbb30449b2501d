"""S5, S11: from a server's address to a store; what is wrong is named, and no password is shown."""

import importlib
import re
import subprocess
import sys
import time
import tomllib
from pathlib import Path
from typing import Any

import pytest
from psycopg.conninfo import conninfo_to_dict

from stillfresh import Cache, ConfigError
from stillfresh.errors import MissingExtra, needs
from stillfresh.stores import capabilities_of
from stillfresh.stores.postgres import PostgresStore
from stillfresh.stores.postgres.address import options_of
from stillfresh.stores.redis import RedisStore
from stillfresh.stores.sqlite import SqliteStore
from stillfresh.stores.tenants import TenantStore
from stillfresh.stores.urls import store_for

ROOT = Path(__file__).parent.parent.parent


class TestG18FileNames:
    @pytest.mark.parametrize(
        ("address", "file"),
        [
            ("prices.db", "prices.db"),
            ("./data/a b.sqlite", "data/a b.sqlite"),
            ("/var/cache/100%.SQLITE3", "/var/cache/100%.SQLITE3"),
            ("sqlite:///prices.db", "prices.db"),
            ("sqlite:////var/cache/prices.db", "/var/cache/prices.db"),
            ("SQLite:///a%20b", "a b"),
        ],
    )
    def test_a_name_alone_is_a_file(self, address: str, file: str) -> None:
        """Where an address is taken, as `sqlite:///` and the name."""
        store = store_for(address, time.time)
        assert isinstance(store, SqliteStore)
        assert store.path == Path(file).absolute()

    @pytest.mark.parametrize(
        "name",
        [
            "memory",
            "prices",
            "gw.toml",
            "prices.db?x=1",
            "",
            ".",
            "a:b.db",
            "sqlite:///",
            "sqlite:///a%00",
        ],
    )
    def test_a_name_that_is_no_database_file_is_refused(self, name: str) -> None:
        """It would make a file that nobody meant."""
        with pytest.raises(ConfigError, match=r"write memory://, sqlite:///path/to/file\.db"):
            store_for(name, time.time)

    def test_an_address_names_at_most_one_tenant(self) -> None:
        """Or none."""
        store = store_for("memory://?tenant=a", time.time)
        assert capabilities_of(store).tenant == "a"
        with pytest.raises(ConfigError, match="names a tenant more than once"):
            store_for("memory://?tenant=a&tenant=b", time.time)

    @pytest.mark.parametrize("url", ["sqlite:/abs.db", "sqlite:abs.db", "sqlite://abs.db/x"])
    def test_an_absolute_path_has_four_slashes(self, url: str) -> None:
        """`sqlite:/abs.db` could be meant as either."""
        with pytest.raises(ConfigError, match=r"write sqlite:///file\.db .* or sqlite:////path"):
            store_for(url, time.time)


class TestG18Extras:
    EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]

    @pytest.mark.parametrize(
        ("module", "library"),
        [
            ("stillfresh.integrations.fastapi", "fastapi"),
            ("stillfresh.integrations.fastapi", "starlette"),
            ("stillfresh.integrations.django", "django"),
            ("stillfresh.integrations.flask", "flask"),
            ("stillfresh.integrations.postgres", "psycopg"),
            ("stillfresh.gateway.server", "starlette"),
            ("stillfresh.systems.feed.http", "httpx2"),
            ("stillfresh.http.client", "httpx2"),
        ],
    )
    def test_an_import_names_the_extra(self, module: str, library: str) -> None:
        """As an ImportError and as a ConfigError, for those that expect either."""
        script = f"""
import sys
sys.modules[{library!r}] = None
from stillfresh import ConfigError
try:
    import {module}
except ImportError as error:
    assert isinstance(error, ConfigError)
    print(error)
"""
        command = [sys.executable, "-W", "error", "-c", script]
        said = subprocess.run(command, check=True, timeout=60, capture_output=True, text=True)
        found = re.fullmatch(r"[\w. ]+ needs (\w+): install stillfresh\[(\w+)\]\n", said.stdout)
        assert found is not None, said.stdout
        needed = " ".join(self.EXTRAS[found[2]])
        assert found[1] == library
        assert library in needed or "stillfresh[web]" in needed

    def test_a_mistake_of_our_own_is_not_hidden(self) -> None:
        """A module of stillfresh that is not there is no missing extra."""
        with pytest.raises(ModuleNotFoundError) as caught, needs("web", "it"):
            importlib.import_module("stillfresh.nothing")
        assert not isinstance(caught.value, MissingExtra)


class TestS5Address:
    @pytest.mark.parametrize(
        "url",
        [
            "redis://localhost",
            "redis://localhost/",
            "redis://localhost:6380/3?prefix=shop",
            "rediss://user:word@cache.example:6379/0?ssl_ca_certs=/ca.pem&timeout=250ms",
            "valkey://[::1]:6379?max_connections=5",
            "valkeys://cache.example?ssl_check_hostname=false",
        ],
    )
    def test_a_redis_address_names_a_store(self, url: str) -> None:
        """Nothing is connected by naming it."""
        assert isinstance(store_for(url, time.time), RedisStore)

    @pytest.mark.parametrize(
        ("url", "says"),
        [
            ("redis://", "names no host"),
            ("redis:///0", "names no host"),
            ("redis://host:none/0", "port"),
            ("redis://host:99999", "port"),
            ("redis://host/shop", "number of a database"),
            ("redis://host/0/1", "number of a database"),
            ("redis://host#1", "number of a database"),
            ("redis://host?prefx=shop", "has no option prefx"),
            ("redis://host?ssl_ca_certs=/ca.pem", "has no option ssl_ca_certs"),
            ("redis://host?prefix=a&prefix=b", "twice"),
            ("redis://host?prefix=", "prefix"),
            ("redis://host?prefix={a}", "prefix"),
            ("redis://host?timeout=soon", "timeout"),
            ("redis://host?timeout=0", "timeout"),
            ("redis://host?max_connections=0", "max_connections"),
            ("redis://host?max_connections=many", "max_connections"),
            ("redis://host?timeout=", "timeout is .*500ms"),
            ("redis://host?timeout=-1s", "timeout is .*500ms"),
            ("redis://host?timeout=5", "timeout is .*500ms"),
            ("rediss://host?ssl_check_hostname=maybe", "ssl_check_hostname is true or false"),
            ("rediss://host?ssl_check_hostname=", "ssl_check_hostname is true or false"),
            ("rediss://host?ssl_cert_reqs=some", "ssl_cert_reqs is none, optional or required"),
            ("rediss://host?ssl_cert_reqs=", "ssl_cert_reqs is none, optional or required"),
        ],
    )
    def test_a_mistake_in_a_redis_address_is_named(self, url: str, says: str) -> None:
        """When it is written, not when it is used."""
        with pytest.raises(ConfigError, match=says):
            Cache(url)

    @pytest.mark.parametrize(
        "wrong",
        [
            {"url": "http://user:hidden@host"},
            {"max_connections": 0},
            {"timeout": "soon"},
            {"prefix": "a b"},
        ],
    )
    def test_a_mistake_in_a_redis_store_made_by_hand_is_named(self, wrong: dict[str, Any]) -> None:
        """Not when it is opened."""
        with pytest.raises(ConfigError) as caught:
            RedisStore(**{"url": "redis://host", **wrong})
        assert "hidden" not in str(caught.value)

    def test_no_password_in_an_error(self) -> None:
        """Errors end up in logs."""
        with pytest.raises(ConfigError) as caught:
            Cache("redis://user:hidden@host/0?prefx=shop")
        assert "hidden" not in str(caught.value)
        assert "redis://***@host/0" in str(caught.value)

    @pytest.mark.parametrize("query", ["password=hidden", "prefix=a&Pass=hidden", "timeout=hidden"])
    def test_no_password_behind_the_question_mark_is_in_an_error(self, query: str) -> None:
        """Behind ? nothing is shown but the name of what was wrong."""
        with pytest.raises(ConfigError) as caught:
            Cache(f"redis://host/0?{query}")
        assert "hidden" not in str(caught.value)

    @pytest.mark.parametrize(
        ("said", "means"),
        [
            *[(said, True) for said in ("true", "True", "TRUE", "1", "yes", "Yes")],
            *[(said, False) for said in ("false", "False", "0", "no", "NO")],
        ],
    )
    def test_ssl_check_hostname_is_read_as_people_write_it(self, said: str, means: bool) -> None:
        """As people write it: none of them may turn the check off by accident."""
        store = store_for(f"rediss://host?ssl_check_hostname={said}", time.time)
        assert isinstance(store, RedisStore)
        assert store.options == {"ssl_check_hostname": means}

    @pytest.mark.parametrize("said", ["none", "optional", "required", "Required", "CERT_REQUIRED"])
    def test_ssl_cert_reqs_is_read_in_any_case(self, said: str) -> None:
        """In any case, and as Python names them."""
        store = store_for(f"rediss://host?ssl_cert_reqs={said}", time.time)
        assert isinstance(store, RedisStore)
        assert store.options == {"ssl_cert_reqs": said.lower().removeprefix("cert_")}

    def test_a_redis_address_without_the_library_says_what_to_install(self) -> None:
        """Named at the cache, in words; nothing else needs it."""
        script = """
import sys
sys.modules["redis"] = None
from stillfresh import Cache, ConfigError
Cache("memory://")
try:
    Cache("redis://localhost")
except ConfigError as error:
    print(error)
"""
        command = [sys.executable, "-W", "error", "-c", script]
        said = subprocess.run(command, check=True, timeout=60, capture_output=True, text=True)
        assert "stillfresh[redis]" in said.stdout


class TestS11Address:
    @pytest.mark.parametrize(
        "url",
        [
            "postgresql://localhost",
            "postgres://user:word@host:5433/shop?schema=cache&timeout=250ms&max_connections=5",
            "postgresql://one:1,two:2/shop?target_session_attrs=read-write&sslmode=require",
            "postgresql:///shop?host=/run/postgresql&tenant=acme",
        ],
    )
    def test_a_postgresql_address_names_a_store(self, url: str) -> None:
        """Nothing is connected by naming it."""
        store = store_for(url, time.time)
        assert isinstance(store.inner if isinstance(store, TenantStore) else store, PostgresStore)

    @pytest.mark.parametrize(
        ("url", "says"),
        [
            ("postgresql://host?schma=shop", "schma"),
            ("postgresql://host?schema=Shop", "schema: must be"),
            ("postgresql://host?schema=pg_shop", "schema: must be"),
            ("postgresql://host?schema=a&schema=b", "twice"),
            ("postgresql://host?timeout=soon", "timeout"),
            ("postgresql://host?max_connections=0", "max_connections: must be"),
            ("postgresql:///shop?host=a,b,c&port=1,2", "one for each host"),
            ("postgresql://host/shop#1", "%23"),
            ("postgresql://user:a@hidden@host/shop", "%40"),
            ("postgresql://user:a/hidden@host/shop", "%2F"),
            ("postgresql://user:a?hidden@host/shop", "%3F"),
            ("postgresql://host?max_bytes=2GB", "max_bytes is for memory"),
        ],
    )
    def test_a_mistake_in_a_postgresql_address_is_named(self, url: str, says: str) -> None:
        """When it is written, not when it is used; and without the password."""
        with pytest.raises(ConfigError, match=says) as caught:
            Cache(url if "hidden" in url else url.replace("//", "//user:hidden@", 1))
        assert "hidden" not in str(caught.value)

    def test_each_host_is_reached_by_itself(self) -> None:
        """A time-out is for one of them; a port for all, or one for each."""
        hosts, _ = options_of("postgresql://one:1,two:2/shop?connect_timeout=3")
        assert [conninfo_to_dict(it)["host"] for it in hosts] == ["one", "two"]
        assert [conninfo_to_dict(it)["port"] for it in hosts] == ["1", "2"]

    def test_a_space_in_an_option_stays_a_space(self) -> None:
        """S11: libpq does not read a plus sign as a space."""
        (host,), _ = options_of("postgresql://h/shop?options=-c%20work_mem%3D1MB")
        assert conninfo_to_dict(host)["options"] == "-c work_mem=1MB"


class TestS5SharedStores:
    @pytest.mark.parametrize(
        ("address", "is_shared"),
        [
            ("sqlite:///prices.db", True),
            ("redis://127.0.0.1:6379/0", True),
            ("postgresql://127.0.0.1/prices", True),
            ("dynamodb://prices?bucket=bodies", True),
            ("memory://", False),
        ],
    )
    def test_caches_of_one_address_are_known_to_share_its_store(
        self, address: str, is_shared: bool
    ) -> None:
        """So figures of the store are counted once; nobody shares memory."""
        first, second = (capabilities_of(store_for(address, time.time)) for _ in range(2))
        assert first.address == second.address
        assert (first.address is not None) is is_shared
