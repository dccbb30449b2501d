"""`stillfresh table create|describe`: makes and shows what a store needs to be there."""

import asyncio
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import click

from stillfresh.cli.program import Command, CommandGroup, as_json, extra, print_json
from stillfresh.errors import ConfigError
from stillfresh.stores import dynamodb_options, split_tenant


@click.group(
    cls=CommandGroup, examples=["stillfresh table describe site-cache --bucket site-pages"]
)
def table() -> None:
    """Create or show the tables of a PostgreSQL or DynamoDB store."""


def about_a_table(command: Callable[..., None]) -> Callable[..., None]:
    """TABLE and its options, as the store's address has them."""
    options = [
        click.argument("table", envvar="FACETHEORY_CACHE_TABLE_NAME"),
        click.option("--bucket", help="DynamoDB: the S3 bucket for the values."),
        click.option("--region", help="DynamoDB: the region, if your AWS settings name none."),
        click.option("--endpoint", help="DynamoDB: a compatible server in place of AWS."),
        click.option("--s3-endpoint", help="The same for S3, if it is another server."),
        as_json,
    ]
    for option in reversed(options):
        command = option(command)
    return command


@table.command(
    cls=Command,
    examples=[
        "stillfresh table create 'dynamodb://site-cache?bucket=site-pages'",
        "stillfresh table create postgresql://admin@localhost/shop --unlogged",
    ],
)
@click.option(
    "--unlogged/--logged",
    default=None,
    help="PostgreSQL: unlogged tables are faster, and empty after a crash. Default: logged.",
)
@click.option(
    "--push/--no-push",
    "pushes",
    default=None,
    help="PostgreSQL: notify other processes of every change at once. Default: push.",
)
@about_a_table
def create(
    *, is_json: bool, unlogged: bool | None, pushes: bool | None, **options: str | None
) -> None:
    """Create the tables that a store needs, if they do not exist yet.

    TABLE is a postgresql:// address, a dynamodb:// address, or the name of a DynamoDB table.

    PostgreSQL: creates the schema, or updates the schema of an earlier release. It needs a role
    that may create a schema; an application needs fewer rights (docs/stores.md).

    DynamoDB: creates the table (on-demand billing, TTL on) and its bucket. What exists already is
    not changed.
    """
    how: dict[str, bool] = {}
    if unlogged is not None:
        how["unlogged"] = unlogged
    if pushes is not None:
        how["pushes"] = pushes
    show("create", options, how, is_json)


@table.command(
    cls=Command, examples=["stillfresh table describe site-cache --bucket site-pages --json"]
)
@about_a_table
def describe(*, is_json: bool, **options: str | None) -> None:
    """Show the table and bucket of a DynamoDB store, or the schema of a PostgreSQL store."""
    show("describe", options, {}, is_json)


def show(step: str, options: dict[str, str | None], how: dict[str, bool], is_json: bool) -> None:
    """Run a step, and print the table that it returns."""
    description = asyncio.run(run_step(step, options, how))
    if is_json:
        print_json(description)
        return
    for name, value in description.items():
        click.echo(f"{name.replace('_', ' '):15} {'-' if value is None else value}")


async def run_step(step: str, given: dict[str, str | None], how: dict[str, bool]) -> dict[str, Any]:
    """Run the step. An address of a store is checked as the store itself would check it."""
    address = given["table"] or ""
    if address.startswith(("postgresql://", "postgres://")):
        for name, value in given.items():
            if value is not None and name != "table":
                raise ConfigError(f"--{name.replace('_', '-')} is for a dynamodb:// store only")
        steps = extra("stillfresh.stores.postgres", "postgres")
        return asdict(await getattr(steps, step)(split_tenant(address)[0], **how))
    if how:
        raise ConfigError("--unlogged and --push are for a postgresql:// store only")
    admin = extra("stillfresh.stores.dynamodb.admin")
    aws = extra("stillfresh.stores.aws")
    stores = extra("stillfresh.stores.dynamodb.store")
    if "://" in address:
        options = dynamodb_options(address)
        stores.DynamoStore(**options)
        given = {**given, **options}
    table = stores.table_name(given["table"])
    place = aws.AwsPlace(given["region"], given["endpoint"], given["s3_endpoint"])
    return asdict(await getattr(admin, step)(table, given["bucket"], place))
