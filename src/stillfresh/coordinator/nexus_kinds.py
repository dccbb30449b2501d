"""Posts and users, as a Nexus server has them (C10, C12): two kinds, declared by what fetches them.

Their views differ by viewer (a post's bookmark, a user's relationship), so both are per viewer.
"""

from collections.abc import Awaitable, Sequence
from typing import Any, Final, Protocol

from stillfresh.coordinator.config import TtlConfig
from stillfresh.coordinator.model import Kind
from stillfresh.coordinator.rules import View, by_id, post_id, user_id
from stillfresh.errors import ConfigError, shown

POST: Final = "post"
USER: Final = "user"


class Nexus(Protocol):
    """A server of posts and users; `NexusClient` is the real one."""

    def posts_by_ids(
        self, post_ids: list[str], viewer_id: str | None
    ) -> Awaitable[Sequence[View]]: ...

    def users_by_ids(
        self, user_ids: list[str], viewer_id: str | None
    ) -> Awaitable[Sequence[View]]: ...


def checked_nexus(nexus: Nexus) -> Nexus:
    for method in ("posts_by_ids", "users_by_ids"):
        if not callable(getattr(nexus, method, None)):
            raise ConfigError(f"nexus: has no {method}(ids, viewer_id): {shown(nexus)}")
    return nexus


def nexus_kinds(nexus: Nexus, config: TtlConfig) -> list[Kind]:
    """With the terms of the configuration (C1)."""

    async def posts(ids: list[str], viewer_id: str | None) -> dict[str, Any]:
        return by_id(POST, ids, await nexus.posts_by_ids(ids, viewer_id), post_id)

    async def users(ids: list[str], viewer_id: str | None) -> dict[str, Any]:
        return by_id(USER, ids, await nexus.users_by_ids(ids, viewer_id), user_id)

    return [
        Kind(
            POST,
            fetch=posts,
            fresh_for=config.post_ttl_ms / 1000,
            max_batch=config.post_max_batch_size,
            per_viewer=True,
        ),
        Kind(
            USER,
            fetch=users,
            fresh_for=config.user_ttl_ms / 1000,
            max_batch=config.user_max_batch_size,
            counted=True,
            per_viewer=True,
        ),
    ]
