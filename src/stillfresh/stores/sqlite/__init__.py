"""`sqlite:///path`: copies and leases in one file, shared by any number of processes.

A file of another design has this package's connections, writer's thread, leases and tags as well:
its store holds and calls them, with tables of its own.
"""

from stillfresh.stores.sqlite.connection import (
    CORRUPT,
    FAILED,
    abandon,
    bytes_of,
    connect_viewer,
    explained,
    translated,
)
from stillfresh.stores.sqlite.database import WriteJob
from stillfresh.stores.sqlite.leases import LeaseTable
from stillfresh.stores.sqlite.ownership import Format, by_header, not_ours
from stillfresh.stores.sqlite.schema import BEGIN_FILE, TAGS, TIMES, Row, at_least, at_most
from stillfresh.stores.sqlite.steps import STORE, following, own_kinds, own_tables
from stillfresh.stores.sqlite.store import LOOK_EVERY, SLICE, SqliteStore
from stillfresh.stores.sqlite.tags import (
    FIRST,
    begin_epoch,
    delete_tags,
    epoch_of,
    is_past,
    replace_late_tags,
    replace_tags,
    tagged,
)
from stillfresh.stores.sqlite.view import SqliteView, open_viewer, read_only_copy
from stillfresh.stores.sqlite.writer import MAX_QUEUED, Writer

__all__ = ["SqliteStore", "SqliteView", "read_only_copy"]
# For a store with a few more tables in its file.
__all__ += ["BEGIN_FILE", "STORE", "Row", "own_kinds", "own_tables"]
# For a file of another design: its format, its writer, connections to it.
__all__ += ["LOOK_EVERY", "MAX_QUEUED", "SLICE", "Format", "WriteJob", "Writer", "by_header"]
__all__ += ["abandon", "bytes_of", "connect_viewer", "not_ours", "open_viewer"]
__all__ += ["CORRUPT", "FAILED", "explained", "translated"]
# Its leases and tags, in tables that have these columns.
__all__ += ["FIRST", "TAGS", "TIMES", "LeaseTable", "at_least", "at_most", "following"]
__all__ += ["begin_epoch", "delete_tags", "epoch_of", "is_past", "tagged"]
__all__ += ["replace_late_tags", "replace_tags"]
