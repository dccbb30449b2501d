"""stillfresh for Django: a cache backend, pages, and invalidation by model.

In `settings.py`: `"BACKEND": "stillfresh.integrations.django.StillfreshCache"`; for the management
command, `"stillfresh.integrations.django"` in INSTALLED_APPS.
"""

from stillfresh.errors import needs

with needs("django", "stillfresh.integrations.django"):
    from stillfresh.integrations.django.backend import StillfreshCache
    from stillfresh.integrations.django.board import dashboard
    from stillfresh.integrations.django.codec import DjangoCodec
    from stillfresh.integrations.django.errors import UnavailableMiddleware
    from stillfresh.integrations.django.invalidation import invalidate, invalidate_on_change, tag_of
    from stillfresh.integrations.django.own_writes import ReadYourWritesMiddleware
    from stillfresh.integrations.django.pages import PageMiddleware, cache_page

__all__ = ["DjangoCodec", "PageMiddleware", "StillfreshCache", "cache_page", "invalidate"]
__all__ += [
    "ReadYourWritesMiddleware",
    "UnavailableMiddleware",
    "dashboard",
    "invalidate_on_change",
    "tag_of",
]
