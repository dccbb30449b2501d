"""stillfresh for Django: a cache backend, pages, and invalidation by model (E20).

In `settings.py`: `"BACKEND": "stillfresh.contrib.django.StillfreshCache"`; for the management
command, `"stillfresh.contrib.django"` in INSTALLED_APPS.
"""

from stillfresh.errors import needs

with needs("django", "stillfresh.contrib.django"):
    from stillfresh.contrib.django.backend import StillfreshCache
    from stillfresh.contrib.django.board import dashboard
    from stillfresh.contrib.django.codec import DjangoCodec
    from stillfresh.contrib.django.invalidation import invalidate, invalidate_on_change, tag_of
    from stillfresh.contrib.django.pages import PageMiddleware, cache_page

__all__ = ["DjangoCodec", "PageMiddleware", "StillfreshCache", "cache_page", "invalidate"]
__all__ += ["dashboard", "invalidate_on_change", "tag_of"]
