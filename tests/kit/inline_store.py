"""A store whose steps a test can break, and whose reads are inline, as those of SQLite."""

from collections.abc import Mapping, Sequence

from msgspec.structs import replace

from stillfresh import StoreError
from stillfresh.stores import Capabilities
from stillfresh.stores.contract import Record
from tests.kit.held_store import SteppedStore


class InlineStore(SteppedStore):
    """Reads on the spot, as SQLite does."""

    def capabilities(self) -> Capabilities:
        return replace(super().capabilities(), inline=self)

    def read_now(
        self, kind: str, ids: Sequence[str], known: Mapping[str, str] | None = None
    ) -> dict[str, Record]:
        if "read" in self.broken:
            raise StoreError("cannot read")
        return super().read_now(kind, ids, known)
