"""The command line: `stillfresh serve` is a page cache in front of a site; `stillfresh table
create|describe` makes and shows a DynamoDB store's table.

It chooses the adapters and prints what they answer; nothing is decided here.
"""

import asyncio
from collections.abc import Callable
from dataclasses import asdict
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

from stillfresh.errors import ConfigError, StillfreshError
from stillfresh.stores.urls import dynamodb_options

try:
    import click
except ModuleNotFoundError as exc:
    raise SystemExit("stillfresh: the commands need click: pip install 'stillfresh[cli]'") from exc

if TYPE_CHECKING:
    from stillfresh.stores.dynamodb.admin import Made

__all__ = ["main"]


@click.group()
@click.version_option(package_name="stillfresh")
def main() -> None:
    """Keeps cached data fresh."""


@main.group()
def table() -> None:
    """The DynamoDB table and the S3 bucket of a `dynamodb://` store."""


def about_a_table(command: Callable[..., None]) -> Callable[..., None]:
    """TABLE and its options, as the store's address has them."""
    options = [
        click.argument("table", envvar="FACETHEORY_CACHE_TABLE_NAME"),
        click.option("--bucket", help="Where the values are kept."),
        click.option("--region", help="AWS's region, if not in its own settings."),
        click.option("--endpoint", help="A server of the same kind, in place of AWS."),
        click.option("--s3-endpoint", help="The same for S3, if it is another one."),
    ]
    for option in reversed(options):
        command = option(command)
    return command


@table.command()
@about_a_table
def create(**options: str | None) -> None:
    """Make TABLE (paid by the request, TTL on) and its bucket, where they are not there yet.

    TABLE is a name, or a store's whole address: dynamodb://site-cache?bucket=site-pages
    """
    show("create", options)


@table.command()
@about_a_table
def describe(**options: str | None) -> None:
    """Show TABLE and its bucket as they are."""
    show("describe", options)


def show(step: str, options: dict[str, str | None]) -> None:
    """Field by field; an error is one sentence."""
    try:
        made = asyncio.run(done(step, options))
    except StillfreshError as exc:
        raise click.ClickException(str(exc)) from exc
    for name, value in asdict(made).items():
        click.echo(f"{name.replace('_', ' '):15} {'-' if value is None else value}")


async def done(step: str, given: dict[str, str | None]) -> "Made":
    admin, aws = extra("stillfresh.stores.dynamodb.admin"), extra("stillfresh.stores.aws")
    if "://" in (given["table"] or ""):
        given = {**given, **dynamodb_options(given["table"] or "")}
    table = named(given)
    place = aws.Place(given["region"], given["endpoint"], given["s3_endpoint"])
    made: Made = await getattr(admin, step)(table, given["bucket"], place)
    return made


def named(given: dict[str, str | None]) -> str:
    """The table, as a store at this address would name it; what it would refuse is refused."""
    store = extra("stillfresh.stores.dynamodb.store")
    name: str = store.table_name(given["table"])
    store.checked_tenant(given.get("tenant"))
    return name


def extra(module: str, named: str = "aws") -> ModuleType:
    try:
        return import_module(module)
    except ModuleNotFoundError as exc:
        needed = f"pip install 'stillfresh[{named}]'"
        raise ConfigError(f"this command needs {exc.name}: {needed}") from exc


def routes_of(texts: tuple[str, ...]) -> dict[str, str]:
    """`/blog/*=10m`: a path, and how long its pages are fresh."""
    pairs = [text.rpartition("=") for text in texts]
    if bad := next((text for text, pair in zip(texts, pairs, strict=True) if not pair[0]), None):
        raise ConfigError(f"--route {bad!r}: write PATH=DURATION, as '/blog/*=10m'")
    return {path: duration for path, _, duration in pairs}


class Mistake(click.ClickException):
    """One sentence about what was typed."""

    exit_code = 2


class Serve(click.Command):
    """What cannot be read is told as what cannot be: in a line, without the usage."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except click.UsageError as exc:
            raise Mistake(exc.format_message()) from exc


@main.command(cls=Serve)
@click.option("--upstream", required=True, help="The site, as http://host:port or https://host.")
@click.option("--store", default="memory://", show_default=True, help="Where pages are kept.")
@click.option("--host", default="127.0.0.1", show_default=True, help="The address to listen on.")
@click.option(
    "--port", type=click.IntRange(0, 65_535), default=8080, show_default=True, help="0: a free one."
)
@click.option("--site-host", multiple=True, help="A Host to serve, told to the site; repeatable.")
@click.option("--route", multiple=True, help="PATH=DURATION, over what the site says; repeatable.")
@click.option("--query", multiple=True, help="A query parameter that makes a page; default: all.")
@click.option(
    "--memory-for", default="0s", show_default=True, help="Pages without asking the store."
)
@click.option("--tenant", help="Whose pages these are, on a store of several.")
@click.option(
    "--max-body",
    type=click.IntRange(1),
    default=1_048_576,
    show_default=True,
    help="Bytes; more is not kept.",
)
@click.option("--timeout", default=30.0, show_default=True, help="Seconds for the site to answer.")
@click.option(
    "--trusted-proxy", multiple=True, help="Whose X-Forwarded-* counts, as 10.0.0.0/8; repeatable."
)
def serve(
    route: tuple[str, ...],
    site_host: tuple[str, ...],
    trusted_proxy: tuple[str, ...],
    **options: Any,  # noqa: ANN401
) -> None:
    """Serve a site's pages from a cache in front of it, as a reverse proxy.

    Pages are kept as the site says itself (Cache-Control, ETag, Vary), or as --route says. Several
    processes, on several machines, may share one --store: a page is then rendered once for all.
    """
    try:
        serving = extra("stillfresh.isr.serve", "web")
        options |= {"site_hosts": site_host, "trusted_proxies": trusted_proxy}
        settings = serving.Settings(routes=routes_of(route), **options)
        serving.serve(settings, click.echo)
    except ConfigError as exc:
        raise Mistake(str(exc)) from exc
    except StillfreshError as exc:
        raise click.ClickException(str(exc)) from exc


if __name__ == "__main__":
    main()
