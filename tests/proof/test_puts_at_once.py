"""E35: processes that put one key at once, as users do; `puts_at_once.py` runs more rounds."""

from pathlib import Path

import pytest

from tests.kit.servers.aws import Aws
from tests.kit.servers.postgres import PostgresServer
from tests.kit.servers.valkey import Server
from tests.proof.puts_at_once import counted, rounds_of_puts, rounds_of_sessions

SERVERS = ("redis", "postgresql", "dynamodb")


@pytest.fixture(
    params=["sqlite", *(pytest.param(name, marks=pytest.mark.proof) for name in SERVERS)]
)
def place(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The address of an empty store that processes can share."""
    match request.param:
        case "sqlite":
            return f"sqlite:///{tmp_path}/cache.db"
        case "redis":
            valkey: Server = request.getfixturevalue("valkey")
            return valkey.url()
        case "postgresql":
            postgres: PostgresServer = request.getfixturevalue("postgres")
            return postgres.new_store()
    aws: Aws = request.getfixturevalue("aws")
    return aws.address(aws.new_table())


@pytest.mark.timeout(240)
class TestE35AtOnce:
    async def test_of_concurrent_puts_one_value_is_read(self, place: str) -> None:
        """Eight processes: every put is acknowledged, and a read finds one of the values."""
        assert await rounds_of_puts(place, writers=8, rounds=10) == []

    def test_a_django_session_survives_concurrent_requests(self, place: str) -> None:
        """Django's sessions in the cache, four workers."""
        assert rounds_of_sessions(place, workers=4, rounds=10) == []

    def test_every_concurrent_incr_counts(self, place: str) -> None:
        """Django's `incr` in four workers."""
        assert counted(place, workers=4, times=10) == 40
