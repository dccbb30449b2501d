"""Origins as browsers tell them: which pages of other sites may ask (G2, G3)."""

from collections.abc import Iterable
from urllib.parse import urlsplit

from stillfresh.errors import ConfigError, shown

__all__ = ["checked_origins"]


def checked_origins(origins: Iterable[str]) -> tuple[str, ...]:
    """As a browser's Origin header has them: scheme, host, perhaps a port; nothing behind."""
    if isinstance(origins, str):
        raise ConfigError(f"origins: takes a list of origins; write [{origins!r}]")
    found = tuple(origins)
    for origin in found:
        if not isinstance(origin, str) or not _is_origin(origin):
            raise ConfigError(f"origins: write 'https://host' or with a port, not {shown(origin)}")
    return found


def _is_origin(text: str) -> bool:
    try:
        parts = urlsplit(text)
        is_site = parts.scheme in {"http", "https"} and parts.hostname and parts.username is None
        return bool(is_site) and text == f"{parts.scheme}://{parts.netloc}".lower()
    except ValueError:
        return False
