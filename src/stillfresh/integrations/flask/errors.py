"""Exceptions of cached functions in a Flask app: which reach callers, and LoadFailed as a 503."""

import time

from werkzeug.exceptions import HTTPException, ServiceUnavailable

from stillfresh.errors import LoadFailed
from stillfresh.http import pause_after


def is_refusal(error: BaseException) -> bool:
    """True for an HTTPException below 500: an answer to the request, not a failed load."""
    if not isinstance(error, HTTPException) or error.code is None:
        return False
    return error.code < 500


def unavailable(error: LoadFailed) -> HTTPException:
    """Answer 503 with `Retry-After`: `app.register_error_handler(LoadFailed, unavailable)`."""
    return ServiceUnavailable(retry_after=pause_after(error, time.time()))
