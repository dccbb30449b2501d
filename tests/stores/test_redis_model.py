"""S3, S5: the Redis store on a real server answers as the memory store does, whatever is asked."""

from collections.abc import Callable
from typing import ClassVar
from uuid import uuid4

from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test

from stillfresh.clock import Clock
from stillfresh.stores.contract import Store
from stillfresh.stores.redis import RedisStore
from tests.kit.servers.valkey import Server
from tests.kit.store_model import StoreModel


class RedisModel(StoreModel):
    server: ClassVar[Server]

    def new_store(self, clock: Clock, new_token: Callable[[], str]) -> Store:
        """Tokens are made by the server."""
        return RedisStore(self.server.address, prefix=uuid4().hex, clock=clock, timeout=10)


def test_s5_answers_as_memory_does(valkey: Server) -> None:
    """Copies, leases, failures, tags, evictions and counts, to the last bit of every time."""

    class OnValkey(RedisModel):
        server = valkey

    some = settings(max_examples=25, stateful_step_count=40)
    run_state_machine_as_test(OnValkey, settings=some)
