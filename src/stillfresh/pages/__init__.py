"""Pages rendered once for all, served at once, refreshed in the background."""

from stillfresh.pages.asgi import MAX_BODY, IsrMiddleware
from stillfresh.pages.model import Headers, Page, ServedPage
from stillfresh.pages.on_demand import KIND
from stillfresh.pages.page_cache import MAX_ENTRIES, PageCache
from stillfresh.pages.routes import Route
from stillfresh.pages.stored import page_in
from stillfresh.stores.dynamodb import (
    LOCK,
    META,
    TABLE_VARIABLE,
    FaceTheoryCacheLease,
    FaceTheoryCacheMetadata,
    cache_pk,
)

__all__ = [
    "KIND",
    "MAX_BODY",
    "MAX_ENTRIES",
    "Headers",
    "IsrMiddleware",
    "Page",
    "PageCache",
    "Route",
]
__all__ += ["ServedPage", "page_in"]
# The schema in DynamoDB, which other languages share.
__all__ += ["LOCK", "META", "TABLE_VARIABLE", "FaceTheoryCacheLease", "FaceTheoryCacheMetadata"]
__all__ += ["cache_pk"]
