"""What was probably meant, where a store knows nothing of a name that was given (G10).

On stderr, and only for people: an id that is not there is no mistake, it may be loading just now.
"""

from collections.abc import Sequence
from typing import Final

import click

from stillfresh.cli.output import plain
from stillfresh.cli.places import Readable

LOOKED_AT: Final = 1_000
"""Entries whose kinds are named."""


async def about_names(store: Readable, kind: str) -> str:
    """Of ids of this kind none is there."""
    if await store.entries(kind, "", None, 1):
        return "the store has no such id; `inspect` lists those it has"
    return await about_kind(store, kind)


async def about_kind(store: Readable, kind: str) -> str:
    page = await store.entries(None, "", None, LOOKED_AT)
    kinds = sorted({entry.kind for entry in page}) + (["…"] if len(page) == LOOKED_AT else [])
    there = f"it has: {', '.join(kinds)}" if kinds else "it has no entries"
    return f"the store has no kind {kind}; {there}"


def about_tags(tags: Sequence[str]) -> str:
    return f"no entry has the tag {' or '.join(tags)}"


def say(hint: str | None, *, is_json: bool) -> None:
    if hint is not None and not is_json:
        click.echo(plain(f"Note: {hint}"), err=True)
