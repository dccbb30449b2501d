"""Every error that stillfresh raises, so that one `except StillfreshError` catches them all."""

__all__ = [
    "ConfigError",
    "LeaseHeld",
    "LeaseLost",
    "LoadFailed",
    "NotOpen",
    "StillfreshError",
    "StoreError",
]


class StillfreshError(Exception):
    """The root of them all."""


class ConfigError(StillfreshError, ValueError):
    """A setting that cannot be used: says which one, what was given, and what is allowed."""


class NotOpen(StillfreshError):
    """Asked of something that is closed, or was never opened."""


class StoreError(StillfreshError):
    """The store failed; the client library's own error is the cause."""


class LeaseHeld(StillfreshError):
    """Another holds the right to refresh this key."""


class LeaseLost(StillfreshError):
    """The lease is no longer ours: it ran out, or an invalidation voided it."""


class LoadFailed(StillfreshError):
    """There was nothing to serve and loading failed; the loader's error is the cause."""
