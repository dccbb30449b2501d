"""Counts requests to services that charge for them, in the units that are charged."""

from collections import Counter
from collections.abc import Mapping
from typing import Any, Final

from stillfresh.stores.contract import Costs

READS: Final = frozenset({"get_item", "batch_get_item", "query", "scan"})
S3_COUNTS: Final = {
    "get_object": "s3_gets",
    "head_object": "s3_gets",
    "put_object": "s3_puts",
    "copy_object": "s3_puts",
    "delete_objects": "s3_deletes",
    "list_objects_v2": "s3_lists",
}
PAID_REFUSALS: Final = frozenset(
    {"ConditionalCheckFailedException", "TransactionCanceledException"}
)


class CostMeter:
    """The units that were used; refused writes are charged too."""

    def __init__(self) -> None:
        self._counts: dict[str, Any] = Counter()

    def costs(self) -> Costs:
        return Costs(**self._counts)

    def count_request(self, operation: str) -> None:
        name = S3_COUNTS.get(operation)
        if name is not None:
            self._counts[name] += 1

    def count_response(self, operation: str, response: Mapping[str, Any]) -> None:
        consumed = response.get("ConsumedCapacity", ())
        tables = [consumed] if isinstance(consumed, Mapping) else consumed
        name = "read_units" if operation in READS else "write_units"
        self._counts[name] += sum(table.get("CapacityUnits", 0.0) for table in tables)

    def count_refusal(self, code: str, arguments: Mapping[str, Any]) -> None:
        """A refusal comes without figures: one unit for a small row, two in a transaction."""
        actions = len(arguments.get("TransactItems", ()))
        if code in PAID_REFUSALS:
            self._counts["write_units"] += 2 * actions or 1
