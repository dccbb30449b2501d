"""E20 in Flask: settings, several apps, and the servers under which an app runs."""

import gc
import os
import re
import signal
import subprocess
import sys
import threading
import urllib.request
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPException
from pathlib import Path
from typing import Any

import pytest
from flask import Flask

from stillfresh import Cache, ConfigError, SyncCache
from stillfresh.integrations.flask import Fresh
from tests.kit.servers.valkey import free_port
from tests.kit.sync import Calling, until

PROGRAM = """
import os
from pathlib import Path
from flask import Flask
from stillfresh.integrations.flask import Fresh

here = Path(__file__).parent
app = Flask("shop")
app.config["STILLFRESH_STORE"] = f"sqlite:///{here}/shop.db"
fresh = Fresh(app)

@fresh.cache.cached("greeting", fresh_for="1h")
def greeting(name: str) -> str:
    return f"hello {name}"

@app.get("/pid")
def pid() -> str:
    return f"{os.getpid()} {greeting('ann')} RELEASE"

@app.get("/page/<name>")
@fresh.view("1h")
def page(name: str) -> str:
    with (here / "loads").open("a") as loads:
        loads.write(f"{name}\\n")
    return f"{name} by {os.getpid()}"

greeting("ann")  # the cache is open before a server forks
"""


def app_of(store: object = "memory://", **settings: object) -> Flask:
    app = Flask("shop")
    app.config.from_mapping({"STILLFRESH_STORE": store, **settings})
    return app


class TestE20Extension:
    def test_fresh_makes_a_cache_from_the_apps_settings(self, tmp_path: Path) -> None:
        """`Fresh(app)` has a SyncCache by the app's settings; nothing is opened or started."""
        before = threading.active_count()
        app = app_of(f"sqlite:///{tmp_path}/app.db", STILLFRESH_GRACE="1s")
        fresh = Fresh(app)
        assert app.extensions["stillfresh"] is fresh
        assert isinstance(fresh.cache, SyncCache)
        assert fresh.cache is fresh.cache
        assert (list(tmp_path.iterdir()), threading.active_count()) == ([], before)

    @pytest.mark.parametrize(
        ("settings", "said"),
        [
            ({}, "STILLFRESH_STORE is not set; set app.config"),
            ({"STILLFRESH_STORE": "sqlight:///x"}, "STILLFRESH_STORE: .*sqlight"),
            ({"STILLFRESH_STORE": 5}, "STILLFRESH_STORE: "),
            ({"STILLFRESH_STORE": "memory://", "STILLFRESH_GRACE": "x"}, "STILLFRESH_GRACE: .*'x'"),
            (
                {"STILLFRESH_STORE": "memory://", "STILLFRESH_STOER": "x"},
                "STILLFRESH_STOER: there is no such setting; there are STILLFRESH_STORE, STILL",
            ),
        ],
    )
    def test_a_bad_flask_setting_is_named(self, settings: dict[str, object], said: str) -> None:
        """By `init_app`, before any request."""
        app = Flask("shop")
        app.config.update(settings)
        with pytest.raises(ConfigError, match=said):
            Fresh(app)

    def test_several_apps_of_one_factory_have_caches_of_their_own(self) -> None:
        """Each has a cache of its own; views may be declared before and after."""
        fresh, calls = Fresh(), list[str]()

        def page() -> str:
            calls.append("page")
            return f"{len(calls)}"

        early = fresh.view("10m", name="early")(page)
        apps = [app_of(), app_of()]
        for app in apps:
            fresh.init_app(app)
            app.add_url_rule("/early", "early", early)
        apps[0].add_url_rule("/late", "late", fresh.view("10m", name="late")(page))
        seen = [app.test_client().get("/early").text for app in (*apps, *apps)]
        assert seen == ["1", "2", "1", "2"]
        assert [apps[0].test_client().get("/late").text for _ in range(2)] == ["3", "3"]
        with pytest.raises(ConfigError, match="this Fresh has 2 apps, and the current app is none"):
            _ = fresh.cache
        for app in apps:
            with app.app_context():
                fresh.cache.close()

    def test_a_collected_app_leaves_no_cache_behind(self) -> None:
        """A test suite makes many."""
        fresh, app = Fresh(), app_of()
        fresh.view("10m", name="page")(str)
        fresh.init_app(app)
        cache, gone = weakref.ref(fresh.cache), weakref.ref(app)
        del app
        gc.collect()
        assert (gone(), cache()) == (None, None)

    def test_fresh_takes_a_given_cache_for_all_apps(self) -> None:
        """One for all apps, whose functions can be declared before any app is there."""
        cache = SyncCache("memory://")
        fresh = Fresh(cache=cache)
        assert fresh.cache is cache
        for _ in range(2):
            fresh.init_app(Flask("shop"))
        with pytest.raises(ConfigError, match="STILLFRESH_STORE: "):
            fresh.init_app(app_of())

    def test_wrong_view_declarations_are_refused_by_name(self) -> None:
        """E15: each names the view."""
        fresh, app = Fresh(), app_of()
        fresh.init_app(app)

        def page(id: int) -> str:  # noqa: A002
            return f"{id}"

        fresh.view("10m")(page)
        with pytest.raises(ConfigError, match=r"^above: @fresh\.view"):
            fresh.view("10m", name="above")(app.get("/above")(lambda: "above"))
        bad: list[tuple[dict[str, Any], str]] = [
            ({}, "page: another view has this name; write name='page_2'"),
            ({"name": "Page"}, "resource name 'Page'"),
            ({"name": "a", "per": "user"}, "a: per is a function without arguments"),
            ({"name": "a", "tags": lambda x: x}, "a: tags= takes 'x', which the view does not"),
            ({"name": "a", "stale_for": "soon"}, "a: stale_for"),
            ({"name": "a", "concurrency": 0}, "a: concurrency"),
        ]
        for options, said in bad:
            with pytest.raises(ConfigError, match=re.escape(said)):
                fresh.view("10m", **options)(page)

    def test_an_async_cache_and_a_view_without_a_duration_are_refused(self) -> None:
        """An async Cache, and `@fresh.view` without brackets, are refused at declaration."""
        with pytest.raises(ConfigError, match="a SyncCache is needed here"):
            Fresh(cache=Cache("memory://"))  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match="view: fresh_for: "):
            Fresh().view(str)  # type: ignore[arg-type]

    def test_a_view_of_an_uninitialised_app_says_what_to_call(self) -> None:
        """The error says what to call."""
        fresh, app = Fresh(), Flask("shop")
        app.testing = True
        app.add_url_rule("/", "page", fresh.view("10m", name="page")(str))
        with pytest.raises(ConfigError, match=r"call init_app\(app\)"):
            app.test_client().get("/")


@contextmanager
def running(folder: Path, *command: str) -> Iterator[subprocess.Popen[str]]:
    (folder / "shop.py").write_text(PROGRAM)
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", *command], cwd=folder, stdout=log, stderr=log, text=True
        )
    try:
        yield process
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(30)


def get(port: int, path: str) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=20) as answer:
        return str(answer.read().decode())


def is_up(port: int, release: str = "RELEASE") -> bool:
    try:
        return get(port, "/pid").endswith(release)
    except (OSError, HTTPException):  # the old server may end in the middle of its answer
        return False


class TestE20FlaskServers:
    def test_an_app_preloaded_by_gunicorn_works_in_each_worker(self, tmp_path: Path) -> None:
        """The app is loaded, and its cache used, before the fork; each worker has its own after."""
        port = free_port()
        command = ["gunicorn", "shop:app", "--preload", "-w", "2", "-b", f"127.0.0.1:{port}"]
        with running(tmp_path, *command) as process:
            until(lambda: is_up(port))
            pids = {get(port, "/pid").split()[0]}
            until(lambda: (other := get(port, "/pid").split()[0]) not in pids and other)
            asked = [Calling(get, port, f"/page/{n % 4}") for n in range(16)]
            answers = {it.result() for it in asked}
        assert len(answers) == 4
        assert f"{process.pid}" not in {it.split()[-1] for it in answers} | pids
        assert sorted((tmp_path / "loads").read_text().split()) == ["0", "1", "2", "3"]
        assert process.returncode == 0, (tmp_path / "log").read_text()

    def test_copies_survive_the_reloader_of_flask_run(self, tmp_path: Path) -> None:
        """A changed program is served by a new process, and the copies are still there."""
        port = free_port()
        command = ["flask", "--app", "shop", "run", "--debug", "--port", f"{port}"]
        with running(tmp_path, *command):
            until(lambda: is_up(port))
            first = get(port, "/page/x")
            (tmp_path / "shop.py").write_text(PROGRAM.replace("RELEASE", "NEXT"))
            until(lambda: is_up(port, "NEXT"))
            assert get(port, "/page/x") == first
        assert str(os.getpid()) not in first
