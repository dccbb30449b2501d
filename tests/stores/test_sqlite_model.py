"""S3: the SQLite store on a real file answers as the memory store does, whatever is asked."""

import tempfile
from collections.abc import Callable
from pathlib import Path

from hypothesis import settings

from stillfresh.clock import Clock
from stillfresh.stores.sqlite import SqliteStore
from tests.kit.examples import examples
from tests.kit.store_model import StoreModel


class SqliteModel(StoreModel):
    def new_store(self, clock: Clock, new_token: Callable[[], str]) -> SqliteStore:
        self.directory = tempfile.TemporaryDirectory()
        path = Path(self.directory.name) / "cache.db"
        return SqliteStore(path, clock=clock, new_token=new_token)

    def teardown(self) -> None:
        super().teardown()
        self.directory.cleanup()


TestS3SqliteModel = SqliteModel.TestCase
TestS3SqliteModel.settings = settings(max_examples=examples(40), stateful_step_count=40)
