"""G1: `stillfresh.toml`, right and wrong: every mistake is found, and each is one line."""

import re
import tomllib
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stillfresh.errors import ConfigError
from stillfresh.freshness import Policy
from stillfresh.gateway.config import (
    KindSettings,
    Mistakes,
    OutboxSettings,
    PagesSettings,
    ServerSettings,
    StoreSettings,
    load,
    settings_of,
)
from stillfresh.gateway.setting_readers import keys_of
from stillfresh.gateway.sources import page_cache_of
from stillfresh.pages import Route

LOOPBACK = Path(__file__).parent.parent / "kit" / "tls" / "loopback.pem"
MODELS = {
    "store": StoreSettings,
    "pages": PagesSettings,
    "kinds": KindSettings,
    "server": ServerSettings,
    "outbox": OutboxSettings,
}

GOOD = """
[store]
url = "sqlite:///stillfresh.db"
memory_for = "2s"

[pages]
upstream = "http://127.0.0.1:3000"
routes = { "/blog/*" = "10m" }
query = ["page"]
site_hosts = ["example.com"]
tenant = "blog"
max_body = 1000
timeout = "5s"
trusted_proxies = ["10.0.0.0/8"]
forward = "request"
credentials = ["X-Mine"]
stale_for = "4s"
error_for = "5s"
absent_for = "3s"

[kinds.post]
batch_url = "http://127.0.0.1:8080/v0/stream/posts/by_ids"
ids_field = "post_ids"
id = "{details.author}:{details.id}"
list_field = "data.posts"
fresh_for = "5m"
stale_for = "1h"
error_for = "2h"
absent_for = "30s"
max_batch = 20
timeout = "3s"
max_bytes = 1000
headers = { Authorization = "Bearer hush" }
per_viewer = true
viewer_field = "viewer"

[server]
host = "127.0.0.1"
port = 9000
origins = ["https://example.com"]
hosts = ["gateway.example.com"]
token = "hush-hush"
authenticate_url = "http://127.0.0.1:8080/who"
max_connections = 500

[outbox]
database = "postgresql://app:hush@127.0.0.1/shop"
consumer = "gateway"
max_lag = "1m"
"""

WRONG: dict[tuple[str, str], list[Any]] = {
    ("store", "url"): [
        "ftp://x",
        1,
        "",
        "sqlite://",
        "redis://[",
        "memory://x?y=1",
        "sqlite:///a\0b.db",
        "sqlite:///a%00b.db",
        "memory://\ud800",
    ],
    ("store", "memory_for"): ["soon", -1, True, "5 parsecs"],
    ("pages", "upstream"): [
        "ftp://x",
        "http://x/path?a",
        "http://x/a/%2e./b",
        "http://x/a//b",
        3000,
        "http://x:99999",
        "",
        [],
        ["http://x", "http://x/"],
        ["http://x", 3000],
        {"a": "http://x"},
    ],
    ("pages", "routes"): [
        [],
        {"blog": "1m"},
        {"/a": "soon"},
        {"/*/a": "1m"},
        "1m",
        {"/a": {"revalidate": "soon"}},
        {"/a": {"forward": "both"}},
        {"/a": {"revalidat": "1m"}},
        {"/a": "Never"},
        {"/a": {"ignore_cookies": "_ga"}},
        {"/a": {"ignore_cookies": ["a b"]}},
        {"/a": {"vary": ["a b"]}},
        {"/a": {"vary": "Authorization"}},
        {"/a": {"tags": [""]}},
        {"/a": {"vary": ["authorization"], "forward": "key"}},
    ],
    ("pages", "ignore_cookies"): ["_ga", [""], ["a b"], ["*a"], [1]],
    ("pages", "host"): ["visitors", 1, ""],
    ("pages", "own_prefix"): [
        "",
        "cache",
        "/",
        "/cache/",
        "//cache",
        "/a//b",
        "/a/../b",
        "/.",
        "/a b",
        "/a%2Fb",
        "/a?b",
        "/ü",
        "/" + "a" * 200,
        ["/a"],
        1,
    ],
    ("pages", "forward"): ["both", 1, ""],
    ("pages", "heuristic"): ["yes", 1],
    ("pages", "cdn_override"): ["yes", 1],
    ("pages", "normalise_query"): ["yes", 1],
    ("pages", "absent_for"): ["soon", -1],
    ("pages", "stale_for"): ["soon", -1],
    ("pages", "error_for"): ["soon", -1],
    ("pages", "credentials"): ["X-Api-Key", [""], ["a b"], [1]],
    ("pages", "query"): ["page", [1], [""]],
    ("pages", "site_hosts"): ["example.com", [""], [1]],
    ("pages", "tenant"): ["a#b", 1, ""],
    ("pages", "trusted_proxies"): ["10.0.0.0/8", ["10.0.0.1/8"], ["proxy"], [1]],
    ("pages", "max_body"): [0, -1, "1MB", True, 2**40],
    ("pages", "timeout"): ["never", 0, -1, 100_000],
    ("kinds", "url"): [
        1,
        "",
        "x/{id}",
        "ftp://x/{id}",
        "http://x/items",
        "http://{id}/x",
        "http://{id}.x/{id}",
        "http://x:{id}/",
        "http://x/{id}#{id}",
        "http://x/{name}",
        "http://x/{id!r}",
        "http://x/{id}/{",
        "http://x/a/../{id}",
        "http://a:b@x/{id}",
    ],
    ("kinds", "terms"): ["", "theirs", 1],
    ("kinds", "concurrency"): [0, 1_001, "4", True],
    ("pages", "site_connections"): [0, "many", True, 10**9],
    ("pages", "pool_wait"): ["soon", -1],
    ("pages", "min_upload_rate"): [-1, "500B", True, 10**9],
    ("pages", "max_spill"): [-1, "1GB", True, 10**15],
    ("pages", "max_entries"): [0, "many", True, 10**9],
    ("pages", "max_bytes"): [0, "256MB", True, 10**15],
    ("pages", "max_streams"): [0, "many", True, 10**9],
    ("pages", "expose_tags"): ["yes", 1],
    ("pages", "site_ca"): ["no.pem", 1, "", "pyproject.toml", "a\0b"],
    ("pages", "health_path"): ["health", 1, "", "/a b", "/ä", "/a\r\nb"],
    ("pages", "health_every"): ["soon", 0, -1, "2h"],
    ("pages", "purge_from"): ["10.0.0.0/8", ["10.0.0.1/8"], ["everybody"], [1]],
    ("pages", "objective"): [
        "always",
        "100% of reads younger than 1m",
        "99% of reads younger than soon",
        99,
    ],
    ("kinds", "check"): [-1, 1.5, True, "often"],
    ("kinds", "true_within"): [0, "soon", True],
    ("kinds", "check_calls"): [0, -1, "many"],
    ("kinds", "objective"): [
        "100% of reads true within 5s",
        ["99% of reads younger than 1m", "99% of reads younger than 1m"],
        "always",
        "100% of reads younger than 1m",
        "99% of reads younger than soon",
        99,
    ],
    ("kinds", "batch_url"): [
        "x",
        1,
        "ftp://x/y",
        "http://",
        "http://a:b@x/",
        "http://[x",
        "http://x:99999/",
        "http://x:0/",
        "http://x/a b",
        "http://x y/",
        "http://x/\0",
        "http://x\n/",
    ],
    ("kinds", "fresh_for"): ["soon", 0, -1, [], 1e300],
    ("kinds", "ids_field"): ["", 1, [], "a\0"],
    ("kinds", "id"): ["", "id", "{}", "{0}", "{a", "{a!r}", "{a:>5}", "{a[0]}", "{a..b}", 1],
    ("kinds", "list_field"): ["", "a.", 1, "a b"],
    ("kinds", "stale_for"): ["soon", -1],
    ("kinds", "error_for"): ["soon", -1],
    ("kinds", "absent_for"): ["soon", -1],
    ("kinds", "max_batch"): [0, 1.5, "20", True, 1_001],
    ("kinds", "timeout"): [0, "soon", "31s"],
    ("kinds", "max_bytes"): [0, "1MB", True],
    ("kinds", "headers"): ["x", {"a b": "c"}, {"a": 1}, {"a": "x\ny"}, {"Host": "x"}],
    ("kinds", "per_viewer"): ["yes", 1],
    ("kinds", "viewer_field"): ["", 1, "post_ids"],
    ("server", "host"): [
        "",
        1,
        "h\0",
        "999.1.1.1",
        "1.2.3",
        "a b",
        "::g",
        "http://x",
        "x:80",
        "a..b",
    ],
    ("server", "hosts"): ["x", [""], ["a/b"], [1], ["a\0"]],
    ("server", "port"): [-1, 65_536, "8080", True],
    ("server", "origins"): ["https://x", ["x"], ["https://x/"], ["*"], ["https://a:b@x"], [1]],
    ("server", "token"): ["", "with space", 1, "ü"],
    ("server", "token_file"): ["", 1, "/nowhere/at/all", "a\0b"],
    ("server", "authenticate_url"): ["x", 1, "ftp://x"],
    ("server", "max_connections"): [0, "many", True, 1.5],
    ("server", "workers"): [0, 257, 10_000, "2", True],
    ("server", "uds"): ["", 1, "a\0b"],
    ("server", "drain"): ["soon", -1, True],
    ("server", "record"): [5, "", True],
    ("server", "record_share"): [0, 1.5, "most", True],
    ("outbox", "database"): ["", 1, "a\0b"],
    ("outbox", "consumer"): ["", 1],
    ("outbox", "max_lag"): ["soon", 0, "2d", True],
}


def good() -> dict[str, Any]:
    return tomllib.loads(GOOD)


def table_of(tables: dict[str, Any], name: str) -> tuple[dict[str, Any], str]:
    if name == "kinds":
        return tables["kinds"]["post"], "kinds.post"
    return tables[name], name


def mistakes_in(tables: dict[str, Any]) -> tuple[str, ...]:
    with pytest.raises(Mistakes) as caught:
        settings_of(tables, {})
    return caught.value.mistakes


class TestG1GoodFile:
    def test_every_setting_of_a_good_file_is_read(self, tmp_path: Path) -> None:
        """Durations are seconds; everything is frozen."""
        file = tmp_path / "stillfresh.toml"
        file.write_text(GOOD)
        settings = load(file)
        assert settings.store == StoreSettings("sqlite:///stillfresh.db", 2)
        assert settings.pages == PagesSettings(
            ("http://127.0.0.1:3000",),
            {"/blog/*": Route(600)},
            ("page",),
            ("example.com",),
            "blog",
            1000,
            5,
            ("10.0.0.0/8",),
            "request",
            ("X-Mine",),
            4,
            5,
            3,
        )
        pages = page_cache_of(settings.pages, StoreSettings("memory://"))
        assert pages.terms(600) == (Policy(600, 4, 5), Policy(3))
        assert settings.kinds == (
            KindSettings(
                "post",
                300,
                None,
                "http://127.0.0.1:8080/v0/stream/posts/by_ids",
                "own",
                4,
                "post_ids",
                "{details.author}:{details.id}",
                "data.posts",
                3600,
                7200,
                30,
                20,
                3,
                1000,
                {"Authorization": "Bearer hush"},
                per_viewer=True,
                viewer_field="viewer",
            ),
        )
        assert settings.server == ServerSettings(
            "127.0.0.1",
            9000,
            ("gateway.example.com",),
            ("https://example.com",),
            "hush-hush",
            "http://127.0.0.1:8080/who",
            500,
        )

    def test_a_site_or_one_kind_is_enough(self) -> None:
        """A site, or one kind."""
        pages = settings_of({"pages": {"upstream": "http://x"}}, {})
        kind = {"batch_url": "http://x/y", "fresh_for": "5m"}
        kinds = settings_of({"kinds": {"post": kind}}, {})
        assert pages.pages == PagesSettings(("http://x",))
        assert kinds.kinds == (KindSettings("post", 300, batch_url="http://x/y"),)
        assert kinds.store == StoreSettings()
        assert kinds.server == ServerSettings()

    def test_command_line_options_override_the_file(self, tmp_path: Path) -> None:
        """Key by key."""
        file = tmp_path / "stillfresh.toml"
        file.write_text(GOOD)
        settings = load(file, {"server": {"port": 1}, "store": {"url": "memory://"}})
        assert (settings.server.port, settings.server.host) == (1, "127.0.0.1")
        assert settings.store == StoreSettings("memory://", 2)

    def test_a_route_may_say_how_the_site_is_asked(self) -> None:
        """I24: a duration, or a table with `revalidate` and `forward`; each may be left out."""
        routes = {
            "/a": "1m",
            "/b": {"revalidate": "10m", "forward": "request"},
            "/c": {"forward": "key"},
        }
        found = settings_of({"pages": {"upstream": "http://x", "routes": routes}}).pages
        assert found is not None
        assert found.routes == {
            "/a": Route(60),
            "/b": Route(600, forward="request"),
            "/c": Route(forward="key"),
        }


class TestG1Token:
    def test_the_token_may_come_from_a_file_or_the_environment(self, tmp_path: Path) -> None:
        """Written in the file it counts first."""
        file = tmp_path / "token"
        file.write_text("from-a-file\n")
        site = {"pages": {"upstream": "http://x"}}
        told = {"STILLFRESH_TOKEN": "from-outside"}
        by_file = settings_of({**site, "server": {"token_file": str(file)}}, told)
        by_environment = settings_of(site, told)
        written = settings_of({**site, "server": {"token": "written"}}, told)
        tokens = [it.server.token for it in (by_file, by_environment, written)]
        assert tokens == ["from-a-file", "from-outside", "written"]

    def test_the_token_is_never_shown_in_errors_or_reprs(self) -> None:
        """Neither in an error nor in what settings look like."""
        tables = good()
        assert "hush" not in repr(settings_of(tables, {}))
        tables["server"]["token"] = "hush hush hush"  # noqa: S105 (a bad one)
        tables["kinds"]["post"]["headers"] = {"Authorization": "hush\n"}
        assert "hush" not in "".join(mistakes_in(tables))
        found = settings_of({"pages": {"upstream": "http://x"}}, {"STILLFRESH_TOKEN": "hush"})
        assert "hush" not in repr(found)

    def test_two_tokens_or_an_unprintable_one_are_refused(self, tmp_path: Path) -> None:
        """Two are a mistake, and so is one that cannot be a header's value."""
        tables = good()
        tables["server"]["token_file"] = str(tmp_path)
        assert mistakes_in(tables)[0].startswith("server.token_file: there is a server.token too")
        with pytest.raises(Mistakes, match="STILLFRESH_TOKEN: must be printable"):
            settings_of({"pages": {"upstream": "http://x"}}, {"STILLFRESH_TOKEN": "a b"})


class TestG1Mistakes:
    @pytest.mark.parametrize(
        ("table", "key", "value"),
        [(*where, value) for where, values in WRONG.items() for value in values],
    )
    def test_each_wrong_value_is_one_line_with_its_key(
        self, table: str, key: str, value: Any
    ) -> None:
        """Every key of every table, wrong in turn."""
        tables = good()
        if key == "token_file":
            del tables["server"]["token"]
        where, name = table_of(tables, table)
        if (table, key) in {("kinds", "url"), ("kinds", "terms")}:
            where.clear()
            where |= {"url": "http://x/{id}", "fresh_for": 1}
        where[key] = value
        (line,) = mistakes_in(tables)
        assert line.startswith(f"{name}.{key}")
        assert "\n" not in line

    @pytest.mark.parametrize("url", ["memory://", "MEMORY:///", "memory://?tenant=a"])
    def test_workers_need_a_store_that_they_can_share(self, url: str) -> None:
        """G17: each process would have a memory of its own; a SQLite file is named instead."""
        tables = good()
        del tables["pages"]["tenant"]
        tables["store"], tables["server"]["workers"] = {"url": url}, 2
        (line,) = mistakes_in(tables)
        assert line.startswith(f"server.workers: 2 processes cannot share {url}; name a store")
        assert "sqlite:///stillfresh.db" in line
        tables["store"]["url"] = "sqlite:///stillfresh.db"
        assert settings_of(tables, {}).server.workers == 2

    @pytest.mark.parametrize(
        ("key", "wrong", "right"),
        [
            ("upstream", ["ftp://x", 3000, "http://x/a//b"], "http://x"),
            ("ignore_cookies", ["a b", "", "*a"], "_ga*"),
            ("site_hosts", ["a b", "", "*"], "a.example"),
            ("trusted_proxies", ["here", "10.0.0.1/8"], "10.0.0.0/8"),
            ("purge_from", ["here", "10.0.0.1/8"], "10.0.0.0/8"),
            ("credentials", ["a b", "ä"], "X-Mine"),
        ],
    )
    def test_each_wrong_item_of_a_list_is_named_at_once(
        self, key: str, wrong: list[Any], right: str
    ) -> None:
        tables = good()
        tables["pages"][key] = [*wrong, right]
        lines = mistakes_in(tables)
        assert len(lines) == len(wrong)
        assert all(line.startswith(f"pages.{key}: ") for line in lines)

    def test_settings_that_go_with_another_one_say_so(self) -> None:
        pages = {"upstream": "http://x", "health_every": "1s", "site_ca": str(LOOPBACK)}
        assert mistakes_in({"pages": pages}) == (
            "pages.health_every: goes with pages.health_path, which is missing",
            "pages.site_ca: goes with an https:// address in pages.upstream",
        )
        pages |= {"upstream": "HTTPS://x", "health_path": "/"}
        assert settings_of({"pages": pages}, {}).pages is not None

    def test_each_route_has_its_own_mistakes(self) -> None:
        """All at once, also where a route is a table."""
        tables = good()
        table = {"revalidate": "soon", "forwrad": "key"}
        tables["pages"]["routes"] = {"/a": "soon", "blog": "1m", "/*/b": 0, "/c": table}
        told = [line.partition(": ")[0] for line in mistakes_in(tables)]
        keys = ['"/a"', "", '"/*/b"', "", '"/c".forwrad', '"/c".revalidate']
        assert told == [f"pages.routes.{key}".rstrip(".") for key in keys]

    def test_every_key_has_a_test_of_a_wrong_value(self) -> None:
        """A key that is added is also tried out."""
        keys = {(table, key) for table, model in MODELS.items() for key in keys_of(model)}
        assert set(WRONG) == keys

    @pytest.mark.parametrize(
        ("table", "key", "near"),
        [
            ("store", "uri", "url"),
            ("pages", "upsteam", "upstream"),
            ("pages", "ignore_cookie", "ignore_cookies"),
            ("pages", "cdn_overide", "cdn_override"),
            ("pages", "own_prefx", "own_prefix"),
            ("pages", "heath_path", "health_path"),
            ("pages", "side_ca", "site_ca"),
            ("kinds", "fresh", "fresh_for"),
            ("server", "prot", "port"),
        ],
    )
    def test_an_unknown_key_gets_a_suggestion(self, table: str, key: str, near: str) -> None:
        """In each table."""
        tables = good()
        where, name = table_of(tables, table)
        where[key] = 1
        assert mistakes_in(tables) == (f"{name}.{key}: unknown key; did you mean {near}?",)

    def test_an_unknown_table_gets_a_suggestion(self) -> None:
        """Or all there are, if none is near."""
        assert mistakes_in({**good(), "page": {}}) == ("page: unknown key; did you mean pages?",)
        (line,) = mistakes_in({**good(), "zzz": {}})
        assert line.startswith("zzz: unknown key; ")
        assert all(
            table in line for table in ("store", "pages", "kinds", "server", "outbox", "log")
        )

    @pytest.mark.parametrize(("table", "key"), [("pages", "upstream"), ("kinds", "fresh_for")])
    def test_a_missing_key_is_named(self, table: str, key: str) -> None:
        """There is nothing to guess."""
        tables = good()
        where, name = table_of(tables, table)
        del where[key]
        assert mistakes_in(tables) == (f"{name}.{key}: is missing",)

    @pytest.mark.parametrize("table", ["store", "pages", "kinds", "server"])
    @pytest.mark.parametrize("value", [1, "x", [], True])
    def test_a_table_of_another_type_is_refused(self, table: str, value: Any) -> None:
        """One line for each that is none."""
        (line,) = mistakes_in({**good(), table: value})
        assert line.startswith(f"{table}: must be")

    def test_a_kind_that_is_no_table_is_refused(self) -> None:
        """Its name is the key."""
        tables = good()
        tables["kinds"]["user"] = "5m"
        (line,) = mistakes_in(tables)
        assert line.startswith("kinds.user: must be a table, as [kinds.user]")

    @pytest.mark.parametrize("name", ["Post", "a b", "", "1st", "sqlite_x", "x_ttl", "page"])
    def test_a_kind_with_a_bad_name_is_refused(self, name: str) -> None:
        """And not the one that pages are kept under."""
        tables = good()
        tables["kinds"][name] = {"batch_url": "http://x", "fresh_for": 1}
        (line,) = mistakes_in(tables)
        assert line.startswith(f"kinds.{name}: ")

    def test_all_mistakes_are_listed_in_the_order_of_the_tables(self) -> None:
        """In the order of the tables."""
        tables = good()
        tables["store"]["url"] = "ftp://x"
        tables["pages"]["timeout"] = 0
        del tables["kinds"]["post"]["batch_url"]
        tables["server"]["port"] = "a"
        keys = [line.split(":")[0] for line in mistakes_in(tables)]
        assert keys == ["store.url", "pages.timeout", "kinds.post.url", "server.port"]

    @pytest.mark.parametrize(
        ("host", "port", "url", "is_itself"),
        [
            ("127.0.0.1", 8080, "http://127.0.0.1:8080/by_ids", True),
            ("127.0.0.1", 8080, "http://localhost:8080/by_ids", True),
            ("0.0.0.0", 80, "http://127.0.0.1/by_ids", True),  # noqa: S104 (what is written)
            ("10.0.0.1", 8080, "http://10.0.0.1:8080/by_ids", True),
            ("10.0.0.1", 8080, "http://127.0.0.1:8080/by_ids", False),
            ("127.0.0.1", 8081, "http://127.0.0.1:8080/by_ids", False),
            ("127.0.0.1", 0, "http://127.0.0.1:8080/by_ids", False),
            ("127.0.0.1", 8080, "https://127.0.0.1:8080/by_ids", False),
        ],
    )
    def test_a_gateway_that_would_ask_itself_is_refused(
        self, host: str, port: int, url: str, is_itself: bool
    ) -> None:
        """It would wait for itself; whichever name of this machine was written."""
        tables = {
            "kinds": {"post": {"batch_url": url, "fresh_for": "1s"}},
            "server": {"host": host, "port": port},
        }
        if not is_itself:
            assert settings_of(tables, {}).kinds
            return
        (said,) = mistakes_in(tables)
        assert said.startswith(f"kinds.post.batch_url: {url} is where this gateway listens itself")

    @pytest.mark.parametrize(
        ("table", "key", "said"),
        [
            ({}, "url", "neither is set; write url (a GET for each id) or batch_url (a"),
            (
                {"url": "http://x/{id}", "batch_url": "http://x"},
                "url",
                "both are set; write url",
            ),
            ({"url": "http://x/{id}", "max_batch": 5}, "max_batch", "is for kinds with batch_url"),
            ({"batch_url": "http://x", "terms": "own"}, "terms", "is for kinds with url, and"),
            ({"url": "http://x/{id}", "per_viewer": True}, "url", "{viewer_id} belongs into it"),
            ({"url": "http://x/{id}/{viewer_id}"}, "url", "{viewer_id} belongs into it if"),
        ],
    )
    def test_g11_a_kind_is_asked_for_in_one_way(
        self, table: dict[str, Any], key: str, said: str
    ) -> None:
        """By `url` or by `batch_url`: both, neither and the keys of the other are mistakes."""
        who = {"authenticate_url": "http://x/who"}
        kind = {"fresh_for": 1, **table}
        (line,) = mistakes_in({"kinds": {"item": kind}, "server": who})
        assert line.startswith(f"kinds.item.{key}: {said}")

    def test_advice_in_errors_is_written_for_toml(self) -> None:
        """No Python in it, and no key twice."""
        kind = {"batch_url": "ftp://x", "fresh_for": "soon"}
        said = "\n".join(mistakes_in({"kinds": {"x_ttl": kind}}))
        assert "kinds.x_ttl.batch_url: must begin with http://" in said
        assert "seconds as a number, or text such as '250ms'" in said
        assert "names that end in _ttl" in said
        assert "timedelta" not in said

    def test_settings_with_nothing_to_serve_are_refused(self) -> None:
        """A store alone serves nothing."""
        (line,) = mistakes_in({"store": {}})
        assert "[pages] or [kinds.NAME]" in line

    def test_a_per_viewer_kind_needs_an_authenticate_url(self) -> None:
        """Or nobody could ever see it."""
        tables = good()
        del tables["server"]["authenticate_url"]
        (line,) = mistakes_in(tables)
        assert line.startswith("server.authenticate_url: is missing")

    @given(
        st.dictionaries(
            st.sampled_from(["store", "pages", "kinds", "server", "x"]),
            st.recursive(
                st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
                lambda it: st.lists(it) | st.dictionaries(st.text(), it),
                max_leaves=10,
            ),
        )
    )
    def test_any_tables_are_read_or_refused_with_printable_lines(
        self, tables: dict[str, Any]
    ) -> None:
        """Nothing but ConfigError comes out, and its lines are lines."""
        with suppress(Mistakes):
            settings_of(tables, {})
            return
        assert all(line.isprintable() for line in mistakes_in(tables))


class TestG1BadFile:
    @pytest.mark.parametrize(
        ("content", "said"),
        [
            (b"[store\nurl = 1", "not TOML: Expected ']' at the end of a table"),
            (b"a = 1\na = 2\n", "line 2"),
            (b"[kinds.post]\n[kinds.post]", "line 2"),
            (b"\xff\xfe", "not UTF-8"),
            (b"x = " + b"[" * 100_000, "not TOML"),
            (b"#" * 1_000_001, "longer than 1,000,000 bytes"),
        ],
    )
    def test_a_file_that_is_not_toml_is_one_line_with_its_name(
        self, tmp_path: Path, content: bytes, said: str
    ) -> None:
        """With the file's name, and the line where TOML tells it."""
        file = tmp_path / "stillfresh.toml"
        file.write_bytes(content)
        with pytest.raises(Mistakes) as caught:
            load(file)
        (line,) = caught.value.mistakes
        assert line.startswith(f"{file}: ")
        assert said in line
        assert "\n" not in line

    def test_a_settings_file_that_cannot_be_read_is_refused(self, tmp_path: Path) -> None:
        """Not there, or a directory."""
        for path, said in ((tmp_path / "none", "No such file"), (tmp_path, "Is a directory")):
            with pytest.raises(ConfigError, match=said):
                load(path)

    @pytest.mark.parametrize("name", ["\ud800.toml", "a\0b.toml"])
    def test_an_impossible_file_name_is_refused_in_printable_words(self, name: str) -> None:
        """Is said in printable words, too."""
        with pytest.raises(Mistakes, match="no file can have this name") as caught:
            load(name)
        assert caught.value.mistakes[0].isprintable()


KEY = re.compile(r"^\| `((?:store|pages|kinds|server|outbox)\.[\w.]+)` \|", re.MULTILINE)


class TestG1Documented:
    PAGE = (Path(__file__).parents[2] / "docs" / "gateway.md").read_text()

    def test_every_setting_is_documented_in_order(self) -> None:
        """Each once, in the order of its table."""
        named = KEY.findall(self.PAGE)
        keys = [f"{table}.{key}" for table, model in MODELS.items() for key in keys_of(model)]
        assert named == [key.replace("kinds.", "kinds.NAME.") for key in keys]

    def test_every_example_in_the_docs_is_valid(self) -> None:
        """What is shown can be copied."""
        blocks = re.findall(r"^```toml\n(.*?)^```$", self.PAGE, re.MULTILINE | re.DOTALL)
        assert blocks
        for block in blocks:
            settings_of(tomllib.loads(block), {})
