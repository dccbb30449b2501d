"""How a store tells what is done to it, as a contract (S10)."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Final, TypeAlias

Tell: TypeAlias = Callable[[str, str, str | None], None]
"""Called with a kind, an id, and the generation that was published; None: it is void."""
A_TAG: Final = ""
"""Instead of a kind, with the tag for an id: whatever has the tag is void, named or not."""


class Channel(ABC):
    """S10: the way on which a store tells what is done to it."""

    @abstractmethod
    async def beat(self) -> None:
        """Until everything has been told that was done before this call.

        StoreError if the channel is broken, or silent for too long.
        """
