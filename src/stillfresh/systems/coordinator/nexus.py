"""NexusClient: the two `by_ids` endpoints of a Nexus server, over HTTP.

Only the requests and the shape of the answers; `http.client` sends them.
"""

from typing import TYPE_CHECKING, Any, Final, Self

import msgspec

from stillfresh.durations import Duration, seconds
from stillfresh.errors import LoadFailed
from stillfresh.http.client import MAX_BYTES, Endpoint, checked_client, checked_url, new_client
from stillfresh.systems.coordinator.rules import SentViews

if TYPE_CHECKING:
    import httpx
    import httpx2

POSTS: Final = "v0/stream/posts/by_ids"
USERS: Final = "v0/stream/users/by_ids"


class NexusClient:
    """The HTTP client of a Nexus server: `NexusClient("https://nexus.example")`.

    It keeps no connection open between requests. Its methods raise an error if the server does not
    answer within `timeout`, answers with an error, or sends more than `max_bytes`.
    """

    def __init__(
        self,
        url: str,
        *,
        timeout: Duration = "10s",
        max_bytes: int = MAX_BYTES,
        client: "httpx2.AsyncClient | httpx.AsyncClient | None" = None,
    ) -> None:
        base = str(checked_url(url)).rstrip("/")
        most = seconds(timeout, name="timeout", positive=True)
        self._client = (
            new_client(most, idle_connections=0) if client is None else checked_client(client)
        )
        self._posts, self._users = (
            Endpoint(self._client, f"{base}/{path}", timeout=most, max_bytes=max_bytes)
            for path in (POSTS, USERS)
        )

    async def posts_by_ids(self, post_ids: list[str], viewer_id: str | None = None) -> SentViews:
        """Return the posts that the server has, as this viewer sees them."""
        return await _views(self._posts, "post_ids", post_ids, viewer_id)

    async def users_by_ids(self, user_ids: list[str], viewer_id: str | None = None) -> SentViews:
        """Return the users that the server has, as this viewer sees them."""
        return await _views(self._users, "user_ids", user_ids, viewer_id)

    async def close(self) -> None:
        """Close the HTTP client."""
        await self._client.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


async def _views(
    endpoint: Endpoint, field: str, ids: list[str], viewer_id: str | None
) -> SentViews:
    """Ask for views. An empty body is an answer that broke off, not an empty list."""
    request: dict[str, Any] = {field: ids}
    if viewer_id:
        request["viewer_id"] = viewer_id
    body = await endpoint.ask(request)
    try:
        return SentViews(msgspec.json.decode(body, type=list[Any]))
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as exc:
        raise LoadFailed(f"{field}: the answer is not a list of views: {exc}") from exc
