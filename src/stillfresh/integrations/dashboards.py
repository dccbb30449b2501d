"""The dashboard for WSGI frameworks: imported when it is asked for, because it needs an extra."""

from importlib import import_module
from typing import TYPE_CHECKING

from stillfresh.errors import needs
from stillfresh.sync import SyncCache

if TYPE_CHECKING:
    from stillfresh.gateway import Dashboard


def dashboard_of(cache: SyncCache, token: str | None) -> "Dashboard":
    """The dashboard of this cache. Raises MissingExtra without `stillfresh[web]`."""
    with needs("web", "the dashboard"):
        module = import_module("stillfresh.gateway")
    board: Dashboard = module.Dashboard(cache, token=token)
    return board
