"""`stillfresh table create|describe`: makes and shows a DynamoDB store's table (S6)."""

import asyncio
from collections.abc import Callable
from dataclasses import asdict
from typing import TYPE_CHECKING

import click

from stillfresh.cli.program import Command, CommandGroup, as_json, extra, print_json
from stillfresh.stores import checked_tenant, dynamodb_options

if TYPE_CHECKING:
    from stillfresh.stores.dynamodb.admin import TableState


@click.group(
    cls=CommandGroup, examples=["stillfresh table describe site-cache --bucket site-pages"]
)
def table() -> None:
    """Make or show the table of a dynamodb:// store."""


def about_a_table(command: Callable[..., None]) -> Callable[..., None]:
    """TABLE and its options, as the store's address has them."""
    options = [
        click.argument("table", envvar="FACETHEORY_CACHE_TABLE_NAME"),
        click.option("--bucket", help="Where the values are kept."),
        click.option("--region", help="AWS's region, if not in its own settings."),
        click.option("--endpoint", help="A server of the same kind, in place of AWS."),
        click.option("--s3-endpoint", help="The same for S3, if it is another one."),
        as_json,
    ]
    for option in reversed(options):
        command = option(command)
    return command


@table.command(
    cls=Command, examples=["stillfresh table create 'dynamodb://site-cache?bucket=site-pages'"]
)
@about_a_table
def create(*, is_json: bool, **options: str | None) -> None:
    """Make TABLE (paid by the request, TTL on) and its bucket, where they are not there yet.

    TABLE is a name, or a store's whole address: dynamodb://site-cache?bucket=site-pages
    """
    show("create", options, is_json=is_json)


@table.command(
    cls=Command, examples=["stillfresh table describe site-cache --bucket site-pages --json"]
)
@about_a_table
def describe(*, is_json: bool, **options: str | None) -> None:
    """Show TABLE and its bucket as they are."""
    show("describe", options, is_json=is_json)


def show(step: str, options: dict[str, str | None], *, is_json: bool) -> None:
    made = asdict(asyncio.run(done(step, options)))
    if is_json:
        print_json(made)
        return
    for name, value in made.items():
        click.echo(f"{name.replace('_', ' '):15} {'-' if value is None else value}")


async def done(step: str, given: dict[str, str | None]) -> "TableState":
    """Where the address is a store's, what that store would refuse is refused here."""
    admin, aws = extra("stillfresh.stores.dynamodb.admin"), extra("stillfresh.stores.aws")
    if "://" in (given["table"] or ""):
        given = {**given, **dynamodb_options(given["table"] or "")}
    checked_tenant(given.get("tenant"))
    table = extra("stillfresh.stores.dynamodb.store").table_name(given["table"])
    place = aws.AwsPlace(given["region"], given["endpoint"], given["s3_endpoint"])
    made: TableState = await getattr(admin, step)(table, given["bucket"], place)
    return made
