"""One exchange with a site as bytes: the request that is written, and the answer that is read.

Pure: `SiteConnection` sends and receives. RFC 9112 says where a message ends. A cache that reads an
end elsewhere than the site gives one visitor's answer to another, so everything that could be read
in two ways is an error:

- *A head* (§4, §5): a status line, then fields whose names are tokens. A folded line belongs to the
  field before it, and a line may end in LF alone. Nothing else is mended. A value with a control
  character is an error (RFC 9110 §5.5), because servers refuse to send it on.
- *The end of a body* (§6.3), the first that is true: there is none (HEAD, 204, 304); chunks; one
  length, which may be repeated; the end of the connection. A transfer coding other than `chunked`
  is an error.
- *Afterwards* the connection may have another exchange if the answer is complete and allows it
  (HTTP/1.1, no `Connection: close`), and no byte is left over.

h11 reads answers in the same way, except for control characters, and a test feeds both the same
bytes. It is not used here because its states and events took a fifth of the time of a passed
request. httptools refuses lengths that are repeated and lines that are folded, and cannot be told
that the answer to HEAD has no body.
"""

import re
from functools import lru_cache
from typing import Final, NamedTuple

from stillfresh.http.fields import NAME, Raw, lowered, values

LONGEST_HEAD: Final = 102_400
"""Bytes of a head, of a line between chunks, or of trailers, as long as they are incomplete."""
LAST_STATUS: Final = 599
"""RFC 9110 §15."""
SWITCHED: Final = 101
FINAL: Final = 200
"""The lowest status of an answer that is not an interim one."""
WITHOUT_BODY: Final = frozenset({204, 304})
MOST_DIGITS: Final = 20
"""The most digits of a length."""
TOKEN: Final = rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]++"
VALUE: Final = rb"(?:[^\x00\s]++(?:[ \t]++[^\x00\s]++)*+)?+"
STATUS_LINE: Final = re.compile(rb"HTTP/([0-9]\.[0-9]) ([0-9]{3})(?: (?:[ \t]|[^\x00\s])*)?")
ANSWER_VALUE: Final = rb"(?:[^\x00-\x20\x7f]++(?:[ \t]++[^\x00-\x20\x7f]++)*+)?+"
FIELD_VALUE: Final = re.compile(VALUE)
FIELD_LINE: Final = re.compile(rb"(" + TOKEN + rb"):[ \t]*+(" + ANSWER_VALUE + rb")[ \t]*")
METHOD: Final = re.compile(TOKEN)
TARGET: Final = re.compile(rb"[!-~]+")
DIGITS: Final = re.compile(rb"[0-9]+")
CHUNK_LINE: Final = re.compile(rb"([0-9A-Fa-f]{1,20})(?:;.*)?[ \t]*\r\n")
EMPTY_LINE: Final = re.compile(rb"\n\r?\n")


class SiteBroken(ConnectionError):
    """The site cannot be reached, closed the connection, or does not speak HTTP.

    Its text continues "cannot be reached:" or "broke off its answer:".
    """

    fault: bytes | None = None
    """RFC 9209 §2.3, if it is a special one."""


class CannotBePassed(Exception):
    """This request cannot be sent to the site."""


class SiteRequest(NamedTuple):
    """The head of a request, with its Host and the framing of its body."""

    method: str
    target: bytes
    headers: Raw


class SiteHead(NamedTuple):
    """The head of an answer, or of an interim answer (a status below 200)."""

    status_code: int
    headers: Raw
    """Names in lower case; one length at most."""
    version: bytes

    @property
    def is_interim(self) -> bool:
        return self.status_code < FINAL


class RequestWriter:
    """Writes one request."""

    def __init__(self, request: SiteRequest) -> None:
        self._request = request
        self._left: int | None = 0
        """Bytes of the body to come; None: it is sent in chunks."""

    def head(self) -> bytes:
        """Raises CannotBePassed."""
        method = self._request.method.encode("ascii", "replace")
        target = self._request.target
        if not METHOD.fullmatch(method) or method == b"CONNECT" or not TARGET.fullmatch(target):
            raise CannotBePassed("its first line cannot be written")
        lines = [method + b" " + target + b" HTTP/1.1\r\n"]
        is_chunked = False
        for name, value in self._request.headers:
            if not _is_name(name) or not FIELD_VALUE.fullmatch(value):
                raise CannotBePassed("a header field cannot be written")
            if name == b"transfer-encoding":
                is_chunked = True
            elif name == b"content-length":
                self._left = _length_to_send(value)
            lines += (name, b": ", value, b"\r\n")
        if is_chunked:
            self._left = None
        lines.append(b"\r\n")
        return b"".join(lines)

    def part(self, data: bytes) -> bytes:
        """Raises CannotBePassed if the body becomes longer than announced."""
        if self._left is None:
            return b"%x\r\n%b\r\n" % (len(data), data) if data else b""
        self._left -= len(data)
        if self._left < 0:
            raise CannotBePassed("its body is longer than announced")
        return data

    def end(self) -> bytes:
        """Raises CannotBePassed if the body is shorter than announced."""
        if self._left:
            raise CannotBePassed("its body is shorter than announced")
        return b"0\r\n\r\n" if self._left is None else b""


@lru_cache(maxsize=1024)  # requests have only a few different names
def _is_name(name: bytes) -> bool:
    return NAME.fullmatch(name.lower()) is not None


def _length_to_send(value: bytes) -> int:
    if not DIGITS.fullmatch(value) or len(value) > MOST_DIGITS:
        raise CannotBePassed("its length is not a number")
    return int(value)


class AnswerReader:
    """Reads the answer to one request from the bytes of its connection.

    `head` and `part` return None while more bytes are needed. `may_switch`: the request asks for
    another protocol, so 101 is an answer to it.
    """

    def __init__(self, method: str, *, may_switch: bool = False) -> None:
        self._is_head = method == "HEAD"
        self._may_switch = may_switch
        self._is_over = False
        self._searched = 0
        """Bytes without the end of a head, which are not searched again."""
        self._left = 0
        """Bytes to come of the body, or of this chunk."""
        self._is_chunked = False
        self._is_until_end = False
        self._is_behind_chunk = False
        self._is_in_trailers = False
        self._fault: SiteBroken | None = None
        """What is wrong behind the last part."""
        self.unread = bytearray()
        self.is_complete = False
        self.may_stay = False
        """Another exchange may follow on the connection, if this one is complete."""

    def receive(self, data: bytes) -> None:
        self.unread += data

    def end(self) -> None:
        """The site has sent everything."""
        self._is_over = True

    def head(self) -> SiteHead | None:
        """The next head; the last one has a status of at least 200, or is 101."""
        lines = self._lines()
        if lines is None:
            if self.unread and self.unread[0] <= 0x20:
                raise _wrong("its first line is no status line")
            return None
        head = _head_in(lines)
        if head.status_code == SWITCHED and not self._may_switch:
            raise _wrong("it switches protocols, but was not asked to")
        if not head.is_interim:
            self._frame(head)
        return head

    def _frame(self, head: SiteHead) -> None:
        """RFC 9112 §6.3: where the body ends; §9.3: what becomes of the connection."""
        self.may_stay = head.version >= b"1.1" and not _closes(head.headers)
        if self._is_head or head.status_code in WITHOUT_BODY:
            return
        lengths = values(head.headers, b"content-length")
        if values(head.headers, b"transfer-encoding"):
            self._is_chunked = True
        elif lengths:
            self._left = int(lengths[0])
        else:
            self._is_until_end = True

    def take_unread(self) -> bytes:
        """The bytes behind the answer, which belong to a tunnel."""
        return self._taken(len(self.unread))

    def part(self) -> bytes | None:
        """The next bytes of the body; empty when the answer is complete.

        Chunks that are there are joined. A site may send a chunk for each byte, and what a part
        costs on its way to the visitor is a thousand times what a byte costs.
        """
        if self._fault is not None:
            raise self._fault
        part = self._next_part()
        if not part or not self._is_chunked:
            return part
        chunks: list[bytes | bytearray] = [part]
        try:
            while chunk := self._next_part():
                chunks.append(chunk)
                chunks += self._take_whole_chunks()
        except SiteBroken as exc:  # what came before is passed on first
            self._fault = exc
        return b"".join(chunks)

    def _take_whole_chunks(self) -> list[bytearray]:
        """The chunks that are there to their last byte; the last one, and faulty ones, are left."""
        if self._left or not self.unread.startswith(b"\r\n"):
            return []
        chunks: list[bytearray] = []
        at = 0  # behind a chunk, and before the end of its line
        while match := CHUNK_LINE.match(self.unread, at + 2):
            begin = match.end()
            end = begin + int(match[1], 16)
            if end == begin or self.unread[end : end + 2] != b"\r\n":
                break
            chunks.append(self.unread[begin:end])
            at = end
        del self.unread[:at]
        return chunks

    def _next_part(self) -> bytes | None:
        """The same, of one chunk at most."""
        if self._is_until_end:
            if self.unread:
                return self._taken(len(self.unread))
            self.is_complete = self._is_over
            return b"" if self._is_over else None
        if self._is_chunked and not self._left:
            return self._next_chunk()
        if not self._left:
            self.is_complete = True
            return b""
        if not self.unread:
            self._expect_more()
            return None
        part = self._taken(min(self._left, len(self.unread)))
        self._left -= len(part)
        self._is_behind_chunk = self._is_chunked and not self._left
        self.is_complete = not (self._left or self._is_chunked)
        return part

    def _next_chunk(self) -> bytes | None:
        """RFC 9112 §7.1: the first bytes of a chunk; after the last one come trailers."""
        if self._is_in_trailers:
            return self._trailers()
        if self._is_behind_chunk:
            if not b"\r\n".startswith(self.unread[:2]):
                raise _wrong("a chunk does not end where it should")
            if len(self.unread) < 2:
                self._expect_more()
                return None
            del self.unread[:2]
            self._is_behind_chunk = False
        end = self.unread.find(b"\r\n") + 2
        if end < 2:
            self._expect_more()
            return None
        match = CHUNK_LINE.fullmatch(self._taken(end))
        if match is None:
            raise _wrong("the size of a chunk cannot be read")
        self._left = int(match[1], 16)
        self._is_in_trailers = not self._left
        return self._next_part()

    def _trailers(self) -> bytes | None:
        """They are read, because the answer ends behind them, and then dropped."""
        lines = self._lines()
        if lines is None:
            return None
        _fields_in(lines)
        self._is_chunked = False
        return self._next_part()

    def _lines(self) -> list[bytes] | None:
        """The lines up to an empty one."""
        for ending in (b"\n", b"\r\n"):
            if self.unread.startswith(ending):
                del self.unread[: len(ending)]
                return []
        match = EMPTY_LINE.search(self.unread, self._searched)
        if match is None:
            self._searched = max(0, len(self.unread) - 2)
            self._expect_more()
            return None
        self._searched = 0
        lines = self._taken(match.end()).split(b"\n")[:-2]
        return [line.removesuffix(b"\r") for line in lines]

    def _taken(self, size: int) -> bytes:
        data = bytes(self.unread[:size])
        del self.unread[:size]
        return data

    def _expect_more(self) -> None:
        """Raises SiteBroken if there can be no more bytes, or if they are already too many."""
        if len(self.unread) > LONGEST_HEAD:
            raise _wrong("a line or a head is too long")
        if self._is_over:
            raise SiteBroken("it closed the connection too early")


def _head_in(lines: list[bytes]) -> SiteHead:
    match = STATUS_LINE.fullmatch(lines[0]) if lines else None
    if match is None:
        raise _wrong("its first line is no status line")
    status = int(match[2])
    if not 100 <= status <= LAST_STATUS:
        raise _wrong(f"{status} is no status")
    return SiteHead(status, _fields_in(lines[1:]), match[1])


def _fields_in(lines: list[bytes]) -> Raw:
    fields: list[tuple[bytes, bytes]] = []
    length: bytes | None = None
    is_coded = False
    for line in _unfolded(lines):
        match = FIELD_LINE.fullmatch(line)
        if match is None:
            raise _wrong("a header field cannot be read")
        name = lowered(match[1])
        value = match[2]
        if name == b"content-length":
            value = _one_length(value)
            if length is not None and value != length:
                raise _wrong("it has several lengths")
            if length is not None:
                continue
            length = value
        elif name == b"transfer-encoding":
            value = value.lower()
            if is_coded or value != b"chunked":
                raise _wrong("its transfer coding is not known")
            is_coded = True
        fields.append((name, value))
    return tuple(fields)


def _unfolded(lines: list[bytes]) -> list[bytes]:
    """RFC 9112 §5.2: a line that begins with a space belongs to the field before it."""
    if not any(line.startswith((b" ", b"\t")) for line in lines):
        return lines
    whole: list[bytearray] = []
    for line in lines:
        if not line.startswith((b" ", b"\t")):
            whole.append(bytearray(line))
        elif whole:
            whole[-1] += b" " + line.lstrip(b" \t")
        else:
            raise _wrong("its first field begins with a space")
    return [bytes(line) for line in whole]


def _closes(fields: Raw) -> bool:
    """RFC 9112 §9.6: the site closes the connection behind this answer."""
    options = b",".join(values(fields, b"connection")).lower().split(b",")
    return any(option.strip() == b"close" for option in options)


def _one_length(value: bytes) -> bytes:
    """RFC 9112 §6.3: a length may be repeated, as `5, 5`."""
    lengths = {length.strip() for length in value.split(b",")}
    length = lengths.pop()
    if lengths or not DIGITS.fullmatch(length) or len(length) > MOST_DIGITS:
        raise _wrong("its length is not a number")
    return length


def _wrong(why: str) -> SiteBroken:
    return SiteBroken(f"its answer is not valid HTTP/1.1 ({why})")
