"""Which tests of the shipped suites take so long on a server that only `make proof` runs them.

They repeat every request of a long history at every later point. The same suites have shorter
histories, and the memory store and Redis, which are quick, run all of them in `make test`.
"""

import pytest

from stillfresh.testing import StoreConformance

SLOW_SUITES = {"TestS6DynamoStore", "TestS11PostgresStore"}
LONG_HISTORIES = {
    test.__name__
    for test in (
        StoreConformance.test_late_requests_around_an_invalidation_undo_nothing,
        StoreConformance.test_late_requests_around_a_takeover_undo_nothing,
        StoreConformance.test_late_requests_around_puts_and_loads_undo_nothing,
        StoreConformance.test_late_requests_around_tags_that_come_with_a_copy_undo_nothing,
    )
}


def pytest_itemcollected(item: pytest.Item) -> None:
    suite = item.getparent(pytest.Class)
    if suite is not None and suite.name in SLOW_SUITES and item.name in LONG_HISTORIES:
        item.add_marker(pytest.mark.proof)
