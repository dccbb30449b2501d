"""`stillfresh table create|describe`: makes and shows what a store needs to be there (S6, S11)."""

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
    """Make or show the tables of a dynamodb:// or postgresql:// store."""


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
    cls=Command,
    examples=[
        "stillfresh table create 'dynamodb://site-cache?bucket=site-pages'",
        "stillfresh table create postgresql://admin@localhost/shop --unlogged",
    ],
)
@click.option(
    "--unlogged/--logged",
    default=None,
    help="PostgreSQL: tables that are faster, and empty after a crash. Else logged.",
)
@click.option(
    "--push/--no-push",
    "pushes",
    default=None,
    help="PostgreSQL: whether every change is told to other processes at once. Else yes.",
)
@about_a_table
def create(
    *, is_json: bool, unlogged: bool | None, pushes: bool | None, **options: str | None
) -> None:
    """Make TABLE (paid by the request, TTL on) and its bucket, where they are not there yet.

    TABLE is a name, or a store's whole address: dynamodb://site-cache?bucket=site-pages

    For postgresql://user@host/database it makes the schema, or brings that of an earlier release
    to this one's version.
    """
    given = {"unlogged": unlogged, "pushes": pushes}
    show("create", options, {name: it for name, it in given.items() if it is not None}, is_json)


@table.command(
    cls=Command, examples=["stillfresh table describe site-cache --bucket site-pages --json"]
)
@about_a_table
def describe(*, is_json: bool, **options: str | None) -> None:
    """Show TABLE and its bucket, or the schema of a postgresql:// store, as they are."""
    show("describe", options, {}, is_json)


def show(step: str, options: dict[str, str | None], how: dict[str, bool], is_json: bool) -> None:
    made = asyncio.run(done(step, options, how))
    if is_json:
        print_json(made)
        return
    for name, value in made.items():
        click.echo(f"{name.replace('_', ' '):15} {'-' if value is None else value}")


async def done(step: str, given: dict[str, str | None], how: dict[str, bool]) -> dict[str, Any]:
    """Where the address is a store's, what that store would refuse is refused here."""
    address = given["table"] or ""
    if address.startswith(("postgresql://", "postgres://")):
        if wrong := [name for name, it in given.items() if it is not None and name != "table"]:
            raise ConfigError(f"--{wrong[0].replace('_', '-')} is for a dynamodb:// store only")
        steps = extra("stillfresh.stores.postgres", "postgres")
        return asdict(await getattr(steps, step)(split_tenant(address)[0], **how))
    if how:
        raise ConfigError("--unlogged and --push are for a postgresql:// store only")
    admin, aws = extra("stillfresh.stores.dynamodb.admin"), extra("stillfresh.stores.aws")
    stores = extra("stillfresh.stores.dynamodb.store")
    if "://" in address:
        options = dynamodb_options(address)
        stores.DynamoStore(**options)
        given = {**given, **options}
    table = stores.table_name(given["table"])
    place = aws.AwsPlace(given["region"], given["endpoint"], given["s3_endpoint"])
    return asdict(await getattr(admin, step)(table, given["bucket"], place))
