"""The five clients that can have a cache, with one face for tests: it sends, and waits."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from types import ModuleType
from typing import Any

import httpx
import httpx2
import requests

from stillfresh import Cache
from stillfresh.integrations.http_cache.model import ResponseInfo
from stillfresh.integrations.httpx import AsyncCacheTransport, CacheTransport
from stillfresh.integrations.requests import CacheAdapter, info_of
from stillfresh.stores.contract import Store
from stillfresh.sync import SyncCache
from stillfresh.testing import ManualClock

NAMES = ("httpx async", "httpx2 async", "httpx sync", "httpx2 sync", "requests")
LIBRARIES: dict[str, ModuleType] = {"httpx": httpx, "httpx2": httpx2}


class Got:
    """A response, in words that all clients share."""

    def __init__(self, response: Any, info: ResponseInfo) -> None:
        self.response = response
        self.info = info
        self.status: int = response.status_code
        self.body: bytes = response.content
        self.headers: Mapping[str, str] = response.headers
        self.cache_status: str = response.headers.get("cache-status", "")

    @property
    def is_hit(self) -> bool:
        return self.cache_status.startswith("stillfresh; hit")


class Client:
    """A client with a cache. `clock`: of the cache, a manual one."""

    def __init__(self, which: str, store: str | Store, site: str, **options: Any) -> None:
        self.site = site
        self.clock = ManualClock(1_000_000.0)
        self._is_closed = False
        self.is_async = which.endswith(" async")
        self._runner = asyncio.Runner() if self.is_async else None
        self._library = LIBRARIES.get(which.partition(" ")[0])
        cache: Any = (Cache if self.is_async else SyncCache)(store, clock=self.clock)
        self.cache = cache
        self._client: Any
        self.door: Any
        if self._library is None:
            self.door = CacheAdapter(cache, **options)
            self._client = requests.Session()
            self._client.mount("http://", self.door)
        elif self.is_async:
            self.door = AsyncCacheTransport(cache, **options)
            self._client = self._library.AsyncClient(transport=self.door, timeout=20)
        else:
            self.door = CacheTransport(cache, **options)
            self._client = self._library.Client(transport=self.door, timeout=20)

    def run(self, result: Any) -> Any:
        """The result itself, or what its coroutine returns."""
        if self._runner is None:
            return result
        return self._runner.run(result, context=copy_context())

    def get(self, path: str, headers: Mapping[str, str] | None = None, **controls: Any) -> Got:
        return self.send("GET", path, headers, **controls)

    def send(
        self,
        method: str,
        path: str,
        headers: Mapping[str, str] | None = None,
        content: bytes | None = None,
        **controls: Any,
    ) -> Got:
        return self._got(self.run(self._request(method, path, headers, content, controls)))

    def many(self, path: str, count: int) -> list[Got]:
        """Send them all at once, from tasks or threads."""
        return self.each(path, [{}] * count)

    def each(self, path: str, senders: Sequence[Mapping[str, str]]) -> list[Got]:
        """Send one request with each of these header fields, all at once."""
        if self._runner is None:
            with ThreadPoolExecutor(len(senders)) as pool:
                return list(pool.map(self.get, [path] * len(senders), senders))

        async def gathered() -> list[Any]:
            requests_sent = (self._request("GET", path, sender, None, {}) for sender in senders)
            responses = await asyncio.gather(*requests_sent, return_exceptions=True)
            for response in responses:  # all of them have ended: no connection is left open
                if isinstance(response, BaseException):
                    raise response
            return responses

        return [self._got(response) for response in self._runner.run(gathered())]

    def _request(
        self,
        method: str,
        path: str,
        headers: Mapping[str, str] | None,
        content: bytes | None,
        controls: dict[str, Any],
    ) -> Any:
        url = path if path.startswith("http") else f"{self.site}{path}"
        fields = dict(headers or {})
        if self._library is None:
            if controls:
                fields["X-Stillfresh"] = in_field(controls)
            return self._client.request(
                method, url, headers=fields, data=content, allow_redirects=False, timeout=20
            )
        extensions = {"stillfresh": controls} if controls else {}
        return self._client.request(
            method, url, headers=fields, content=content, extensions=extensions
        )

    def _got(self, response: Any) -> Got:
        if self._library is None:
            return Got(response, info_of(response))
        return Got(response, response.extensions["stillfresh"])

    def stream(self, path: str, parts: Callable[[bytes], object]) -> ResponseInfo:
        """Read a body part by part, as it arrives."""
        url = f"{self.site}{path}"
        if self._library is None:
            with self._client.get(url, stream=True) as response:
                for part in response.iter_content(65_536):
                    parts(part)
                return info_of(response)
        if self._runner is None:
            with self._client.stream("GET", url) as response:
                for part in response.iter_bytes():
                    parts(part)
                return response.extensions["stillfresh"]  # type: ignore[no-any-return]

        async def read() -> ResponseInfo:
            async with self._client.stream("GET", url) as response:
                async for part in response.aiter_bytes():
                    parts(part)
                return response.extensions["stillfresh"]  # type: ignore[no-any-return]

        return self._runner.run(read())

    @property
    def cookies(self) -> dict[str, str]:
        """Those that the client keeps."""
        return dict(self._client.cookies)

    def settle(self) -> None:
        """Wait until no request runs in the background."""
        resource = self.door._responses.resource
        if self._runner is not None:
            assert self._runner.run(resource.settled("20s"))
        else:
            assert self.cache.run(resource.settled, "20s")

    @property
    def errors(self) -> tuple[type[Exception], ...]:
        if self._library is None:
            return (requests.ConnectionError, requests.exceptions.ChunkedEncodingError)
        return (self._library.TransportError,)

    def close(self) -> None:
        """May be called twice."""
        if self._is_closed:
            return
        self._is_closed = True
        if self._runner is None:
            self._client.close()
            self.door.close()
            self.cache.close()
            return
        self._runner.run(self._client.aclose())
        self._runner.run(self.cache.close())
        self._runner.close()


def in_field(controls: Mapping[str, Any]) -> str:
    """Controls as the request field `X-Stillfresh` has them."""
    parts: list[str] = []
    for name, value in controls.items():
        directive = name.replace("_", "-")
        if value is True:
            parts.append(directive)
        elif name == "tags":
            parts.append(f'{directive}="{" ".join(value)}"')
        else:
            parts.append(f"{directive}={value}")
    return ", ".join(parts)
