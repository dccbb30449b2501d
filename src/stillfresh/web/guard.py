"""Who may see and do what an operator may: by token, or from this machine itself (G6).

Without a token only loopback peers under a loopback name are operators: a page of another site that
points its own name at 127.0.0.1 comes with its own Host. Neither is who came through a proxy that
says so: its peer is this machine, its visitor is not.
"""

import hmac
import re
from collections.abc import Collection
from typing import Final

from starlette.types import Scope

from stillfresh.web.replies import header

SECRET: Final = re.compile(r"[\x21-\x7e]+")
"""What a token is made of: anything that a header field can carry whole."""
LOCAL_NAMES: Final = frozenset({"localhost", "127.0.0.1", "::1"})
HOST: Final = re.compile(r"(\[[\da-f:.]+\]|[^\s:@/?#\[\]]+)(:\d*)?", re.ASCII)
PASSED_ON: Final = frozenset(
    (b"forwarded", b"via", b"cdn-loop", b"cf-ray", b"x-original-host", b"x-envoy-external-address")
)
PASSED_ON_BY: Final = re.compile(rb"x-forwarded.*|.*-(client|connecting|real|remote)-?(ip|addr).*")
"""Fields by which proxies say that they are one; an empty one says it as well."""
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
    is_passed_on = any(_is_of_proxy(name) for name, _ in scope["headers"])
    return _is_loopback(peer) and _host_name(scope) in LOCAL_NAMES and not is_passed_on


def is_called_rightly(scope: Scope, hosts: Collection[str]) -> bool:
    """From this machine: by one of its names, or by one of `hosts` (`*.` stands for any below).

    A browser here is led to 127.0.0.1 by any name whose owner wishes it.
    """
    peer, name = (scope.get("client") or ("",))[0], _host_name(scope)
    if not _is_loopback(peer) or name in LOCAL_NAMES:
        return True
    return name is not None and any(_is_named(name, host.lower()) for host in hosts)


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


def _is_of_proxy(name: bytes) -> bool:
    return name in PASSED_ON or PASSED_ON_BY.fullmatch(name) is not None


def _is_named(name: str, host: str) -> bool:
    return name.endswith(host[1:]) if host.startswith("*.") else name == host.strip("[]")


def _host_name(scope: Scope) -> str | None:
    """Of one Host, and of one that is nothing but a name and a port."""
    told = [value.decode("latin-1").lower() for name, value in scope["headers"] if name == b"host"]
    found = HOST.fullmatch(told[0]) if len(told) == 1 else None
    return found[1].strip("[]") if found is not None else None
