"""S1, S2, S4: the SQLite store passes the conformance suite, and keeps its own promises."""

from pathlib import Path

import pytest

from stillfresh import Clock
from stillfresh.stores.sqlite import SqliteStore
from stillfresh.testing import StoreConformance


class TestS1SqliteStore(StoreConformance):
    path: Path

    @pytest.fixture(autouse=True)
    def _file(self, tmp_path: Path) -> None:
        self.path = tmp_path / "cache.db"

    async def new_store(self, clock: Clock) -> SqliteStore:
        return SqliteStore(self.path, clock=clock)
