"""The HTTP cache of clients beside hishel and requests-cache, all on SQLite (D1).

`python -m benchmarks.http_clients site` is the site: it prints its port, and counts requests.
`python -m benchmarks.http_clients ask NAME FOLDER URL` is one of eight processes: it says `ready`,
waits for a line, and asks.
"""

import asyncio
import itertools
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import IO, Any, cast

import hishel
import hishel.httpx
import hishel.requests
import httpx
import requests
import requests_cache

from benchmarks.harness import Contender, Figures, Progress, Row, Section, race, race_on_loop
from stillfresh.integrations.httpx import AsyncCacheTransport
from stillfresh.integrations.requests import CacheAdapter

__all__ = ["section"]

OURS = "stillfresh"
ASYNC = (OURS, "hishel", "no cache")
SYNC = (OURS, "hishel", "requests-cache", "no cache")
AT_ONCE = 16
PROCESSES = 8
BODY = b"x" * 2_000
PAUSE = 0.05
"""Seconds that the site takes for an answer that many ask for at once."""


async def serve_site() -> None:
    """`/slow…` takes a while; `/count?path` says how often a path was asked for."""
    counts: dict[str, int] = {}

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                path = head.split(b" ", 2)[1].decode()
                body = BODY
                if path.startswith("/count?"):
                    body = b"%d" % counts.get(path.partition("?")[2], 0)
                else:
                    counts[path] = counts.get(path, 0) + 1
                if path.startswith("/slow"):
                    await asyncio.sleep(PAUSE)
                lines = (
                    b"HTTP/1.1 200 OK\r\nCache-Control: max-age=3600\r\nContent-Length: %d\r\n\r\n"
                )
                writer.write(lines % len(body) + body)
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


def async_client(name: str, folder: str) -> httpx.AsyncClient:
    match name:
        case "stillfresh":
            return httpx.AsyncClient(transport=AsyncCacheTransport(f"sqlite:///{folder}/async.db"))
        case "hishel":
            storage = hishel.AsyncSqliteStorage(database_path=f"{folder}/hishel-async.db")
            transport = hishel.httpx.AsyncCacheTransport(
                httpx.AsyncHTTPTransport(), storage, rfc=True
            )
            return httpx.AsyncClient(transport=transport)
    return httpx.AsyncClient()


def session_of(name: str, folder: str) -> requests.Session:
    session = requests.Session()
    match name:
        case "stillfresh":
            session.mount("http://", CacheAdapter(f"sqlite:///{folder}/sync.db"))
        case "hishel":
            storage = hishel.SqliteStorage(database_path=f"{folder}/hishel-sync.db")
            session.mount("http://", hishel.requests.CacheAdapter(storage=storage, rfc=True))
        case "requests-cache":
            return requests_cache.CachedSession(f"{folder}/requests-cache", cache_control=True)
    return session


@contextmanager
def started_site() -> Iterator[str]:
    command = [sys.executable, "-m", "benchmarks.http_clients", "site"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            port = cast("IO[str]", process.stdout).readline().strip()
            yield f"http://127.0.0.1:{port}"
        finally:
            process.kill()


def asked(site: str, path: str) -> int:
    return int(httpx.get(f"{site}/count?{path}").text)


async def race_async(site: str, folder: str) -> tuple[Figures, Figures, Figures]:
    """A hit and a miss in µs, and the site's requests for tasks at once."""
    async with AsyncClients(folder) as clients:
        hits: list[Contender] = []
        misses: list[Contender] = []
        for name, client in clients.items():
            url = f"{site}/hit-{name.replace(' ', '')}"
            await client.get(url)
            await client.get(url)
            hits.append(Contender(name, "await client.get(key)", {"client": client}, [url] * 10))
            fresh = map(f"{site}/miss-{name.replace(' ', '')}-{{}}".format, itertools.count())
            names = {"client": client, "fresh": fresh}
            misses.append(Contender(name, "await client.get(next(fresh))", names, [0] * 5))
        hit = await race_on_loop(hits, rounds=31)
        miss = await race_on_loop(misses, rounds=15)
        requests_sent: Figures = {}
        for name, client in clients.items():
            path = f"/slow-tasks-{name.replace(' ', '')}"
            await asyncio.gather(*(client.get(f"{site}{path}") for _ in range(AT_ONCE)))
            requests_sent[name] = asked(site, path)
    return in_micros(hit), in_micros(miss), requests_sent


class AsyncClients:
    """The async clients, by name; all are closed."""

    def __init__(self, folder: str) -> None:
        self._clients = {name: async_client(name, folder) for name in ASYNC}

    async def __aenter__(self) -> dict[str, httpx.AsyncClient]:
        return self._clients

    async def __aexit__(self, *_: object) -> None:
        for client in self._clients.values():
            await client.aclose()


def race_sync(site: str, folder: str) -> tuple[Figures, Figures, Figures]:
    """The same with requests, in threads."""
    hits: list[Contender] = []
    misses: list[Contender] = []
    sessions = {name: session_of(name, folder) for name in SYNC}
    for name, session in sessions.items():
        url = f"{site}/hit-sync-{name.replace(' ', '')}"
        session.get(url)
        session.get(url)
        hits.append(Contender(name, "session.get(key)", {"session": session}, [url] * 10))
        fresh = map(f"{site}/miss-sync-{name.replace(' ', '')}-{{}}".format, itertools.count())
        names: dict[str, Any] = {"session": session, "fresh": fresh}
        misses.append(Contender(name, "session.get(next(fresh))", names, [0] * 5))
    hit = race(hits, rounds=31)
    miss = race(misses, rounds=15)
    sent = {name: _threads(site, name, session) for name, session in sessions.items()}
    for session in sessions.values():
        session.close()
    return in_micros(hit), in_micros(miss), sent


def _threads(site: str, name: str, session: requests.Session) -> float:
    path = f"/slow-threads-{name.replace(' ', '')}"
    start = threading.Barrier(AT_ONCE)

    def ask(_: int) -> None:
        start.wait()
        session.get(f"{site}{path}")

    with ThreadPoolExecutor(AT_ONCE) as pool:
        list(pool.map(ask, range(AT_ONCE)))
    return asked(site, path)


def in_micros(taken: Figures) -> Figures:
    return {name: nanoseconds / 1_000 for name, nanoseconds in taken.items()}


def from_processes(site: str, folder: str, name: str) -> float:
    """The site's requests for processes at once; an error of one ends the measurement."""
    path = f"/slow-processes-{name.replace(' ', '')}"
    command = [sys.executable, "-m", "benchmarks.http_clients", "ask", name, folder]
    with ExitStack() as stack:
        processes = []
        for _ in range(PROCESSES):
            process = subprocess.Popen(
                [*command, f"{site}{path}"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            stack.enter_context(process)
            stack.callback(process.kill)
            processes.append(process)
        for process in processes:
            cast("IO[str]", process.stdout).readline()
        for process in processes:
            stdin = cast("IO[str]", process.stdin)
            stdin.write("go\n")
            stdin.flush()
        for process in processes:
            if cast("IO[str]", process.stdout).readline().strip() != str(len(BODY)):
                raise RuntimeError(f"{name}: a process got no whole answer")
    return asked(site, path)


def ask(name: str, folder: str, url: str) -> None:
    session = session_of(name, folder)
    print("ready", flush=True)
    sys.stdin.readline()
    print(len(session.get(url).content), flush=True)
    session.close()


def section(progress: Progress) -> Section:
    figures: dict[str, Figures] = {}
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder, started_site() as site:
        progress("HTTP clients: httpx")
        found = asyncio.run(race_async(site, folder))
        _add(rows, figures, "httpx.AsyncClient", f"{AT_ONCE} tasks", found)
        progress("HTTP clients: requests")
        found = race_sync(site, folder)
        _add(rows, figures, "requests.Session", f"{AT_ONCE} threads", found)
        progress("HTTP clients: processes")
        sent = {name: from_processes(site, folder, name) for name in SYNC[:-1]}
        what = f"requests of the site for {PROCESSES} processes at once"
        figures[what] = sent
        rows.append(Row("D1", what, sent[OURS], 1.0, unit=""))
    notes = (
        "A response of 2 kB with `max-age`, on SQLite, from a site on this machine, each with the "
        "client's own cost. hishel follows RFC 9111 (`rfc=True`), requests-cache the header fields "
        "(`cache_control=True`)."
    )
    return Section("HTTP clients (D1)", rows, figures, notes)


def _add(
    rows: list[Row],
    figures: dict[str, Figures],
    client: str,
    who: str,
    found: tuple[Figures, Figures, Figures],
) -> None:
    for what, taken in zip(("a hit", "a miss"), found[:2], strict=True):
        figures[f"`{client}`, {what}, µs"] = taken
        for peer in sorted(set(taken) - {OURS}):
            ratio = taken[OURS] / taken[peer]
            rows.append(Row("D1", f"{what} of `{client}`, against {peer}", ratio))
    what = f"requests of the site for {who} at once, with `{client}`"
    figures[what] = found[2]
    rows.append(Row("D1", what, found[2][OURS], 1.0, unit=""))


def main(command: str, *arguments: str) -> None:
    programs: dict[str, Callable[..., object]] = {
        "site": lambda: asyncio.run(serve_site()),
        "ask": ask,
    }
    programs[command](*arguments)


if __name__ == "__main__":
    main(*sys.argv[1:])
