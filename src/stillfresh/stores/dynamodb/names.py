"""From kind and id to the names in the table and in the bucket, and back (I1, I5, I17, I19).

Pure.
"""

from dataclasses import dataclass
from typing import Final
from urllib.parse import quote

from stillfresh.stores.dynamodb.schema import AnyItem, cache_pk, tag_pk, text
from stillfresh.stores.tenants import tenant_prefix

PAGE: Final = "page"
"""The kind whose ids are cache keys as they stand, so that other languages find the same rows."""
S3: Final = "s3://"


@dataclass(frozen=True, slots=True)
class Names:
    """From kind and id to the names in the table and in the bucket (I1, I5)."""

    table: str
    tenant: str | None = None
    bucket: str = ""

    def pk(self, kind: str, id_: str) -> str:
        return cache_pk(cache_key(kind, id_), self.tenant)

    def named(self, item: AnyItem) -> tuple[str, str] | None:
        """The kind and the id of a row; None if it does not say them, or wrongly."""
        kind, id_ = text(item, "kind"), text(item, "id") or ""
        is_true = kind is not None and self.pk(kind, id_) == text(item, "pk")
        return (kind, id_) if kind is not None and is_true else None

    def tag(self, tag: str) -> str:
        return tag_pk(tag, self.tenant)

    @property
    def pk_prefix(self) -> str:
        return f"{tenant_prefix(self.tenant)}CACHE#"

    @property
    def bodies(self) -> str:
        """Every body of this table and tenant stands under it, and nobody else's does."""
        owner = "cache" if self.tenant is None else f"tenant={quote(self.tenant, safe='')}"
        return f"{self.table}/{owner}/"

    def body(self, pk: str, generation: str, nonce: str) -> str:
        """Never used before: whoever publishes twice with one lease writes two bodies."""
        return f"{self._own(pk)}{generation}.{nonce}"

    def object_key(self, pointer: str) -> str | None:
        """I19: a key, or `s3://bucket/key` of our own bucket.

        None for any other bucket: whoever can write a row would choose what our rights read.
        """
        if not pointer.startswith(S3):
            return pointer
        bucket, _, key = pointer.removeprefix(S3).partition("/")
        return key if key and bucket == self.bucket else None

    def ours(self, s3_key: str, pk: str) -> list[str]:
        """The body to delete with this row: one that we wrote for it, and no other's."""
        key = self.object_key(s3_key)
        return [key] if key is not None and key.startswith(self._own(pk)) else []

    def is_anothers(self, s3_key: str, pk: str) -> bool:
        """A body of this table, of any tenant, that was written for another row than this."""
        roots = (f"{self.table}/cache/", f"{self.table}/tenant=")
        return s3_key.startswith(roots) and not s3_key.startswith(self._own(pk))

    def _own(self, pk: str) -> str:
        return f"{self.bodies}{pk.rpartition('#')[2]}/"

    def pk_of_body(self, s3_key: str) -> str:
        return f"{self.pk_prefix}{s3_key.removeprefix(self.bodies).partition('/')[0]}"


def cache_key(kind: str, id_: str) -> str:
    """A page's id is its cache key; other kinds stand apart behind a character no URL has."""
    return id_ if kind == PAGE and not id_.startswith("\0") else f"\0{kind}\0{id_}"
