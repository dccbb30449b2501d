"""TTL Coordinator: refreshes items on screen in batches, when they become stale.

The way of an item: `coordinator` ticks, and the kind's `track` looks up which subscribed items are
stale (`rules`). The engine loads them in one batch with the kind's `fetch` (`nexus` for posts and
users), and publishes the views to `database`. `controller` does the same for callers that ask now,
and tells the listeners.

`NexusClient` is imported when it is named: it alone needs httpx2, the extra `stillfresh[web]`.
"""

from typing import TYPE_CHECKING, Any

from stillfresh.systems.coordinator.config import Kind, TtlConfig, TtlSnapshot, checked_kinds
from stillfresh.systems.coordinator.controller import TtlController
from stillfresh.systems.coordinator.coordinator import TtlCoordinator
from stillfresh.systems.coordinator.database import Database
from stillfresh.systems.coordinator.manager import CoordinatorsManager

if TYPE_CHECKING:
    from stillfresh.systems.coordinator.nexus import NexusClient

__all__ = [
    "CoordinatorsManager",
    "Database",
    "Kind",
    "NexusClient",
    "TtlConfig",
    "TtlController",
    "TtlCoordinator",
    "TtlSnapshot",
    "checked_kinds",
]


def __getattr__(name: str) -> Any:  # noqa: ANN401 (a module's attribute)
    if name == "NexusClient":
        from stillfresh.systems.coordinator.nexus import NexusClient  # noqa: PLC0415 (only when named)

        return NexusClient
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
