"""Pages at hand (I16): the result of an earlier identical request, while it is still right.

It decides nothing. A page is remembered by the bytes of the request that mattered, with the entries
that it depends on. If one of these has changed, the request takes the normal path.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, Final, NamedTuple, TypeAlias

from stillfresh.engine import Face, MemoryEntry
from stillfresh.freshness import Verdict
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
Step: TypeAlias = tuple[PageKey, MemoryEntry[PageKey, StoredPage], int]
"""An entry that was read, and its edition."""
HasPlaces: TypeAlias = Callable[[PageAddress, Sequence[str], float], bool]


class Hot(NamedTuple):
    """The entries that a page depends on, itself last. Only the entry holds the bytes."""

    steps: tuple[Step, ...]
    address: PageAddress


class HotPages(Face[PageKey, StoredPage]):
    """`has_places`: whether the names in a page's key still have their places."""

    def __init__(self, pages: PageCache, has_places: HasPlaces, marks: frozenset[bytes]) -> None:
        super().__init__(pages.core)
        self._has_places = has_places
        self._marks = marks
        self._verified = pages.core.verified
        self._most = pages.core.spec.max_entries
        self._known: dict[Line | None, Hot | frozenset[bytes]] = {}
        """By the request line; where header fields count, their names, and then by both."""

    def stand_back(self, *, back: bool) -> None:
        """Forget all pages at hand; while it stands back, remember none."""
        super().stand_back(back=back)
        for entry in self.core.memory.entries.values() if back else ():
            entry.edition += 1

    def find(self, scope: Scope, marks: frozenset[bytes]) -> StoredPage | None:
        """The page for this request, with its `ready`; None: take the normal path.

        A server that can repeat the answer is told for how long it may.
        """
        line = line_of(scope, marks)
        hot, keep = self._known.get(line), scope.get(KEEP)
        if type(hot) is frozenset:
            keep = None if PEER in hot else keep
            hot = self._known.get((line, said(scope["headers"], hot)))
        if type(hot) is not Hot or (stored := self._standing(hot, self._clock())) is None:
            return None
        if keep is not None:
            keep(partial(self._holds, hot, stored.ready.said))
        return stored

    def _holds(self, hot: Hot, said: Raw) -> bool:
        """True if the same page with the same fields is still right; then it counts as a hit."""
        stored = self._standing(hot, self._clock())
        if stored is None or stored.ready.said is said:
            return stored is not None
        _uncount(hot)
        return False

    def _standing(self, hot: Hot, now: float) -> StoredPage | None:
        """The page, if everything that it depends on is unchanged; counted as a read."""
        for key, entry, edition in hot.steps:
            if entry.edition == edition:
                if now < entry.until:
                    entry.hits += 1
                    continue
                if self._verified(key, entry, now) is not None:  # where it is counted
                    continue
            _uncount(hot, entry)
            return None
        stored = entry.answer.value
        made: ReadyPage = stored.ready
        if (made is not None and made.begins <= now < made.ends) or self._is_prepared(hot, now):
            return stored
        _uncount(hot)
        return None

    def _is_prepared(self, hot: Hot, now: float) -> bool:
        """The age in a page's fields is right for part of a second; then it is written again."""
        answer = hot.steps[-1][1].answer
        if not self._has_places(hot.address, [key.id for key, _, _ in hot.steps], now):
            return False
        made, age, ttl = ready(answer.value), age_at(answer, now), ttl_at(answer, now)
        made.said = told(answer.value, age, hit_text(ttl))
        made.begins, made.ends = now, now + min(1.0 - age % 1.0, ttl % 1.0)
        return True

    def remember(self, scope: Scope, visit: Visit, found: FoundPage) -> None:
        """Remember that these bytes lead to this page."""
        line = line_of(scope, self._marks)
        steps = tuple(step for key in found.keys if (step := self._step(key)) is not None)
        if line is None or len(steps) < len(found.keys):
            return
        if steps[-1][1].answer.value is not found.stored:
            return
        if found.is_new and not is_of(found.stored, visit.headers, visit.carried):
            return  # this visitor got another form, this once
        named = {*visit.route.vary}.union(*(it[1].answer.value.head.vary for it in steps))
        names = frozenset(name.lower().encode("latin-1", "replace") for name in named)
        hot = Hot(steps, (visit.host, visit.path, visit.query))
        self._keep(line, names, scope["headers"], hot)

    def _step(self, key: PageKey) -> Step | None:
        """None if it is not in memory, or is not served repeatedly as it is."""
        entry = self._entry(key)
        if entry is None:
            return None
        answer = entry.answer
        is_plain = answer.found and answer.verdict is Verdict.FRESH and answer.error is None
        return (entry.key, entry, entry.edition) if is_plain else None

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


def _uncount(hot: Hot, missed: MemoryEntry[PageKey, StoredPage] | None = None) -> None:
    """E12: undo counts: the normal path counts these reads itself."""
    for _, entry, _ in hot.steps:
        if entry is missed:
            return
        entry.hits -= 1


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
