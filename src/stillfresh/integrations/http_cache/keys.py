"""The names of responses: by address, body, sender and variant, without any secret.

Pure. An id begins with the address. A credential or a secret parameter of the query is in it as a
digest that is slow to make, so that it cannot be guessed back: senders never share a private
response, and nobody who sees a key or a log learns a password.
"""

import hashlib
import re
from collections.abc import Iterable
from functools import lru_cache
from typing import Final
from urllib.parse import quote, unquote_plus, urlsplit

from stillfresh.errors import ConfigError, shown_address
from stillfresh.http import carried_in
from stillfresh.http.fields import Raw, members, normalised, values
from stillfresh.integrations.http_cache.model import HttpRequest, ResponseKey

MOST_KEY: Final = 8_192
"""Characters; a request with a longer address is not cached."""
MOST_PREFIXES: Final = 8
"""Parts of a path by which a response can be invalidated."""
LONGEST_PREFIX: Final = 1_000
"""Characters of such a part. Below a longer path, everything is invalidated together."""
ROUNDS: Final = 1_000
"""Of the slow digest: about 0.7 ms, once for each secret."""
SALT: Final = b"stillfresh http cache"
RESERVED: Final = "%!$&()*+,;=:@/?"
"""Characters of paths and queries that `_one_form` leaves as they are."""
PLAIN: Final = re.compile(r"[!$&()*+,;=:@/?~A-Za-z0-9._-]*")
UNRESERVED: Final = re.compile(r"[A-Za-z0-9._~-]")
ESCAPE: Final = re.compile(r"%([0-9A-Fa-f]{2})")
NO_ESCAPE: Final = re.compile(r"%(?![0-9A-Fa-f]{2})")
DEFAULT_PORTS: Final = {"http": 80, "https": 443}
SECRETS: Final = frozenset(
    {
        "access_key",
        "access_token",
        "api_key",
        "api-key",
        "apikey",
        "appid",
        "auth",
        "auth_token",
        "authtoken",
        "bearer",
        "client_secret",
        "code",
        "hdnea",
        "hdnts",
        "id_token",
        "jwt",
        "key",
        "otp",
        "pass",
        "passwd",
        "password",
        "pwd",
        "refresh_token",
        "secret",
        "session",
        "session_id",
        "sessionid",
        "sig",
        "sign",
        "signature",
        "ticket",
        "token",
        "x-amz-credential",
        "x-amz-security-token",
        "x-amz-signature",
        "x-goog-credential",
        "x-goog-signature",
    }
)
"""Parameters of a query whose values are secrets."""
SECRET_ENDS: Final = (
    "-key",
    "_key",
    "accesskeyid",
    "apikey",
    "assertion",
    "authorization",
    "credential",
    "credentials",
    "hmac",
    "jwt",
    "passphrase",
    "password",
    "samlresponse",
    "secret",
    "sessionid",
    "session_id",
    "signature",
    "token",
    "verifier",
)
"""How names of other such parameters end, as `oauth_token` does."""
CREDENTIAL_ENDS: Final = tuple(
    end.encode() for end in (*SECRET_ENDS, "-auth", "-session", "-session-id")
)
"""How names of request fields end that identify the sender, as `Private-Token` does."""
PARAMETER: Final = re.compile(r"(?:^|;)([^=;]*)=")
NAME_PARTS: Final = re.compile(r"[^\[\].]+")


@lru_cache(maxsize=1_024)
def secret_digest(secret: bytes) -> str:
    return hashlib.pbkdf2_hmac("sha256", secret, SALT, ROUNDS).hex()[:32]


def digest(*parts: bytes) -> str:
    """A digest of what is no secret; the parts cannot be mistaken for each other."""
    whole = b"".join(b"%d:%b" % (len(part), part) for part in parts)
    return hashlib.sha256(whole).hexdigest()[:32]


def clean_url(url: str, secrets: frozenset[str] = SECRETS) -> str:
    """The address in one form: no user, no fragment, no default port, no secret in the query."""
    try:
        parts = urlsplit(url)
        port = parts.port
        path = _one_form(_without_dots(parts.path))
        query = _clean_query(_one_form(parts.query), secrets)
    except ValueError:
        raise ConfigError(f"url: {shown_address(url)} is not an address") from None
    host = (parts.hostname or "").lower()
    if not parts.scheme or not host:
        raise ConfigError(f"url: {shown_address(url)} is not an address with a scheme and a host")
    if ":" in host:
        host = f"[{host}]"
    if port is not None and port != DEFAULT_PORTS.get(parts.scheme):
        host = f"{host}:{port}"
    return f"{parts.scheme}://{host}{path or '/'}{'?' if query else ''}{query}"


def _one_form(text: str) -> str:
    """RFC 3986 §6.2.2: clients encode what they send, and an address that is invalidated may be as
    people write it. Whether a reserved character is encoded makes a difference, and is kept.
    """
    if PLAIN.fullmatch(text):
        return text
    encoded = quote(NO_ESCAPE.sub("%25", text), safe=RESERVED)
    return ESCAPE.sub(_shortest, encoded)


def _shortest(escape: re.Match[str]) -> str:
    character = chr(int(escape[1], 16))
    return character if UNRESERVED.fullmatch(character) else escape[0].upper()


def _without_dots(path: str) -> str:
    """RFC 3986 §5.2.4, as clients do before they send a request."""
    if "/." not in path:
        return path
    names: list[str] = []
    for name in path.split("/")[1:]:
        if name == "..":
            names = names[:-1]
        elif name != ".":
            names.append(name)
    if path.endswith(("/.", "/..")):
        names.append("")
    return "/" + "/".join(names)


def _clean_query(query: str, secrets: frozenset[str]) -> str:
    if not query:
        return ""
    return "&".join(_clean_parameter(parameter, secrets) for parameter in query.split("&"))


def _clean_parameter(parameter: str, secrets: frozenset[str]) -> str:
    """A semicolon may part two parameters, or stand in a secret: the rest is hidden with it."""
    for named in PARAMETER.finditer(parameter):
        value = parameter[named.end() :]
        if value and _is_secret(unquote_plus(named[1]).lower(), secrets):
            return f"{parameter[: named.end()]}~{secret_digest(value.encode())}"
    return parameter


def _is_secret(name: str, secrets: frozenset[str]) -> bool:
    """Also of a name in parts, such as `filter[api_key]`."""
    is_whole = name in secrets or name.endswith(SECRET_ENDS)
    parts = NAME_PARTS.findall(name)
    return is_whole or any(part in secrets or part.endswith(SECRET_ENDS) for part in parts)


def credentials_in(headers: Raw, credentials: frozenset[bytes]) -> frozenset[bytes]:
    """The fields of this request that identify its sender, by their names."""
    named = carried_in(headers, credentials)
    return named.union(name for name, _ in headers if name.endswith(CREDENTIAL_ENDS))


def url_tag(url: str) -> str:
    """The tag of all responses of one (clean) address: of each sender, body and variant."""
    return f"url:{url}"


def prefix_tags(url: str) -> list[str]:
    """The tags of the paths above a clean address, and of its own path."""
    start, _, path = _without_query(url).partition("://")
    host, *names = path.split("/")
    names = [name for name in names if name][:MOST_PREFIXES]
    folders = [f"{start}://{host}/"]
    for name in names:
        folder = f"{folders[-1]}{name}/"
        if len(folder) > LONGEST_PREFIX:
            break
        folders.append(folder)
    return [f"under:{folder}" for folder in folders]


def prefix_tag(url: str) -> str:
    """The tag of everything at and below a clean address."""
    return prefix_tags(url)[-1]


def _without_query(url: str) -> str:
    return url.partition("?")[0]


def response_key(
    request: HttpRequest,
    url: str,
    sender: str,
    *,
    tags: Iterable[str] = (),
    is_by_body: bool = False,
) -> ResponseKey:
    """`url`: the clean address. `sender`: whose response it is, in a private cache."""
    parts = [url]
    host = _other_host(request.headers, url)
    if host:
        parts.append(f"host:{host}")
    if request.trust:
        parts.append(f"trust:{digest(request.trust.encode())}")
    if is_by_body:
        types = b", ".join(values(request.headers, b"content-type"))
        parts.append(f"{request.method}:{digest(types, request.body or b'')}")
    if sender:
        parts.append(f"for:{sender}")
    return ResponseKey(" ".join(parts), (url_tag(url), *prefix_tags(url), *tags))


def _other_host(headers: Raw, url: str) -> str:
    """The request's `Host`, if it is not that of the address; else nothing."""
    lines = values(headers, b"host")
    host = b", ".join(lines).decode("latin-1").lower()
    of_url = _without_query(url).partition("://")[2].partition("/")[0]
    return "" if host in {"", of_url} else quote(host, safe=":[]")


def sender_of(request: HttpRequest, carried: frozenset[bytes]) -> str:
    """A digest of what identifies the sender; empty if there is nothing."""
    if not carried:
        return ""
    fields = sorted((name, value) for name, value in request.headers if name in carried)
    lines = [b"%b: %b" % field for field in fields]
    if request.certificate:
        lines.append(request.certificate.encode())
    return secret_digest(b"\n".join(lines))


def variant_of(vary: Iterable[str], headers: Raw) -> str | None:
    """RFC 9111 §4.1: a digest of the request's values of these fields; None if one is too long.

    They may be secrets, such as a key in a field that is named nowhere as a credential.
    """
    parts: list[bytes] = []
    for name in vary:
        value = _field_value(name, headers)
        if value is None:
            return None
        parts.extend((name.encode("latin-1", "replace"), value))
    return secret_digest(b"%d %b" % (len(parts), digest(*parts).encode())) if parts else ""


def _field_value(name: str, headers: Raw) -> bytes | None:
    """The value in one form for equal meanings; None if it is too long.

    Codings are compared as they are written: a site may choose any that the client accepts.
    """
    if name == "accept-encoding":
        lines = values(headers, b"accept-encoding")
        return b", ".join(b"".join(member.split()).lower() for member in members(lines))
    value = normalised(name, headers)
    return None if value is None else value.encode()


def variant_key(base: ResponseKey, vary: Iterable[str], variant: str) -> ResponseKey:
    return ResponseKey(f"{base.id} vary:{','.join(vary)}:{variant}", base.tags)
