"""A small Django project: what the tests of Django's parts share.

A process has one set of Django's settings; whatever test comes first makes them.
"""

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import django
from django.conf import settings
from django.core.cache import caches
from django.test import override_settings

from stillfresh.integrations.tagged_values import BlockingCache

BACKEND = "stillfresh.integrations.django.StillfreshCache"
FOLDER = tempfile.TemporaryDirectory(prefix="stillfresh-shop-")


def configure() -> None:
    """Once in a process."""
    if settings.configured:
        return
    database = {"ENGINE": "django.db.backends.sqlite3", "NAME": Path(FOLDER.name) / "shop.db"}
    settings.configure(
        ALLOWED_HOSTS=["*"],
        DATABASES={"default": database},
        DEFAULT_AUTO_FIELD="django.db.models.AutoField",
        INSTALLED_APPS=["stillfresh.integrations.django", "tests.kit.shop"],
        ROOT_URLCONF="tests.kit.shop.urls",
        SECRET_KEY="tests",  # noqa: S106
        TEMPLATES=[{"BACKEND": "django.template.backends.django.DjangoTemplates"}],
        USE_TZ=True,
    )
    django.setup()


def tables() -> None:
    """Those of the shop, with nothing in them."""
    from django.core.management import call_command  # noqa: PLC0415 (after settings)

    from tests.kit.shop.models import Label, Product  # noqa: PLC0415

    call_command("migrate", run_syncdb=True, verbosity=0)
    for model in (Product, Label):
        model.objects.all().delete()


@contextmanager
def cache_on(url: str, clock: Callable[[], float], patch: Any, **options: Any) -> Iterator[Any]:
    """`caches["default"]` on this store and this clock."""
    from stillfresh.integrations.django import shared  # noqa: PLC0415

    patch.setattr(shared, "_caches", {})
    patch.setattr(shared, "BlockingCache", partial(BlockingCache, clock=clock))
    given = {"BACKEND": BACKEND, "LOCATION": url, "OPTIONS": options}
    with override_settings(CACHES={"default": given}):
        yield caches["default"]
        for opened in shared._caches.values():
            opened.cache.close()
