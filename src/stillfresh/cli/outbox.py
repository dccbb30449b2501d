"""`stillfresh outbox …`: a PostgreSQL database says what is stale."""

import asyncio
import logging
import signal
from collections.abc import Sequence
from math import inf

import click

from stillfresh.cli.program import (
    TEXT,
    CommandGroup,
    age_text,
    as_json,
    command,
    extra,
    plain,
    print_json,
)
from stillfresh.durations import seconds
from stillfresh.engine import Cache
from stillfresh.errors import ConfigError, without_password
from stillfresh.logs import Hidden, LineHandler, LineWriter, passwords_in
from stillfresh.pages import PageCache

PACKAGE = "stillfresh.integrations.postgres"
CREATE = "stillfresh outbox create postgresql://localhost/shop --table 'products=product:{id}'"
FOLLOW = "stillfresh outbox follow postgresql://localhost/shop redis://localhost:6379/0"


@click.group(cls=CommandGroup, examples=[CREATE, FOLLOW])
def outbox() -> None:
    """Invalidate entries when rows of a PostgreSQL database change.

    Triggers write the tags of changed rows into a table, the outbox. A consumer (`outbox follow`)
    invalidates these tags in a store.
    """


@command(CREATE, "stillfresh outbox create --sql --table 'shop.products=product:{id}'")
@click.argument("database", required=False)
@click.option(
    "--table",
    "pairs",
    multiple=True,
    required=True,
    type=TEXT,
    help="TABLE=TAG, with columns in braces; repeatable.",
)
@click.option("--sql", "is_sql", is_flag=True, help="Print the SQL for a migration; run nothing.")
async def create(*, database: str | None, pairs: Sequence[str], is_sql: bool) -> None:
    """Create the outbox and its triggers in DATABASE.

    Existing parts are kept. Name all tables each time: a table that is not named loses its
    triggers. Columns in a tag are of type smallint, integer, bigint, text, varchar or uuid.
    """
    if (database is None) is not is_sql:
        raise click.UsageError("name a DATABASE, or --sql to print the statements.")
    tables: dict[str, list[str]] = {}
    for pair in pairs:
        table, _, tag = pair.partition("=")
        tables.setdefault(table, []).append(tag)
    postgres = extra(PACKAGE, "postgres")
    if is_sql:
        click.echo(postgres.outbox_sql(tables), nl=False)
    else:
        await postgres.create_outbox(database, tables)
        click.echo(plain(f"the outbox records changes of {', '.join(tables)}"))


@command("stillfresh outbox drop postgresql://localhost/shop")
@click.argument("database")
async def drop(*, database: str) -> None:
    """Remove the outbox, its triggers and its consumers from DATABASE."""
    await extra(PACKAGE, "postgres").drop_outbox(database)
    click.echo("the outbox was removed")


@command(FOLLOW)
@click.argument("database")
@click.argument("store")
@click.option(
    "--consumer",
    default="cache",
    show_default=True,
    help="The consumer's name: one for each STORE.",
)
@click.option(
    "--poll", default="5s", show_default=True, help="How often to look without a notification."
)
@click.option("--soft", is_flag=True, help="Serve invalidated copies as stale, not as expired.")
@click.option("--pages", "is_pages", is_flag=True, help="The tags are those of a gateway's pages.")
async def follow(
    *, database: str, store: str, consumer: str, poll: str, soft: bool, is_pages: bool
) -> None:
    """Invalidate in STORE the tags of rows that change in DATABASE, until Ctrl-C.

    SIGTERM ends it, too. You may start a second process with the same --consumer: it stands by and
    takes over if the first one ends. You may kill either at any time: no tag is lost.
    """
    if store.startswith("memory:"):
        raise ConfigError(f"store {store}: lives in the process that uses it; run it there")
    hide = Hidden([*passwords_in(database), *passwords_in(store)])
    logging.basicConfig(handlers=[LineHandler(LineWriter(), hide, is_json=False)])
    postgres = extra(PACKAGE, "postgres")
    cache = PageCache(store) if is_pages else Cache(store)
    following = postgres.OutboxConsumer(cache, database, consumer, poll=poll, soft=soft)
    end = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, end.set)
    async with cache, following:
        ending = asyncio.ensure_future(end.wait())
        first = asyncio.ensure_future(following.caught_up())
        try:
            await asyncio.wait([ending, first], return_when=asyncio.FIRST_COMPLETED)
            if first.done():
                first.result()
                click.echo(plain(f"{without_password(store)} is up to date as {consumer}"))
                await ending
        finally:
            first.cancel()
            ending.cancel()


@command("stillfresh outbox show postgresql://localhost/shop --max-lag 30s")
@click.argument("database")
@click.option("--max-lag", help="Exit with 1 if a consumer lags by more, or there is none.")
@as_json
async def show(*, database: str, max_lag: str | None, is_json: bool) -> None:
    """Show how far the consumers of DATABASE are behind."""
    limit = None if max_lag is None else seconds(max_lag, name="--max-lag")
    lags: dict[str, float] = await extra(PACKAGE, "postgres").consumer_lags(database)
    if is_json:
        print_json(lags)
    else:
        for name, lag in lags.items():
            click.echo(plain(f"{name:20} {age_text(lag)} behind at most"))
    if limit is not None and max(lags.values(), default=inf) > limit:
        raise click.exceptions.Exit(1)


for each in (create, drop, follow, show):
    outbox.add_command(each)
