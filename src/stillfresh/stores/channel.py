"""How a store announces changes, as a contract (S10)."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Final, TypeAlias

Tell: TypeAlias = Callable[[str, str, str | None], None]
"""Called with a kind, an id and the new generation; None: it was invalidated or deleted."""
A_TAG: Final = ""
"""In place of a kind: the id is a tag, whose entries are invalidated, and reported as well."""


class Channel(ABC):
    """How a store reports changes that any process makes (S10)."""

    @abstractmethod
    async def beat(self) -> None:
        """Wait until every change that was made before this call is reported.

        Raises StoreError if the channel is broken, or silent for too long.
        """
