"""Pages that other services read too: an object in S3 and its row.

The body is the object. Its metadata has the status, the type and the security policy under
FaceTheory's names. The whole head is in the row, for us only.
"""

import re
from typing import TYPE_CHECKING, Final

import msgspec

from stillfresh.freshness import Policy
from stillfresh.http.fields import Raw, field_value, members, values
from stillfresh.pages.model import Head, PageKey, StoredPage
from stillfresh.pages.stored import decoded, encoded, packed, parts
from stillfresh.stores import capabilities_of
from stillfresh.stores.contract import Store
from stillfresh.stores.dynamodb import ABOUT, object_metadata

if TYPE_CHECKING:
    from stillfresh.stores.bodies import Body

POLICY: Final = b"content-security-policy"
TOLD: Final = (b"content-type", b"location", POLICY)
"""Header fields of a page that its object shows other services."""
STATUS: Final = re.compile(r"(?!206|304)[2-5][0-9][0-9]", re.ASCII)
UNCODED: Final = frozenset({b"identity", b"aws-chunked"})
"""The second is how some clients send objects; some stores keep it."""


def coding_of(headers: Raw) -> str:
    """The coding of the body; empty if there is none."""
    codings = (coding.lower() for coding in members(values(headers, b"content-encoding")))
    return b", ".join(coding for coding in codings if coding not in UNCODED).decode("latin-1")


def is_misplaced(key: PageKey, page: StoredPage) -> bool:
    """Compressed, under the key that others read; a variant's key has more lines."""
    return "\n" not in key.id and bool(coding_of(page.head.headers))


class PageShape:
    """How a page is stored in S3, where services in other languages read and write it."""

    def __init__(self, others: Policy | None = None) -> None:
        self.others = others
        """The cache's own times, for pages whose rows have none."""

    def outside(self, value: bytes) -> "Body":
        from stillfresh.stores.bodies import Body  # noqa: PLC0415 (only where S3 is used)

        head, body = parts(value)
        page = decoded(head)
        lines = {name: values(page.headers, name) for name in (*TOLD, b"etag")}
        first = {name: each[0].decode("latin-1") for name, each in lines.items() if each}
        shown = {name.decode(): first[name] for name in TOLD if name in first}
        if policies := lines[POLICY]:
            shown[POLICY.decode()] = b", ".join(policies).decode("latin-1")
        metadata = object_metadata(page.status, shown)
        return Body(
            bytes(body),
            metadata[f"{ABOUT}content-type"],
            page.etag.decode("latin-1") if page.etag else first.get(b"etag"),
            bytes(head),
            encoding=coding_of(page.headers) or None,
            metadata=metadata,
        )

    def inside(self, body: "Body") -> bytes:
        """Its freshness is that of the row, which another service may have changed."""
        terms = body.terms or Policy(0)
        if not body.extra:
            return packed(encoded(_of_another(body, terms)), body.data)
        try:
            head = decoded(body.extra)
        except msgspec.DecodeError:
            return packed(body.extra, body.data)  # the codec says what is wrong with it
        stale_by = 0.0 if terms.fresh_for else head.stale_by
        head = msgspec.structs.replace(head, fresh_for=terms.fresh_for, stale_by=stale_by)
        return packed(encoded(head), body.data)


def _of_another(body: "Body", terms: Policy) -> Head:
    """Status and fields of the object's metadata, if valid; else 200 and its type.

    With the row's ETag and interval. A compressed body is for requests that accept it.
    """
    about = {name: body.metadata.get(f"{ABOUT}{name.decode()}") for name in TOLD}
    status = body.metadata.get(f"{ABOUT}status", "")
    texts = [(b"content-type", body.content_type), (b"etag", body.etag), *about.items()]
    texts.append((b"content-encoding", body.encoding))
    texts.append((b"cache-control", body.cache_control))
    # A type in the metadata that cannot be one leaves the object's own.
    fields: dict[bytes, bytes] = {}
    for name, text in texts:
        value = field_value(text) if text else None
        if value:
            fields[name] = value
    coding = coding_of(tuple(fields.items()))
    if not coding:
        fields.pop(b"content-encoding", None)
    return Head(
        status=int(status) if STATUS.fullmatch(status) else 200,
        headers=tuple(fields.items()),
        fresh_for=terms.fresh_for,
        stale_for=terms.stale_for,
        error_for=terms.error_for,
        is_own=True,
        vary=("accept-encoding",) if coding else (),
        variant=(("accept-encoding", coding),) if coding else (),
        is_foreign=True,
    )


def is_shared(store: Store, terms: Policy) -> bool:
    """True if other services read this store's pages, which are then stored in their form."""
    shapes = capabilities_of(store).shapes
    if shapes is None:
        return False
    shapes.setdefault("page", PageShape(terms))
    return True
