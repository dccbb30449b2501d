"""MCP: the response cache of a client in any store of stillfresh.

```python
responses = ResponseStore(cache)
client = Client(url, cache=CacheConfig(store=responses, partition=user_id))
```

The SDK decides what may be stored, for how long and for whom: by `ttlMs` and `cacheScope` of each
response. This store keeps the responses, for all clients on the same store, also those of other
processes. It says nothing that it cannot check: a copy that was invalidated, or that the store
could not confirm, is a miss. Needs `stillfresh[mcp]`.
"""

import json
from collections.abc import Mapping
from types import UnionType
from typing import Any, Final, Literal, get_args

from msgspec import Struct

from stillfresh.engine import Cache
from stillfresh.errors import needs
from stillfresh.freshness import Verdict

with needs("mcp", "stillfresh.integrations.mcp"):
    from mcp.client.caching import MAX_TTL_MS, CacheEntry, CacheKey
    from mcp_types import CacheableResult
    from mcp_types.methods import CACHEABLE_METHODS, MONOLITH_RESULTS

__all__ = ["ResponseStore"]

LONGEST: Final = MAX_TTL_MS / 1000
"""Seconds; the SDK cuts longer lifetimes."""


class StoredReply(Struct):
    """A result as it is on the wire, with the SDK's own terms."""

    result: dict[str, Any]
    scope: Literal["public", "private"]
    expires_at: float


class ResponseStore:
    """A `ResponseCacheStore` of the MCP SDK on a `Cache`, which must be open.

    `name` names its resource; no other resource of that cache may have it. All entries
    have the tag `name`, and `name:method`, such as `mcp:tools/list`.
    """

    def __init__(self, cache: Cache, *, name: str = "mcp") -> None:
        def tags(key: str) -> list[str]:
            return [name, f"{name}:{json.loads(key)[0]}"]

        declare = cache.batched(name, fresh_for=LONGEST, tags=tags)
        self._responses = declare(_load_nothing)
        self._clock = cache.clock

    async def get(self, key: CacheKey) -> CacheEntry | None:
        """Return the stored response, or None."""
        answer = await self._responses.get_stored(_text_of(key))
        if answer is None or not answer.found or answer.verdict is not Verdict.FRESH:
            return None
        response = answer.value
        value = RESULTS[key.method].model_validate(response.result)
        return CacheEntry(value, response.scope, response.expires_at)

    async def set(self, key: CacheKey, entry: CacheEntry) -> None:
        """Store a response for as long as it says."""
        lifetime = 0.0 if entry.expires_at is None else entry.expires_at - self._clock()
        if entry.expires_at is None or lifetime <= 0:
            await self.delete(key)
            return
        # Without defaults: the SDK looks at which fields the server has sent.
        result = entry.value.model_dump(mode="json", by_alias=True, exclude_unset=True)
        response = StoredReply(result, entry.scope, entry.expires_at)
        await self._responses.put(_text_of(key), response, fresh_for=lifetime)

    async def delete(self, key: CacheKey) -> None:
        """Forget a response, in all processes."""
        await self._responses.delete(_text_of(key))

    async def clear(self) -> None:
        """Forget all responses, in all processes."""
        await self._responses.clear()


async def _load_nothing(_keys: list[str]) -> dict[str, StoredReply]:
    """Responses are put; the SDK asks the server for those that are missing."""
    return {}


def _text_of(key: CacheKey) -> str:
    """As JSON: no two keys look alike."""
    return json.dumps([key.method, key.params_key, key.partition])


def _results() -> Mapping[str, type[CacheableResult]]:
    """The class of each cacheable method's result."""
    results = {}
    for method in CACHEABLE_METHODS:
        row = MONOLITH_RESULTS[method]
        for result in get_args(row) if isinstance(row, UnionType) else (row,):
            if issubclass(result, CacheableResult):
                results[method] = result
    return results


RESULTS: Final = _results()
