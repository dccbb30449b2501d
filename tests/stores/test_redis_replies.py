"""S5, S14: replies are read from any pieces in which they come."""

import pytest
from redis.exceptions import InvalidResponse, MovedError, NoScriptError, ResponseError

from stillfresh.stores.redis.replies import ReplyReader, packed

TEXT = (
    b"+OK\r\n:12\r\n:-2\r\n$5\r\nhe\r\nl\r\n$0\r\n\r\n$-1\r\n*-1\r\n*0\r\n"
    b"*3\r\n$1\r\na\r\n*2\r\n:1\r\n*1\r\n$-1\r\n+fine\r\n:7\r\n"
)
REPLIES = [b"OK", 12, -2, b"he\r\nl", b"", None, None, [], [b"a", [1, [None]], b"fine"], 7]


class TestS14Replies:
    @pytest.mark.parametrize("size", [1, 2, 3, 7, len(TEXT)])
    def test_replies_come_in_pieces_of_any_size(self, size: int) -> None:
        """Each is given once, when its last byte has come."""
        reader = ReplyReader()
        replies = []
        for first in range(0, len(TEXT), size):
            replies += reader.feed(TEXT[first : first + size])
        assert replies == REPLIES

    def test_a_reply_may_be_cut_anywhere(self) -> None:
        """What came before the cut is read once."""
        for cut in range(len(TEXT) + 1):
            reader = ReplyReader()
            assert reader.feed(TEXT[:cut]) + reader.feed(TEXT[cut:]) == REPLIES

    def test_errors_are_replies_of_the_librarys_classes(self) -> None:
        """Also inside a list; the next reply is whole."""
        reader = ReplyReader()
        text = b"-NOSCRIPT no\r\n-MOVED 3 host:1\r\n*2\r\n-ERR odd\r\n:1\r\n:2\r\n"
        no_script, moved, (odd, one), two = reader.feed(text)
        assert isinstance(no_script, NoScriptError)
        assert isinstance(moved, MovedError)
        assert (moved.host, moved.port) == ("host", 1)
        assert isinstance(odd, ResponseError)
        assert (one, two) == (1, 2)

    @pytest.mark.parametrize("text", [b"HTTP/1.1 400 Bad Request\r\n", b"$x\r\n", b"\r\n"])
    def test_another_protocol_is_refused(self, text: bytes) -> None:
        """As the client library refuses it."""
        with pytest.raises(InvalidResponse, match="Protocol Error"):
            ReplyReader().feed(text)

    def test_commands_are_packed_as_the_protocol_says(self) -> None:
        """Text, numbers and bytes of any kind."""
        assert packed([("GET", b"\r\n"), ("SET", "é", 12)]) == (
            b"*2\r\n$3\r\nGET\r\n$2\r\n\r\n\r\n*3\r\n$3\r\nSET\r\n$2\r\n\xc3\xa9\r\n$2\r\n12\r\n"
        )
