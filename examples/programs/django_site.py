"""A whole Django site in one file: a page that is served stale while it is rendered again.

Use it when visitors must not wait for a slow page, and Django's own cache_page makes them wait.
In a project of yours, copy CACHES and the decorator. `python django_site.py runserver` starts it.
"""

import sys

from django.conf import settings
from django.core.management import execute_from_command_line
from django.http import HttpRequest, HttpResponse
from django.urls import path

if not settings.configured:
    settings.configure(
        SECRET_KEY="change me",  # noqa: S106 (an example)
        ALLOWED_HOSTS=["localhost", "127.0.0.1", "testserver"],
        ROOT_URLCONF=__name__,
        DEBUG=True,
        CACHES={
            "default": {
                "BACKEND": "stillfresh.integrations.django.StillfreshCache",
                "LOCATION": "sqlite:///django.db",
                "OPTIONS": {"STALE_FOR": "1h", "ERROR_FOR": "1d"},
            }
        },
    )

from stillfresh.integrations.django import cache_page


@cache_page(60, stale_for="1h")
def prices(_request: HttpRequest) -> HttpResponse:
    return HttpResponse("tea 300")  # a slow page


urlpatterns = [path("prices", prices)]

if __name__ == "__main__":
    execute_from_command_line(sys.argv)
