"""T5: what an upstream may say instead of an answer: a table of bytes, and of silences.

Each entry makes, of the body that would have been right, the bytes of a whole answer from its
status line on. None among them is a rest; without end, so that nothing more is said or closed.
"""

import gzip
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import chain, repeat
from typing import NamedTuple, TypeAlias

__all__ = ["GROUPS", "SLOW", "Bad", "good_answer", "noted"]

Said: TypeAlias = Iterable[bytes | None]


class Bad(NamedTuple):
    """One way to go wrong."""

    name: str
    say: Callable[[bytes], Said]
    is_whole: bool = False
    """Good HTTP, whatever it says: a proxy passes it on."""
    is_legal: bool = False
    """An upstream may mean it so: who reads it may take it, or refuse it."""


def head(*fields: str, status: str = "200 OK") -> bytes:
    lines = [f"HTTP/1.1 {status}", *fields]
    return "".join(f"{line}\r\n" for line in lines).encode("latin-1") + b"\r\n"


def plain(body: bytes, *fields: str, status: str = "200 OK") -> bytes:
    kind = "Content-Type: application/json"
    return head(kind, f"Content-Length: {len(body)}", *fields, status=status) + body


def good_answer(body: bytes) -> bytes:
    return plain(body, "Connection: close")


def chunked(*parts: bytes) -> bytes:
    sent = b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in parts)
    return head("Content-Type: application/json", "Transfer-Encoding: chunked") + sent


def shaped(name: str, body: bytes, *fields: str, status: str = "200 OK") -> Bad:
    """Good HTTP around a body that is none of those asked for."""
    return Bad(name, lambda _: [plain(body, *fields, status=status)], is_whole=True)


def status(line: str, *fields: str, is_whole: bool = True) -> Bad:
    """The right body, under another status."""
    name = f"status {line} {' '.join(fields)}".strip()[:60]
    return Bad(name, lambda body: [plain(body, *fields, status=line)], is_whole=is_whole)


def raw(name: str, *parts: bytes) -> Bad:
    return Bad(name, lambda _: parts)


def silent(name: str, after: Callable[[bytes], bytes]) -> Bad:
    return Bad(name, lambda body: chain([after(body)], repeat(None)))


def dripping(data: bytes) -> Iterator[bytes | None]:
    """A byte, and a rest of the sender's own."""
    for byte in data:
        yield bytes([byte])
        yield None


BOMB = gzip.compress(bytes(50_000_000), 9)
EARLY = (b"HTTP/1.1 100 Continue\r\n\r\n" * 99, None)
LATE = "Retry-After: Mon, 01 Jan 2024 00:00:00 +99999999999999"

TRUNCATED = [
    Bad("half of the JSON", lambda body: [plain(body[: len(body) // 2])], is_whole=True),
    Bad("all but the last byte", lambda body: [plain(body[:-1])], is_whole=True),
    Bad("less than content-length", lambda body: [head(f"Content-Length: {len(body) + 9}") + body]),
    Bad("half of content-length", lambda body: [plain(body)[: -len(body) // 2]]),
    Bad("chunks without an end", lambda body: [chunked(body)]),
    Bad("half a chunk", lambda body: [chunked(body)[:-9]]),
    raw("only a head", head("Content-Length: 10")),
    raw("half a head", b"HTTP/1.1 200 OK\r\nContent-Le"),
    raw("half a status line", b"HTTP/1."),
    raw("nothing at all"),
    Bad(
        "a gzip stream cut short",
        lambda body: [gzipped(gzip.compress(body, mtime=0)[:-6])],
        is_whole=True,
    ),
]
FRAMED_WRONGLY = [
    raw("a chunk's size that is none", chunked() + b"zz\r\nab\r\n0\r\n\r\n"),
    raw("a chunk of 16 EB", chunked() + b"ffffffffffffffff\r\nab"),
    raw("a chunk's size of 1 MB of zeros", chunked() + b"0" * 1_000_000 + b"1\r\na"),
    raw("a negative content-length", head("Content-Length: -1") + b"ab"),
    raw("a content-length that is no number", head("Content-Length: many") + b"ab"),
    raw("a content-length of 10,000 digits", head(f"Content-Length: {'9' * 10_000}") + b"ab"),
    Bad(
        "two content-lengths",
        lambda body: [head(f"Content-Length: {len(body)}", "Content-Length: 3") + body],
    ),
    Bad("more than content-length", lambda body: [head("Content-Length: 4") + body], is_whole=True),
    Bad(
        "content-length and chunks",
        lambda body: [chunked(body, b"").replace(b"\r\n", b"\r\nContent-Length: 3\r\n", 1)],
        is_legal=True,
    ),
    raw("an unknown transfer coding", head("Transfer-Encoding: gzip, chunked") + b"0\r\n\r\n"),
]
HUGE = [
    Bad("a body without an end", lambda _: chain([head()], repeat(b"[1," * 20_000))),
    Bad(
        "a body of 10^18 bytes",
        lambda _: chain([head(f"Content-Length: {10**18}")], repeat(b"[1," * 20_000)),
    ),
    Bad(
        "chunks for ever",
        lambda _: chain([chunked()], repeat(b"ea60\r\n" + b"[1," * 20_000 + b"\r\n")),
    ),
    Bad("a gzip bomb", lambda _: [gzipped(BOMB)], is_whole=True),
    Bad("one header field of 1 MB", lambda body: [plain(body, f"X-Long: {'a' * 1_000_000}")]),
    Bad(
        "100,000 header fields", lambda body: [plain(body, *(f"X-{n}: a" for n in range(100_000)))]
    ),
    Bad(
        "a head without an end",
        lambda _: chain([b"HTTP/1.1 200 OK\r\n"], repeat(b"A: b\r\n" * 9_999)),
    ),
    Bad("a status line without an end", lambda _: chain([b"HTTP/1.1 200 "], repeat(b"a" * 60_000))),
]
SLOW = [  # given up for that alone
    Bad("1xx without an end", lambda _: chain.from_iterable(repeat(EARLY))),
    silent("silence", lambda _: b""),
    silent("a head, then silence", lambda _: head("Content-Length: 10")),
    silent("half, then silence", lambda body: plain(body)[:-5]),
    Bad("a byte at a time", lambda body: dripping(plain(body + b" " * 9_999))),
    Bad("a head, a byte at a time", lambda _: dripping(head(f"X: {'a' * 9_999}"))),
]
SHAPED_WRONGLY = [
    shaped("nothing in 200", b""),
    shaped("a page in 200", b"<!doctype html><h1>Bad gateway</h1>"),
    *(
        shaped(text, text.encode())
        for text in ("true", '"text"', "-1", '{"a": 1}', "[1, 2]", "[{}]")
    ),
    shaped("NaN", b"[NaN]"),
    shaped("Infinity", b'{"id": Infinity}'),
    shaped("a number of 10,000 digits", b"[" + b"9" * 10_000 + b"]"),
    shaped("1e999", b"[1e999]"),
    shaped("100,000 brackets", b"[" * 100_000),
    shaped("100,000 brackets, closed", b"[" * 100_000 + b"]" * 100_000),
    shaped("100,000 objects", b'{"a":' * 100_000),
    shaped("two values", b"[] []"),
    shaped("a comment", b"[] // done"),
    shaped("NUL", b"[]\0"),
    Bad(
        "invalid UTF-8",
        lambda body: [plain(b'\xff\xfe"'.join(body.rsplit(b'"', 1)))],
        is_whole=True,
    ),
    Bad("UTF-16", lambda body: [plain(body.decode().encode("utf-16"))], is_whole=True),
    Bad("a BOM", lambda body: [plain(b"\xef\xbb\xbf" + body)], is_whole=True, is_legal=True),
    shaped("a lone surrogate", rb'["\ud800"]'),
]
PACKED_WRONGLY = [
    Bad("gzip that is none", lambda body: [gzipped(body)], is_whole=True),
    Bad(
        "gzip, and more",
        lambda body: [gzipped(gzip.compress(body, mtime=0) + b"more")],
        is_whole=True,
    ),
    Bad("brotli", lambda body: [plain(body, "Content-Encoding: br")], is_whole=True),
    Bad("gzip twice", lambda body: [plain(body, "Content-Encoding: gzip, gzip")], is_whole=True),
]
STATUSES = [
    *(status(line) for line in ("206 Partial Content", "400 Bad", "401 Who", "403 No", "418 Tea")),
    *(status(line) for line in ("500 Oops", "502 Bad Gateway", "599 Odd")),
    status("503 Busy", LATE),
    status("429 Slow", "Retry-After: " + "9" * 5_000),
    status("503 Busy", "Retry-After: -1"),
    *(status(line, is_whole=False) for line in ("999 Odd", "000 None", "20 Short", "abc")),
    status("101 Switching Protocols", "Upgrade: smtp", is_whole=False),
    status("302 Found", "Location: /loop"),
    status("302 Found", "Location: http://["),
    status("302 Found", "Location: //\x00", is_whole=False),
    status("308 For ever", "Location: http://127.0.0.1:1/"),
    status("302 Found"),
    Bad("204 with a body", lambda body: [plain(body, status="204 No")], is_legal=True),
    Bad("304 with a body", lambda body: [plain(body, status="304 Same")], is_legal=True),
]
SPOKEN_WRONGLY = [
    raw("SSH", b"SSH-2.0-OpenSSH_9.2\r\n"),
    raw("TLS", b"\x15\x03\x01\x00\x02\x02\x46"),
    raw("zeros", bytes(1_000)),
    Bad("HTTP/3.0", lambda body: [plain(body).replace(b"1.1", b"3.0", 1)], is_legal=True),
    raw("no status line", b"Content-Length: 2\r\n\r\n[]"),
    raw("a field without a colon", head("Content-Length: 2", "odd") + b"[]"),
    raw("a field with NUL", head("Content-Length: 2", "X: \0") + b"[]"),
    raw("a field name with a space", head("Content-Length: 2", "X Y: 1") + b"[]"),
    Bad(
        "fields twice", lambda body: [plain(body, *["Content-Type: text/plain"] * 2)], is_legal=True
    ),
    Bad(
        "103, then the answer",
        lambda body: [head(status="103 Early") + good_answer(body)],
        is_legal=True,
    ),
    Bad("10,000 cookies", lambda body: [plain(body, *["Set-Cookie: a=b"] * 2_000)], is_legal=True),
    Bad("a folded field", lambda body: [plain(body, "X: a\r\n b")], is_legal=True),
    Bad("only line feeds", lambda body: [good_answer(body).replace(b"\r\n", b"\n")], is_legal=True),
    Bad("two answers", lambda body: [plain(body) + plain(b"[]")], is_legal=True),
]


def gzipped(packed: bytes) -> bytes:
    return plain(packed, "Content-Encoding: gzip")


GROUPS = {
    "truncated": TRUNCATED,
    "framed wrongly": FRAMED_WRONGLY,
    "huge": HUGE,
    "shaped wrongly": SHAPED_WRONGLY,
    "packed wrongly": PACKED_WRONGLY,
    "other statuses": STATUSES,
    "spoken wrongly": SPOKEN_WRONGLY,
}
"""What comes at once."""


@contextmanager
def noted(bad: Bad) -> Iterator[None]:
    try:
        yield
    except BaseException as exc:
        exc.add_note(f"the upstream's answer: {bad.name}")
        raise
