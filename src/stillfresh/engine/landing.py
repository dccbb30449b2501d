"""How a load ended, key by key, and who is told of it (E3-E8)."""

from collections.abc import Container, Hashable, Iterable, Mapping
from typing import Generic, Protocol, TypeVar

from msgspec import Struct

from stillfresh.engine.flights import Flight
from stillfresh.errors import LoadFailed
from stillfresh.stores.contract import Copy, Failure

__all__ = ["Land", "Landing"]

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class Landing(Struct, Generic[V], frozen=True):
    """How a key's load ended: with a copy and its value, or with an error."""

    copy: Copy | None = None
    value: V | None = None
    failure: Failure | None = None
    error: LoadFailed | None = None
    is_kept: bool = True
    """False: told to those who wait, and not published."""


class Land(Protocol[K, V]):
    """Tells those who wait for the flights how they ended; the rest by id.

    `since`: the store was asked to keep it then; what it has been told later is not known.
    """

    def __call__(
        self,
        flights: Iterable[Flight[K, V]],
        landings: Mapping[str, Landing[V]],
        *,
        stored: Container[str] = (),
        superseded: Container[str] = (),
        since: float | None = None,
    ) -> None: ...
