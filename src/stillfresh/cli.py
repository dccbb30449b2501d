"""The command line: `stillfresh table create|describe` makes and shows a DynamoDB store's table.

It chooses the adapters and prints what they answer; nothing is decided here.
"""

import asyncio
from collections.abc import Callable
from dataclasses import asdict
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING

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
    place = aws.Place(given["region"], given["endpoint"], given["s3_endpoint"])
    made: Made = await getattr(admin, step)(given["table"], given["bucket"], place)
    return made


def extra(module: str) -> ModuleType:
    try:
        return import_module(module)
    except ModuleNotFoundError as exc:
        raise ConfigError(f"this command needs {exc.name}: pip install 'stillfresh[aws]'") from exc


if __name__ == "__main__":
    main()
