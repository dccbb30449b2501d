"""Answers that are given again without the app, by the bytes of a request's head.

The answer to a request depends on its head and on the state of the cache. When the app has answered
a request, it may say how to give the same answer again (`stillfresh.pages.repeats`). Then this
server finds that answer before it parses anything and before it starts a task. It looks in memos of
two kinds (`Hits`). Connections from trusted proxies have a set of their own.

*By the whole head* (`by_head`): for clients that send the same bytes each time.

*By the request line and the fields that count* (`plain`; `chosen` if more fields count than the
Host): for browsers, of which each sends its own `User-Agent` and cookies. The app names the fields
that may choose another answer; their lines are part of the key, as they were sent and in their
order. It also names fields with which it must be asked, and the server adds those that mean more
than a head. A head that has one of these, or that is written in an unusual way, does not match, and
the parser decides about it.

An answer is written anew from what the app returns, unless its fields are the same as the last
time. It is only kept at all if the app's own answer had just these bytes: so nothing that a layer
between app and server does to an answer is lost.

Nothing here knows what a page is.
"""

import asyncio
import re
import time
from collections.abc import Iterable
from typing import Final

from uvicorn.protocols.http.httptools_impl import STATUS_LINE

from stillfresh.http.fields import http_date_text, names_in
from stillfresh.http.own_writes import COOKIE_NAME
from stillfresh.pages.edge import Repeatable

LONGEST_HEAD_REPEATED: Final = 8_192
"""Bytes; longer heads take the normal way."""
LONGEST_ANSWER: Final = 65_536
"""Bytes; longer ones take the normal way."""
MOST_BYTES_BY_HEAD: Final = 4_194_304
"""Bytes of whole heads, and of the heads of their answers; bodies are not copied."""
MOST_BYTES: Final = 33_554_432
"""The same for plain requests by what counts of them."""
MOST_BYTES_CHOSEN: Final = 8_388_608
"""The same for requests with fields that choose the answer: clients can make these up."""
MOST_NAMES: Final = 16
"""Fields that may choose an answer, of all pages; more would make each key long."""
BESIDE: Final = 600
"""Bytes of a remembered answer besides its request and its head, about."""
WITH_MORE: Final = names_in(
    b"content-length expect http2-settings keep-alive proxy-connection te trailer "
    b"transfer-encoding upgrade"
)
"""Fields by which a request is more than a head, or the connection does not stay as it is."""
OF_ALL: Final = frozenset({b"host"})
"""Fields that are part of every key."""
OF_PROXIES: Final = OF_ALL | {b"x-forwarded-host", b"x-forwarded-proto"}
"""Fields that choose no answer beside the page's address."""
TOKEN: Final = rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]"
PLAIN_HEAD: Final = re.compile(
    rb"(?:GET|HEAD) /[!-~]*+ HTTP/1\.1\r\n"
    rb"(?:" + TOKEN + rb"++:[^\x00-\x08\x0a-\x1f\x7f]*+\r\n)*+\r\n"
)
"""A head without anything unusual: the parser reads it in the same way, whatever its fields are."""


class RepeatedAnswer:
    """An answer that the app gives again, as bytes."""

    __slots__ = ("_fields", "_head", "_repeat", "is_used", "size")

    def __init__(self, repeatable: Repeatable, request_size: int) -> None:
        self._repeat = repeatable.repeat
        response = repeatable.response
        self._fields = response.fields
        self._head = written_head(response.status, response.fields)
        self.size = request_size + len(self._head) + BESIDE
        self.is_used = False
        """It was given since it was last in danger of making room."""

    def has_bytes(self, repeatable: Repeatable, text: bytes) -> bool:
        """True if the app's own answer, after it went through all layers, has the same bytes."""
        return text == self._head + repeatable.response.body

    def text(self) -> bytes | None:
        """All bytes of the answer, which counts as given. None: the app must be asked."""
        response = self._repeat()
        if response is None:
            return None
        if response.fields is not self._fields:
            self._head = written_head(response.status, response.fields)
            self._fields = response.fields
        self.is_used = True
        return self._head + response.body


def written_head(status: int, fields: Iterable[tuple[bytes, bytes]]) -> bytes:
    """The head of a response, with a Date if there is none (RFC 9110 §6.6.1)."""
    has_date = False
    lines = [STATUS_LINE[status]]
    for name, value in fields:
        lines += (name, b": ", value, b"\r\n")
        if name == b"date":
            has_date = True
    if not has_date:
        lines += (b"date: ", http_date_text(time.time()), b"\r\n")
    lines.append(b"\r\n")
    return b"".join(lines)


class RequestKeys:
    """What heads must have in common for the same answer; it grows with what apps name."""

    def __init__(self) -> None:
        self._names: frozenset[bytes] = frozenset()
        self._aside: frozenset[bytes] = frozenset()
        self._compile(OF_ALL, WITH_MORE)

    def _compile(self, names: frozenset[bytes], aside: frozenset[bytes]) -> None:
        self._names = names
        self._aside = aside
        # A connection stays as it is with `keep-alive`, which HTTP/1.1 means anyway.
        closing = rb"connection:(?![ \t]*keep-alive[ \t]*\r)"
        # A client with a token of its changes may not be given what was right for others.
        token = rb"cookie:[^\r]*" + COOKIE_NAME
        aside_lines = rb"|".join((_any_of(aside), closing, token))
        self._has_aside = re.compile(rb"\n(?:" + aside_lines + rb")").search
        self._lines = re.compile(rb"\n(?i:" + _any_of(names) + rb")[^\r]*").findall
        chosen = names - OF_PROXIES
        self._chosen = re.compile(rb"\n(?i:" + _any_of(chosen) + rb")").search if chosen else None

    def admit(self, names: frozenset[bytes], aside: frozenset[bytes]) -> bool | None:
        """Take these names up. None: too many; False: keys made so far are of no use now."""
        if names <= self._names and aside <= self._aside:
            return True
        all_names = self._names | names
        if len(all_names) > MOST_NAMES:
            return None
        self._compile(all_names, self._aside | aside)
        return False

    def key(self, head: bytes) -> bytes | None:
        """The same for all heads with the same answer. None: the app must be asked."""
        if PLAIN_HEAD.fullmatch(head) is None or self._has_aside(head.lower()) is not None:
            return None
        end = head.index(b"\r")
        return head[:end] + b"".join(self._lines(head, end))

    def is_chosen(self, key: bytes) -> bool:
        """True if the request has more that counts than its line and its host."""
        return self._chosen is not None and self._chosen(key) is not None


def _any_of(names: frozenset[bytes]) -> bytes:
    return b"(?:" + b"|".join(re.escape(name) + b":" for name in sorted(names)) + b")"


class RepeatedAnswers:
    """Answers by request, of a limited size.

    When there is no room, an answer that was not used lately makes room. If the next in turn was
    used, the new one has to wait for another visit. So where more requests are made in turn than
    there is room for, most are still answered from here.
    """

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._bytes = 0
        self._answers: dict[bytes, RepeatedAnswer] = {}
        self.get = self._answers.get

    def __len__(self) -> int:
        return len(self._answers)

    def clear(self) -> None:
        self._bytes = 0
        self._answers.clear()

    def note(self, key: bytes, answer: RepeatedAnswer) -> None:
        before = self._answers.pop(key, None)
        if before is not None:
            self._bytes -= before.size
        while self._answers and self._bytes + answer.size > self._most_bytes:
            oldest_key = next(iter(self._answers))
            oldest = self._answers.pop(oldest_key)
            if oldest.is_used:
                oldest.is_used = False
                self._answers[oldest_key] = oldest  # as the newest
                return
            self._bytes -= oldest.size
        self._answers[key] = answer
        self._bytes += answer.size


class Hits:
    """The answers that one server can give again."""

    def __init__(self) -> None:
        self._keys = RequestKeys()
        self.by_head = RepeatedAnswers(MOST_BYTES_BY_HEAD)
        self.plain = RepeatedAnswers(MOST_BYTES)
        self.chosen = RepeatedAnswers(MOST_BYTES_CHOSEN)
        """Those to requests with more that counts than line and host. Clients can make these up,
        and must not push out the plain ones."""

    def __len__(self) -> int:
        return len(self.by_head) + len(self.plain) + len(self.chosen)

    def clear(self) -> None:
        self.by_head.clear()
        self._clear_requests()

    def _clear_requests(self) -> None:
        self.plain.clear()
        self.chosen.clear()

    def text(self, head: bytes) -> bytes | None:
        """All bytes of the answer to this request, which counts as given."""
        if len(head) > LONGEST_HEAD_REPEATED:
            return None
        answer = self.by_head.get(head)
        if answer is not None:
            text = answer.text()
            if text is not None:
                return text
        key = self._keys.key(head)
        if key is None:
            return None
        answer = self.plain.get(key) or self.chosen.get(key)
        return None if answer is None else answer.text()

    def note(self, head: bytes, repeatable: Repeatable, text: bytes) -> None:
        """Remember what the app has just answered to a request with this head."""
        answer = RepeatedAnswer(repeatable, len(head))
        if not answer.has_bytes(repeatable, text):
            return
        self.by_head.note(head, answer)
        is_known = self._keys.admit(repeatable.names, repeatable.aside)
        if is_known is None:
            return
        if not is_known:
            self._clear_requests()
        key = self._keys.key(head)
        if key is not None:
            part = self.chosen if self._keys.is_chosen(key) else self.plain
            part.note(key, answer)


class Recorder:
    """The transport of one answer. It records the bytes written after the app called `keep`."""

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._parts: list[bytes] = []
        self._repeatable: Repeatable | None = None
        self.close = transport.close
        self.is_closing = transport.is_closing

    def write(self, data: bytes) -> None:
        if self._repeatable is not None:
            self._parts.append(data)
        self._transport.write(data)

    def keep(self, repeatable: Repeatable) -> None:
        """The answer that follows may be given again as this says."""
        self._repeatable = repeatable

    def recorded(self) -> tuple[Repeatable, bytes] | None:
        """The whole answer, if it may be given again."""
        if self._repeatable is None or sum(map(len, self._parts)) > LONGEST_ANSWER:
            return None
        return self._repeatable, b"".join(self._parts)


def is_one_head(data: bytes) -> bool:
    """True if these are the bytes of one whole GET or HEAD request, and nothing else."""
    is_read = data.startswith((b"GET ", b"HEAD "))
    is_short = len(data) <= LONGEST_HEAD_REPEATED
    return is_read and is_short and data.find(b"\r\n\r\n") == len(data) - 4
