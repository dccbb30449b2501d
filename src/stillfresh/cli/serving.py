"""`stillfresh serve`, `check`, `demo`: a gateway of settings, and a site to see it by."""

import os
from functools import partial
from typing import Any, Final

import click

from stillfresh.cli.program import WRONG_USE, as_json, command, extra, plain, print_json
from stillfresh.errors import ConfigError

NUMBER: Final = "seconds as a number, or "
"""A part of errors about durations that is true for files, not for options."""


def routes_of(
    ctx: click.Context, param: click.Parameter, texts: tuple[str, ...]
) -> dict[str, str] | None:
    """`/blog/*=10m`: a path, and how long its pages are fresh; or `never`."""
    for text in texts:
        if "=" not in text:
            problem = f"{text!r}: write PATH=DURATION, as '/blog/*=10m'"
            raise click.BadParameter(problem, ctx, param)
    pairs = (text.rpartition("=") for text in texts)
    return {path: duration for path, _, duration in pairs} or None


def given(ctx: click.Context) -> tuple[dict[str, dict[str, Any]], dict[str, str]]:
    """The options as tables of a file, and the option of each key."""
    tables: dict[str, dict[str, Any]] = {}
    options: dict[str, str] = {}
    for param in ctx.command.params:
        name = str(param.name)
        value = ctx.params[name]
        if "__" in name and value is not None and value != ():
            table, key = name.split("__")
            tables.setdefault(table, {})[key] = list(value) if isinstance(value, tuple) else value
            options[f"{table}.{key}"] = param.opts[0]
    return tables, options


@command(
    "stillfresh serve --upstream http://127.0.0.1:3000",
    "stillfresh serve --upstream https://example.org --store sqlite:///site.db",
    "stillfresh serve --upstream http://127.0.0.1:3000 --route '/blog/*=10m'",
    "stillfresh serve stillfresh.toml --port 8081 --workers 4",
)
@click.argument("file", required=False)
@click.option(
    "--upstream",
    "pages__upstream",
    multiple=True,
    help="The site, as http://host:port or https://host; repeatable, for several addresses.",
)
@click.option(
    "--store", "store__url", help="The store, as sqlite:///site.db.  [default: memory://]"
)
@click.option("--host", "server__host", help="The address to listen on.  [default: 127.0.0.1]")
@click.option(
    "--port", "server__port", type=int, help="The port; 0 is any free one.  [default: 8080]"
)
@click.option(
    "--workers",
    "server__workers",
    type=int,
    help="Worker processes, which share one --store.  [default: 1]",
)
@click.option("--uds", "server__uds", help="A Unix socket to listen on, in place of a port.")
@click.option(
    "--drain",
    "server__drain",
    help="After SIGTERM, how long /readyz answers 503 before it ends.  [default: 0s]",
)
@click.option(
    "--record",
    "server__record",
    metavar="PATH",
    help="Record reads in this file, for `stillfresh plan`.",
)
@click.option(
    "--record-share",
    "server__record_share",
    type=float,
    help="The share of all keys that is recorded.  [default: 1.0]",
)
@click.option(
    "--log-level",
    "log__level",
    metavar="LEVEL",
    help="debug, info, warning, error or critical.  [default: warning]",
)
@click.option("--log-format", "log__format", metavar="text|json", help="[default: text]")
@click.option(
    "--access-log",
    "log__access",
    metavar="off|text|json",
    help="A line for each request, on standard error.  [default: off]",
)
@click.option(
    "--site-host",
    "pages__site_hosts",
    multiple=True,
    help="A Host with pages of its own, which the site receives; repeatable.",
)
@click.option(
    "--route",
    "pages__routes",
    multiple=True,
    callback=routes_of,
    help="PATH=DURATION: how long pages are fresh, whatever the site says; or PATH=never. "
    "Repeatable.",
)
@click.option(
    "--query",
    "pages__query",
    multiple=True,
    help="A query parameter that tells pages apart; repeatable.  [default: all]",
)
@click.option(
    "--normalise-query",
    "pages__normalise_query",
    is_flag=True,
    default=None,
    help="Sort the parameters of a query by name, in the key and for the site.",
)
@click.option(
    "--memory-for",
    "store__memory_for",
    help="How long to answer from memory without asking the store.  [default: 0s]",
)
@click.option(
    "--tenant",
    "pages__tenant",
    help="The tenant of the pages, on a store that several sites share.",
)
@click.option(
    "--max-body",
    "pages__max_body",
    type=int,
    help="Largest page to keep, in bytes.  [default: 1048576]",
)
@click.option(
    "--max-entries",
    "pages__max_entries",
    type=int,
    help="The most pages in memory.  [default: 10000]",
)
@click.option(
    "--max-bytes",
    "pages__max_bytes",
    type=int,
    help="The most bytes of pages in memory.  [default: 268435456]",
)
@click.option(
    "--timeout", "pages__timeout", type=float, help="Seconds for the site to answer.  [default: 30]"
)
@click.option(
    "--site-connections",
    "pages__site_connections",
    type=int,
    help="Connections to the site for visitors, and as many for loads.  [default: 100]",
)
@click.option(
    "--pool-wait",
    "pages__pool_wait",
    help="How long a request waits for one of them; then 503.  [default: 1s]",
)
@click.option(
    "--min-upload-rate",
    "pages__min_upload_rate",
    type=int,
    help="Bytes a second that an upload must bring; then 408. 0: any.  [default: 500]",
)
@click.option(
    "--max-spill",
    "pages__max_spill",
    type=int,
    help="Bytes of temporary files for responses that are read slowly.  [default: 1073741824]",
)
@click.option(
    "--trusted-proxy",
    "pages__trusted_proxies",
    multiple=True,
    help="An address or network whose X-Forwarded-* is believed, as 10.0.0.0/8; repeatable.",
)
@click.option(
    "--forward",
    "pages__forward",
    metavar="request|key",
    help="Send the site the visitor's request, or one made from the page's key.  "
    "[default: key on routes with a duration, else request]",
)
@click.option(
    "--credential",
    "pages__credentials",
    multiple=True,
    help="A request field that identifies a client; repeatable.  "
    "[default: X-Api-Key, Api-Key, X-Auth-Token, X-Access-Token]",
)
@click.option(
    "--ignore-cookie",
    "pages__ignore_cookies",
    metavar="NAME",
    multiple=True,
    help="A cookie that says nothing about a page, as consent or '_ga*'; repeatable.",
)
@click.option(
    "--heuristic",
    "pages__heuristic",
    is_flag=True,
    default=None,
    help="Keep pages with only Last-Modified for a tenth of their age, at most a day.",
)
@click.option(
    "--cdn-override/--no-cdn-override",
    "pages__cdn_override",
    is_flag=True,
    default=None,
    help="Whether CDN-Cache-Control counts in place of Cache-Control.  [default: it does]",
)
@click.option(
    "--own-prefix",
    "pages__own_prefix",
    metavar="PATH",
    help="Move all paths of the gateway's own below this path, as /_cache.",
)
@click.option(
    "--site-ca",
    "pages__site_ca",
    metavar="FILE",
    help="Certificates that the site's is checked by, in place of the system's.",
)
@click.option(
    "--health-path",
    "pages__health_path",
    metavar="PATH",
    help="Check each address of the site by this path, and leave out one that fails.",
)
@click.pass_context
def serve(ctx: click.Context, /, file: str | None, **_: object) -> None:
    """Serve pages and entities, kept fresh.

    A cache in front of a site or an API. Pages are fresh as long as --route or the site says
    (Cache-Control, Vary); other responses pass through uncached. Without a route the site
    receives the visitor's own request. Declare entities of an API in FILE, as [kinds.NAME].
    Options override FILE and variables such as STILLFRESH_STORE__URL; SIGHUP reads them again.
    Several processes, on several machines, may share one --store.
    """
    tables, options = given(ctx)
    has_variables = any(
        name.startswith(("STILLFRESH_PAGES__", "STILLFRESH_KINDS__")) for name in os.environ
    )
    if file is None and "pages.upstream" not in options and not has_variables:
        raise click.UsageError("name a FILE of settings, or --upstream URL.")
    config = extra("stillfresh.gateway.config", "web")
    serving = extra("stillfresh.gateway.serving", "web")
    try:
        settings = config.load(file, tables)
    except config.Mistakes as exc:
        lines: list[str] = []
        for mistake in exc.mistakes:
            by_option = config.by_name(mistake, options)
            is_of_option = by_option != mistake
            lines.append(by_option.replace(NUMBER, "") if is_of_option else mistake)
        raise ConfigError("\n".join(lines)) from exc
    read = None if file is None else partial(config.load, file, tables)
    serving.serve(settings, click.echo, read, _outbox_consumer)


def _outbox_consumer(outbox: Any, pages: object) -> Any:  # noqa: ANN401 (extras may be absent)
    """A consumer that polls often enough to stay below `max_lag`, even while it stands by."""
    postgres = extra("stillfresh.integrations.postgres", "postgres")
    poll = min(5.0, max(outbox.max_lag, 1.0) / 4)
    return postgres.OutboxConsumer(
        pages, outbox.database, outbox.consumer, poll=poll, max_lag=outbox.max_lag
    )


@command("stillfresh check stillfresh.toml")
@click.argument("file")
@as_json
@click.pass_context
def check(ctx: click.Context, file: str, *, is_json: bool) -> None:
    """Check a file of settings, as `serve` takes it.

    Prints one line for each mistake, with its key, and exits with 2. It opens nothing: whether the
    store and the site can be reached is not checked.
    """
    config = extra("stillfresh.gateway.config", "web")
    try:
        settings = config.load(file)
    except config.Mistakes as exc:
        if not is_json:
            raise
        print_json({"file": file, "ok": False, "mistakes": exc.mistakes})
        ctx.exit(WRONG_USE)
    if is_json:
        print_json({"file": file, "ok": True, "mistakes": []})
        return
    site = [] if settings.pages is None else [f"pages of {', '.join(settings.pages.upstream)}"]
    kinds = [f"kind {kind.name}" for kind in settings.kinds]
    click.echo(plain(f"{file}: fine; {', '.join(site + kinds)}"))


@command(
    "stillfresh demo",
    "stillfresh demo --port 0 --store ~/stillfresh-demo",
)
@click.option("--host", default="127.0.0.1", show_default=True, help="The address to listen on.")
@click.option("--port", default=8000, show_default=True, help="The port; 0 is any free one.")
@click.option("--store", metavar="DIR", help="A directory to keep its data in.  [default: none]")
@click.option(
    "--speed", default=1.0, show_default=True, help="How many times faster the demo runs."
)
@click.option("--open", "is_open", is_flag=True, help="Open it in a browser.")
def demo(*, host: str, port: int, store: str | None, speed: float, is_open: bool) -> None:
    """Run a site to see what stillfresh does.

    Its upstream is slow, and breaks when you say so: open the address that it prints, and turn the
    upstream off.
    """
    site = extra("stillfresh.demo", "demo")
    site.run(host=host, port=port, store=store, say=click.echo, open_browser=is_open, speed=speed)
