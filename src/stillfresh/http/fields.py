"""Read HTTP header fields, and choose which of them are passed on.

Everything here is pure. Reading never raises, for any bytes: a value that cannot be read is None or
zero. RFC 9110 §5.6 (lists, dates), §7.6.1 (Connection), §10.2.3 (Retry-After) and §12.5
(preferences), RFC 9111 §1.2, §4.1 and §5.2, RFC 9211, RFC 9651.
"""

import re
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from email.utils import formatdate
from functools import lru_cache
from typing import Final, TypeAlias

from stillfresh.errors import ConfigError, shown

Raw: TypeAlias = tuple[tuple[bytes, bytes], ...]
"""Header fields as ASGI has them, names in lower case."""


def names_in(text: bytes) -> frozenset[bytes]:
    """Split text into field names, which are separated by spaces."""
    return frozenset(text.split())


MOST_SECONDS: Final = 2**31
"""RFC 9111 §1.2.2: a greater number counts as this."""
MEMBER: Final = re.compile(rb'(?:[^",]|"(?:\\.|[^"\\])*"?)+', re.DOTALL)
TOKEN: Final = re.compile(rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
lowered: Final = lru_cache(maxsize=1024)(bytes.lower)  # a name is one object for all pages


def values(headers: Iterable[tuple[bytes, bytes]], name: bytes) -> list[bytes]:
    """Every value of a field, in order."""
    return [value for field, value in headers if field == name]


def with_field(headers: Iterable[tuple[bytes, bytes]], name: bytes, value: bytes) -> Raw:
    """Replace all lines of a field by one line."""
    return (*[field for field in headers if field[0] != name], (name, value))


def members(lines: Iterable[bytes]) -> list[bytes]:
    """RFC 9110 §5.6.1: the members of a list over all its lines; commas in quotes do not part."""
    return [part for line in lines for member in MEMBER.findall(line) if (part := member.strip())]


def directives(lines: Iterable[bytes]) -> dict[str, str]:
    """RFC 9111 §5.2: by lower-case name; of several the first counts; without argument: empty.

    No space belongs around `=`. An argument with one keeps it, so that it is no number.
    """
    result: dict[str, str] = {}
    for member in members(lines):
        before, _, after = member.partition(b"=")
        name = before.rstrip()
        argument = after.lstrip()
        if TOKEN.fullmatch(name):
            is_spaced = name != before or argument != after
            text = _unquoted(argument)
            result.setdefault(name.decode("ascii").lower(), f" {text}" if is_spaced else text)
    return result


_KEY: Final = r"[a-z*][a-z0-9_.*-]*"
_BARE: Final = (
    r"""(?:-?[0-9]{1,12}\.[0-9]{1,3}|-?[0-9]{1,15}|"(?:[ !#-\[\]-~]|\\["\\])*"|\?[01]"""
    r"""|[A-Za-z*][!#$%&'*+.^_`|~0-9A-Za-z:/-]*|:[A-Za-z0-9+/=]*:|@-?[0-9]{1,15})"""
)
_PARAMS: Final = rf"(?:;\x20*{_KEY}(?:={_BARE})?)*"
_INNER: Final = rf"\(\x20*(?:{_BARE}{_PARAMS}(?:\x20+(?!\))|\x20*(?=\))))*\)"
_MEMBER: Final = re.compile(rf"({_KEY})(?:=({_BARE}|{_INNER}))?{_PARAMS}[ \t]*(,[ \t]*(?!\Z)|\Z)")


_STRING: Final = re.compile(
    rf"""\"((?:[ !#-\[\]-~]|\\["\\])*)\"{_PARAMS}[ \t]*(,[ \t]*(?!\Z)|\Z)"""
)


def dictionary(lines: Iterable[bytes]) -> dict[str, str]:
    """RFC 9651 §4.2.2: the members of a structured field; the last one of a name counts."""
    result = {match[1]: match[2] or "" for match in _match_members(_MEMBER, lines)}
    return {name: value for name, value in result.items() if value != "?0"}


def strings(lines: Iterable[bytes]) -> list[str]:
    """RFC 9651 §4.2.1: a list of strings; a list with anything else in it is ignored."""
    return [re.sub(r"\\(.)", r"\1", match[1]) for match in _match_members(_STRING, lines)]


def _match_members(member: re.Pattern[str], lines: Iterable[bytes]) -> list[re.Match[str]]:
    """The members of a structured field; a field with a mistake anywhere is ignored."""
    text = b", ".join(lines).decode("latin-1").strip(" ")
    position = 0
    result: list[re.Match[str]] = []
    while position < len(text):
        match = member.match(text, position)
        if match is None:
            return []
        result.append(match)
        position = match.end()
    return result


TAG_FIELDS: Final = names_in(b"cache-groups cache-tag surrogate-key")
"""Fields by which a site tags its pages for the caches in front of it."""


MOST_TAGS: Final = 100
LONGEST_TAG: Final = 1_024
"""Tags of one response, and bytes of one of them."""


def tag_names(headers: Raw) -> list[str] | None:
    """The tags, each once, and groups (RFC 9875). None if they are too many, or one is too long."""
    if TAG_FIELDS.isdisjoint(name for name, _ in headers):
        return []
    keys = [key for line in values(headers, b"surrogate-key") for key in line.split()]
    keys += [key.strip() for line in values(headers, b"cache-tag") for key in line.split(b",")]
    groups = strings(values(headers, b"cache-groups"))
    tags = list(dict.fromkeys(filter(None, [*map(utf8_text, keys), *groups])))
    if len(tags) > MOST_TAGS:
        return None
    if any(len(tag.encode()) > LONGEST_TAG for tag in tags):
        return None
    return tags


def utf8_text(value: bytes) -> str:
    """A value that is UTF-8, or else Latin-1, as text."""
    try:
        return value.decode()
    except UnicodeDecodeError:
        return value.decode("latin-1")


def untagged(headers: Iterable[tuple[bytes, bytes]]) -> Raw:
    """The fields without those that tag a page."""
    return tuple(field for field in headers if field[0] not in TAG_FIELDS)


def _unquoted(argument: bytes) -> str:
    text = argument.decode("latin-1")
    is_quoted = len(text) > 1 and text[0] == text[-1] == '"'
    return text[1:-1] if is_quoted else text


def number(known: Mapping[str, str], name: str) -> float | None:
    """Seconds of a directive; None if it is not there, zero if it cannot be read (§4.2.1)."""
    if (text := known.get(name)) is None:
        return None
    if not (text.isascii() and text.isdigit()):
        return 0.0
    if len(text) > 10:  # too long to be worth reading: Python refuses very long numbers
        return float(MOST_SECONDS)
    return float(min(int(text), MOST_SECONDS))


MONTHS: Final = b"Jan Feb Mar Apr May Jun Jul Aug Sep Oct Nov Dec".split()
_DAY: Final = b"(?:Mon|Tue|Wed|Thu|Fri|Sat|Sun)"
_LONG_DAY: Final = b"(?:Mon|Tues|Wednes|Thurs|Fri|Satur|Sun)day"
_MONTH: Final = b"(?P<month>%b)" % b"|".join(MONTHS)
_TIME: Final = b"(?P<hour>[0-9]{2}):(?P<minute>[0-9]{2}):(?P<second>[0-5][0-9]|60)"
_DATES: Final = tuple(
    re.compile(form, re.IGNORECASE)
    for form in (
        rb"%b, (?P<day>[0-9]{2}) %b (?P<year>[0-9]{4}) %b GMT" % (_DAY, _MONTH, _TIME),
        rb"%b, (?P<day>[0-9]{2})-%b-(?P<year>[0-9]{2}) %b GMT" % (_LONG_DAY, _MONTH, _TIME),
        rb"%b %b (?P<day>[0-9]{2}| [0-9]) %b (?P<year>[0-9]{4})" % (_DAY, _MONTH, _TIME),
    )
)
"""IMF-fixdate, and the two obsolete forms."""
LONGEST_PAUSE: Final = 86_400.0
"""Seconds; an upstream that asks for a longer pause is tried again after a day."""


def http_date(value: bytes) -> float | None:
    """RFC 9110 §5.6.7: a date in one of the three forms, in seconds; None if it is not a date.

    A year of two digits is from 1969 to 2068. Names of days and months, and GMT, are read in any
    case: the RFC does not ask for that, but browsers and other caches read them so.
    """
    matches = (form.fullmatch(value) for form in _DATES)
    match = next(filter(None, matches), None)
    if match is None:
        return None
    year, day, hour, minute, second = (
        int(match[name]) for name in ("year", "day", "hour", "minute", "second")
    )
    if len(match["year"]) == 2:
        year += 2000 if year < 69 else 1900
    month = MONTHS.index(match["month"].title()) + 1
    try:  # a leap second counts as the one before it
        return datetime(year, month, day, hour, minute, min(second, 59), tzinfo=UTC).timestamp()
    except ValueError:
        return None


def http_date_text(moment: float) -> bytes:
    """RFC 9110 §5.6.7: as it is written in a header field."""
    return formatdate(int(moment), usegmt=True).encode()


def pause_of(retry_after: str, date: str, now: float) -> float | None:
    """Seconds to wait; None if none are given, or the time is over.

    A date is compared with the server's own `Date` (else with `now`), because clocks differ.
    """
    text = retry_after.strip()
    if text.isascii() and text.isdigit():
        pause = float(text)
    elif (until := http_date(text.encode("latin-1", "replace"))) is not None:
        server_now = http_date(date.encode("latin-1", "replace"))
        pause = until - (now if server_now is None else server_now)
    else:
        return None
    return min(pause, LONGEST_PAUSE) if pause > 0 else None


def date_of(headers: Raw, name: bytes) -> float | None:
    """The date in a field; None if there is none."""
    lines = values(headers, name)
    return http_date(lines[0]) if lines else None


NAME: Final = re.compile(rb"[!#$%&'*+.^_`|~0-9a-z-]+")
BAD: Final = re.compile(rb"[\x00-\x08\x0a-\x1f\x7f]")


def field_value(text: str) -> bytes | None:
    """RFC 9110 §5.5: the text as a field value; None if it cannot be one."""
    try:
        value = text.encode("latin-1")
    except UnicodeEncodeError:
        return None
    if BAD.search(value) or value != value.strip():
        return None
    return value


_HEADER_VALUE: Final = re.compile(r"[\t\x20-\x7e]*")


def checked_headers(headers: object) -> dict[str, str]:
    """Check header fields. Errors show names only: values are often secrets."""
    if not isinstance(headers, Mapping):
        raise ConfigError(f"headers: must map names to texts, not {type(headers).__name__}")
    for name, value in headers.items():
        if not isinstance(name, str) or not TOKEN.fullmatch(name.encode("latin-1", "replace")):
            raise ConfigError(f"headers: {shown(name)} is no name of a header")
        if not isinstance(value, str) or not _HEADER_VALUE.fullmatch(value):
            raise ConfigError(f"headers: the value of {shown(name)} must be printable ASCII text")
    return dict(headers)


HOP_BY_HOP: Final = names_in(
    b"connection keep-alive proxy-authenticate proxy-authentication-info "
    b"proxy-authorization proxy-connection te trailer transfer-encoding upgrade"
)
NOT_LISTED: Final = names_in(
    b"age cache-control cdn-cache-control content-encoding content-length date expires "
    b"host set-cookie vary"
)
"""Fields that a Connection field cannot remove: others store and judge a response by them."""


def end_to_end(headers: Raw) -> Raw:
    """Without the fields of one connection, which have fixed names or are in `Connection`."""
    dropped = _hop_by_hop(tuple(values(headers, b"connection")))
    return tuple([field for field in headers if field[0] not in dropped])


@lru_cache(maxsize=64)  # requests have only a few different values
def _hop_by_hop(connection: tuple[bytes, ...]) -> frozenset[bytes]:
    listed = {name.lower() for name in members(connection)}
    return HOP_BY_HOP | (listed - NOT_LISTED)


ENCODINGS: Final = ("br", "zstd", "gzip")
"""The codings that an app is offered, in this order, if the client accepts them: 8 variants."""
LONGEST_HEADER: Final = 1_024
WEIGHT: Final = re.compile(r";\s*q\s*=([^;]*)", re.IGNORECASE)
QUALITY: Final = re.compile(r"\s*[01](?:\.[0-9]{0,3})?\s*")


def normalised(name: str, headers: Raw) -> str | None:
    """A request field in one form for all equal meanings; None if it is too long for a key."""
    lines = values(headers, name.encode("latin-1", "replace"))
    if sum(map(len, lines)) > LONGEST_HEADER:
        return None
    parts = [part.decode("latin-1") for part in members(lines)]
    if name == "accept-encoding":
        return _encodings(parts)
    if name == "accept-language":
        return _languages(parts)
    # As bytes: in UTF-8 a byte that Latin-1 takes for a space is half of a letter.
    return b", ".join(b" ".join(part.split()) for part in members(lines)).decode("latin-1")


def _encodings(parts: Iterable[str]) -> str:
    """RFC 9110 §12.5.3: our codings that the client accepts; `*` covers those it does not name."""
    accepted: dict[str, bool] = {}
    for part in parts:
        name = part.partition(";")[0].strip().lower()
        accepted[name] = accepted.get(name, True) and _quality(part) > 0
    others = accepted.get("*", False)
    return ", ".join(
        coding for coding in ENCODINGS if accepted.get(coding, accepted.get(f"x-{coding}", others))
    )


def _languages(parts: Iterable[str]) -> str:
    """The best first; then refused ones that a wider range would include (§12.5.4).

    Languages of equal quality are sorted: their order means nothing.
    """
    qualities = [(part.partition(";")[0].strip().lower(), _quality(part)) for part in parts]
    by_rank = sorted((-quality, language) for language, quality in qualities if quality)
    accepted = [language for _, language in by_rank]
    wider = tuple(f"{language}-" for language in accepted)
    refused = {
        language
        for language, quality in qualities
        if not quality and ("*" in accepted or language.startswith(wider))
    }
    return ", ".join([*accepted, *(f"{language};q=0" for language in sorted(refused))])


def _quality(part: str) -> float:
    """RFC 9110 §12.4.2; a weight that cannot be read counts as a refusal."""
    match = WEIGHT.search(part)
    if match is None:
        return 1.0
    weight = match[1]
    return float(weight) if QUALITY.fullmatch(weight) else 0.0
