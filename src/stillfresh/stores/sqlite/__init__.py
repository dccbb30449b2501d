"""`sqlite:///path`: copies and leases in one file, shared by any number of processes.

Other packages keep files of their own schema through this module, with the same writer and leases.
"""

from stillfresh.stores.sqlite.connection import (
    CORRUPT,
    FAILED,
    abandon,
    connect_viewer,
    explained,
    translated,
)
from stillfresh.stores.sqlite.database import Work
from stillfresh.stores.sqlite.ownership import Format, by_header, not_ours
from stillfresh.stores.sqlite.schema import BEGIN_FILE, TAGS, TIMES, Row, Statements, record_of
from stillfresh.stores.sqlite.steps import (
    OWN,
    STORE,
    KindTables,
    Layout,
    at_most,
    own_kinds,
    own_tables,
)
from stillfresh.stores.sqlite.store import LOOK_EVERY, SLICE, SqliteStore
from stillfresh.stores.sqlite.view import SqliteView, read_only_copy
from stillfresh.stores.sqlite.writer import MAX_QUEUED, Writer

__all__ = ["SqliteStore", "SqliteView", "read_only_copy"]
# For a file of another design: its format, its tables, its writer, and connections to it.
__all__ += ["BEGIN_FILE", "OWN", "STORE", "TAGS", "TIMES", "Format", "by_header", "not_ours"]
__all__ += ["KindTables", "Layout", "Row", "Statements", "own_kinds", "own_tables", "record_of"]
__all__ += ["LOOK_EVERY", "MAX_QUEUED", "SLICE", "Work", "Writer", "at_most"]
__all__ += ["CORRUPT", "FAILED", "abandon", "connect_viewer", "explained", "translated"]
