"""A route's values: as the store keeps them, and as FastAPI gets them back.

A value is stored by its declared type; a whole response is stored as its bytes, if it can
be shared. No request may be needed here.
"""

from collections.abc import Callable
from functools import partial
from inspect import Signature
from typing import Any, get_origin

from fastapi import Response
from fastapi.encoders import jsonable_encoder
from pydantic import TypeAdapter
from pydantic.errors import PydanticSchemaGenerationError
from starlette.responses import FileResponse, StreamingResponse

from stillfresh.engine import Codec, CodecMaker, MsgpackCodec, Private, codec_for, codec_of
from stillfresh.errors import ConfigError
from stillfresh.integrations.routes import KeptResponse, is_for_all


class RouteCodec:
    """The codec of a route's values; a dict or an ORM's row becomes the declared type first."""

    def __init__(self, of: Any, route: str) -> None:  # noqa: ANN401 (a type form)
        codec: Codec[Any] = codec_for(Any if of is Signature.empty else of, route)
        self._ready = jsonable_encoder if of is Signature.empty else _ready(of, route)
        self._encode = codec.encode
        self.decode = codec.decode

    def encode(self, value: object) -> bytes:
        """As FastAPI does it: validated, or without a type converted for JSON."""
        return self._encode(self._ready(value))


def _ready(of: Any, route: str) -> Callable[[object], Any]:  # noqa: ANN401 (a type form)
    try:
        adapter = TypeAdapter[Any](of)
    except PydanticSchemaGenerationError as exc:
        raise ConfigError(f"{route}: FastAPI cannot send a {of!r}; give model=") from exc
    if of is Any:
        return partial(adapter.dump_python, mode="json", by_alias=True)
    return partial(adapter.validate_python, from_attributes=True)


def _chosen_codec(of: Any, route: str, *, is_response: bool) -> Codec[Any]:  # noqa: ANN401
    """The codec of a route without `codec=`."""
    return MsgpackCodec(KeptResponse, route) if is_response else RouteCodec(of, route)


class RouteValues:
    """Turns a route's values into stored ones, and back."""

    def __init__(self, route: str, of: Any, codec: Codec[Any] | CodecMaker | None) -> None:  # noqa: ANN401
        origin = get_origin(of) or of
        is_response = isinstance(origin, type) and issubclass(origin, Response)
        chosen = partial(_chosen_codec, of, route, is_response=is_response)
        self.codec: Codec[Any] = codec_of(codec, chosen, route)
        self._is_response = is_response

    def to_store(self, value: object) -> object:
        """For the engine: a value, or a `Private` for its caller only."""
        if not isinstance(value, Response):
            return value
        is_stream = isinstance(value, StreamingResponse | FileResponse)
        if self._is_response and not is_stream and value.background is None:
            headers = list(value.raw_headers)
            body = bytes(value.body)
            if is_for_all(value.status_code, headers, len(body)):
                return KeptResponse(200, headers, body)
        return Private(value, is_noted=False)

    def to_serve(self, value: object) -> object:
        """The value; a response is made again for each caller, because sending may change it."""
        if not isinstance(value, KeptResponse):
            return value
        response = Response(value.body, value.status)
        response.raw_headers = list(value.headers)
        return response
