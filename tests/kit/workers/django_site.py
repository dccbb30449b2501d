"""A Django site with its admin, for the tests of a gateway in front of it: django_site.py FOLDER.

Prints its port. A user `ann` with the password `secret-of-ann` may do everything.
"""
# ruff: noqa: PLC0415  Django's modules can be imported only after its settings are there.

import sys
from pathlib import Path
from socketserver import ThreadingMixIn
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

import django
from django.conf import settings


class Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True


class Quiet(WSGIRequestHandler):
    def log_message(self, *_: object) -> None:
        pass


def main(folder: Path) -> None:
    applications = ["admin", "auth", "contenttypes", "sessions", "messages", "staticfiles"]
    middleware = [
        "django.middleware.security.SecurityMiddleware",
        "django.contrib.sessions.middleware.SessionMiddleware",
        "django.middleware.common.CommonMiddleware",
        "django.middleware.csrf.CsrfViewMiddleware",
        "django.contrib.auth.middleware.AuthenticationMiddleware",
        "django.contrib.messages.middleware.MessageMiddleware",
    ]
    processors = [
        "django.template.context_processors.request",
        "django.contrib.auth.context_processors.auth",
        "django.contrib.messages.context_processors.messages",
    ]
    settings.configure(
        DEBUG=False,
        SECRET_KEY="for-tests",  # noqa: S106 (of a test)
        ALLOWED_HOSTS=["127.0.0.1"],
        ROOT_URLCONF=__name__,
        INSTALLED_APPS=[f"django.contrib.{name}" for name in applications],
        MIDDLEWARE=middleware,
        PASSWORD_HASHERS=["django.contrib.auth.hashers.MD5PasswordHasher"],
        TEMPLATES=[
            {
                "BACKEND": "django.template.backends.django.DjangoTemplates",
                "APP_DIRS": True,
                "OPTIONS": {"context_processors": processors},
            }
        ],
        DATABASES={"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": folder / "site.db"}},
        STATIC_URL="/static/",
        USE_TZ=True,
    )
    django.setup()

    from django.contrib import admin
    from django.contrib.auth.models import User
    from django.contrib.staticfiles.handlers import StaticFilesHandler
    from django.core.handlers.wsgi import WSGIHandler
    from django.core.management import call_command
    from django.http import HttpRequest, HttpResponse
    from django.urls import path
    from django.views.decorators.cache import cache_control

    call_command("migrate", verbosity=0)
    User.objects.create_superuser("ann", password="secret-of-ann")  # noqa: S106 (of a test)
    visits = 0

    def news(request: HttpRequest) -> HttpResponse:
        nonlocal visits
        visits += 1
        return HttpResponse(f"news {visits} for {request.get_host()}")

    def icon(_: HttpRequest) -> HttpResponse:
        return HttpResponse(status=204)

    addresses = [
        path("admin/", admin.site.urls),
        path("news", cache_control(public=True, max_age=60)(news)),
        path("favicon.ico", icon),
    ]
    globals()["urlpatterns"] = addresses
    site = StaticFilesHandler(WSGIHandler())
    server = make_server("127.0.0.1", 0, site, server_class=Server, handler_class=Quiet)
    print(server.server_port, flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
