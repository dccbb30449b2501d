"""The loaders that run in this process, and the faces that may answer from memory without a look.

What a loader reads may not lag (`at_least.py`), also if it is the loader of another cache. So while
a loader runs, of whatever cache, the faces of all resources whose memory may lag look at the
context of each read before memory answers it. While none runs, they do not look.

The first loader that begins closes the faces that are *open*. They stay closed when the last loader
has ended: some hits later each one opens itself. So a load costs as much as there are faces that
were hit often since the last one, not as there are resources.

Caches have event loops and threads of their own. One lock guards what all their faces take entries
from. No request to a store and no function of the user runs under it.
"""

from threading import RLock
from typing import Final, Protocol
from weakref import WeakSet


class Watchable(Protocol):
    """A face, which may answer from memory without a look at the context."""

    def stand_back(self) -> None:
        """Look whether a loader runs."""


class RunningLoaders:
    """Closes the open faces when the first loader begins."""

    def __init__(self) -> None:
        self.are_some = False
        """True while a loader may run."""
        self.lock = RLock()  # a finalizer may come here while its own thread has it
        self._running: set[int] = set()
        """Numbers, so that a load whose event loop was closed can be collected."""
        self._open: WeakSet[Watchable] = WeakSet()
        self._are_open = False
        """True if there may be an open face: to ask the set would take longer."""

    def begin(self, load: int) -> None:
        """Return when no face answers a loader from memory that may lag."""
        with self.lock:
            self._running.add(load)
            self.are_some = True
            if self._are_open:
                self._close_faces()

    def end(self, load: int) -> None:
        with self.lock:
            self._running.discard(load)
            self.are_some = bool(self._running)

    def note_open(self, face: Watchable) -> None:
        """The face answers without a look from now on. Its caller has the lock."""
        self._open.add(face)
        self._are_open = True

    def _close_faces(self) -> None:
        for face in tuple(self._open):
            face.stand_back()
        self._open.clear()
        self._are_open = False

    def forked(self) -> None:
        """In the child: other threads, which may have had the lock, and their loaders are gone."""
        self.lock = RLock()
        self._running = set()
        self.are_some = False


RUNNING_LOADERS: Final = RunningLoaders()
