"""The middleware's memo: which page an earlier equal request was served, while that is unchanged.

It decides nothing. When `Visits` has found a page, the memo remembers the entries of memory that
led to it, by the parts of the request that counted: its line and Host, and the fields that the
page's `Vary` or its route names. A request with a field that could change the answer in another way
(`MARKS` but the Host, a token of changes) takes the normal path. So does every request once an
entry has changed: it was refreshed, invalidated, dropped, or is no longer fresh.

Two callers use it. The middleware finds the page of a request here, on any server. And it tells a
server that can repeat answers how it may (`PageRepeat`): the memos of `stillfresh serve` are asked
before a request is parsed, and call the `PageRepeat` to learn whether the page is still right. So
one place says what is unchanged.
"""

from collections.abc import Callable, Iterable, Sequence
from enum import Enum, auto
from typing import Any, Final, TypeAlias, assert_never

from stillfresh.engine import Answer, Memo
from stillfresh.http import age_at, ttl_at
from stillfresh.http.fields import Raw
from stillfresh.http.own_writes import COOKIE_NAME, FIELD_NAME
from stillfresh.pages.clients import PageAddress
from stillfresh.pages.model import FoundPage, PageKey, Scope, StoredPage
from stillfresh.pages.page_cache import PageCache
from stillfresh.pages.repeats import KEEP, Repeatable, Response
from stillfresh.pages.routes import Visit
from stillfresh.pages.sharing import is_of
from stillfresh.pages.stored import ReadyPage, answer_to, body_of, hit_text, ready, response_fields

LONGEST_REQUEST: Final = 512
"""Bytes of a request that are remembered; longer ones take the normal path."""
HOST: Final = b"host"
COOKIE: Final = b"cookie"
RANGE: Final = b"range"
OF_RANGES: Final = frozenset({RANGE, b"if-range"})
PEER: Final = b"x-forwarded-for"
"""A field that a proxy adds: the request's head alone does not have it."""
MARKS: Final = frozenset(
    {HOST, b"authorization", b"cache-control", b"if-match", b"if-unmodified-since", b"pragma"}
    | {FIELD_NAME}
)
"""Request fields with which the memo must not answer; and the Host, which is part of its key."""
WHOLE_PAGE_MARKS: Final = MARKS | {b"if-modified-since", b"if-none-match", b"if-range", b"range"}
"""The marks for a caller that sends only whole pages: also the fields that ask for the page on
conditions, or for a part of it."""
CONDITIONS: Final = frozenset({b"if-modified-since", b"if-none-match"})
"""Fields that decide whether the visitor's own copy is still the page."""
Line: TypeAlias = tuple[Any, ...]
HasPlaces: TypeAlias = Callable[[PageAddress, Sequence[str], float], bool]


class Form(Enum):
    """Which response a request gets of its page; the same as long as the page is the same."""

    WHOLE = auto()
    HEAD = auto()
    NOT_MODIFIED = auto()
    PART = auto()


class PageRepeat:
    """The page that a request was answered with, to answer the same request again.

    It holds the entries of memory that led to the page, and no bytes. Called, it returns the
    response of this moment, and counts the visit; None if an entry has changed.
    """

    __slots__ = ("_address", "_form", "_ids", "_memo", "_pages", "_request")

    def __init__(
        self,
        pages: "PageMemo",
        memo: Memo[PageKey, StoredPage],
        ids: list[str],
        address: PageAddress,
    ) -> None:
        self._pages = pages
        self._memo = memo
        self._ids = ids
        """The keys of the answers that the page depends on, its own last."""
        self._address = address
        self._form = Form.WHOLE
        self._request: Raw = ()

    def __call__(self) -> Response | None:
        stored = self.visited()
        return None if stored is None else self.response(stored)

    def visited(self) -> StoredPage | None:
        """The page, with its `ready` fields, if it is still right; then that counts as a visit."""
        now = self._pages.clock()
        stored = self.confirmed(now)
        if stored is not None:
            self._memo.count(now)
        return stored

    def confirmed(self, now: float) -> StoredPage | None:
        """The same, without counting."""
        answer = self._memo.read(now)
        if answer is None:
            return None
        page: ReadyPage | None = answer.value.ready
        is_ready = page is not None and page.begins <= now < page.ends
        if not is_ready and not self._prepare(answer, now):
            return None
        return answer.value

    def _prepare(self, answer: Answer[StoredPage], now: float) -> bool:
        """The age in a page's fields is right for part of a second; then it is written again."""
        if not self._pages.has_places(self._address, self._ids, now):
            return False
        age = age_at(answer, now)
        ttl = ttl_at(answer, now)
        ends = now + min(1.0 - age % 1.0, ttl % 1.0)
        ready(answer.value).begin(response_fields(answer.value, age, hit_text(ttl)), now, ends)
        return True

    def response(self, stored: StoredPage) -> Response:
        """The response of this moment, which `visited` has prepared."""
        page: ReadyPage = stored.ready
        match self._form:
            case Form.WHOLE:
                return Response(stored.head.status, page.whole, body_of(stored))
            case Form.NOT_MODIFIED:
                return Response(304, page.unmodified, b"")
            case Form.HEAD:
                return Response(stored.head.status, page.whole, b"")
            case Form.PART:
                return answer_to(stored, page.said, self._request, is_head=False)
            case _:
                assert_never(self._form)

    def to(self, request: Raw, stored: StoredPage, *, is_head: bool) -> "PageRepeat":
        """The same for a request with these conditions."""
        repeat = PageRepeat(self._pages, self._memo, self._ids, self._address)
        status = answer_to(stored, (), request, is_head=is_head).status
        if status == 304:
            repeat._form = Form.NOT_MODIFIED
        elif is_head:
            repeat._form = Form.HEAD
        elif any(name == RANGE for name, _ in request):
            repeat._form = Form.PART
            repeat._request = tuple(field for field in request if field[0] in OF_RANGES)
        return repeat


class PageMemo:
    """`has_places`: whether the names in a page's key still have their places.

    `marks`: `MARKS`, and the request fields that identify a client.
    """

    def __init__(self, pages: PageCache, has_places: HasPlaces, marks: frozenset[bytes]) -> None:
        self._resource = pages.resource
        self.clock = pages.clock
        self.has_places = has_places
        self._marks = marks
        self._most = pages.max_entries
        self._known: dict[Line | None, PageRepeat | frozenset[bytes]] = {}
        """By the request line; where header fields count, their names, and then by both."""

    def find(self, scope: Scope, marks: frozenset[bytes]) -> StoredPage | None:
        """The page for this request, with its `ready`; None: take the normal path.

        `marks`: those of `MARKS`, or of `WHOLE_PAGE_MARKS` if the caller sends only whole pages. A
        server that can repeat the answer is told how.
        """
        line = line_of(scope, marks)
        known = self._known.get(line)
        names: frozenset[bytes] = frozenset()
        if type(known) is frozenset:
            names = known
            known = self._known.get((line, fields_named(names, scope["headers"])))
        if type(known) is not PageRepeat:
            return None
        stored = known.visited()
        if stored is not None:
            self._offer(scope, known, stored, names)
        return stored

    def _offer(
        self, scope: Scope, known: PageRepeat, stored: StoredPage, names: frozenset[bytes]
    ) -> None:
        """Tell a server that can repeat this answer how it may."""
        keep = scope.get(KEEP)
        if keep is None or PEER in names:
            return
        is_head = scope["method"] == "HEAD"
        repeat = known.to(tuple(scope["headers"]), stored, is_head=is_head)
        aside = (self._marks - {HOST}) | OF_RANGES
        keep(Repeatable(repeat.response(stored), repeat, names | CONDITIONS, aside))

    def remember(self, scope: Scope, visit: Visit, page: FoundPage) -> None:
        """Remember that such a request leads to this page.

        A server that can repeat the answer is told how, but not if the page was loaded for this
        visit: then the next visit tells it.
        """
        line = line_of(scope, self._marks)
        memo_and_answers = self._resource.memo(page.keys)
        if line is None or memo_and_answers is None:
            return
        memo, answers = memo_and_answers
        if answers[-1].value is not page.stored:
            return
        if page.is_new and not is_of(page.stored, visit.headers, visit.carried):
            return  # this visitor got another form, this once
        named = {*visit.route.vary}.union(*(answer.value.head.vary for answer in answers))
        names = frozenset(name.lower().encode("latin-1", "replace") for name in named)
        ids = [key.id for key in page.keys]
        repeat = PageRepeat(self, memo, ids, (visit.host, visit.path, visit.query))
        if self._keep(line, names, scope["headers"], repeat) and not page.is_new:
            stored = repeat.confirmed(self.clock())
            if stored is not None:
                self._offer(scope, repeat, stored, names)

    def _keep(self, line: Line, names: frozenset[bytes], headers: Raw, repeat: PageRepeat) -> bool:
        """False if it would take too much memory."""
        before = self._known.get(line)
        names |= before if isinstance(before, frozenset) else frozenset()
        lines = fields_named(names, headers)
        if _size(line) + sum(map(_size, lines)) > LONGEST_REQUEST:
            return False
        while len(self._known) >= self._most:
            del self._known[next(iter(self._known))]  # the oldest makes room
        if names:
            self._known[line] = names
        self._known[(line, lines) if names else line] = repeat
        return True


def line_of(scope: Scope, marks: frozenset[bytes]) -> Line | None:
    """The parts of a plain request for a page; None if it asks for more, or has a token."""
    host = None
    for name, value in scope["headers"]:
        if name in marks:
            if name != HOST or host is not None:
                return None
            host = value
        elif name == COOKIE and COOKIE_NAME in value:
            return None
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


def fields_named(names: frozenset[bytes], headers: Iterable[tuple[bytes, bytes]]) -> Raw:
    """The header fields of these names."""
    return tuple((name, value) for name, value in headers if name in names)


def _size(parts: Iterable[bytes | str | None]) -> int:
    return sum(len(part) for part in parts if part is not None)
