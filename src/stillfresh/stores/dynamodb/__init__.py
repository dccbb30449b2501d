"""`dynamodb://table?bucket=…`: the FaceTheory schema in DynamoDB, values in S3.

The schema needs no library; `DynamoStore` needs `stillfresh[aws]` and is imported when named.
"""

from typing import TYPE_CHECKING

from stillfresh.errors import needs
from stillfresh.stores.dynamodb.schema import (
    ABOUT,
    LOCK,
    META,
    TABLE_VARIABLE,
    FaceTheoryCacheLease,
    FaceTheoryCacheMetadata,
    cache_pk,
    object_metadata,
)

if TYPE_CHECKING:
    from stillfresh.stores.dynamodb.store import DynamoStore

__all__ = ["ABOUT", "LOCK", "META", "TABLE_VARIABLE", "DynamoStore"]
__all__ += ["FaceTheoryCacheLease", "FaceTheoryCacheMetadata", "cache_pk", "object_metadata"]


def __getattr__(name: str) -> object:
    if name != "DynamoStore":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    with needs("aws", "a dynamodb:// store"):
        from stillfresh.stores.dynamodb.store import DynamoStore  # noqa: PLC0415 (only when named)
    return DynamoStore
