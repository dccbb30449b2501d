"""I25: answers of a site are read as h11 reads them, whatever comes and wherever it is split."""

from collections.abc import Iterable
from typing import NamedTuple

import h11
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stillfresh.http.fields import BAD
from stillfresh.pages.site_messages import (
    LAST_STATUS,
    AnswerReader,
    CannotBePassed,
    RequestWriter,
    SiteBroken,
    SiteRequest,
)
from tests.kit.examples import examples
from tests.pages.test_bad_input import MALFORMED, ODD, OK

HOST = ((b"host", b"x"),)
SWITCH = ((b"connection", b"Upgrade"), (b"upgrade", b"websocket"))


class Reading(NamedTuple):
    """What a reader made of an answer, until it broke off, or was complete."""

    heads: list[tuple[int, list[tuple[bytes, bytes]]]]
    body: bytes
    is_whole: bool
    may_stay: bool
    rest: bytes


def read_by_us(method: str, parts: list[bytes], *, may_switch: bool) -> Reading:
    reader = AnswerReader(method, may_switch=may_switch)
    heads: list[tuple[int, list[tuple[bytes, bytes]]]] = []
    body = b""
    arriving = iter([*parts, b""])

    def receive() -> None:
        if part := next(arriving):
            reader.receive(part)
        else:
            reader.end()

    try:
        while not heads or heads[-1][0] < 200:
            if heads and heads[-1][0] == 101:
                break
            while (head := reader.head()) is None:
                receive()
            heads.append((head.status_code, list(head.headers)))
        while heads[-1][0] >= 200 and (part := reader.part()) != b"":
            if part is None:
                receive()
            else:
                body += part
                assert not reader.is_complete or reader.part() == b""
    except SiteBroken:
        return Reading(heads, body, is_whole=False, may_stay=False, rest=b"")
    rest = bytes(reader.unread) + b"".join(arriving)
    may_stay = reader.is_complete and reader.may_stay
    return Reading(heads, body, is_whole=True, may_stay=may_stay, rest=rest)


def has_controls(fields: Iterable[tuple[bytes, bytes]]) -> bool:
    return any(BAD.search(value) for _, value in fields)


def read_by_h11(method: str, parts: list[bytes], *, may_switch: bool) -> Reading:
    """A status above 599, and a control character in a field, count as malformed here."""
    reader = h11.Connection(h11.CLIENT, max_incomplete_event_size=102_400)
    fields = [*HOST, *(SWITCH if may_switch else ())]
    reader.send(h11.Request(method=method, target="/", headers=fields))
    reader.send(h11.EndOfMessage())
    heads: list[tuple[int, list[tuple[bytes, bytes]]]] = []
    body = b""
    arriving = iter([*parts, b""])
    try:
        while not isinstance(event := reader.next_event(), h11.EndOfMessage):
            match event:
                case h11.NEED_DATA:
                    reader.receive_data(next(arriving))
                case h11.InformationalResponse() | h11.Response():
                    if event.status_code > LAST_STATUS or has_controls(event.headers):
                        return Reading(heads, body, is_whole=False, may_stay=False, rest=b"")
                    heads.append((event.status_code, list(event.headers)))
                    if event.status_code == 101:
                        break
                case h11.Data():
                    body += bytes(event.data)
    except h11.RemoteProtocolError:
        return Reading(heads, body, is_whole=False, may_stay=False, rest=b"")
    if isinstance(event, h11.EndOfMessage) and has_controls(event.headers):
        return Reading(heads, body, is_whole=False, may_stay=False, rest=b"")
    rest = reader.trailing_data[0] + b"".join(arriving)
    may_stay = reader.our_state is h11.DONE and reader.their_state is h11.DONE
    return Reading(heads, body, is_whole=True, may_stay=may_stay, rest=rest)


def compare(method: str, answer: bytes, *, may_switch: bool = False) -> None:
    """Whole, and split at each place."""
    whole = read_by_us(method, [answer], may_switch=may_switch)
    assert whole == read_by_h11(method, [answer], may_switch=may_switch)
    for place in range(1, len(answer)):
        parts = [answer[:place], answer[place:]]
        split = read_by_us(method, parts, may_switch=may_switch)
        assert split == read_by_h11(method, parts, may_switch=may_switch), parts
        assert split == whole or not whole.is_whole, parts


VERSIONS = st.sampled_from([b"HTTP/1.1", b"HTTP/1.1", b"HTTP/1.0", b"HTTP/2.0", b"http/1.1"])
STATUSES = st.sampled_from(
    [
        b"200 OK",
        b"200 OK",
        b"200",
        b"200 ",
        b"204 No",
        b"205 Reset",
        b"304 Not",
        b"404 \xe4",
        b"099 Low",
        b"600 High",
        b"20 Short",
        b"2000 Long",
        b"103 Early",
        b"101 Switch",
        b"200\tOK",
    ]
)
FIELDS = st.sampled_from(
    [
        b"Content-Length: 2",
        b"Content-Length: 2",
        b"content-length: 02",
        b"Content-Length: 2, 2",
        b"Content-Length: 2, 3",
        b"Content-Length: -2",
        b"Content-Length:",
        b"Content-Length: 0",
        b"Content-Length: " + b"9" * 21,
        b"Content-Length: 5",
        b"Content-Length: 2,",
        b"Transfer-Encoding: chunked",
        b"Transfer-Encoding: Chunked ",
        b"Transfer-Encoding: gzip",
        b"Transfer-Encoding: gzip, chunked",
        b"Transfer-Encoding:",
        b"Transfer-Encoding : chunked",
        b"Connection: close",
        b"Connection: Keep-Alive, CLOSE",
        b'Connection: "a, close"',
        b"Connection: keep-alive",
        b"X: 1",
        b"X:1 \t",
        b"X: a\tb",
        b"X: \xff",
        b"X: a\x01b",
        b"X: a\x00b",
        b"X: a\x0bb",
        b"X: a\rb",
        b"X Y: 1",
        b": 1",
        b"no colon",
        b" folded",
        b"\t",
        b"X:",
        b"X: a  b",
        b"\xe4: 1",
        b"X: \x7f",
        b"Upgrade: websocket",
    ]
)
ENDINGS = st.sampled_from([b"\r\n", b"\r\n", b"\r\n", b"\n", b"\r"])
BODIES = st.sampled_from(
    [
        b"",
        b"hi",
        b"hi",
        b"hello",
        b"h",
        b"2\r\nhi\r\n0\r\n\r\n",
        b"2\r\nhi\r\n0\r\n\r\nmore",
        b"2;a=b\r\nhi\r\n0\r\nX: 1\r\n\r\n",
        b"2 \r\nhi\r\n0\r\n\r\n",
        b"2\nhi\n0\n\n",
        b"0\r\n\r\n",
        b"2\r\nhiX\r\n0\r\n\r\n",
        b"2\r\nhi\r\n0\r\nbad trailer\r\n\r\n",
        b"2\r\nhi\r\n0\r\nX: a\x01\r\n\r\n",
        b"2\r\nhi\r\n0\r\nX: a\x01\r\n\r\n",
        b"-2\r\nhi\r\n0\r\n\r\n",
        b"2\r\nhi",
        b"2\r\nhi\r\n",
        b"2\r\nhi\r",
        b"2\r\nhi\r\n0\r\n",
        b"0x2\r\nhi\r\n0\r\n\r\n",
        b"2\r\nhi\r\n0\r\n\n",
        b"1\r\nh\r\n1\r\ni\r\n00\r\nContent-Length: 1\r\n\r\n",
        b"\r\n",
        b"\n",
        b"2\r\nhi\r\n0\r\nContent-Length: x\r\n\r\n",
        b"f" * 21 + b"\r\n",
        b"2;\n\r\nhi\r\n0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nevil",
    ]
)


FRAMED = [
    OK + b"Connection: close\r\nContent-Length: 2\r\n\r\nhi",
    OK + b"Connection: Keep-Alive, CLOSE\r\nContent-Length: 2\r\n\r\nhi",
    OK + b'Connection: "a, close"\r\nContent-Length: 2\r\n\r\nhi',
    OK + b"Content-Length: 2\r\n\r\nhi\r\n",
    b"HTTP/1.0 200 OK\r\nContent-Length: 2\r\n\r\nhi",
    OK + b"Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nhi\r\n0\r\n\r\n",
    b"HTTP/1.0 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nhi\r\n0\r\n\r\n",
    b"HTTP/1.1 205 Reset\r\nContent-Length: 2\r\n\r\nhi",
    b"HTTP/1.1 103 Early\r\nContent-Length: 2\r\n\r\nHTTP/1.1 204 No\r\nContent-Length: 2\r\n\r\n",
    b"HTTP/1.1 100 Go\r\n\r\nHTTP/1.1 304 Not\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
]


@st.composite
def heads(draw: st.DrawFn) -> bytes:
    end = draw(ENDINGS)
    lines = [draw(VERSIONS) + b" " + draw(STATUSES)]
    lines += draw(st.lists(FIELDS, max_size=4))
    return b"".join(line + end for line in lines) + draw(ENDINGS)


ANSWERS = st.builds(
    lambda parts, body: b"".join(parts) + body, st.lists(heads(), max_size=2), BODIES
)


class TestI25AnswersAreReadAsByH11:
    @settings(max_examples=examples(60), deadline=None)
    @given(
        answer=ANSWERS, method=st.sampled_from(["GET", "HEAD", "POST"]), may_switch=st.booleans()
    )
    def test_status_fields_body_end_and_reuse_are_the_same(
        self, answer: bytes, method: str, may_switch: bool
    ) -> None:
        """Whole, and split at each place; also what is left over behind the answer."""
        compare(method, answer, may_switch=may_switch)

    @settings(max_examples=examples(200), deadline=None)
    @given(data=st.data())
    def test_changed_bytes_are_read_the_same(self, data: st.DataObject) -> None:
        """A good answer in which some bytes were replaced, left out or put in."""
        fields, body = data.draw(st.sampled_from(ODD))
        answer = bytearray(OK + fields + b"\r\n" + body)
        for _ in range(data.draw(st.integers(1, 3))):
            at = data.draw(st.integers(0, len(answer) - 1))
            new = data.draw(
                st.sampled_from([b"", b"\r", b"\n", b"\r\n", b" ", b":", b"\x00", b"0"])
            )
            answer[at : at + data.draw(st.integers(0, 2))] = new
        place = data.draw(st.integers(0, len(answer)))
        for pieces in ([answer], [answer[:place], answer[place:]]):
            parts = [bytes(piece) for piece in pieces if piece]
            ours = read_by_us("GET", parts, may_switch=False)
            assert ours == read_by_h11("GET", parts, may_switch=False)

    @pytest.mark.parametrize("case", range(len(MALFORMED) + len(ODD) + len(FRAMED)))
    def test_known_malformed_and_odd_answers_are_read_the_same(self, case: int) -> None:
        """Those of `test_bad_input`, split at each place unless they are long."""
        odd = [OK + fields + b"\r\n" + body for fields, body in ODD]
        cases = [*MALFORMED, *odd, *FRAMED]
        answer = cases[case]
        if len(answer) < 1_000:
            compare("GET", answer)
        else:
            pieces = [answer[at : at + 32_768] for at in range(0, len(answer), 32_768)]
            ours = read_by_us("GET", pieces, may_switch=False)
            assert ours == read_by_h11("GET", pieces, may_switch=False)

    def test_a_byte_at_a_time_gives_the_same_answer(self) -> None:
        """Chunks, an extension, trailers, and an interim response before them."""
        answer = (
            b"HTTP/1.1 103 Early\r\nLink: a\r\n\r\n" + OK + b"Transfer-Encoding: chunked\r\n\r\n"
        )
        answer += b"2;x=y\r\nhi\r\n3\r\nyou\r\n0\r\nA: b\r\n\r\n"
        parts = [bytes([byte]) for byte in answer]
        ours = read_by_us("GET", parts, may_switch=False)
        assert ours == read_by_h11("GET", parts, may_switch=False)
        assert (ours.body, ours.is_whole, ours.may_stay) == (b"hiyou", True, True)

    def test_many_folded_lines_are_read_in_linear_time(self) -> None:
        """A field of thirty thousand lines."""
        answer = OK + b"X: a\r\n" + b" b\r\n" * 30_000 + b"Content-Length: 0\r\n\r\n"
        ours = read_by_us("GET", [answer], may_switch=False)
        assert ours == read_by_h11("GET", [answer], may_switch=False)


CHUNKED = OK + b"Transfer-Encoding: chunked\r\n\r\n"


def reader_of(*parts: bytes) -> AnswerReader:
    reader = AnswerReader("GET")
    for part in parts:
        reader.receive(part)
    assert reader.head() is not None
    return reader


class TestI25Chunks:
    def test_chunks_that_have_come_are_one_part(self) -> None:
        """A site may send a chunk for each byte: the visitor gets them together."""
        reader = reader_of(CHUNKED + b"1\r\nx\r\n" * 1_000 + b"2;a=b\r\nyz\r\n0\r\n\r\n")
        assert reader.part() == b"x" * 1_000 + b"yz"
        assert reader.is_complete
        assert reader.part() == b""

    def test_chunks_are_joined_wherever_they_are_split(self) -> None:
        """The end of a chunk, or of its line, may come later."""
        answer = b"1\r\na\r\n" * 3 + b"b;x\r\nhello world\r\n1\r\n!\r\n0\r\nT: 1\r\n\r\n"
        for at in range(len(answer)):
            reader = reader_of(CHUNKED, answer[:at])
            body = b""
            while (part := reader.part()) is not None:
                body += part
                if not part:
                    break
            reader.receive(answer[at:])
            while part := reader.part():
                body += part
            assert (part, body, reader.is_complete) == (b"", b"aaahello world!", True)

    @pytest.mark.parametrize("wrong", [b"zz\r\n", b"1\r\nxy\r\n", b"1\nx\r\n0\r\n\r\n"])
    def test_what_came_before_a_faulty_chunk_is_passed_on_first(self, wrong: bytes) -> None:
        """The visitor sees how far the answer was right."""
        reader = reader_of(CHUNKED + b"1\r\na\r\n1\r\nb\r\n" + wrong)
        part = reader.part()
        assert part is not None
        assert part.startswith(b"ab")
        for _ in range(2):
            with pytest.raises(SiteBroken):
                reader.part()
        assert not reader.is_complete


def written_by_us(request: SiteRequest, parts: list[bytes]) -> bytes | None:
    writer = RequestWriter(request)
    try:
        sent = [writer.head(), *(writer.part(part) for part in parts), writer.end()]
    except CannotBePassed:
        return None
    return b"".join(sent)


def written_by_h11(request: SiteRequest, parts: list[bytes]) -> bytes | None:
    writer = h11.Connection(h11.CLIENT)
    method, target, headers = request
    try:
        sent = [writer.send(h11.Request(method=method, target=target, headers=list(headers)))]
        sent += [writer.send(h11.Data(data=part)) for part in parts]
        sent.append(writer.send(h11.EndOfMessage()))
    except h11.LocalProtocolError:
        return None
    return b"".join(part for part in sent if part is not None)


VALUES = st.one_of(
    st.sampled_from(
        [b"", b"a", b"a b", b" a", b"a ", b"a\tb", b"\xff", b"a\x01", b"a\x00", b"\x0b"]
    ),
    st.sampled_from([b"a\r\nEvil: 1", b"a\nEvil: 1", b"a\r", b"\r\n", b"a: b"]),
    st.binary(max_size=4),
)
NAMES = st.one_of(
    st.sampled_from(
        [b"x", b"X-Y", b"x_y", b"", b"x y", b"x:", b"x: y", b"x\r\ny", b"x\n", b"\xe4"]
    ),
    st.binary(max_size=3),
)
FRAMINGS = st.sampled_from(
    [
        (),
        ((b"content-length", b"2"),),
        ((b"transfer-encoding", b"chunked"),),
        ((b"content-length", b"-2"),),
        ((b"content-length", b"9" * 21),),
    ]
)


class TestI25RequestsAreWrittenAsByH11:
    @settings(max_examples=examples(200), deadline=None)
    @given(
        method=st.sampled_from(["GET", "POST", "HEAD", "M-SEARCH", "", "G T", "GET\r\n", "GÄT"]),
        target=st.one_of(
            st.sampled_from(
                [b"/", b"*", b"/a?b", b"", b"/a b", b"/\r\n", b"/\xe4", b"/\x7f", b"/%"]
            ),
            st.binary(max_size=3),
        ),
        fields=st.lists(st.tuples(NAMES, VALUES), max_size=3),
        framing=FRAMINGS,
        parts=st.lists(st.sampled_from([b"", b"a", b"hi", b"abc"]), max_size=3),
    )
    def test_a_request_is_written_in_the_same_bytes_or_refused(
        self,
        method: str,
        target: bytes,
        fields: list[tuple[bytes, bytes]],
        framing: tuple[tuple[bytes, bytes], ...],
        parts: list[bytes],
    ) -> None:
        """No field, method or target can bring another line into a request."""
        if any(name.lower() in {b"host", b"te"} for name, _ in fields):
            return
        request = SiteRequest(method, target, (*HOST, *framing, *fields))
        try:
            theirs = written_by_h11(request, parts)
        except UnicodeEncodeError:
            theirs = None
        assert written_by_us(request, parts) == theirs

    def test_a_connect_is_refused(self) -> None:
        """It would open a tunnel, which is not passed on; h11 sends it, and then reads nothing."""
        assert written_by_us(SiteRequest("CONNECT", b"x:1", HOST), []) is None
