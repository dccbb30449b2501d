"""nginx with `proxy_cache` under the same proof: an HTTP cache in front of a site.

Each process of the proof is a visitor and a part of the site: it asks nginx for pages, and answers
nginx on a port that all processes share, so the kernel chooses which of them renders a page. A
process that is killed or paused takes the page along that it renders. The faults of connections are
between nginx and the site. nginx itself stays up: without it, no visitor would get an answer at
all, and there would be nothing to judge.

Everything is set as nginx's documentation says: one request for a page at a time, old pages while
they are refreshed and while the site is down, and times that the site names in `Cache-Control`. A
page is invalidated with `proxy_cache_bypass`, which renders it anew and stores it: free nginx has
no other way.

nginx is started by a shell that waits for the end of its input. So it also ends if the command is
killed, which cannot end it any more.
"""

import asyncio
import fcntl
import grp
import os
import pwd
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from stillfresh.errors import ConfigError, LoadFailed, StoreError
from stillfresh.lab.prove.proxy import HOST, Proxy, faults_of_connections, stop_listening
from stillfresh.lab.prove.shelf import PeerShelf
from stillfresh.lab.prove.stage import Stage
from stillfresh.lab.prove.witness import Log, MovedClock

if TYPE_CHECKING:
    from stillfresh.lab.prove.worker import ProofJob

NGINX: Final = "nginx"
SYSTEM_FOLDERS: Final = ("/usr/local/sbin", "/usr/sbin")
"""Where packages put it, and the PATH of most users does not lead."""
STARTED_WITHIN: Final = 30.0
"""Seconds."""
ANSWERED_WITHIN: Final = 90.0
"""Seconds for one page: longer than nginx waits for the site."""
ERROR_FOR: Final = 30 * 24 * 3600
OK: Final = 200
OLD: Final = "STALE"
"""`$upstream_cache_status` of an old page: nginx asks the site meanwhile, or could not."""
RENEWED: Final = "BYPASS"
"""`$upstream_cache_status` of a page that was rendered anew."""
SOCKET: Final = "socket"
VISITORS: Final = "visitors"
"""A file that each process has locked, together with the others, while it asks for pages."""
GUARDED: Final = '"$0" -c "$1" & cat >/dev/null; kill "$!"; wait "$!"'

SETTINGS: Final = """\
{user}
daemon off;
worker_processes 1;
pid {folder}/pid;
error_log {folder}/errors crit;
events {{ worker_connections 512; }}
http {{
  access_log off;
  keepalive_timeout 1d;
  client_body_temp_path {folder}/client;
  proxy_temp_path {folder}/proxy;
  fastcgi_temp_path {folder}/fastcgi;
  uwsgi_temp_path {folder}/uwsgi;
  scgi_temp_path {folder}/scgi;
  proxy_cache_path {folder}/pages keys_zone=pages:1m;
  server {{
    listen unix:{folder}/{socket};
    location / {{
      proxy_pass http://{host}:{port};
      proxy_cache pages;
      proxy_cache_lock on;
      proxy_cache_background_update on;
      proxy_cache_bypass $http_x_refresh;
      add_header X-Cache-Status $upstream_cache_status always;
    }}
  }}
}}
"""


def checked_nginx() -> str:
    """The path of the program. Raises ConfigError if it is not installed."""
    path = os.pathsep.join([os.environ.get("PATH", os.defpath), *SYSTEM_FOLDERS])
    program = shutil.which(NGINX, path=path)
    if program is None:
        raise ConfigError(
            "--peer nginx: nginx is not installed, or not on the PATH; "
            "on Debian and Ubuntu, run apt-get install nginx-light"
        )
    return program


@contextmanager
def nginx_stage() -> Iterator[Stage]:
    """nginx before a site whose connections can be cut, delayed and half answered."""
    program = checked_nginx()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="nginx-")))
        site = stack.enter_context(_shared_port())
        proxy = stack.enter_context(Proxy(HOST, site))
        stack.enter_context(_running(program, folder, proxy.port))
        (folder / VISITORS).touch()
        yield Stage(
            str(folder / SOCKET),
            faults_of_connections(proxy, "the site"),
            peer=NGINX,
            site_port=site,
            moves_clock=False,
            may_forget=True,
        )


@contextmanager
def _shared_port() -> Iterator[int]:
    """A port on which each process of the proof may listen, and nobody else."""
    with listener_on(0) as own:
        yield own.getsockname()[1]


def listener_on(port: int) -> socket.socket:
    """A socket on a port that others have, too. 0: a port that is free."""
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    listener.bind((HOST, port))
    return listener


@contextmanager
def _running(program: str, folder: Path, site: int) -> Iterator[None]:
    settings = folder / "nginx.conf"
    place = folder / SOCKET
    text = SETTINGS.format(user=_user(), folder=folder, socket=SOCKET, host=HOST, port=site)
    settings.write_text(text)
    with (folder / "output").open("wb") as output:
        process = subprocess.Popen(  # noqa: S603 (our own words, and a path)
            ["/bin/sh", "-c", GUARDED, program, str(settings)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=output,
            start_new_session=True,  # the terminal's Ctrl-C is for the command alone
        )
    try:
        _await_start(folder, place)
        yield
    finally:
        process.communicate()  # the end of its input


def _user() -> str:
    """Who runs nginx's worker. Root's would give up its rights, and could not use the folder."""
    if os.geteuid() != 0:
        return ""
    return f"user {pwd.getpwuid(0).pw_name} {grp.getgrgid(0).gr_name};"


def _await_start(folder: Path, place: Path) -> None:
    deadline = time.monotonic() + STARTED_WITHIN
    while True:
        with socket.socket(socket.AF_UNIX) as probe, suppress(OSError):
            probe.connect(str(place))
            return
        output = (folder / "output").read_text(errors="replace")
        if "[emerg]" in output or time.monotonic() > deadline:
            reason = output.strip() or f"no answer within {STARTED_WITHIN:g} s"
            raise StoreError(f"nginx did not start: {reason}")
        time.sleep(0.02)


class Reply(NamedTuple):
    """What nginx answered."""

    status: int
    cache_status: str
    text: str


class NginxShelf(PeerShelf):
    """A visitor of nginx, and a part of the site behind it."""

    def __init__(self, job: "ProofJob", log: Log, clock: MovedClock) -> None:
        super().__init__(job, log, clock)
        self.get = self._visit
        self.drop = self._renew
        self.close = self._leave
        fresh_for = f"{job.stage.fresh_for:.0f}"
        stale_for = f"{job.stage.stale_for:.0f}"
        self._terms = (
            f"max-age={fresh_for}, stale-while-revalidate={stale_for}, stale-if-error={ERROR_FOR}"
        )
        self._place = Path(job.stage.url)
        self._replies: dict[asyncio.Task[None], asyncio.StreamWriter] = {}
        """To nginx, while they are made."""
        self._idle: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []

    async def open(self) -> None:
        self._visitors = (self._place.parent / VISITORS).open("rb")
        fcntl.flock(self._visitors, fcntl.LOCK_SH)
        listener = listener_on(self.job.stage.site_port)
        self._site = await asyncio.start_server(self._accept, sock=listener)

    async def _leave(self) -> None:
        """End, but only after the last visitor: until then nginx may ask this part of the site."""
        for _, writer in self._idle:
            writer.close()
        with self._visitors:
            fcntl.flock(self._visitors, fcntl.LOCK_UN)
            await asyncio.to_thread(fcntl.flock, self._visitors, fcntl.LOCK_EX)
        await stop_listening(self._site)
        for reply in self._replies.values():
            reply.transport.abort()
        if self._replies:
            await asyncio.wait(self._replies)

    def _accept(self, request: asyncio.StreamReader, reply: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(self._render(request, reply))
        self._replies[task] = reply
        task.add_done_callback(self._replies.pop)

    async def _render(self, request: asyncio.StreamReader, reply: asyncio.StreamWriter) -> None:
        """Answer nginx, as the site."""
        try:
            head = await request.readuntil(b"\r\n\r\n")
            _, path, _ = head.decode().split(" ", 2)
            text = (await self.load(path.strip("/"))).encode()
            fields = f"Cache-Control: {self._terms}\r\nContent-Length: {len(text)}\r\n"
            reply.write(f"HTTP/1.1 200 OK\r\n{fields}Connection: close\r\n\r\n".encode() + text)
            await reply.drain()
        except (OSError, asyncio.IncompleteReadError):
            pass  # the connection was cut
        finally:
            reply.close()

    async def _visit(self, key: str) -> str:
        reply = await self._ask(key)
        if reply.status != OK:
            raise LoadFailed(f"nginx answered {reply.status}")
        if reply.cache_status == OLD:
            self._note_trouble(reply.text)
        return reply.text

    def _note_trouble(self, text: str) -> None:
        """Count a page that is so old that nginx could not ask the site."""
        fetched_at, _, _ = text.partition(" ")
        usable_for = self.job.stage.fresh_for + self.job.stage.stale_for
        if self._clock() - float(fetched_at) > usable_for:
            self.troubles += 1

    async def _renew(self, key: str) -> None:
        reply = await self._ask(key, "X-Refresh: 1\r\n")
        if reply.status != OK or reply.cache_status != RENEWED:
            raise StoreError(f"nginx answered {reply.status}, {reply.cache_status or 'no cache'}")

    async def _ask(self, key: str, fields: str = "") -> Reply:
        """Ask nginx for a page, on a connection that is used again."""
        if self._idle:
            reader, writer = self._idle.pop()
        else:
            reader, writer = await asyncio.open_unix_connection(str(self._place))
        is_reusable = False
        try:
            async with asyncio.timeout(ANSWERED_WITHIN):
                writer.write(f"GET /{key} HTTP/1.1\r\nHost: site\r\n{fields}\r\n".encode())
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                status, reply_fields = _parsed(head)
                body = await reader.readexactly(int(reply_fields["content-length"]))
            is_reusable = reply_fields.get("connection") == "keep-alive"
        finally:
            if is_reusable:
                self._idle.append((reader, writer))
            else:
                writer.close()
        return Reply(status, reply_fields.get("x-cache-status", ""), body.decode())


def _parsed(head: str) -> tuple[int, Mapping[str, str]]:
    """The status and the fields of a response."""
    first_line, *lines = head.strip().split("\r\n")
    _, status, *_ = first_line.split(" ")
    pairs = (line.partition(":") for line in lines)
    return int(status), {name.lower(): value.strip() for name, _, value in pairs}
