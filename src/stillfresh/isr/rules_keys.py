"""Which requests are for the same page (I13), and how people name pages (I11, I21).

Pure. What is in the key is what the render is given, in the same form; nothing else reaches it.
RFC 9110 §4.2.3 and RFC 3986 §6.2 for equal URLs, RFC 9111 §4.1 for variants.
"""

import re
from collections.abc import Collection, Iterable, Mapping
from typing import Final
from urllib.parse import quote, unquote, unquote_to_bytes

from stillfresh.errors import ConfigError, shown
from stillfresh.http.fields import Raw, members, values

MOST_URL: Final = 8_192
"""Bytes of path and query; what is longer passes without being kept."""
MOST_PATH: Final = 65_536
"""Bytes of a path that a program names; a longer one is a mistake."""
HOST: Final = re.compile(r"(?:[a-z0-9_-]+(?:\.[a-z0-9_-]+)*|\[[0-9a-f:.]+\])(?::[0-9]{1,5})?")
HOST_LENGTH: Final = 255
PORTS: Final = {"http": ":80", "https": ":443"}
ESCAPE: Final = re.compile(rb"%([0-9A-Fa-f]{2})|(%)")
UNRESERVED: Final = frozenset(b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-._~")
NEVER_ENCODED: Final = frozenset(b"/\\\x7f") | frozenset(range(0x20))
PERSONAL: Final = frozenset({"cookie", "authorization"})
"""Who varies by these is shared only among those who send none."""
ENCODINGS: Final = ("br", "zstd", "gzip")
"""In the order in which an app is offered those that the client takes: eight variants at most."""
LONGEST_HEADER: Final = 1_024
WEIGHT: Final = re.compile(r";\s*q\s*=([^;]*)", re.IGNORECASE)
QUALITY: Final = re.compile(r"\s*[01](?:\.[0-9]{0,3})?\s*")


def canonical_host(headers: Raw, scheme: str) -> str | None:
    """One Host, well-formed, in lower case, without a default port; else None."""
    hosts = values(headers, b"host")
    if len(hosts) != 1:
        return None
    host = hosts[0].decode("latin-1").lower().removesuffix(PORTS.get(scheme, ""))
    return host if len(host) <= HOST_LENGTH and HOST.fullmatch(host) else None


def is_allowed(host: str, allowed: Collection[str]) -> bool:
    """By name, or below `*.name`; a port that is not written is any port."""
    name = host.rpartition(":")[0] if re.search(r":[0-9]+$", host) else host
    return any(
        one in (host, name) or (one.startswith("*.") and name.endswith(one[1:])) for one in allowed
    )


def canonical_path(raw: bytes) -> str | None:
    """RFC 3986 §6.2.2; None where a server behind might read another path than this one.

    Such are dot segments, empty segments, backslashes, and slashes or controls in disguise.
    """
    if not raw.startswith(b"/") or len(raw) > MOST_URL or b"\\" in raw:
        return None
    if any(byte <= 0x20 or byte == 0x7F for byte in raw):
        return None
    if (plain := _escapes(raw)) is None:
        return None
    text = quote(plain, safe="/!$&'()*+,;=:@~-._%")
    segments = text.split("/")[1:]
    if any(it in {".", ".."} or not it for it in segments[:-1]) or segments[-1] in {".", ".."}:
        return None
    return text


def plain_path(path: str) -> str:
    """A path as a person writes it, as visits to it have it; one that none can have, as it is."""
    before, mark, query = path.partition("?")
    canonical = canonical_path(quote(before, safe="/%!$&'()*+,;=:@~-._").encode("ascii"))
    return path if canonical is None else unquote(canonical) + mark + query


def canonical_url(url: str) -> str:
    """A whole URL as visits to it have it; one that none can have, as it is."""
    written, _, rest = url.partition("://")
    scheme = written.lower()
    host, slash, path = rest.partition("/")
    before, _, asked = (slash + path or "/").partition("?")
    raw = quote(before, safe="/%!$&'()*+,;=:@~-._").encode("ascii")
    named = canonical_host(((b"host", host.encode("latin-1", "replace")),), scheme)
    found, query = canonical_path(raw), canonical_query(asked.encode(), None)
    if named is None or found is None or query is None:
        return url
    return f"{scheme}://{named}{found}{'?' if query else ''}{query}"


def _escapes(raw: bytes) -> bytes | None:
    """Escapes of plain characters undone, the others in upper case; None if one is malicious."""
    bad = False

    def one(found: "re.Match[bytes]") -> bytes:
        nonlocal bad
        if found[2]:
            bad = True
            return b""
        byte = int(found[1], 16)
        bad = bad or byte in NEVER_ENCODED
        return bytes([byte]) if byte in UNRESERVED else b"%%%02X" % byte

    plain = ESCAPE.sub(one, raw)
    return None if bad else plain


def canonical_query(raw: bytes, declared: Collection[str] | None) -> str | None:
    """Sorted by name, equal names in their order; only declared ones; None: declare all.

    Where some are left out, the others are written anew, so that no separator hides in them.
    """
    if not raw:
        return ""
    if len(raw) > MOST_URL or any(byte <= 0x20 or byte >= 0x7F for byte in raw):
        return None
    parts = [part.partition(b"=") for part in raw.split(b"&") if part]
    if declared is None:
        ordered = sorted(parts, key=lambda part: part[0])
        return b"&".join(b"".join(part) for part in ordered).decode("ascii")
    named = [(_text(name), _text(value)) for name, _, value in parts]
    kept = sorted((it for it in named if it[0] in declared), key=lambda it: it[0])
    return "&".join(f"{_escaped(name)}={_escaped(value)}" for name, value in kept)


def _escaped(text: str) -> str:
    return quote(text, safe="", errors="surrogateescape")


def _text(raw: bytes) -> str:
    return unquote_to_bytes(raw.replace(b"+", b" ")).decode("utf-8", "surrogateescape")


def normalised(name: str, headers: Raw) -> str | None:
    """A request header so that what means the same is the same; None: too long to be kept by."""
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
    """RFC 9110 §12.5.3: those of ours that the client takes; what it does not name, `*` is for."""
    said: dict[str, bool] = {}
    for part in parts:
        name = part.partition(";")[0].strip().lower()
        said[name] = said.get(name, True) and _quality(part) > 0
    others = said.get("*", False)
    return ", ".join(it for it in ENCODINGS if said.get(it, said.get(f"x-{it}", others)))


def _languages(parts: Iterable[str]) -> str:
    """The best first; then those that a wider range would mean, and that are refused (§12.5.4)."""
    said = [(part.partition(";")[0].strip().lower(), _quality(part)) for part in parts]
    ranked = [it for it, _ in sorted((it for it in said if it[1]), key=_by_quality, reverse=True)]
    wide = tuple(f"{it}-" for it in ranked)
    refused = {it for it, quality in said if not quality and ("*" in ranked or it.startswith(wide))}
    return ", ".join([*ranked, *(f"{it};q=0" for it in sorted(refused))])


def _by_quality(said: tuple[str, float]) -> float:
    return said[1]


def _quality(part: str) -> float:
    """RFC 9110 §12.4.2; a weight that is none is taken for a refusal."""
    if (found := WEIGHT.search(part)) is None:
        return 1.0
    return float(found[1]) if QUALITY.fullmatch(found[1]) else 0.0


def variant(names: Iterable[str], headers: Raw) -> Mapping[str, str] | None:
    """RFC 9111 §4.1: what the request says in these headers; None: it is nobody else's."""
    result: dict[str, str] = {}
    for name in names:
        value = normalised(name, headers)
        if value is None or (value and name in PERSONAL):
            return None
        if value:
            result[name] = value
    return result


def checked_path(path: str) -> str:
    """A path, or a URL, as a page's key."""
    is_key = isinstance(path, str) and path.lower().startswith(("/", "http://", "https://"))
    if not is_key or any(ord(character) < 0x20 for character in path):
        raise ConfigError(f"path: begins with / (or is a whole URL), which {shown(path)} does not")
    if len(path.encode("utf-8", "surrogatepass")) > MOST_PATH:
        raise ConfigError(f"path: of at most {MOST_PATH:,} bytes, unlike {shown(path)}")
    return path


def reached(key: str) -> tuple[str, list[str]]:
    """I21: the tag of every variant of the page, and the ids that it may itself be kept under.

    Others write no tags: their pages are reached by the id alone.
    """
    is_path = checked_path(key).startswith("/")
    which, name = ("path", plain_path(key)) if is_path else ("key", canonical_url(key))
    return f"{which}:{name}", list(dict.fromkeys([key, name]))


def own_tag(tag: str) -> str:
    """A tag that the user gave, apart from ours: `path:…` and `key:…`."""
    if not isinstance(tag, str) or not tag:
        raise ConfigError(f"tag: a word such as 'blog', not {shown(tag)}")
    return f"tag:{tag}"


def own_tags(tags: Iterable[str]) -> list[str]:
    return [own_tag(tag) for tag in ([tags] if isinstance(tags, str) else tags)]
