"""Has a function changed since its values were stored? Only in Python's development mode.

A new release of a program reads the values that an older one has stored. If they have the same
type and another meaning, nothing in them shows it. So in development mode (`python -X dev`) the
store holds a digest of each cached function, as a copy of a resource of its own. When a function
with another digest is declared, the log names `version=`. Comments, formatting and decorators do
not count.
"""

import ast
import inspect
import logging
from collections.abc import Callable
from contextlib import suppress
from hashlib import sha256
from textwrap import dedent
from typing import Any, Final

from stillfresh.clock import Clock
from stillfresh.errors import StillfreshError
from stillfresh.freshness import Policy
from stillfresh.stores.contract import Copy, Put, Record, Store

SOURCES: Final = "function_source"
"""The resource that holds the digests, by the names of the others."""
REMEMBERED_FOR: Final = Policy(30 * 86_400.0)

logger = logging.getLogger(__name__)


def source_digest(function: Callable[..., Any]) -> bytes | None:
    """A digest of what the function does; None if its source is not there."""
    try:
        tree = ast.parse(dedent(inspect.getsource(inspect.unwrap(function))))
    except (OSError, TypeError, SyntaxError):  # made by `exec`, in C, or a part of an expression
        return None
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            node.decorator_list = []
    return sha256(ast.dump(tree).encode()).digest()


async def compare_source(
    kind: str, function: Callable[..., Any], store: Store, clock: Clock
) -> None:
    """Log it if the stored digest is of another function, and store this one's."""
    digest = source_digest(function)
    if digest is None:
        return
    with suppress(StillfreshError):  # a store that is away has its own log lines
        records = await store.read(SOURCES, [kind])
        before = records.get(kind, Record()).copy
        if before is not None and before.value == digest:
            return
        if before is not None:
            logger.warning(
                "%s: the function has changed since its values were stored, and callers may still "
                "get the old values. If they have another meaning now, write version='2', or "
                "invalidate them all once.",
                kind,
            )
        copy = Copy(store.new_generation(), clock(), REMEMBERED_FOR, digest)
        await store.put(SOURCES, {kind: Put(copy)})
