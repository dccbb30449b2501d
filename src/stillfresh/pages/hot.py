"""Pages at hand: the result of an earlier identical request, while it is still right.

It decides nothing. A page is remembered by the bytes of the request that mattered, with the entries
that it depends on. If one of these has changed, the request takes the normal path.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, Final, TypeAlias

from msgspec import Struct

from stillfresh.engine import Answer, Memo
from stillfresh.http.fields import Raw
from stillfresh.pages.clients import PageAddress
from stillfresh.pages.model import FoundPage, PageKey, Scope, StoredPage
from stillfresh.pages.page_cache import PageCache
from stillfresh.pages.routes import KEEP, Visit
from stillfresh.pages.sharing import age_at, is_of, ttl_at
from stillfresh.pages.stored import ReadyPage, hit_text, ready, told

MOST_HOT: Final = 512
"""Bytes of a request that are remembered; longer ones take the normal path."""
HOST: Final = b"host"
PEER: Final = b"x-forwarded-for"
"""A field that a proxy adds: the request's head alone does not have it."""
ON_CONDITIONS: Final = frozenset(
    {HOST, b"authorization", b"cache-control", b"if-match", b"if-unmodified-since", b"pragma"}
)
"""Request fields, besides the host, with which another answer may be right."""
PLAIN: Final = ON_CONDITIONS | {b"if-modified-since", b"if-none-match", b"if-range", b"range"}
"""Also fields that ask for the page on conditions, or for a part of it."""
Line: TypeAlias = tuple[Any, ...]
HasPlaces: TypeAlias = Callable[[PageAddress, Sequence[str], float], bool]


class Hot(Struct, frozen=True):
    """The answers that a page depends on, its own last. The memo holds no bytes."""

    memo: Memo[PageKey, StoredPage]
    ids: list[str]
    """The keys of these answers."""
    address: PageAddress


class HotPages:
    """`has_places`: whether the names in a page's key still have their places."""

    def __init__(self, pages: PageCache, has_places: HasPlaces, marks: frozenset[bytes]) -> None:
        self._resource = pages.resource
        self._clock = pages.clock
        self._has_places = has_places
        self._marks = marks
        self._most = pages.max_entries
        self._known: dict[Line | None, Hot | frozenset[bytes]] = {}
        """By the request line; where header fields count, their names, and then by both."""

    def find(self, scope: Scope, marks: frozenset[bytes]) -> StoredPage | None:
        """The page for this request, with its `ready`; None: take the normal path.

        A server that can repeat the answer is told for how long it may.
        """
        line = line_of(scope, marks)
        hot, keep = self._known.get(line), scope.get(KEEP)
        if type(hot) is frozenset:
            keep = None if PEER in hot else keep
            hot = self._known.get((line, said(scope["headers"], hot)))
        if type(hot) is not Hot:
            return None
        now = self._clock()
        answer = hot.memo.read(now)
        if answer is None:
            return None
        stored = answer.value
        made: ReadyPage = stored.ready
        is_ready = made is not None and made.begins <= now < made.ends
        if not is_ready and not self._is_prepared(hot, answer, now):
            return None
        hot.memo.count(now)
        if keep is not None:
            keep(partial(self._holds, hot, stored.ready.said))
        return stored

    def _holds(self, hot: Hot, said: Raw) -> bool:
        """True if the same page with the same fields is still right; then it counts as a hit."""
        now = self._clock()
        answer = hot.memo.read(now)
        if answer is None:
            return False
        made: ReadyPage = answer.value.ready
        if made.said is said and made.begins <= now < made.ends:
            hot.memo.count(now)
            return True
        return False

    def _is_prepared(self, hot: Hot, answer: Answer[StoredPage], now: float) -> bool:
        """The age in a page's fields is right for part of a second; then it is written again."""
        if not self._has_places(hot.address, hot.ids, now):
            return False
        made, age, ttl = ready(answer.value), age_at(answer, now), ttl_at(answer, now)
        made.said = told(answer.value, age, hit_text(ttl))
        made.begins, made.ends = now, now + min(1.0 - age % 1.0, ttl % 1.0)
        return True

    def remember(self, scope: Scope, visit: Visit, found: FoundPage) -> None:
        """Remember that these bytes lead to this page."""
        line = line_of(scope, self._marks)
        memo_and_answers = self._resource.memo(found.keys)
        if line is None or memo_and_answers is None:
            return
        memo, answers = memo_and_answers
        if answers[-1].value is not found.stored:
            return
        if found.is_new and not is_of(found.stored, visit.headers, visit.carried):
            return  # this visitor got another form, this once
        named = {*visit.route.vary}.union(*(answer.value.head.vary for answer in answers))
        names = frozenset(name.lower().encode("latin-1", "replace") for name in named)
        hot = Hot(memo, [key.id for key in found.keys], (visit.host, visit.path, visit.query))
        self._keep(line, names, scope["headers"], hot)

    def _keep(self, line: Line, names: frozenset[bytes], headers: Raw, hot: Hot) -> None:
        before = self._known.get(line)
        names |= before if isinstance(before, frozenset) else frozenset()
        words = said(headers, names)
        if _size(line) + sum(map(_size, words)) > MOST_HOT:
            return
        if len(self._known) >= self._most:
            self._known.clear()
        if names:
            self._known[line] = names
        self._known[(line, words) if names else line] = hot


def line_of(scope: Scope, marks: frozenset[bytes]) -> Line | None:
    """The parts of a plain request for a page; None if it asks for more."""
    host = None
    for name, value in scope["headers"]:
        if name in marks:
            if name != HOST or host is not None:
                return None
            host = value
    if host is None:
        return None
    try:
        return (
            scope["scheme"],
            host,
            scope.get("raw_path"),
            scope["path"],
            scope["query_string"],
            scope["root_path"],
        )
    except KeyError:  # optional in ASGI; no server omits them
        return None


def said(headers: Iterable[tuple[bytes, bytes]], names: frozenset[bytes]) -> Raw:
    """The header fields of these names."""
    return tuple((name, value) for name, value in headers if name in names)


def _size(parts: Iterable[bytes | str | None]) -> int:
    return sum(len(part) for part in parts if part is not None)
