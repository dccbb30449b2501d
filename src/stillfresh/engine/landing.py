"""How a load ended, key by key, and who is told of it (E3-E8)."""

import logging
from collections.abc import Container, Hashable, Iterable, Mapping
from secrets import token_hex
from typing import Any, Generic, Protocol, TypeVar

from msgspec import Struct

from stillfresh.engine.flights import Flight
from stillfresh.engine.metrics import Meter
from stillfresh.engine.model import Private
from stillfresh.engine.results import Absent, pause_of
from stillfresh.engine.rules import failed
from stillfresh.engine.spec import Runtime, Spec
from stillfresh.errors import LoadFailed, error_text
from stillfresh.freshness import Policy
from stillfresh.stores.contract import Copy, Failure, Lease, Record

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")

logger = logging.getLogger(__name__)


class Landing(Struct, Generic[V], frozen=True):
    """How a key's load ended: with a copy and its value, or with an error."""

    copy: Copy | None = None
    value: V | None = None
    failure: Failure | None = None
    error: LoadFailed | None = None
    is_kept: bool = True
    """False: told to those who wait, and not published."""
    private: Private[Any] | None = None
    """For the caller whose loader gave it."""


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


class Look(Protocol[K, V]):
    """What another process has done, seen at `since`; `waited`: after the lease was denied."""

    def __call__(
        self, flight: Flight[K, V], record: Record, since: float, *, waited: bool = False
    ) -> None: ...


class Landings(Generic[K, V]):
    """From what a loader said to how each key's load ended; counted and logged."""

    def __init__(self, spec: Spec[K, V], runtime: Runtime, meter: Meter) -> None:
        self._spec = spec
        self._runtime = runtime
        self._meter = meter

    def of(
        self,
        flight: Flight[K, V],
        result: object,
        sent: float,
        lease: Lease | None,
        gone: Policy,
    ) -> Landing[V]:
        """E25: what cannot even be looked at, such as an unbound proxy, has failed alone."""
        try:
            return self._of(flight, result, sent, lease, gone)
        except Exception as exc:  # noqa: BLE001 (a value of somebody else's)
            return self.failed(flight, exc)

    def _of(
        self,
        flight: Flight[K, V],
        result: object,
        sent: float,
        lease: Lease | None,
        gone: Policy,
    ) -> Landing[V]:
        """What the loader said as a copy."""
        if isinstance(result, BaseException):
            return self.failed(flight, result)
        generation = lease.token if lease is not None else token_hex(16)
        if isinstance(result, Absent | Private):
            self._meter.absent += 1
            private = result if isinstance(result, Private) else None
            is_kept = private is None or private.is_noted or flight.seen is not None
            return Landing(Copy(generation, sent, gone, None), is_kept=is_kept, private=private)
        try:
            return Landing(*self._spec.kept(result, generation, sent, self._runtime.dice))
        except Exception as exc:  # noqa: BLE001 (a codec may raise anything)
            kept = LoadFailed(f"the value cannot be stored: {error_text(exc)}")
            kept.__cause__ = exc
            return self.failed(flight, kept)

    def failed(
        self, flight: Flight[K, V], error: BaseException, what: str = "loading failed"
    ) -> Landing[V]:
        self._meter.failed += 1
        text = error_text(error)
        failure = failed(
            flight.failure,
            text,
            self._runtime.clock(),
            self._runtime.dice(),
            pause_of(error),
        )
        self._meter.failing.failed(flight.id, failure)
        raised = LoadFailed(f"{self._spec.kind} {flight.key!r}: {what}: {text}")
        raised.__cause__ = error
        return Landing(failure=failure, error=raised)

    def report_slow(self, took: float) -> None:
        """E16: once for a resource."""
        fresh_for = self._spec.terms.policy.fresh_for
        if 0 < fresh_for <= took and not self._meter.slow_reported:
            self._meter.slow_reported = True
            logger.warning(
                "%s: the loader took %.3g s, and what it loads is fresh for %.3g s, which count "
                "from when it was asked: nothing is fresh when it arrives. Make fresh_for longer, "
                "or the loader faster.",
                self._spec.kind,
                took,
                fresh_for,
            )

    def log(self, landings: dict[str, Landing[V]]) -> None:
        """E7: once for a batch."""
        errors = [it.error for it in landings.values() if it.error is not None]
        if errors:
            of = f"{len(errors)} of {len(landings)} failed; " if len(landings) > 1 else ""
            logger.warning("%s%s", of, errors[0])
