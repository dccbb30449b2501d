"""What a route returned, as the store keeps it, and as FastAPI gets it back (E11, E19).

A value goes through Pydantic, as FastAPI sends it; a whole response is kept as its bytes, if it can
be shared. No request may be needed here.
"""

from typing import Any, Final, get_origin

from fastapi import Response
from msgspec import Struct, msgpack
from pydantic import TypeAdapter
from pydantic.errors import PydanticSchemaGenerationError
from pydantic_core import PydanticSerializationError
from starlette.responses import FileResponse, StreamingResponse

from stillfresh.engine import Codec, MsgpackCodec, Private
from stillfresh.errors import ConfigError
from stillfresh.http.fields import directives, values

MAX_BODY: Final = 1_048_576
"""Bytes of a response that is kept."""
UNSHARED: Final = {"private", "no-store"}


class KeptResponse(Struct, frozen=True):
    """A response as it was, for any number of callers."""

    status: int
    headers: list[tuple[bytes, bytes]]
    body: bytes

    def response(self) -> Response:
        """A new one for each caller: what is sent may change it."""
        response = Response(self.body, self.status)
        response.raw_headers = list(self.headers)
        return response


def kept_response(response: Response) -> "KeptResponse | Private[Response]":
    """One that only its own caller may have is not kept."""
    if not _is_for_all(response):
        return Private(response, is_noted=False)
    return KeptResponse(200, list(response.raw_headers), bytes(response.body))


def _is_for_all(response: Response) -> bool:
    if isinstance(response, StreamingResponse | FileResponse) or response.background is not None:
        return False
    headers = tuple(response.raw_headers)
    said = directives(values(headers, b"cache-control")).keys()
    is_own = values(headers, b"set-cookie") or not UNSHARED.isdisjoint(said)
    return response.status_code == 200 and len(response.body) <= MAX_BODY and not is_own


class ModelCodec:
    """A value as Pydantic's plain data, by field names and without computed fields, and back."""

    def __init__(self, of: Any, route: str) -> None:  # noqa: ANN401 (a type form)
        self._route = route
        try:
            self._adapter: TypeAdapter[Any] = TypeAdapter(of)
        except PydanticSchemaGenerationError as exc:
            raise ConfigError(
                f"{route}: cannot keep values of type {of!r}; annotate what it returns with a "
                f"type that FastAPI can send, or give model= or codec="
            ) from exc

    def checked(self, value: object) -> object:
        """As the declared type: a row of an ORM or a dict becomes its model, as FastAPI does it."""
        return self._adapter.validate_python(value, from_attributes=True)

    def encode(self, value: object) -> bytes:
        try:
            plain = self._adapter.dump_python(value, mode="json", round_trip=True)
        except PydanticSerializationError as exc:
            raise ConfigError(
                f"{self._route}: returned a {type(value).__name__}, which cannot be kept as it is: "
                f"annotate what the function returns (-> Item), or give model=Item"
            ) from exc
        return msgpack.encode(plain)

    def decode(self, data: bytes) -> object:
        """Plain data has fewer types: also a strict model reads its own back."""
        plain = msgpack.decode(data)
        return self._adapter.validate_python(plain, strict=False, by_alias=True, by_name=True)


class RouteValues:
    """What a route returns, to what is kept of it, and back."""

    def __init__(self, route: str, of: Any, codec: Codec[Any] | None) -> None:  # noqa: ANN401
        origin = get_origin(of) or of
        is_response = isinstance(origin, type) and issubclass(origin, Response)
        self._model = None if is_response or codec is not None else ModelCodec(of, route)
        self.codec: Codec[Any] = (
            codec or self._model or MsgpackCodec[KeptResponse](KeptResponse, route)
        )
        self._is_response = is_response

    def kept(self, value: object) -> object:
        """For the engine: a value, or a `Private` that is the caller's alone."""
        if isinstance(value, Response):
            return kept_response(value) if self._is_response else Private(value, is_noted=False)
        return value if self._model is None else self._model.checked(value)

    def served(self, value: object) -> object:
        return value.response() if isinstance(value, KeptResponse) else value
