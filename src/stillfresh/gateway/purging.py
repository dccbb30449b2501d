"""Purging over HTTP: an operator's list of URLs and tags, and PURGE requests.

PURGE works as with Varnish or a CDN. The connection's peer must be allowed, and so must the client
that a trusted proxy names; what a client says about itself never counts.
"""

from collections.abc import Callable
from typing import Final

import msgspec
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from stillfresh.errors import ConfigError, StillfreshError
from stillfresh.gateway.replies import Problem, json_reply, problem_reply
from stillfresh.http.fields import members, tag_names, values
from stillfresh.pages import PageCache
from stillfresh.pages.edge import Networks, is_trusted, peer_of, target_of
from stillfresh.pages.routes import checked_path, own_tag, percent_encoded

MOST: Final = 1_000
"""The most URLs, and the most tags, of one request: each is a step of the store."""
SOFT: Final = "soft-purge"


class Purge(msgspec.Struct, forbid_unknown_fields=True):
    """`soft`: make them stale, and serve them until they are refreshed; otherwise delete them."""

    urls: list[str] = []
    """Paths, in every variant, or whole URLs."""
    tags: list[str] = []
    soft: bool = False


class Purged(msgspec.Struct):
    """How many pages each reached; 0 if there is none."""

    urls: dict[str, int]
    tags: dict[str, int]


async def purge(pages: PageCache, request: Purge) -> Purged:
    """Purge. Raises a `Problem` that names every mistake, and then does nothing."""
    if mistakes := [*_mistakes(request)]:
        raise Problem(422, "bad_purge", "Cannot be purged", "; ".join(mistakes))
    by_url = pages.revalidate if request.soft else pages.purge
    by_tag = pages.revalidate_tag if request.soft else pages.purge_tag
    urls = {url: len(await by_url(url)) for url in dict.fromkeys(request.urls)}
    return Purged(urls, {tag: len(await by_tag(tag)) for tag in dict.fromkeys(request.tags)})


def _mistakes(request: Purge) -> list[str]:
    mistakes = [] if request.urls or request.tags else ["name urls, or tags"]
    given: list[tuple[str, list[str], Callable[[str], object]]] = [
        ("urls", request.urls, checked_path),
        ("tags", request.tags, own_tag),
    ]
    for name, texts, check in given:
        if len(texts) > MOST:
            mistakes.append(f"{name}: at most {MOST:,}, not {len(texts):,}")
            continue
        for at, text in enumerate(texts):
            try:
                check(text)
            except ConfigError as exc:
                mistakes.append(f"{name}[{at}]: {exc}")
    return mistakes


class PurgeRequests:
    """Before a site: answers `PURGE` of peers in these networks, and passes the rest.

    Without networks everything passes.
    """

    def __init__(self, app: ASGIApp, pages: PageCache, networks: Networks) -> None:
        self._app = app
        self._pages = pages
        self._networks = networks

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_ours = self._networks and scope["type"] == "http" and scope["method"] == "PURGE"
        app = await self._answer(scope) if is_ours else self._app
        await app(scope, receive, send)

    async def _answer(self, scope: Scope) -> ASGIApp:
        # Behind the edge: the client that a trusted proxy named, and the peer.
        passed_on = members(values(scope["headers"], b"x-forwarded-for"))
        senders = [peer_of(scope), *(sender.decode("latin-1") for sender in passed_on)]
        others = [sender for sender in senders if not is_trusted(sender, self._networks)]
        if others:
            why = f"{others[0]} is not in pages.purge_from"
            return problem_reply(Problem(403, "not_allowed", "Not for this address", why))
        try:
            return json_reply(await purge(self._pages, asked_by(scope)))
        except Problem as exc:
            return problem_reply(exc)
        except StillfreshError as exc:
            return problem_reply(Problem(503, "store_away", "The store is unavailable", str(exc)))


def asked_by(scope: Scope) -> Purge:
    """By the tags in its fields, else by its own URL, over either scheme."""
    headers = Headers(scope=scope)
    tags = tag_names(tuple(scope["headers"]))
    soft = headers.get(SOFT) == "1"
    if tags is None:
        raise Problem(422, "bad_purge", "Cannot be purged", "too many tags, or too long ones")
    if tags:
        return Purge(tags=tags, soft=soft)
    place = f"{headers.get('host', '')}{percent_encoded(target_of(scope))}"
    return Purge(urls=[f"{scheme}://{place}" for scheme in ("http", "https")], soft=soft)
