"""S1, S2, S6 and I1-I7: the DynamoDB store on a real server, with values in a real S3."""

import pytest
from aws_servers import Aws, new_name

from stillfresh import Clock
from stillfresh.stores.aws import Place
from stillfresh.stores.dynamodb import DynamoStore
from stillfresh.stores.dynamodb.admin import create
from stillfresh.testing import StoreConformance


class TestS6DynamoStore(StoreConformance):
    @pytest.fixture(autouse=True)
    def _servers(self, aws: Aws) -> None:
        self.aws = aws

    async def new_store(self, clock: Clock) -> DynamoStore:
        table = new_name()
        place = Place(None, self.aws.endpoint, self.aws.s3_endpoint)
        await create(table, self.aws.bucket, place)
        return self.aws.store(table, clock)
