"""`sqlite:///path`: copies and leases in one file, shared by any number of processes (S4)."""

from stillfresh.stores.sqlite.copying import read_only_copy
from stillfresh.stores.sqlite.store import SqliteStore

__all__ = ["SqliteStore", "read_only_copy"]
