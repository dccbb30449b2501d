"""Servers that tests in several places share: one of each for a worker, ended with it."""

from collections.abc import Iterator

import pytest
from valkey_server import Server, binary_of, serving


def server_of(name: str, folders: pytest.TempPathFactory) -> Iterator[Server]:
    binary = binary_of(name)
    if binary is None:
        pytest.skip(f"this machine has no {name}-server")
    with serving(binary, folders.mktemp(name)) as server:
        yield server


@pytest.fixture(scope="session")
def valkey(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    yield from server_of("valkey", tmp_path_factory)


@pytest.fixture(scope="session")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Debian's, where it is installed."""
    yield from server_of("redis", tmp_path_factory)
