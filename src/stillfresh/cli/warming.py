"""`stillfresh warm`: fills a cache by requesting pages and entities before visitors do.

A store does not know where its entries come from. So the command asks a running gateway over HTTP,
or runs one itself for a while, from a file of settings or from a store and a site.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

import click

from stillfresh.cli.program import TEXT, as_json, command, extra, plain, print_json, working
from stillfresh.errors import ConfigError, without_password

if TYPE_CHECKING:
    import httpx2

WITHIN: Final = 60.0
"""Seconds for one answer."""
MOST_SHOWN: Final = 20
"""Lines that failed, on stderr."""
OUTCOMES: Final = ("stored", "there already", "not kept", "failed")


@command(
    "stillfresh warm http://127.0.0.1:8080 --from urls.txt",
    "stillfresh warm stillfresh.toml --from urls.txt --rate 5",
    "stillfresh warm site.db --upstream http://127.0.0.1:3000 --from urls.txt",
)
@click.argument("target", metavar="URL|FILE|STORE", type=TEXT)
@click.option(
    "--from",
    "source",
    metavar="FILE",
    required=True,
    help="A file with a path or an address in each line; - is stdin.",
)
@click.option("--upstream", help="With a STORE: the site whose pages it keeps.")
@click.option(
    "--rate",
    default=10.0,
    show_default=True,
    type=click.FloatRange(0, min_open=True),
    help="Requests a second, at most.",
)
@click.option(
    "--concurrency",
    default=4,
    show_default=True,
    type=click.IntRange(1, 100),
    help="Requests at once, at most.",
)
@as_json
@click.pass_context
def warm(
    ctx: click.Context,
    *,
    target: str,
    source: str,
    upstream: str | None,
    rate: float,
    concurrency: int,
    is_json: bool,
) -> None:
    """Fill a cache before visitors come.

    Requests every line of the file that --from names. A line is a path (/blog/), an address
    (https://example.org/blog/, whose host is sent as Host), or an entity (/v1/post/ann:1). Exits
    with 1 if a line failed.

    URL is a running gateway. FILE is a file of settings, as `serve` takes it; the command fills its
    store, which must not be memory://. With a STORE, name the site with --upstream. A page is
    stored for the Host that visitors use: write addresses, or set pages.site_hosts, whose first
    name is the host of paths.
    """
    counts: Counter[str] = Counter()

    async def request_all() -> None:
        async with _gateway(target, upstream) as client:
            turns = _turns(rate)
            async with asyncio.TaskGroup() as group:
                for _ in range(concurrency):
                    group.create_task(_request_lines(client, paths, turns, counts, advance))

    # Opened before the event loop runs: opening a pipe waits for its writer.
    with working("Asking for:") as advance, click.open_file(source) as lines:
        stripped = (line.strip() for line in lines)
        paths = (line for line in stripped if line and not line.startswith("#"))
        asyncio.run(request_all())
    if is_json:
        print_json({outcome.replace(" ", "_"): counts[outcome] for outcome in OUTCOMES})
    else:
        click.echo(", ".join(f"{counts[outcome]:,} {outcome}" for outcome in OUTCOMES))
    ctx.exit(1 if counts["failed"] else 0)


def _turns(rate: float) -> Callable[[], float]:
    """Seconds that the next request has to wait for its turn."""
    due = 0.0
    now = asyncio.get_running_loop().time

    def turn() -> float:
        nonlocal due
        at = max(due, now())
        due = at + 1 / rate
        return at - now()

    return turn


async def _request_lines(
    client: "httpx2.AsyncClient",
    paths: Iterator[str],
    turn: Callable[[], float],
    counts: Counter[str],
    advance: Callable[[int], None],
) -> None:
    """Request one line after another; several of these tasks share the lines."""
    for line in paths:
        await asyncio.sleep(turn())
        outcome, why = await _request_line(client, line)
        counts[outcome] += 1
        advance(1)
        if why and counts["failed"] <= MOST_SHOWN:
            click.echo(plain(f"{why}: {line}"), err=True)


async def _request_line(client: "httpx2.AsyncClient", line: str) -> tuple[str, str]:
    """One of `OUTCOMES`; and why, if it failed."""
    request_errors = extra("stillfresh.http.client", "web").request_errors
    try:
        parts = urlsplit(line)
        path = parts.path or "/"
        if parts.query:
            path += f"?{parts.query}"
        if not path.startswith("/") or (parts.scheme and not parts.netloc):
            return "failed", "neither a path nor an address"
        host = {"host": parts.netloc} if parts.netloc else {}
        async with client.stream("GET", path, headers=host) as response:
            async for _ in response.aiter_raw():
                pass
    except (*request_errors(), ValueError) as exc:
        return "failed", f"{type(exc).__name__} {exc}".strip()
    if response.status_code >= 400:
        return "failed", f"HTTP {response.status_code}"
    _, _, cache_status = response.headers.get("cache-status", "").rpartition("stillfresh;")
    if "hit" in cache_status.split(";")[0]:
        return "there already", ""
    if "stored" in cache_status:
        return "stored", ""
    return "not kept", ""


@asynccontextmanager
async def _gateway(target: str, upstream: str | None) -> AsyncIterator["httpx2.AsyncClient"]:
    """A client of the gateway at `target`, or of one that runs here."""
    client = extra("stillfresh.http.client", "web")
    if target.startswith(("http://", "https://")):
        _refuse(upstream, "a URL")
        base: Any = client.checked_url(target, "URL")
        async with client.httpx2.AsyncClient(base_url=base, timeout=WITHIN) as http:
            yield http
        return
    settings = _settings(target, upstream)
    if settings.store.url.startswith("memory:"):
        raise ConfigError(
            f"store {settings.store.url}: would be gone when this command ends; name the URL of "
            "the gateway that has it, or set store.url"
        )
    serving = extra("stillfresh.gateway.serving", "web")
    async with client.new_client(serving.LONGEST_WAIT, idle_connections=serving.KEPT) as sources:
        app = serving.gateway_of(settings, sources, checks_page_names=False)
        transport = client.httpx2.ASGITransport(app=app)
        async with (
            app,
            client.httpx2.AsyncClient(transport=transport, base_url=_base(settings)) as http,
        ):
            yield http


def _base(settings: Any) -> str:  # noqa: ANN401 (its module is an extra's)
    """The host of lines that are paths: a page's key has the Host that visitors use."""
    hosts = settings.pages.site_hosts if settings.pages is not None else ()
    names = [host for host in hosts if not host.startswith("*.")]
    return f"http://{names[0]}" if names else "http://localhost"


def _settings(target: str, upstream: str | None) -> Any:  # noqa: ANN401 (its module is an extra's)
    config = extra("stillfresh.gateway.config", "web")
    if target.endswith(".toml"):
        _refuse(upstream, "a FILE")
        return config.load(target)
    if upstream is None:
        raise ConfigError(
            f"{without_password(target)}: a store does not know where its entries come from; "
            "name the URL of a running gateway, a FILE of settings, or the site with --upstream"
        )
    return config.settings_of({"store": {"url": target}, "pages": {"upstream": upstream}})


def _refuse(upstream: str | None, what: str) -> None:
    if upstream is not None:
        raise ConfigError(f"--upstream: goes with a STORE; {what} knows its own")
