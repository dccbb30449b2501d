"""G10: what every command has in common: help, errors, exit codes, pipes, terminals."""

import importlib.util
import json
import os
import pty
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import click
import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stillfresh import Policy
from stillfresh.cli import main, measuring
from stillfresh.cli.program import Command, age_text, moment_text, plain, size_text
from stillfresh.errors import without_password
from tests.kit.cli import COMMAND, call, filled, interruptible, neighbours, put, said, stillfresh
from tests.kit.servers.valkey import Server, free_port
from tests.kit.sync import until

HOUR = Policy(3600)
ROOT = Path(__file__).parent.parent.parent


def commands(group: click.Group = main, *path: str) -> Iterator[tuple[tuple[str, ...], Command]]:
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        assert isinstance(command, Command)
        yield (*path, name), command
        if isinstance(command, click.Group):
            yield from commands(command, *path, name)


ALL = dict(commands())


class TestG10Help:
    def test_the_help_has_every_command(self) -> None:
        """Those that the contract names, and the table's."""
        assert [name for (name, *_) in ALL if len(_) == 0] == [
            "demo",
            "serve",
            "check",
            "warm",
            "inspect",
            "stats",
            "explain",
            "invalidate",
            "evict",
            "plan",
            "prove",
            "replay",
            "bench",
            "table",
            "outbox",
            "browser",
            "diskcache",
        ]
        text = said("--help")
        for path, command in ALL.items():
            assert len(path) > 1 or f"{path[0]:10}  {command.get_short_help_str(100)}\n" in text

    @pytest.mark.parametrize("path", ALL, ids=" ".join)
    def test_the_help_of_each_command_has_a_valid_example(self, path: tuple[str, ...]) -> None:
        """Each example is a call that the command takes."""
        text = said(*path, "--help")
        assert text.startswith(f"Usage: main {' '.join(path)} ")
        assert ALL[path].help
        for example in ALL[path].examples:
            assert f"  {example}\n" in text
            program, *arguments = shlex.split(example)
            assert (program, tuple(arguments[: len(path)])) == ("stillfresh", path)
            if not isinstance(ALL[path], click.Group):
                ALL[path].make_context(path[-1], arguments[len(path) :])

    def test_the_help_is_in_the_docs(self) -> None:
        """`make diagrams` writes it there."""
        page = (ROOT / "docs" / "cli.md").read_text()
        spec = importlib.util.spec_from_file_location("cli_help", ROOT / "scripts" / "cli_help.py")
        assert spec is not None
        assert spec.loader is not None
        script = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(script)
        assert script.written(page) == page
        for path in ALL:
            assert len(path) > 1 or f"<!-- help: stillfresh {path[0]} -->" in page

    @pytest.mark.parametrize("path", ALL, ids=" ".join)
    def test_the_help_fits_a_terminal(self, path: tuple[str, ...]) -> None:
        """But for examples, which are copied whole."""
        prose = said(*path, "--help").partition("\nExample")[0]
        assert max(map(len, prose.splitlines())) <= 80

    def test_the_help_imports_no_optional_library(self) -> None:
        """No web stack, no tables, no client library: it is there at once."""
        script = """
import sys
from stillfresh.cli import main
try:
    main(["--help"], prog_name="stillfresh")
except SystemExit:
    pass
heavy = {"rich", "httpx", "httpx2", "starlette", "uvicorn", "redis", "aiobotocore", "pydantic"}
print(sorted(heavy & {name.partition(".")[0] for name in sys.modules}))
print([name for name in sys.modules if name.startswith(("stillfresh.gateway", "stillfresh.demo"))])
"""
        found = subprocess.run(
            [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True
        )
        assert found.stdout.endswith("[]\n[]\n")

    @pytest.mark.parametrize("module", ["stillfresh", "stillfresh.cli"])
    def test_the_program_runs_as_a_module(self, module: str) -> None:
        """Under its own name."""
        found = subprocess.run(
            [sys.executable, "-m", module, "evict", "-h"],
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        )
        assert found.stdout.startswith("Usage: stillfresh evict")

    def test_without_a_command_the_help_is_shown_as_wrong_use(self) -> None:
        """On stderr."""
        result = call()
        assert result.exit_code == 2
        assert "Commands:" in result.stderr


@cache
def foreign() -> bytes:
    """Another application's SQLite file, with something in it."""
    script = """
import sqlite3, sys
connection = sqlite3.connect(":memory:")
connection.execute("CREATE TABLE t(x)")
sys.stdout.buffer.write(connection.serialize())
"""
    command = [sys.executable, "-c", script]
    return subprocess.run(command, check=True, timeout=60, capture_output=True).stdout


FAST_JSON = ["bench", "--json", "--seconds", "0.01"]
ON_A_STORE = [
    ["inspect", "STORE"],
    ["stats", "STORE"],
    ["explain", "STORE", "price", "a"],
    ["invalidate", "STORE", "price", "a"],
    ["evict", "STORE"],
]


class TestG10Errors:
    @pytest.mark.parametrize("arguments", ON_A_STORE, ids=lambda found: found[0])
    @pytest.mark.parametrize(
        ("store", "code", "says"),
        [
            ("sqlite:///{dir}/none.db", 1, "none.db: there is no such file"),
            ("sqlite:///{dir}/none/none.db", 1, "there is no such file"),
            ("{dir}/none.db", 1, "none.db: there is no such file"),
            ("none", 1, "none: there is no such file"),
            ("{dir}", 1, "{dir}: is not a file"),
            ("localhost:6379", 2, "not a store's address"),
            ("sqlite:/{dir}/none.db", 2, "sqlite:////path/file.db (absolute)"),
            ("sqlite:none.db", 2, "sqlite:////path/file.db (absolute)"),
            ("sqlite:///{dir}", 1, "{dir}: is not a file"),
            ("sqlite:///{dir}/empty.db", 1, "is empty, and not a store yet"),
            ("sqlite:///{dir}/text.db", 1, "is not a SQLite file, or is corrupt"),
            ("{dir}/text.db", 1, "is not a SQLite file, or is corrupt"),
            ("sqlite:///{dir}/foreign.db", 2, "is another application's SQLite file"),
            ("sqlite:///{dir}/none.db?mode=rw", 2, "its options are ?max_bytes="),
            ("ftp://host/x", 2, "not a store's address"),
            ("", 2, "not a store's address"),
            ("redis://[", 2, "not a store's address"),
            ("memory://", 2, "lives in the process that uses it"),
            (
                "redis://127.0.0.1:{port}/0?timeout=0.2s",
                1,
                "the Redis server is unavailable: ConnectionError: ",
            ),
            ("dynamodb://t?colour=red", 2, "takes each once"),
        ],
    )
    def test_a_missing_or_foreign_store_is_one_line_and_no_new_file(
        self, tmp_path: Path, arguments: list[str], store: str, code: int, says: str
    ) -> None:
        """One line, an exit code, and no new file: a wrong path is not an empty store."""
        (tmp_path / "foreign.db").write_bytes(foreign())
        (tmp_path / "empty.db").touch()
        (tmp_path / "text.db").write_text("not a database " * 100)
        before = neighbours(tmp_path / "x")
        address = store.format(dir=tmp_path, port=free_port())
        result = call(*(address if each == "STORE" else each for each in arguments))
        assert (result.exit_code, result.stdout) == (code, ""), result.output
        assert result.stderr.startswith("Error: ")
        assert result.stderr.count("\n") == 1
        assert says.format(dir=tmp_path) in result.stderr
        assert "tries it again" not in result.stderr  # the command has ended
        assert neighbours(tmp_path / "x") == before

    @pytest.mark.parametrize(
        ("arguments", "says"),
        [
            (["inspect"], "Missing argument 'STORE'. Try: main inspect --help"),
            (["inspect", "x.db", "--limit", "-1"], "--limit"),
            (["inspect", "x.db", "--colour"], "--colour"),
            (["nothing"], "No such command 'nothing'"),
            (["explain", "x.db", "price", "-1"], "No such option"),
            (["serve"], "name a FILE of settings, or --upstream URL"),
            (["serve", "--upstream", "ftp://x"], "write http://host:port"),
            (["serve", "--upstream", "http://x", "--route", "/blog"], "PATH=DURATION"),
            (
                ["serve", "--upstream", "http://x", "--port", "99999"],
                "--port: must be a whole number from 0 to",
            ),
            (["serve", "none.toml"], "none.toml: No such file"),
            (["check", "none.toml"], "none.toml: No such file"),
            (["bench", "ftp://x"], "not a store's address"),
            (["table", "describe", "dynamodb://t?colour=red"], "takes each once"),
        ],
    )
    def test_wrong_use_of_a_command_is_one_line(self, arguments: list[str], says: str) -> None:
        """And ends with 2."""
        result = call(*arguments)
        assert (result.exit_code, result.stdout) == (2, "")
        assert says in result.stderr
        assert result.stderr.count("\n") == 1

    def test_an_impossible_kind_is_refused(self, tmp_path: Path) -> None:
        """It would name a table."""
        path = filled(tmp_path / "s.db", lambda store: put(store, "price", ["a"], HOUR, 0))
        for kind in ('x"; DROP TABLE price', "sqlite_x", "Price"):
            result = call("explain", str(path), kind, "a")
            assert result.exit_code == 2
            assert "kind: must be" in result.stderr

    @pytest.mark.parametrize(
        ("library", "arguments", "extra"),
        [
            ("redis", ["inspect", "redis://localhost"], "redis"),
            ("psycopg", ["inspect", "postgresql://localhost/x"], "postgres"),
            ("aiobotocore", ["inspect", "dynamodb://t?bucket=b"], "aws"),
            ("aiobotocore", ["table", "describe", "t"], "aws"),
            ("uvicorn", ["serve", "--upstream", "http://x"], "web"),
            ("httpx2", ["demo"], "demo"),
            ("starlette", ["warm", "x.db", "--upstream", "http://x", "--from", "-"], "web"),
            ("httpx2", ["stats", "http://x"], "web"),
            ("rich", ["bench", "--seconds", "0.01"], "cli"),
            ("click", ["--help"], "cli"),
        ],
    )
    def test_g18_a_missing_library_is_named(
        self, library: str, arguments: list[str], extra: str
    ) -> None:
        """In one line, with the extra that brings it; it ends with 2."""
        script = f"""
import sys
sys.modules[{library!r}] = None
from stillfresh.cli import main
main({arguments!r}, prog_name="stillfresh")
"""
        found = subprocess.run(
            [sys.executable, "-c", script],
            capture_output=True,
            text=True,
            timeout=100,
            check=False,
            stdin=subprocess.DEVNULL,
        )
        assert found.returncode == 2
        assert f"stillfresh[{extra}]" in found.stderr
        assert found.stderr.count("\n") == 1

    def test_ids_that_are_not_text_are_refused(self, tmp_path: Path) -> None:
        """What a shell hands on from a file of another encoding."""
        path = filled(tmp_path / "s.db", lambda store: put(store, "price", ["a"], HOUR, 0))
        for command in (
            ["explain", str(path), "price", "\udcff"],
            ["inspect", str(path), "--search", "\udcff"],
            ["invalidate", str(path), "price", "\udcff"],
            ["invalidate", str(path), "--tag", "\udcff"],
        ):
            found = stillfresh(*command)
            assert found.returncode == 2, found.stderr
            assert "UTF-8" in found.stderr
            assert found.stderr.count("\n") == 1


@pytest.fixture
def many(tmp_path: Path) -> Path:
    ids = [f"{number:05}" for number in range(5_000)]
    return filled(tmp_path / "many.db", lambda store: put(store, "price", ids, HOUR, time.time()))


class TestG10Ends:
    def test_ctrl_c_ends_a_command_quietly_with_130(self, tmp_path: Path) -> None:
        """What it had begun is tidied up."""
        command = [*COMMAND, "bench", f"sqlite:///{tmp_path}/x.db", "--seconds", "60"]
        with interruptible(command) as process:
            until(lambda: any(tmp_path.iterdir()))
            process.send_signal(signal.SIGINT)
            out, err = process.communicate(timeout=60)
        assert (process.returncode, out, err.strip()) == (130, "", "")
        assert list(tmp_path.iterdir()) == []

    @pytest.mark.parametrize("options", [[], ["--json"]], ids=["table", "json"])
    def test_a_closed_pipe_ends_a_command_quietly(self, many: Path, options: list[str]) -> None:
        """As `| head -1` does."""
        command = [*COMMAND, "inspect", str(many), "--limit", "5000", *options]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
            assert process.stdout is not None
            assert process.stderr is not None
            process.stdout.readline()
            process.stdout.close()
            assert process.stderr.read() == b""
            assert process.wait(timeout=60) in {0, 1}

    @pytest.mark.parametrize("arguments", [["--help"], ["check", "--help"], FAST_JSON])
    def test_a_full_disk_is_an_error(self, arguments: list[str]) -> None:
        """Whatever could not be written."""
        with Path("/dev/full").open("w") as full:
            done = subprocess.run(
                [*COMMAND, *arguments],
                stdout=full,
                stderr=subprocess.PIPE,
                text=True,
                timeout=100,
                check=False,
            )
        assert (done.returncode, done.stderr) == (1, "Error: No space left on device\n")

    def test_characters_that_a_terminal_lacks_are_escaped(self, tmp_path: Path) -> None:
        """Letters that it lacks are written out."""
        path = filled(tmp_path / "s.db", lambda store: put(store, "price", ["ключ"], HOUR, 0))
        found = stillfresh("inspect", str(path), env={**os.environ, "PYTHONIOENCODING": "latin-1"})
        assert found.returncode == 0, found.stderr
        assert r"\u043a\u043b\u044e\u0447" in found.stdout


def on_a_terminal(arguments: list[str], **environment: str) -> str:
    """What a person sees: stdout and stderr are a terminal of 60 columns."""
    leader, follower = pty.openpty()
    env = {name: it for name, it in os.environ.items() if name not in {"NO_COLOR", "CI"}}
    env |= {"TERM": "xterm-256color", "COLUMNS": "60", **environment}
    with subprocess.Popen(
        [*COMMAND, *arguments], stdin=follower, stdout=follower, stderr=follower, env=env
    ) as process:
        os.close(follower)
        seen = b""
        while True:
            try:
                part = os.read(leader, 4096)
            except OSError:  # the last one has closed it
                break
            seen += part
        assert process.wait(timeout=60) == 0
    os.close(leader)
    return seen.decode().replace("\r\n", "\n")


class TestG10Terminal:
    def test_colours_are_used_on_a_terminal_only(self, tmp_path: Path) -> None:
        """On a terminal, and not with NO_COLOR, on a dumb one, or in a pipe."""
        path = filled(tmp_path / "s.db", lambda store: put(store, "price", ["a"], HOUR, 0))
        assert "\x1b[" in on_a_terminal(["inspect", str(path)])
        assert "\x1b[3" not in on_a_terminal(["inspect", str(path)], NO_COLOR="1")
        assert "\x1b[" not in on_a_terminal(["inspect", str(path)], TERM="dumb")
        assert "\x1b[" not in stillfresh("inspect", str(path)).stdout

    def test_a_long_id_is_folded_not_cut(self, tmp_path: Path) -> None:
        """It can still be copied."""
        long = "".join(f"{number:03}" for number in range(60))
        path = filled(tmp_path / "s.db", lambda store: put(store, "price", [long], HOUR, 0))
        seen = on_a_terminal(["inspect", str(path)], NO_COLOR="1")
        assert max(len(re.sub(r"\x1b\[[0-9;]*m", "", line)) for line in seen.splitlines()) <= 60
        assert "…" not in seen
        assert "059" in seen

    def test_a_progress_bar_is_shown_for_long_work(self) -> None:
        """On the terminal, and gone when it is done; json is still one document."""
        seen = on_a_terminal(["bench", "memory://", "sqlite:///", "--json", "--seconds", "0.5"])
        assert "Measuring:" in seen
        document = seen[seen.rindex("\n[\n") :] if "\n[\n" in seen else seen[seen.index("[\n") :]
        assert json.loads(document[document.index("[\n") :])


class TestG10Bench:
    def test_bench_measures_each_store(self, tmp_path: Path) -> None:
        """A hit, a read, misses; nothing is left behind."""
        stores = ["memory://", f"sqlite:///{tmp_path}/x.db"]
        rows = json.loads(said("bench", *stores, "--seconds", "0.05", "--json"))
        assert [(row["store"], row["operation"]) for row in rows] == [
            ("memory://", "hit"),
            ("memory://", "miss, loaded and stored"),
            ("memory://", "100 misses in one call"),
            (f"sqlite:///{tmp_path}/x.db", "hit"),
            (f"sqlite:///{tmp_path}/x.db", "read of the store"),
            (f"sqlite:///{tmp_path}/x.db", "miss, loaded and stored"),
            (f"sqlite:///{tmp_path}/x.db", "100 misses in one call"),
        ]
        assert all(0 < row["median_us"] <= row["p99_us"] for row in rows)
        assert list(tmp_path.iterdir()) == []

    def test_bench_prints_a_table(self) -> None:
        """For people."""
        head, hit, *_ = said("bench", "--seconds", "0.01").splitlines()
        assert head.split() == ["store", "operation", "a", "second", "median", "p99"]
        assert hit.startswith("memory://")

    def test_bench_leaves_nothing_on_a_server(self, valkey: Server) -> None:
        """What it wrote it deletes."""
        url = valkey.url()
        rows = json.loads(said("bench", url, "--seconds", "0.05", "--json"))
        assert len(rows) == 4
        assert json.loads(said("inspect", url, "--json"))["copies"] == 0

    def test_bench_of_an_unreachable_store_is_an_error(self) -> None:
        """Is not measured as one that is empty."""
        result = call("bench", f"redis://127.0.0.1:{free_port()}/0?timeout=0.2s")
        assert result.exit_code == 1
        assert "unavailable" in result.stderr

    def test_g18_bench_takes_less_than_a_minute(self) -> None:
        """As long as it is told for each measurement; the default of all of them together."""
        measurements = 7
        assert measurements * measuring.LASTS < 60
        assert len(said("bench", "--seconds", "0.01").splitlines()) == measurements + 1

    def test_g18_bench_all_runs_the_projects_benchmarks_in_a_checkout(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """`--all` is `python -m benchmarks`, and its exit code; elsewhere it is wrong use."""
        (tmp_path / "benchmarks").mkdir()
        (tmp_path / "benchmarks" / "__main__.py").write_text("print('ran'); raise SystemExit(3)")
        (tmp_path / "src" / "stillfresh").mkdir(parents=True)
        found = stillfresh("bench", "--all", cwd=tmp_path)
        assert (found.stdout, found.returncode) == ("ran\n", 3)
        monkeypatch.chdir(tmp_path)
        assert "memory://" in said("bench", "--seconds", "0.01")
        assert call("bench", "--all", "x.db").exit_code == 2
        monkeypatch.chdir(tmp_path / "src")
        result = call("bench", "--all")
        assert (result.exit_code, "in a clone of stillfresh" in result.stderr) == (2, True)


SETTINGS = """
[store]
url = "sqlite:///{directory}/site.db"

[server]
port = 0

[kinds.post]
batch_url = "http://127.0.0.1:1/posts"
fresh_for = "5m"
"""


class TestG10Serve:
    def test_check_reports_a_good_file(self, tmp_path: Path) -> None:
        """In a line, or in JSON; nothing is opened."""
        file = tmp_path / "stillfresh.toml"
        file.write_text(SETTINGS.format(directory=tmp_path))
        assert said("check", str(file)) == f"{file}: fine; kind post\n"
        found = json.loads(said("check", str(file), "--json"))
        assert found == {"file": str(file), "ok": True, "mistakes": []}
        assert [it.name for it in tmp_path.iterdir()] == ["stillfresh.toml"]

    def test_check_lists_every_mistake(self, tmp_path: Path) -> None:
        """A line each, with its key, and 2."""
        file = tmp_path / "stillfresh.toml"
        file.write_text('[store]\nurl = "ftp://x"\n[kinds.post]\nfresh_for = "soon"\n')
        result = call("check", str(file))
        assert (result.exit_code, result.stdout) == (2, "")
        keys = ("store.url", "kinds.post.fresh_for", "kinds.post.url")
        assert all(key in result.stderr for key in keys)
        assert result.stderr.count("\n") == len(keys)
        result = call("check", str(file), "--json")
        assert (result.exit_code, result.stderr) == (2, "")
        assert len(json.loads(result.stdout)["mistakes"]) == len(keys)

    def test_serve_runs_a_file_until_a_signal(self, tmp_path: Path) -> None:
        """Options stand in the place of what the file says."""
        file = tmp_path / "stillfresh.toml"
        file.write_text(SETTINGS.format(directory=tmp_path).replace("port = 0", "port = 1"))
        with subprocess.Popen(
            [*COMMAND, "serve", str(file), "--port", "0"], stdout=subprocess.PIPE, text=True
        ) as process:
            assert process.stdout is not None
            address = process.stdout.readline().split("/v1/")[0]
            assert httpx.get(f"{address}/healthz", timeout=60).status_code == 200
            process.send_signal(signal.SIGTERM)
            assert process.wait(timeout=60) == 0
        assert json.loads(said("inspect", f"{tmp_path}/site.db", "--json"))["copies"] == 0

    def test_a_demo_that_cannot_start_is_an_error(self, tmp_path: Path) -> None:
        """Its port is taken, its directory is a file: 1; a port that is none is wrong use: 2."""
        (tmp_path / "file").touch()
        with socket.create_server(("127.0.0.1", 0)) as taken:
            port = taken.getsockname()[1]
            assert call("demo", "--port", f"{port}").exit_code == 1
        assert call("demo", "--store", f"{tmp_path}/file").exit_code == 1
        assert call("demo", "--port", "99999").exit_code == 2

    def test_demo_runs_until_ctrl_c(self) -> None:
        """One address to open."""
        with subprocess.Popen(
            [*COMMAND, "demo", "--port", "0"], stdout=subprocess.PIPE, text=True
        ) as process:
            assert process.stdout is not None
            address = process.stdout.readline().split()[-1]
            assert httpx.get(address, timeout=60).status_code == 200
            process.send_signal(signal.SIGINT)
            assert process.wait(timeout=60) in {0, 130}


class TestG10Words:
    @given(st.text())
    def test_control_characters_are_escaped(self, text: str) -> None:
        """And nothing else is touched."""
        shown = plain(text)
        assert shown.isprintable()
        assert shown == text or not text.isprintable()

    @given(st.floats(min_value=0, max_value=1e12))
    def test_sizes_and_ages_are_short_texts(self, number: float) -> None:
        """Whatever they are."""
        assert len(size_text(number)) <= 10
        assert len(age_text(number)) <= 12
        assert len(moment_text(number, 0.0)) <= 45

    def test_sizes_and_ages_use_the_largest_fitting_unit(self) -> None:
        """The largest that there are some of."""
        assert [size_text(it) for it in (None, 0, 999, 1_000, 24_576, 123_456_789)] == [
            "-",
            "0 B",
            "999 B",
            "1 kB",
            "24.6 kB",
            "123 MB",
        ]
        assert [age_text(it) for it in (None, 0, 0.25, 90, 7_199, 86_400 * 9)] == [
            "-",
            "0 s",
            "0.2 s",
            "90 s",
            "120 min",
            "9 d",
        ]
        assert moment_text(float("inf"), 0) == "for ever"

    def test_passwords_in_addresses_are_not_shown(self) -> None:
        """An address is, without."""
        assert without_password("redis://me:secret@host/0") == "redis://***@host/0"
        assert without_password("redis://:secret@host:1/0") == "redis://***@host:1/0"
        assert without_password("redis://me:se/cr@et@host/0") == "redis://***@host/0"
        assert without_password("me:secret@host") == "me:***@host"
        assert without_password("sqlite:///a@b.db") == "sqlite:///a@b.db"
        assert without_password("a@b.db") == "a@b.db"

    @pytest.mark.parametrize(
        "address",
        [
            "mysql://u:sekret@host/db",
            "u:sekret@host",
            "memory://u:sekret@h",
            "redis://u:sekret@[",
            "redis://u:#sekret@h",
            "redis://u:/sekret@h",
            "redis://u:?sekret@h",
            "redis:/u:sekret@h",
            "dynamodb://u:sekret@table?bucket=b",
            "sqlite://u:sekret@h/x",
            "x://u:p/sekret@h",
        ],
    )
    def test_passwords_in_addresses_are_not_in_errors(self, tmp_path: Path, address: str) -> None:
        """Wherever an address was written, and however wrongly."""
        file = tmp_path / "s.toml"
        lines = [
            f'[pages]\nupstream = "{address}"',
            f'[pages]\nupstream = "{address.replace("x:", "http:")}"',
            f'[pages]\nupstream = ["{address}"]',
            f'[pages]\nupstream = "http://x"\n[store]\nurl = "{address}"',
            f'[kinds.k]\nfresh_for = 1\nbatch_url = "{address}"',
            f'[kinds.k]\nfresh_for = 1\nbatch_url = "{address.replace("x:", "http:")}"',
        ]
        for line in lines:
            file.write_text(line)
            assert "sekret" not in call("check", str(file)).output
            assert call("serve", str(file)).exit_code == 2
        for found in (call("inspect", address), call("serve", "--upstream", address)):
            assert found.exit_code == 2
            assert "sekret" not in found.output
            assert found.output.count("\n") == 1


class TestE39Help:
    @pytest.mark.parametrize("name", main.listed)
    def test_the_list_of_commands_has_the_first_line_of_each_ones_help(self, name: str) -> None:
        command = main.get_command(click.Context(main), name)
        assert command is not None
        assert command.name == name
        assert main.listed[name][1] == command.get_short_help_str(200)

    @pytest.mark.parametrize("option", ["--help", "--version"])
    def test_help_imports_neither_the_engine_nor_a_command(self, option: str) -> None:
        """It is printed at once: nothing large is imported."""
        program = (
            f"import sys; sys.argv = ['stillfresh', '{option}']\n"
            "from stillfresh.cli import main\n"
            "try:\n    main()\n"
            "finally:\n    print(*sys.modules, sep='\\n', file=sys.stderr)\n"
        )
        ended = subprocess.run(
            [sys.executable, "-c", program], capture_output=True, text=True, check=True
        )
        modules = set(ended.stderr.splitlines())
        assert "stillfresh.cli.program" in modules
        assert not modules & {"asyncio", "rich", "stillfresh.engine", "stillfresh.cli.serving"}
