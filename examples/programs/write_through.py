"""A write that leaves the new value in the cache, also if two programs write at once.

Use it when the next reader should not wait for a load after a change. `changing` marks the copy
before you write: if your program dies inside, nothing old is fresh; if somebody else changes the
key meanwhile, your value is not stored, and the next reader loads.
"""

from stillfresh import SyncCache

cache = SyncCache("sqlite:///stock.db")
stock = {"tea": 7}  # your database


@cache.cached("stock", fresh_for="1h")
def in_stock(sku: str) -> int:
    return stock[sku]


def sell(sku: str) -> None:
    with in_stock.of(sku).changing() as change:
        stock[sku] -= 1
        change.put(stock[sku])


with cache:
    print(in_stock("tea"))  # 7
    sell("tea")
    print(in_stock("tea"))  # 6
