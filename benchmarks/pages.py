"""I16, I29: hits of `stillfresh serve` and of the middleware against nginx, ASGI apps and Next.js.

The servers run side by side, one process each on the same server with the same bytes, and are
asked in turns, so that a ratio compares neighbours in time.
"""

import os
import random
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import tracemalloc
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from typing import IO, Any, TypeAlias, cast

from benchmarks import tried
from benchmarks.harness import Figures, Progress, Row, Section
from benchmarks.pages_next import Missing, next_isr, version
from benchmarks.pages_sites import BODY

__all__ = ["section"]

BARE = "a bare ASGI app"
STARLETTE = "Starlette returning the bytes"
MEMORY = "stillfresh, memory://"
SQLITE = "stillfresh, sqlite://, the store asked at every hit"
VARIED = "stillfresh, memory://, a page with Vary"
SERVE = "`stillfresh serve`, memory://"
NGINX = "nginx proxy_cache, one worker"
NEXT = "Next.js ISR, `next start`"
ROUNDS = 15
CONNECTIONS = 32
PAGES = 10_000
NGINX_SETTINGS = """\
{user} daemon off; worker_processes 1; pid {folder}/pid; error_log /dev/null crit;
events {{ worker_connections 256; }}
http {{
  access_log off;
  client_body_temp_path {folder}/client; proxy_temp_path {folder}/proxy;
  fastcgi_temp_path {folder}/fastcgi; uwsgi_temp_path {folder}/uwsgi; scgi_temp_path {folder}/scgi;
  proxy_cache_path {folder}/cache keys_zone=pages:10m;
  server {{
    listen 127.0.0.1:{port};
    location / {{ proxy_pass http://127.0.0.1:{upstream}; proxy_cache pages; }}
  }}
}}
"""


@contextmanager
def site(name: str) -> Iterator[int]:
    """One of the servers; its port."""
    command = [sys.executable, "-m", "benchmarks.pages_sites", name]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield int(cast("IO[str]", process.stdout).readline())
        finally:
            process.terminate()


@contextmanager
def nginx(folder: Path, upstream: int) -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    settings = folder / "nginx.conf"
    user = "user root;" if os.geteuid() == 0 else ""  # the folder is root's then
    settings.write_text(
        NGINX_SETTINGS.format(folder=folder, port=port, upstream=upstream, user=user)
    )
    binary = shutil.which("nginx") or ""
    # One that was unpacked, and not installed, has no folder for its first errors.
    command = [binary, "-e", f"{folder}/errors", "-c", str(settings)]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as process:
        try:
            while not _listens(port):
                if process.poll() is not None:
                    raise RuntimeError(f"nginx ended with {process.returncode}")
                time.sleep(0.01)
            yield port
        finally:
            process.terminate()


@contextmanager
def serve(upstream: int, *options: str) -> Iterator[int]:
    """What a user runs (T8): the command itself, in front of a site."""
    command = [sys.executable, "-m", "stillfresh.cli", "serve", "--port", "0"]
    command += ["--store", "memory://", "--upstream", f"http://127.0.0.1:{upstream}", *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            said = cast("IO[str]", process.stdout).readline()
            yield int(said.partition(" ")[0].rpartition(":")[2])
        finally:
            process.terminate()


def _listens(port: int) -> bool:
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == 0


def asked(port: int, seconds: float, script: Path | None = None) -> tuple[float, float]:
    """Requests a second, and the 99th percentile of their time in milliseconds.

    `script`: makes the requests.
    """
    wrk = shutil.which("wrk") or ""
    url = f"http://127.0.0.1:{port}/pricing"
    command = [
        wrk,
        "-t1",
        f"-c{CONNECTIONS}",
        f"-d{seconds}s",
        "--timeout",
        "10s",
        "--latency",
        *([] if script is None else ["-s", str(script)]),
        url,
    ]
    said = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    for line in said.splitlines():
        if "Non-2xx" in line or "Socket errors" in line:
            raise RuntimeError(f"wrk: {line.strip()}")
    rate, p99 = (
        re.search(r"Requests/sec:\s+([\d.]+)", said),
        re.search(r"99%\s+([\d.]+)(\w+)", said),
    )
    if rate is None or p99 is None:
        raise RuntimeError(f"wrk said something else: {said!r}")
    return float(rate[1]), float(p99[1]) * {"us": 0.001, "ms": 1.0, "s": 1000.0}[p99[2]]


Taken: TypeAlias = dict[str, list[tuple[float, float]]]
"""Rate and 99th percentile of each round, by name."""


def races(progress: Progress) -> tuple[Taken, str, str]:
    """Every round of each; what Next.js was; what is missing."""
    missing = [] if shutil.which("nginx") else ["nginx is not installed"]
    told = ""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        folder.chmod(0o755)
        ports = {
            BARE: stack.enter_context(site("bare")),
            STARLETTE: stack.enter_context(site("starlette")),
            MEMORY: stack.enter_context(site("memory")),
            SQLITE: stack.enter_context(site(f"sqlite:///{folder}/pages.db")),
            VARIED: stack.enter_context(site("varied")),
        }
        upstream = stack.enter_context(site("expiring"))
        ports[SERVE] = stack.enter_context(serve(upstream))
        if shutil.which("nginx"):
            ports[NGINX] = stack.enter_context(nginx(folder, upstream))
        progress("pages: Next.js is installed and built")
        try:
            (folder / "next").mkdir()
            ports[NEXT] = stack.enter_context(next_isr(folder / "next"))
            told = f" {version(folder / 'next')}, a static route handler."
        except Missing as exc:
            missing.append(f"Next.js ISR: {exc}")
        taken: Taken = {name: [] for name in ports}
        dice, order = random.Random(1), list(ports)
        for port in ports.values():
            asked(port, 1)
        for turn in range(ROUNDS):
            progress(f"pages: round {turn + 1} of {ROUNDS}")
            dice.shuffle(order)
            for name in order:
                taken[name].append(asked(ports[name], 1))
    return taken, told, "; ".join(missing)


def medians(taken: Taken, which: int) -> Figures:
    return {name: median(one[which] for one in rounds) for name, rounds in taken.items()}


def ratio(taken: Taken, name: str, other: str, which: int = 0) -> float:
    """The median of the rounds' own ratios: neighbours in time, on a machine that drifts."""
    pairs = zip(taken[name], taken[other], strict=True)
    return median(one[which] / another[which] for one, another in pairs)


def against(taken: Taken, name: str, other: str, target: float | None = None, why: str = "") -> Row:
    what = f"{name}: rate to {other}"
    return Row("I16", what, ratio(taken, name, other), target, at_least=True, tried=why)


async def fill(count: int) -> object:
    """So many pages of ten kilobytes, all different, each visited three times."""
    from stillfresh.pages import IsrMiddleware, PageCache  # noqa: PLC0415 (in a process of its own)

    async def site(scope: Any, _: object, send: Any) -> None:  # noqa: ANN401
        body = scope["raw_path"].rpartition(b"/")[2].zfill(10) + BODY[10:]
        headers = [(b"content-type", b"text/html; charset=utf-8")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    async def hear() -> dict[str, Any]:
        return {"type": "http.request", "body": b""}

    async def ignore(_: object) -> None:
        return

    app = IsrMiddleware(site, PageCache("memory://", max_entries=count), routes={"/*": "1h"})
    about = {
        "type": "http",
        "method": "GET",
        "scheme": "http",
        "root_path": "",
        "query_string": b"",
    }
    for path in (f"/page/{number}" for number in range(count)):
        for _ in range(3):
            given = {"path": path, "raw_path": path.encode(), "headers": [(b"host", b"a.example")]}
            await app({**about, **given}, hear, ignore)
    return app


def memory() -> float:
    """Bytes held for each byte of page; measured in a new process."""
    command = [sys.executable, "-c", "from benchmarks.pages import measure; measure()"]
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=os.environ)
    return float(done.stdout)


def measure() -> None:
    import asyncio  # noqa: PLC0415 (in a process of its own)
    import gc  # noqa: PLC0415

    async def run() -> float:
        await fill(1)
        gc.collect()
        tracemalloc.start()
        kept = await fill(PAGES)
        gc.collect()
        used = tracemalloc.get_traced_memory()[0]
        del kept
        return used / (PAGES * len(BODY))

    print(asyncio.run(run()))


def section(progress: Progress) -> Section:
    title = "Pages: a hit over HTTP, one process, 10 KB (I16, I29)"
    progress("pages: memory")
    what = f"memory for {PAGES:,} pages of 10 KB, to their size"
    rows = [Row("I16", what, memory(), 1.3, tried=tried.PAGE_MEMORY)]
    if shutil.which("wrk") is None:
        return Section(title, rows, missing="rates, since wrk is not installed")
    taken, told, missing = races(progress)
    rows += [
        against(taken, MEMORY, BARE, 0.9, tried.HTTP_HIT),
        against(taken, MEMORY, STARLETTE, 1.4, tried.HTTP_HIT),
        Row("I16", f"{MEMORY}: 99th percentile to {BARE}", ratio(taken, MEMORY, BARE, 1), 2.0),
        against(taken, VARIED, BARE),
        against(taken, SQLITE, BARE),
    ]
    rows.append(against(taken, SERVE, BARE))
    if NGINX in taken:
        to_nginx = ratio(taken, SERVE, NGINX)
        what, why = f"{SERVE}: rate to {NGINX}", tried.SERVE_HIT
        rows.append(Row("I29", what, to_nginx, 1.5, at_least=True, tried=why))
        rows.append(against(taken, MEMORY, NGINX))
    if NEXT in taken:
        rows.append(against(taken, MEMORY, NEXT, 15.0, tried.HTTP_NEXT))
    notes = (
        f"wrk, one thread, {CONNECTIONS} connections, {ROUNDS} rounds of a second in turns; each "
        f"ratio is the median of its rounds'.{told}"
    )
    figures = {"requests a second": medians(taken, 0), "99th percentile, ms": medians(taken, 1)}
    return Section(title, rows, figures, notes, missing=missing)
