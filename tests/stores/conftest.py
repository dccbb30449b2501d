"""Servers that the tests of one worker share."""

from collections.abc import Iterator

import aws_servers
import pytest
from aws_servers import Aws


@pytest.fixture(scope="session")
def aws(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Aws]:
    """DynamoDB and S3, started for the first who asks."""
    if why := aws_servers.missing():
        pytest.skip(why)
    with pytest.MonkeyPatch.context() as patch, aws_servers.both(tmp_path_factory.mktemp("aws")) as aws:
        for name, value in aws_servers.ENVIRONMENT.items():
            patch.setenv(name, value)
        yield aws
