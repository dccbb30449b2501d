"""A server that is one of several in its process (G8)."""

from collections.abc import Iterator
from contextlib import contextmanager

from stillfresh.web.serving import Server


class QuietServer(Server):
    """Signals are heard by who runs it, not by itself."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield
