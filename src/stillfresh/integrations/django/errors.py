"""Exceptions of cached functions in a Django site: which reach callers, and LoadFailed as a 503."""

import time
from collections.abc import Callable

from asgiref.sync import iscoroutinefunction, markcoroutinefunction
from django.core.exceptions import BadRequest, PermissionDenied, SuspiciousOperation
from django.http import Http404, HttpRequest, HttpResponse

from stillfresh.errors import LoadFailed
from stillfresh.http import pause_after


def is_refusal(error: BaseException) -> bool:
    """True for Django's own HTTP exceptions: an answer to the request, not a failed load."""
    return isinstance(error, Http404 | PermissionDenied | BadRequest | SuspiciousOperation)


class UnavailableMiddleware:
    """Answers 503 with `Retry-After` where a view raises LoadFailed. One line of MIDDLEWARE."""

    async_capable = True
    sync_capable = True

    def __init__(self, get_response: Callable[[HttpRequest], HttpResponse]) -> None:
        self._get_response = get_response
        if iscoroutinefunction(get_response):
            markcoroutinefunction(self)

    def __call__(self, request: HttpRequest) -> HttpResponse:
        return self._get_response(request)

    def process_exception(self, request: HttpRequest, error: Exception) -> HttpResponse | None:  # noqa: ARG002 (Django's)
        """Django calls it with each exception of a view."""
        if not isinstance(error, LoadFailed):
            return None
        pause = str(pause_after(error, time.time()))
        return HttpResponse("Service Unavailable", status=503, headers={"Retry-After": pause})
