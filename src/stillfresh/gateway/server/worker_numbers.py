"""What workers tell each other: bytes in shared memory; no process ever waits for another.

The memory is made before the fork. It has no file and no name, and ends with the processes.
"""

import mmap
import struct
from typing import Final
from zlib import crc32

from stillfresh.errors import StillfreshError

HEAD: Final = struct.Struct("II")
TRIES: Final = 100


class WorkerNumbers:
    """Bytes that each worker writes for the others, in shared memory.

    A worker writes only its own place. A place has two halves: new bytes go to the hidden half,
    which is then shown. So a worker that is killed while it writes leaves its earlier bytes, and no
    worker waits. A checksum finds a half that was written twice while it was read.
    """

    def __init__(self, places: int, size: int) -> None:
        self._half = HEAD.size + size
        self._size = 2 + 2 * self._half
        self.places = places
        self._memory = mmap.mmap(-1, places * self._size)

    def write(self, place: int, data: bytes) -> None:
        """Write. From the first call on, the worker of this place counts as alive."""
        if HEAD.size + len(data) > self._half:
            raise ValueError(f"{len(data)} bytes do not fit into {self._half - HEAD.size}")
        start = place * self._size
        hidden = 1 - self._memory[start]
        begin = start + 2 + hidden * self._half
        whole = HEAD.pack(len(data), crc32(data)) + data
        self._memory[begin : begin + len(whole)] = whole
        self._memory[start : start + 2] = bytes((hidden, True))

    def read(self, place: int) -> bytes:
        """The last bytes of this place; empty if there are none yet."""
        start = place * self._size
        for _ in range(TRIES):
            begin = start + 2 + self._memory[start] * self._half
            length, check = HEAD.unpack_from(self._memory, begin)
            data = self._memory[begin + HEAD.size : begin + HEAD.size + length]
            if crc32(data) == check:
                return data
        raise StillfreshError(f"worker {place + 1}: its numbers change too fast to be read")

    def read_all(self) -> list[tuple[bytes, bool]]:
        """The last bytes of every place, and whether its worker lives."""
        is_alive = [bool(self._memory[place * self._size + 1]) for place in range(self.places)]
        return [(self.read(place), is_alive[place]) for place in range(self.places)]

    def ended(self, place: int) -> None:
        """For the parent: the place has lost its worker."""
        self._memory[place * self._size + 1] = False
