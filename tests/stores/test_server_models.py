"""S3, S5, S11: Redis and PostgreSQL, on real servers, answer as the memory store does."""

from collections.abc import Callable

import pytest
from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test

from stillfresh.clock import Clock
from tests.kit.examples import examples
from tests.kit.full_store import FullStore, full_store_for
from tests.kit.store_model import StoreModel

NewAddress = Callable[[], str]


@pytest.fixture(params=["redis", "postgres"])
def new_address(request: pytest.FixtureRequest) -> NewAddress:
    """Makes the address of an empty store on a server."""
    if request.param == "postgres":
        postgres = request.getfixturevalue("postgres")
        return lambda: str(postgres.new_store())
    valkey = request.getfixturevalue("valkey")
    return lambda: str(valkey.url(timeout="10s"))


@pytest.mark.hypothesis
def test_s3_a_store_on_a_server_answers_as_memory_does(new_address: NewAddress) -> None:
    """Copies, leases, failures, tags, evictions and counts, to the last bit of every time."""

    class OnServer(StoreModel):
        def new_store(self, clock: Clock, new_token: Callable[[], str]) -> FullStore:
            """Tokens are made by the server."""
            return full_store_for(new_address(), clock)

    steps = settings(max_examples=examples(8), stateful_step_count=35)
    run_state_machine_as_test(OnServer, settings=steps)
