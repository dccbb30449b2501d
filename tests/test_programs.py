"""The programs of examples/programs: short, with a reason, and each runs and prints what it says.

A comment after a `print` says what it prints; `…` stands for anything.
"""

import ast
import asyncio
import io
import re
import runpy
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import redirect_stdout
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient

from tests.kit.servers.valkey import Server

ROOT = Path(__file__).parent.parent
PROGRAMS = sorted((ROOT / "examples" / "programs").glob("*.py"))
SAID = re.compile(r"^ *print\(.*\)  # (.*)$", re.MULTILINE)
SITES = {"django_site", "fastapi_site", "flask_site", "http_client"}
"""What only serves or needs a site: tried below, each in a way of its own."""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the programs keep their files."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def path_of(name: str) -> Path:
    return ROOT / "examples" / "programs" / f"{name}.py"


def run(name: str) -> dict[str, Any]:
    """Run a program as a script, and look at what it prints."""
    with redirect_stdout(io.StringIO()) as printed:
        names = runpy.run_path(str(path_of(name)), run_name="__main__")
    assert_printed(name, printed.getvalue())
    return names


def assert_printed(name: str, printed: str) -> None:
    lines = SAID.findall(path_of(name).read_text())
    pattern = "".join(".*?".join(map(re.escape, line.split("…"))) + "\n" for line in lines)
    assert lines
    assert re.fullmatch(pattern, printed), printed


def test_there_are_ten_programs_of_at_most_forty_lines() -> None:
    """Each begins with what it is, and when to use it; docs/programs.md lists each."""
    page = (ROOT / "docs" / "programs.md").read_text()
    assert len(PROGRAMS) == 10
    for path in PROGRAMS:
        text = path.read_text()
        assert len(text.splitlines()) <= 40, path.name
        assert "\nUse it when " in (ast.get_docstring(ast.parse(text)) or ""), path.name
        assert page.count(f"(../examples/programs/{path.name})") == 1, path.name


@pytest.mark.parametrize("name", [it.stem for it in PROGRAMS if it.stem not in SITES | {"shared"}])
def test_a_program_prints_what_its_comments_say(name: str) -> None:
    run(name)


def test_the_program_for_several_machines_sees_a_change_at_once(
    valkey: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CACHE", valkey.url(prefix="programs:"))
    run("shared")


@pytest.fixture
def site() -> Iterator[tuple[str, list[str]]]:
    """An API that says how long its responses are fresh, and the requests that reached it."""
    asked: list[str] = []

    class Api(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            self.send_response(200)
            self.send_header("Cache-Control", "max-age=60")
            self.send_header("Content-Length", "3")
            self.end_headers()
            self.wfile.write(b"tea")

        def log_message(self, format: str, *args: object) -> None: ...  # noqa: A002 (the base's name)

    with ThreadingHTTPServer(("127.0.0.1", 0), Api) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/items", asked
        server.shutdown()
        thread.join()


def test_the_http_client_asks_once_for_sixteen_tasks(site: tuple[str, list[str]]) -> None:
    address, asked = site
    names = runpy.run_path(str(path_of("http_client")))
    with redirect_stdout(io.StringIO()) as printed:
        asyncio.run(names["main"](address))
    assert_printed("http_client", printed.getvalue())
    assert asked == ["/items"]


def test_the_fastapi_site_shows_a_change_to_the_next_visitor() -> None:
    names = runpy.run_path(str(path_of("fastapi_site")))
    with TestClient(names["app"]) as client:
        first = client.get("/prices/tea")
        again = client.get("/prices/tea")
        client.put("/prices/tea", params={"cents": 350})
        changed = client.get("/prices/tea")
    assert [response.json() for response in (first, again, changed)] == [
        {"tea": 300},
        {"tea": 300},
        {"tea": 350},
    ]
    assert "hit" in again.headers["Cache-Status"]
    assert "hit" not in changed.headers["Cache-Status"]


def test_the_flask_site_shows_a_change_to_the_next_visitor() -> None:
    names = runpy.run_path(str(path_of("flask_site")))
    client = names["app"].test_client()
    first = client.get("/prices/tea")
    again = client.get("/prices/tea")
    client.put("/prices/tea/350")
    changed = client.get("/prices/tea")
    names["fresh"].cache.close()
    assert [response.text for response in (first, again, changed)] == [
        "tea costs 300",
        "tea costs 300",
        "tea costs 350",
    ]
    assert "hit" in again.headers["Cache-Status"]
    assert "hit" not in changed.headers["Cache-Status"]


DRIVE = """
import sys
import runpy
names = runpy.run_path(sys.argv[1], run_name="django_site")
sys.modules["django_site"] = type(sys)("django_site")
vars(sys.modules["django_site"]).update(names)
import django
django.setup()
from django.test import Client
for _ in range(2):
    response = Client().get("/prices")
    print(response.status_code, response.content.decode(), response["Cache-Status"])
"""


def test_the_django_site_answers_its_second_visitor_from_the_copy(folder: Path) -> None:
    """In a process of its own: Django can be set up once in a process."""
    done = subprocess.run(
        [sys.executable, "-c", DRIVE, str(path_of("django_site"))],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    first, second = done.stdout.splitlines()
    assert first.startswith("200 tea 300 stillfresh; fwd=miss")
    assert second.startswith("200 tea 300 stillfresh; hit")
