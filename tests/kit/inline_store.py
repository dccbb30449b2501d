"""A store whose steps a test can break, and whose reads are inline, as those of SQLite."""

from collections.abc import Mapping, Sequence

from stillfresh import StoreError
from stillfresh.stores.contract import Record
from stillfresh.stores.memory import MemoryStore
from tests.kit.held_store import SteppedStore


class InlineStore(SteppedStore):
    """Reads on the spot, as SQLite does."""

    reads_inline = True

    def read_now(
        self, kind: str, ids: Sequence[str], known: Mapping[str, str] | None = None
    ) -> dict[str, Record]:
        if "read" in self.broken:
            raise StoreError("cannot read")
        assert isinstance(self.inner, MemoryStore)
        return self.inner.read_now(kind, ids, known)
