"""Face: what the public objects of a resource have in common.

A face answers hits from memory without its core: one lookup, one clock reading, one addition. While
a block of `bypassed()` or `recording()` is open, it finds no entry, so each read goes to the core.
"""

from collections.abc import Hashable
from typing import TYPE_CHECKING, Generic, TypeVar

from stillfresh.errors import shown

if TYPE_CHECKING:
    from stillfresh.engine.core import Core

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class Face(Generic[K, V]):
    """The public object of a resource. It answers hits from memory without its core."""

    def __init__(self, core: "Core[K, V]") -> None:
        self.core = core
        self._clock = core.memory.now
        self._reads = core.memory.counts.on_loop
        core.faces.append(self)
        self.stand_back(back=core.owner.blocks > 0)

    def stand_back(self, *, back: bool) -> None:
        """If `back`, leave every read to the core, which knows the caller's blocks."""
        entries = {} if back else self.core.memory.entries
        self.entry_of = entries.get

    def _one_key(self, *keys: object) -> TypeError:
        """Say how to write a call with several keys."""
        name = getattr(self, "__name__", self.core.spec.kind)
        many = f"{name}.get_many({shown([*keys])})"
        return TypeError(f"{name}: takes one key, not {len(keys)}; write {many}")
