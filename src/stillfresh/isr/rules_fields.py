"""Header fields: reading them, and which of them go where (I12, I14).

Pure, and total: whatever bytes come in, nothing is raised; what cannot be read is None or zero.
RFC 9110 §5.6 (lists, dates) and §7.6.1 (Connection), RFC 9111 §1.2 and §5.2, RFC 9211.
"""

import re
from collections.abc import Iterable, Mapping
from typing import Final, TypeAlias

from stillfresh.wire import http_date as date_in

Raw: TypeAlias = tuple[tuple[bytes, bytes], ...]
"""Header fields as ASGI has them, names in lower case."""


def names_in(text: bytes) -> frozenset[bytes]:
    """Field names, written one after the other."""
    return frozenset(text.split())


MOST_SECONDS: Final = 2**31
"""RFC 9111 §1.2.2: what is greater counts as this."""
MEMBER: Final = re.compile(rb'(?:[^",]|"(?:\\.|[^"\\])*"?)+', re.DOTALL)
TOKEN: Final = re.compile(rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+")


def values(headers: Iterable[tuple[bytes, bytes]], name: bytes) -> list[bytes]:
    """Every value of a field, in order."""
    return [value for field, value in headers if field == name]


def members(lines: Iterable[bytes]) -> list[bytes]:
    """RFC 9110 §5.6.1: the members of a list over all its lines; commas in quotes do not part."""
    found = (part.strip() for line in lines for part in MEMBER.findall(line))
    return [part for part in found if part]


def directives(lines: Iterable[bytes]) -> dict[str, str]:
    """RFC 9111 §5.2: by lower-case name; of several the first counts; without argument: empty."""
    result: dict[str, str] = {}
    for member in members(lines):
        name, _, argument = member.partition(b"=")
        if TOKEN.fullmatch(name := name.strip()):
            result.setdefault(name.decode("ascii").lower(), _unquoted(argument.strip()))
    return result


def _unquoted(argument: bytes) -> str:
    text = argument.decode("latin-1")
    return text[1:-1] if len(text) > 1 and text[0] == text[-1] == '"' else text


def number(known: Mapping[str, str], name: str) -> float | None:
    """Seconds of a directive; None if it is not there, zero if it cannot be read (§4.2.1)."""
    if (text := known.get(name)) is None:
        return None
    if not (text.isascii() and text.isdigit()):
        return 0.0
    return float(MOST_SECONDS if len(text) > 10 else min(int(text), MOST_SECONDS))


def http_date(value: bytes) -> float | None:
    """RFC 9110 §5.6.7: any of the three forms, as seconds; None if it is no date."""
    return date_in(value.decode("latin-1"))


def date_of(headers: Raw, name: bytes) -> float | None:
    """The date in a field; None if there is none."""
    found = values(headers, name)
    return http_date(found[0]) if found else None


NAME: Final = re.compile(rb"[!#$%&'*+.^_`|~0-9a-z-]+")
BAD: Final = re.compile(rb"[\x00-\x08\x0a-\x1f\x7f]")


def field_value(text: str) -> bytes | None:
    """RFC 9110 §5.5: as a header field's value; None if it can be none."""
    try:
        value = text.encode("latin-1")
    except UnicodeEncodeError:
        return None
    return None if BAD.search(value) or value != value.strip() else value


HOP_BY_HOP: Final = names_in(
    b"connection keep-alive proxy-authenticate proxy-authentication-info "
    b"proxy-authorization proxy-connection te trailer transfer-encoding upgrade"
)
NOT_LISTED: Final = names_in(
    b"age cache-control cdn-cache-control content-encoding content-length date expires "
    b"host set-cookie vary"
)
"""A Connection header that names these would change what others keep; it is not obeyed in that."""


def end_to_end(headers: Raw) -> Raw:
    """Without what concerns one connection only, by name or by the Connection header's list."""
    listed = {it.lower() for it in members(values(headers, b"connection"))} - NOT_LISTED
    dropped = HOP_BY_HOP | listed
    return tuple(it for it in headers if it[0] not in dropped)
