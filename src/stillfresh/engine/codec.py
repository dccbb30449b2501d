"""Values to bytes and back: msgspec by the loader's annotation, or a codec of your own (E11).

Never pickle: a cache file must not be able to run code.
"""

from typing import Any, Generic, Protocol, TypeVar

import msgspec

from stillfresh.errors import ConfigError

V = TypeVar("V")


class Codec(Protocol[V]):
    """What `codec=` takes. `decode` may raise anything for bytes that it does not know."""

    def encode(self, value: V, /) -> bytes:
        """The value as bytes."""

    def decode(self, data: bytes, /) -> V:
        """The value that `encode` was given."""


class MsgpackCodec(Generic[V]):
    """Typed msgpack."""

    def __init__(self, of: Any, resource: str) -> None:  # noqa: ANN401 (a type form)
        try:
            self._decoder: msgspec.msgpack.Decoder[V] = msgspec.msgpack.Decoder(of)
        except TypeError as exc:
            raise ConfigError(
                f"{resource}: cannot store values of type {of!r} ({exc}); "
                f"annotate a type that msgspec knows, or give codec="
            ) from exc
        self.encode = msgspec.msgpack.Encoder().encode
        self.decode = self._decoder.decode
