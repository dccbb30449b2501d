"""S3, S11: the PostgreSQL store on a real server answers as the memory store does."""

from collections.abc import Callable
from typing import ClassVar

from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test

from stillfresh.clock import Clock
from stillfresh.stores.contract import Store
from stillfresh.stores.urls import store_for
from tests.kit.servers.postgres import PostgresServer
from tests.kit.store_model import StoreModel


class PostgresModel(StoreModel):
    server: ClassVar[PostgresServer]

    def new_store(self, clock: Clock, new_token: Callable[[], str]) -> Store:
        """Tokens are made by the server."""
        return store_for(self.server.new_store(), clock)


def test_s11_answers_as_memory_does(postgres: PostgresServer) -> None:
    """Copies, leases, failures, tags, evictions and counts, to the last bit of every time."""

    class OnPostgres(PostgresModel):
        server = postgres

    some = settings(max_examples=25, stateful_step_count=30)
    run_state_machine_as_test(OnPostgres, settings=some)
