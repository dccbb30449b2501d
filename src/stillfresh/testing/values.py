"""A check for tests: nobody changed a value that callers share."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import chain

from stillfresh.engine import Cache
from stillfresh.sync import SyncCache


@contextmanager
def unchanged_values(*caches: Cache | SyncCache) -> Iterator[None]:
    """Fail if code inside `with` changed a value that all its callers share.

    Raises AssertionError at the end of the block, naming the resource. It looks at the values that
    are in memory or decoded inside the block, the last 1,000 of each resource, and not at resources
    that are declared inside it.
    """
    with ExitStack() as stack:
        problems: list[list[str]] = []
        for cache in caches:
            on_loop = cache.on_loop if isinstance(cache, SyncCache) else cache
            problems.append(stack.enter_context(on_loop.checked_values()))
        yield
    texts = list(chain.from_iterable(problems))
    if texts:
        raise AssertionError("\n".join(texts))
