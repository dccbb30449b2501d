"""G16: the lines of a server's log: whole, bounded, never waited for, and without secrets."""

import asyncio
import json
import logging
import os
import re
import select
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import quote

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from stillfresh import Cache
from stillfresh.errors import LoadFailed, without_secrets
from stillfresh.gateway.server.access import LONGEST_PATH, AccessLog
from stillfresh.logs import Hidden, LineHandler, LineWriter, json_line, passwords_in, pieces
from stillfresh.testing import ManualClock

PIPE = select.PIPE_BUF
secrets = st.text(st.characters(categories=["L", "N"]), min_size=8, max_size=20).map("s3_".__add__)


@contextmanager
def pipe() -> Iterator[tuple[int, int]]:
    ours, theirs = os.pipe()
    try:
        yield ours, theirs
    finally:
        os.close(ours)
        os.close(theirs)


def filled(fd: int) -> int:
    """Until the pipe takes no more; the bytes that it took."""
    os.set_blocking(fd, False)
    size = 0
    try:
        while True:
            size += os.write(fd, b"x" * PIPE)
    except BlockingIOError:
        os.set_blocking(fd, True)
        return size


def long_line(part: bytes, times: int) -> bytes:
    return part.replace(b"\n", b"") * times + b"\n"


class Heard(logging.Handler):
    """Says that something was logged."""

    def __init__(self, event: threading.Event) -> None:
        super().__init__()
        self._event = event

    def emit(self, record: logging.LogRecord) -> None:
        self._event.set()


class TestG16Writing:
    def test_the_log_says_nothing_of_lost_lines_if_none_were_lost(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        """However many groups were written."""
        with pipe() as (reading, writing), caplog.at_level("WARNING"):
            writer = LineWriter(writing)
            with writer.running():
                for _ in range(2):
                    writer.put(b"a line\n".__bytes__)
                    assert os.read(reading, PIPE) == b"a line\n"
        assert caplog.records == []

    def test_all_log_lines_are_written_in_order_before_the_writer_ends(self) -> None:
        """Whatever the thread had not written yet is written when its block ends."""
        with pipe() as (reading, writing):
            writer = LineWriter(writing)
            with writer.running():
                for number in range(200):
                    writer.put(f"line {number}\n".encode)
            expected = b"".join(b"line %d\n" % number for number in range(200))
            assert os.read(reading, 65_536) == expected

    def test_log_lines_put_during_a_write_are_written_too(self) -> None:
        """Also if the end comes meanwhile."""
        with pipe() as (reading, writing):
            writer, is_busy = LineWriter(writing), threading.Event()

            def first() -> bytes:
                is_busy.set()
                assert writer._is_ending.wait(20)
                return b"first\n"

            with writer.running():
                writer.put(first)
                assert is_busy.wait(20)
                writer.put(b"second\n".__bytes__)
            assert os.read(reading, PIPE) == b"first\nsecond\n"

    def test_logging_does_not_wait_for_a_reader_that_does_not_read(self) -> None:
        """`put` returns, the end comes, and every line is written or counted as lost."""
        with pipe() as (reading, writing):
            size = filled(writing)
            writer = LineWriter(writing, most=10, patience=0.01)
            with writer.running():
                for _ in range(50):
                    writer.put(b"a line\n".__bytes__)
                assert writer.dropped >= 30  # ten wait, and ten at most are being written
            assert writer.dropped == 50
            assert "stillfresh-log" not in {thread.name for thread in threading.enumerate()}
            assert len(os.read(reading, 2 * size)) == size

    def test_lost_log_lines_are_counted_in_the_log(self, caplog: pytest.LogCaptureFixture) -> None:
        """As soon as somebody reads again."""
        told = threading.Event()
        with pipe() as (reading, writing), caplog.at_level("WARNING"):
            writer = LineWriter(writing)
            writer.dropped = 7
            logger = logging.getLogger("stillfresh.logs")
            told_too = Heard(told)
            logger.addHandler(told_too)
            with writer.running():
                writer.put(b"a line\n".__bytes__)
                assert told.wait(20)
            logger.removeHandler(told_too)
            assert os.read(reading, PIPE) == b"a line\n"
        assert "7 log lines are lost" in caplog.text
        assert writer.dropped == 0

    def test_the_log_thread_does_not_delay_the_end_of_the_process(self) -> None:
        """It may wait for a reader for ever."""
        with pipe() as (_, writing), LineWriter(writing).running():
            (thread,) = (it for it in threading.enumerate() if it.name == "stillfresh-log")
            assert thread.daemon

    def test_a_closed_log_stream_is_no_error(self) -> None:
        """A log that cannot be written does not end the server."""
        reading, writing = os.pipe()
        os.close(reading)
        writer = LineWriter(writing)
        with writer.running():
            writer.put(b"a line\n".__bytes__)
        os.close(writing)
        assert writer.dropped == 1

    def test_a_log_descriptor_that_is_not_open_is_no_error(self) -> None:
        """As if nobody reads: in its thread, and where something is logged before there is one."""
        reading, writing = os.pipe()
        os.close(reading)
        os.close(writing)
        writer = LineWriter(writing)
        writer.put(b"a line\n".__bytes__)
        with writer.running():
            writer.put(b"a line\n".__bytes__)
        assert writer.dropped == 2

    def test_the_log_is_not_written_to_another_file_with_its_old_number(self) -> None:
        """Else a visitor whose connection has it would read the log."""
        script = """
import os
from stillfresh.logs import LineWriter
first, writing = os.pipe()
assert first == 2
reading = os.dup(first)
os.dup2(writing, 2)
os.close(writing)
LineWriter().put(b"a line\\n".__bytes__)
os.close(2)
assert os.read(reading, 99) == b""
"""
        command = ["sh", "-c", 'exec "$0" "$@" 2>&-', sys.executable, "-c", script]
        assert subprocess.run(command, check=False, timeout=60).returncode == 0

    def test_a_nonblocking_log_stream_is_waited_for(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Whoever shares it may have made it so, and may take the room that there was."""
        with pipe() as (reading, writing):
            write, taken = os.write, [BlockingIOError]

            def written(fd: int, data: bytes) -> int:
                if fd == writing and taken:
                    raise taken.pop()
                return write(fd, data)

            monkeypatch.setattr(os, "write", written)
            writer = LineWriter(writing)
            writer.put(b"a line\n".__bytes__)
            assert os.read(reading, PIPE) == b"a line\n"
            assert writer.dropped == 0

    def test_without_its_thread_a_log_line_is_written_at_once_or_lost(self) -> None:
        """The parent of workers has no thread, and must not hang either."""
        with pipe() as (reading, writing):
            writer = LineWriter(writing)
            writer.put(b"a line\n".__bytes__)
            assert os.read(reading, PIPE) == b"a line\n"
            filled(writing)
            writer.put(b"a line\n".__bytes__)
            assert writer.dropped == 1

    @given(st.lists(st.builds(long_line, st.binary(max_size=4), st.integers(1, PIPE))))
    def test_log_lines_are_written_in_pieces_that_a_pipe_takes_whole(
        self, lines: list[bytes]
    ) -> None:
        """Pieces hold whole lines, so lines of several workers cannot mix."""
        found = list(pieces(lines))
        assert all(0 < len(it) <= PIPE and it.endswith(b"\n") for it in found)
        assert b"".join(found) == b"".join(line[:-1][: PIPE - 1] + b"\n" for line in lines)

    @given(st.text(max_size=20), st.text(max_size=20), st.integers(1, 2_000))
    def test_a_json_log_line_is_valid_json_and_fits_a_pipe(
        self, message: str, trace: str, times: int
    ) -> None:
        """However long a message or a traceback is; its longest text is shortened."""
        hide = Hidden()
        line = json_line({"message": hide(message * times), "exception": hide(trace * times)})
        assert len(line) <= PIPE
        assert set(json.loads(line)) == {"message", "exception"}


def rendered(record: logging.LogRecord, hide: Hidden, *, is_json: bool) -> str:
    with pipe() as (reading, writing):
        LineHandler(LineWriter(writing), hide, is_json=is_json).emit(record)
        return os.read(reading, 65_536).decode()


def raised(text: str) -> Any:
    return ValueError, ValueError(text), None


def record(message: str, *args: object, exc_info: Any = None) -> logging.LogRecord:
    return logging.LogRecord("a.b", logging.WARNING, "", 1, message, args, exc_info)


PLACES = (
    "http://ann:{}@host/path",
    "http://ann:a@{}@host/path",
    "redis://:{}@host:6379/0 is unavailable",
    "postgresql://u:p{}@x@host/db?sslmode=x",
    "GET http://host/path?token={} failed",
    "page '/a?a=1&session={}': loading failed",
    "/reset?{}",
    "Cookie: sid={}; other=1",
    "[(b'cookie', b'sid={}'), (b'host', b'a')]",
    "set-cookie: {}",
    "{{'Authorization': 'Token {}'}}",
    "Proxy-Authorization={}",
    "x-api-key: {}",
    "sent Bearer {}",
    "/search?q=it's&token={}",
    "/a??token={} failed",
    "GET /a?x=(1)&token={} failed",
    "no route ?token={}",
    "redis://:it's{}@host",
    "moved to //ann:{}@host/",
    'Cookie: a="x"; sid={}',
    "[(b'cookie', b'a=\"x\"; sid={}')]",
    'Authorization: Digest username="a", response="{}"',
    "X-Auth-Token: {}",
    "host=h password={}",
)
"""Where a secret stands that nobody told the log of."""


class TestG16NoSecrets:
    @pytest.mark.parametrize("place", PLACES)
    @given(secret=secrets)
    def test_text_that_looks_like_a_secret_is_not_logged(self, place: str, secret: str) -> None:
        """In messages, their arguments and tracebacks, as text and as JSON."""
        text = place.format(secret)
        assert secret not in without_secrets(text)
        for is_json in (False, True):
            said = record("%s", text, exc_info=raised(text))
            assert secret not in rendered(said, Hidden(), is_json=is_json)

    @given(secret=secrets, around=st.text(st.characters(codec="ascii"), max_size=10))
    def test_a_known_secret_is_not_logged_anywhere(self, secret: str, around: str) -> None:
        """Whatever stands around it."""
        hide = Hidden([secret])
        text = f"{around}{secret}{around}"
        assert secret not in hide(text)
        for is_json in (False, True):
            assert secret not in rendered(record("%r", text), hide, is_json=is_json)

    def test_a_secret_that_begins_with_another_secret_is_hidden_whole(self) -> None:
        """The longest is hidden first."""
        assert Hidden(["secret", "secret-and-more"])("(secret-and-more)") == "(***)"

    @given(secret=st.text(st.characters(codec="utf-8"), min_size=4, max_size=20).map("s3_".__add__))
    def test_a_secret_is_hidden_also_if_it_is_escaped_or_quoted(self, secret: str) -> None:
        """Libraries write a password in their own way."""
        for known in (secret, quote(secret), quote(secret, safe="")):
            hide = Hidden([known])
            for said in (repr(secret)[1:-1], json.dumps(secret, ensure_ascii=False)[1:-1]):
                assert hide(f"({said})") == "(***)"
            for said in (quote(secret), quote(secret, safe="")):
                assert hide(f"({said})") == "(***)"

    @pytest.mark.parametrize("part", ["://", "a?", "cookie", "cookie ", "Bearer ", "'"])
    def test_hiding_secrets_takes_linear_time(self, part: str) -> None:
        """A visitor chooses a part of what is logged: 20 times as long is 20 times the work."""
        began = time.process_time()
        without_secrets(part * 100_000)
        assert time.process_time() - began < 5

    @pytest.mark.parametrize(
        ("address", "password"),
        [
            ("redis://:p4ssword@h/0", "p4ssword"),
            ("redis://ann:p%40ssword@[::1]:6379/0", "p%40ssword"),
            ("unix://:p4ssword@/run/redis.sock", "p4ssword"),
            ("postgresql:///db?user=ann&password=p4ssword&sslmode=require", "p4ssword"),
            ("host=h password=p4ssword user=ann", "p4ssword"),
            (r"host=h password = 'it\'s one' user=ann", "it's one"),
            ("http://[bad", None),
        ],
    )
    def test_passwords_are_found_in_urls_and_connection_strings(
        self, address: str, password: str | None
    ) -> None:
        """Of URLs and of connection strings of PostgreSQL."""
        assert set(filter(None, passwords_in(address))) >= ({password} if password else set())

    @pytest.mark.parametrize(
        "text",
        [
            "stillfresh.db: did you mean post? There are: post, user",
            "https://host/path: cannot be reached",
            "the loader took 2 s",
            "Is it (or is it not?) there?",
            "server.token: must be printable ASCII text without spaces",
        ],
    )
    def test_text_that_is_no_secret_stays_in_the_log(self, text: str) -> None:
        """An operator can still read the log."""
        assert without_secrets(text) == text

    def test_a_log_record_that_cannot_be_formatted_is_logged_as_such(self) -> None:
        """A message of somebody else's with wrong arguments does not raise where it is logged."""
        assert "cannot be logged" in rendered(record("%d", "x"), Hidden(), is_json=True)


class TestG16Formats:
    @given(st.text(st.characters(codec="utf-8")))
    def test_logged_text_cannot_look_like_another_record(self, text: str) -> None:
        """Its further lines are indented, and a terminal shows every character of it."""
        said = rendered(record("%s", text, exc_info=raised(text)), Hidden(), is_json=False)
        _, *rest = said.rstrip("\n").split("\n")
        assert all(line.startswith("  ") for line in rest)
        assert all(it.isprintable() for it in said if it not in "\n\t" and ord(it) < 0xA0)
        told = rendered(record("%s", text), Hidden(), is_json=True)
        assert set(json.loads(told)) == {"time", "level", "logger", "message"}
        assert "\x9b" not in told

    def test_a_huge_log_record_loses_its_middle(self) -> None:
        """What waits to be written is bounded; how a traceback ends says most."""
        text = "\n".join(f"line {number}" for number in range(10_000))
        said = rendered(record("%s", text), Hidden(), is_json=False)
        assert len(said) < 8 * PIPE
        assert "line 0\n" in said
        assert said.endswith("  line 9999\n")

    def test_a_text_log_line_has_time_level_logger_and_message(self) -> None:
        """Time, level, logger and message; a traceback in lines of its own."""
        said = rendered(record("%d left", 3, exc_info=raised("bad")), Hidden(), is_json=False)
        first, *rest = said.splitlines()
        assert re.fullmatch(r"\d{4}-\d\d-\d\dT[\d:]{8}\.\d{3}Z WARNING a\.b: 3 left", first)
        assert rest[-1] == "  ValueError: bad"

    def test_a_json_log_line_holds_the_record_and_its_traceback(self) -> None:
        """One object on one line, the traceback in it."""
        said = rendered(record("%d left", 3, exc_info=raised("bad")), Hidden(), is_json=True)
        assert said.count("\n") == 1
        told = json.loads(said)
        assert (told["level"], told["logger"], told["message"]) == ("warning", "a.b", "3 left")
        assert told["exception"].endswith("ValueError: bad")


class Access:
    """An access log on a manual clock, around an app of given messages."""

    def __init__(self, *, is_json: bool = True, hide: Hidden | None = None) -> None:
        self.ticks = ManualClock()
        self.lines: list[bytes] = []
        writer = LineWriter()
        writer.put = lambda render: self.lines.append(render())  # type: ignore[method-assign]
        self.log = AccessLog(
            writer, hide or Hidden(), is_json=is_json, clock=lambda: 0.0, ticks=self.ticks
        )

    def ask(self, *messages: dict[str, Any], error: Exception | None = None, **scope: Any) -> Any:
        async def app(scope: Any, receive: Any, send: Any) -> None:
            self.ticks.advance(0.25)
            for message in messages:
                await send(message)
            if error is not None:
                raise error

        async def send(message: Any) -> None:
            pass

        asked = {"type": "http", "method": "GET", "raw_path": b"/a", "path": "/a", **scope}
        asyncio.run(self.log.around(app)(asked, None, send))  # type: ignore[arg-type]

    def told(self) -> dict[str, Any]:
        (line,) = self.lines
        return dict(json.loads(line))


def begun(status: int = 200, cache: bytes | None = None) -> dict[str, Any]:
    fields = [] if cache is None else [(b"cache-status", cache)]
    return {"type": "http.response.start", "status": status, "headers": fields}


BODY = {"type": "http.response.body", "body": b"12345"}


class TestG16Access:
    def test_an_access_line_has_the_cache_status_and_the_duration(self) -> None:
        """Method, path, status, bytes, cache status and time."""
        access = Access()
        access.ask(begun(200, b"cdn; hit, stillfresh; fwd=miss; stored"), BODY, BODY)
        assert access.told() == {
            "time": "1970-01-01T00:00:00.000Z",
            "level": "access",
            "method": "GET",
            "path": "/a",
            "status": 200,
            "bytes": 10,
            "cache": "fwd=miss; stored",
            "seconds": 0.25,
        }

    def test_an_access_line_may_be_text_in_columns(self) -> None:
        """The same in one line of columns, the one with spaces last."""
        access = Access(is_json=False)
        access.ask(begun(200, b"stillfresh; hit; ttl=20"), BODY)
        line = b"1970-01-01T00:00:00.000Z ACCESS GET /a 200 5 0.250000 hit; ttl=20\n"
        assert access.lines == [line]

    def test_an_access_line_has_no_query_and_no_header_fields(self) -> None:
        """Nor are header fields."""
        access = Access()
        access.ask(begun(), BODY, query_string=b"token=s3cret", headers=[(b"cookie", b"s3cret")])
        assert b"s3cret" not in access.lines[0]

    @given(path=st.binary(max_size=2_000), is_json=st.booleans())
    @example(path=b"cookie:word", is_json=False)
    def test_any_request_path_is_one_access_line(self, path: bytes, is_json: bool) -> None:
        """No path breaks out of its line or its column."""
        access = Access(is_json=is_json)
        access.ask(begun(), BODY, raw_path=b"/" + path)
        (line,) = access.lines
        assert line.count(b"\n") == 1
        assert len(line) <= 4 * LONGEST_PATH
        if is_json:
            assert access.told()["status"] == 200
        else:
            assert re.fullmatch(rb"\S+ ACCESS GET /\S* 200 5 0\.250000 -\n", line)

    def test_a_known_secret_in_a_path_is_hidden_in_the_access_log(self) -> None:
        """As the operator's token."""
        access = Access(hide=Hidden(["operators-token"]))
        access.ask(begun(), BODY, raw_path=b"/operators-token/x")
        assert access.told()["path"] == "/***/x"

    def test_a_head_request_is_logged_with_zero_bytes(self) -> None:
        """The server sends none, whatever the app says."""
        access = Access()
        access.ask(begun(), BODY, method="HEAD")
        assert access.told()["bytes"] == 0

    def test_an_app_that_raises_is_logged_with_status_500(self) -> None:
        """As the server then answers."""
        access = Access()
        with pytest.raises(ValueError, match="no"):
            access.ask(error=ValueError("no"))
        assert access.told()["status"] == 500

    def test_a_client_that_left_is_logged_without_a_status(self) -> None:
        """The app ended without an answer."""
        access = Access()
        access.ask()
        assert access.told()["status"] is None

    @pytest.mark.parametrize(
        ("messages", "status"),
        [
            ([{"type": "websocket.accept"}, {"type": "websocket.close"}], 101),
            ([{"type": "websocket.close"}], 403),
            ([{"type": "websocket.http.response.start", "status": 429}], 429),
        ],
    )
    def test_a_websocket_is_one_access_line_with_its_status(
        self, messages: list[dict[str, Any]], status: int
    ) -> None:
        """Accepted, refused, or answered; the line comes when it is over."""
        access = Access()
        access.ask(*messages, type="websocket")
        assert access.told()["status"] == status

    def test_a_request_that_cannot_be_read_is_logged_without_method_and_path(self) -> None:
        """It has neither method nor path."""
        access = Access()
        access.log.refused(431, 32)
        told = access.told()
        assert (told["method"], told["path"], told["status"], told["bytes"]) == ("-", "-", 431, 32)


class TestG16TheLibraryLogsNoSecret:
    @pytest.mark.parametrize("place", PLACES)
    async def test_the_log_of_a_failed_load_has_neither_key_nor_error_text(
        self, place: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        """Neither the key nor the loader's error: in your process the handlers are yours."""

        async def load(id_: str) -> str:
            raise RuntimeError(place.format("s3cret-of-an-error"))

        async with Cache("memory://") as cache:
            with pytest.raises(LoadFailed):
                await cache.cached("page", fresh_for=60)(load)(place.format("s3cret-of-a-key"))
        assert [it.name for it in caplog.records] == ["stillfresh.engine.loader"]
        assert "s3cret" not in caplog.text
