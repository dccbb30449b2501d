"""Servers that the tests of one worker share, started for the first who asks."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from aws_servers import Aws


@pytest.fixture(scope="session")
def aws(tmp_path_factory: pytest.TempPathFactory) -> "Iterator[Aws]":
    """DynamoDB and S3."""
    import aws_servers  # noqa: PLC0415 (a second of imports that most tests do not need)

    if why := aws_servers.missing():
        pytest.skip(why)
    folder = tmp_path_factory.mktemp("aws")
    with pytest.MonkeyPatch.context() as patch, aws_servers.both(folder) as aws:
        for name, value in aws_servers.ENVIRONMENT.items():
            patch.setenv(name, value)
        yield aws
