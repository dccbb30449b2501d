"""Who may see and do what an operator may: by token, or from this machine itself (G6).

Without a token only loopback peers under a loopback name are operators: a page of another site that
points its own name at 127.0.0.1 comes with its own Host. Neither is who came through a proxy that
says so: its peer is this machine, its visitor is not.
"""

import hmac
import re
from typing import Final
from urllib.parse import urlsplit

from starlette.types import Scope

from stillfresh.web.replies import header

__all__ = ["SECRET", "bearer", "is_local", "is_of_this_page", "is_operator"]

SECRET: Final = re.compile(r"[\x21-\x7e]+")
"""What a token is made of: anything that a header field can carry whole."""
LOCAL_NAMES: Final = frozenset({"localhost", "127.0.0.1", "::1"})
PASSED_ON: Final = (b"forwarded", b"x-forwarded-for", b"x-forwarded-host", b"x-real-ip", b"via")
OWN_SITES: Final = frozenset({"same-origin", "none"})
"""`Sec-Fetch-Site` of this page's own requests, and of an address typed in."""


def bearer(scope: Scope) -> str | None:
    """The token of `Authorization: Bearer …`."""
    kind, _, token = header(scope, b"authorization").partition(" ")
    return token.strip() or None if kind.lower() == "bearer" else None


def is_operator(scope: Scope, token: str | None, given: str | None) -> bool:
    """`token` is the gateway's own, `given` what was sent; compared in constant time."""
    if token is None:
        return is_local(scope) and is_of_this_page(scope)
    return given is not None and hmac.compare_digest(token.encode(), given.encode())


def is_local(scope: Scope) -> bool:
    peer = (scope.get("client") or ("",))[0]
    is_passed_on = any(header(scope, name) for name in PASSED_ON)
    return _is_loopback(peer) and _host_name(scope) in LOCAL_NAMES and not is_passed_on


def is_of_this_page(scope: Scope) -> bool:
    """Not asked by a page of another origin.

    Browsers say so in a field that no script can set; where they do not (plain HTTP), the origin
    is compared with the name that was asked for.
    """
    if site := header(scope, b"sec-fetch-site"):
        return site in OWN_SITES
    origin = header(scope, b"origin")
    return not origin or origin.partition("://")[2].lower() == header(scope, b"host").lower()


def _is_loopback(address: str) -> bool:
    return address == "::1" or address.removeprefix("::ffff:").startswith("127.")


def _host_name(scope: Scope) -> str | None:
    try:
        return urlsplit(f"//{header(scope, b'host')}").hostname
    except ValueError:
        return None
