"""What an app tells a server that can repeat its answers: how, and for which requests.

A server that can repeat answers puts a function under `KEEP` into a request's scope. The app calls
it with a `Repeatable` just before it answers. From then on the server may answer equal requests
without the app: it calls `repeat`, and sends the response that this returns. Layers between the
two wrap `repeat`, so that they count and log such an answer as they would any other.

Which requests are equal? First those with the same bytes. Then those with the same request line,
whose fields named by `names` have the same values as well, and which have none of the fields
`aside`. No other field may change the answer: that is the app's promise, and a server that is wrong
about it gives one visitor the answer to another. tests/gateway/server/test_hits.py compares both
ways with the normal one, byte for byte.
"""

from collections.abc import Callable
from typing import Final, NamedTuple, TypeAlias

from stillfresh.http.fields import Raw

KEEP: Final = "stillfresh.keep"
"""Key in a scope of a server that can repeat an answer: a function that takes a `Repeatable`."""
PROXY: Final = "stillfresh.proxy"
"""Key in such a scope: True if the server keeps the answers for this peer apart from those for
other peers, because it is a trusted proxy."""


class Response(NamedTuple):
    """A whole response. For a HEAD request the body is empty."""

    status: int
    fields: Raw
    """The same object as long as they are the same, so that they need not be written again."""
    body: bytes


Repeat: TypeAlias = Callable[[], Response | None]
"""The response to the same request now, which counts as a visit. None: the app must be asked."""


class Repeatable(NamedTuple):
    """An answer that is about to be sent, and how to give it again."""

    response: Response
    repeat: Repeat
    names: frozenset[bytes] = frozenset()
    """Request fields that may choose another answer, in lower case."""
    aside: frozenset[bytes] = frozenset()
    """Request fields with which the app must be asked, in lower case."""
