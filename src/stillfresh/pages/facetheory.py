"""A site that is itself a FaceTheory service: its old copies, its hydration data, its store.

FaceTheory says in `x-facetheory-isr` how it made a response. If it keeps its pages in the same
table as this cache, under the same keys, each side waits for the lease of the other. `SiteStore`
notices that, by the ETags of the pages.
"""

import logging
import re
from typing import Final
from urllib.parse import parse_qsl, urlencode

from stillfresh.bounded import BoundedDict
from stillfresh.clock import Clock
from stillfresh.errors import without_secrets
from stillfresh.http.fields import Raw, values
from stillfresh.pages.model import Rendered, StoredPage

STATE: Final = b"x-facetheory-isr"
OLD: Final = (b"stale", b"wait")
"""How the states begin of a page that FaceTheory did not render for this request."""
HYDRATION: Final = "__facetheory_isr_hydration"
"""The parameter of a request for the hydration data of a page, not for the page."""
PARAMETER: Final = re.compile(r"\{([^{}/+*]+)\+?\}")
REST: Final = re.compile(r"/\{([^{}/+*]+)\*\}$")
"""In a route: `{slug}`, `{rest+}` for the rest of the path, `{rest*}` for one that may be empty."""
VARIANT: Final = ("?", "&", "#", "\n")
"""What follows a cache key in the cache keys of its variants."""
MOST_SEEN: Final = 1_000
"""Responses whose ETags are remembered."""
LONG: Final = 5.0
"""Seconds; FaceTheory waits seven for a lease, unless it is told otherwise."""
HINT_AGAIN: Final = 600.0
"""Seconds between two hints in the log."""
ADVICE: Final = (
    "Give this cache another table or tenant, or give the site other cache keys: "
    "see 'FaceTheory as the site' in docs/facetheory.md"
)

logger = logging.getLogger(__name__)


def is_old_copy(headers: Raw) -> bool:
    """True if FaceTheory served a stored page because it could not render one now."""
    return any(value.strip().lower().startswith(OLD) for value in values(headers, STATE))


def address_in_key(key: str) -> str | None:
    """The path and the query of a page with FaceTheory's default cache key, as they were sent.

    Such a key is `tenant::/news/{slug}?slug=a&q=1#cookies=…`. None for other keys.
    """
    address = key.partition("#")[0]
    route, mark, pairs = address.partition("::")[2].partition("?")
    if not mark or not route.startswith("/"):
        return None
    needed = PARAMETER.findall(route)
    names = {*needed, *REST.findall(route)}
    parameters: dict[str, str] = {}
    query: list[tuple[str, str]] = []
    for name, value in parse_qsl(pairs, keep_blank_values=True):
        if name in names and name not in parameters:  # the query comes after the parameters
            parameters[name] = value
        else:
            query.append((name, value))
    if any(name not in parameters for name in needed):
        return None
    before_rest = PARAMETER.sub(lambda match: parameters[match[1]], route)
    path = REST.sub(lambda match: _rest(parameters.get(match[1])), before_rest) or "/"
    return f"{path}?{urlencode(query)}" if query else path


def _rest(value: str | None) -> str:
    return "" if value is None else f"/{value}"


def is_variant(key: str, of: str) -> bool:
    """True if `key` is the cache key `of`, or the same with a query, credentials or a variant."""
    return key == of or (key.startswith(of) and (of.endswith("?") or key[len(of)] in VARIANT))


class SiteStore:
    """Finds out whether the site keeps its pages in this cache's own store, under the same keys.

    `is_ours` is set once, and holds until this process ends: only an operator can change it.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._seen: BoundedDict[str, bytes] = BoundedDict(MOST_SEEN)
        """The ETags of FaceTheory's responses that passed through, by page."""
        self._hint_at = float("-inf")
        self.is_ours = False

    def passed(self, id_: str, headers: Raw) -> None:
        """Note a response of the site to a request that held no lease of ours."""
        etags = values(headers, b"etag")
        if etags and values(headers, STATE) and not self.is_ours:
            self._seen.note(id_, etags[0])

    def note_found(self, id_: str, page: StoredPage) -> None:
        """A page that another service stored: the site did, if it answered with the same ETag."""
        if self._seen and page.head.is_foreign and self._seen.pop(id_, None) in _etags(page):
            self._tell(id_)

    def rendered(self, id_: str, rendered: Rendered, old: StoredPage | None, began: float) -> None:
        """Judge a response that was loaded while we held the lease of the page."""
        page = rendered.page
        if page is None or self.is_ours:
            return
        if old is not None and old.head.is_foreign and is_old_copy(page.head.headers):
            if not _etags(page).isdisjoint(_etags(old)):
                self._tell(id_)
        elif old is None and page.head.status >= 500 and self._clock() - began >= LONG:
            self._hint(id_, page.head.status, self._clock() - began)

    def _tell(self, id_: str) -> None:
        self.is_ours = True
        self._seen.clear()
        logger.error(
            "%s: the site is a FaceTheory service that uses the same table and cache keys as this "
            "cache. It waits for the lease that this cache holds, and then answers with its old "
            "page. %s. Until this process is restarted, pages that are not fresh pass to the site "
            "uncached (detail=same-store)",
            without_secrets(id_),
            ADVICE,
        )

    def _hint(self, id_: str, status: int, took: float) -> None:
        now = self._clock()
        if now - self._hint_at < HINT_AGAIN:
            return
        self._hint_at = now
        logger.error(
            "%s: the site answered %d after %.1f s, while this cache held the lease of the page. "
            "If the site is a FaceTheory service that uses the same table and cache keys, it was "
            "waiting for this lease. %s",
            without_secrets(id_),
            status,
            took,
            ADVICE,
        )


def _etags(page: StoredPage) -> set[bytes | None]:
    return {*values(page.head.headers, b"etag")}
