"""`sqlite:///path`: copies and leases in one file, shared by any number of processes (S4)."""

from stillfresh.stores.sqlite.store import SqliteStore
from stillfresh.stores.sqlite.view import SqliteView, read_only_copy

__all__ = ["SqliteStore", "SqliteView", "read_only_copy"]
