"""Versions of values: what a caller gives, and the one form in which every store keeps it.

A version is an integer or a text. Its stored form is bytes: a letter for the kind, and then eight
bytes for an integer, or the text in UTF-8. Forms of one kind are in the order of their bytes, so a
store compares bytes and needs to know nothing else. Two kinds have no order.

Pure: a version in, its form out, or a ConfigError that says what is allowed.
"""

from typing import Final, TypeAlias

from stillfresh.errors import ConfigError, shown

Version: TypeAlias = int | str
"""A version as callers give it to `put(..., version=)` and `Loaded(..., version=)`."""

NO_VERSION: Final = b""
INTEGER: Final = b"i"
TEXT: Final = b"t"
BIAS: Final = 1 << 63
"""Added to an integer, so that negative ones come first."""
LONGEST_TEXT_VERSION: Final = 255
"""Bytes of a text version in UTF-8."""


def packed_version(version: Version | None) -> bytes:
    """Return the stored form. None, for no version, is `NO_VERSION`."""
    if version is None:
        return NO_VERSION
    if isinstance(version, bool) or not isinstance(version, int | str):
        kind = type(version).__name__
        raise ConfigError(
            f"version: must be an int or a str, not {kind} ({shown(version)}); for a date and time "
            f"give its isoformat() in UTC"
        )
    if isinstance(version, int):
        if not -BIAS <= version < BIAS:
            raise ConfigError(
                f"version: must be at least -2**63 and below 2**63, not {shown(version)}"
            )
        return INTEGER + (version + BIAS).to_bytes(8, "big")
    try:
        text = version.encode()
    except UnicodeEncodeError:
        raise ConfigError(f"version: {shown(version)} cannot be written in UTF-8") from None
    if len(text) > LONGEST_TEXT_VERSION:
        raise ConfigError(
            f"version: a text has at most {LONGEST_TEXT_VERSION} bytes in UTF-8, not {len(text)}"
        )
    return TEXT + text


def unpacked_version(form: bytes) -> Version | None:
    """Return the version of a stored form; None if there is none, or the form is damaged."""
    kind = form[:1]
    content = form[1:]
    if kind == INTEGER and len(content) == 8:
        return int.from_bytes(content, "big") - BIAS
    if kind == TEXT:
        try:
            return content.decode()
        except UnicodeDecodeError:
            return None
    return None


def are_comparable(stored: bytes, given: bytes) -> bool:
    """Return False if one version is an integer and the other one a text."""
    return not stored or not given or stored[:1] == given[:1]
