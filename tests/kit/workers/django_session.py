"""A process that serves one user's requests: `URL NAME SESSION`. Each writes to the session.

If SESSION is "new", it signs the user in first, and says the key of the session.
Django keeps the session in the cache alone. It says "signed in" or "signed out" after each request.
"""

import sys
from itertools import count

import django
from django.conf import settings

from tests.kit.shop import BACKEND


def main(url: str, name: str, session_key: str) -> None:
    settings.configure(
        CACHES={"default": {"BACKEND": BACKEND, "LOCATION": url}},
        SESSION_ENGINE="django.contrib.sessions.backends.cache",
        SECRET_KEY="of the tests",  # noqa: S106 (no secret)
        USE_TZ=True,
    )
    django.setup()
    from django.contrib.sessions.backends.base import UpdateError  # noqa: PLC0415 (after settings)
    from django.contrib.sessions.backends.cache import SessionStore  # noqa: PLC0415 (the same)

    print("ready", flush=True)
    if session_key == "new":
        session = SessionStore()
        session["user"] = "ann"
        session.create()
        session_key = session.session_key
        print(session_key, flush=True)
    for number in count():
        if not sys.stdin.readline():
            return
        session = SessionStore(session_key)
        user = session.get("user")
        session[f"seen by {name}"] = number
        try:
            session.save()
        except UpdateError:
            user = None
        print("signed in" if user == "ann" else "signed out", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
