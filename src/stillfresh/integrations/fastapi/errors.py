"""Exceptions of cached functions in a FastAPI app: which reach callers, and LoadFailed as a 503."""

import time

from fastapi import Request
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from stillfresh.errors import LoadFailed
from stillfresh.http import pause_after


def is_refusal(error: BaseException) -> bool:
    """True for an HTTPException below 500: an answer to the request, not a failed load."""
    return isinstance(error, HTTPException) and error.status_code < 500


async def unavailable(request: Request, error: Exception) -> JSONResponse:  # noqa: ARG001 (FastAPI's)
    """Answer 503 with `Retry-After`: `app.add_exception_handler(LoadFailed, unavailable)`."""
    headers: dict[str, str] = {}
    if isinstance(error, LoadFailed):
        headers["Retry-After"] = str(pause_after(error, time.time()))
    return JSONResponse({"detail": "Service Unavailable"}, 503, headers)
