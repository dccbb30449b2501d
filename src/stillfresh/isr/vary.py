"""Request fields in normal form: what means the same to a site is the same (I13, I25).

Pure. RFC 9111 §4.1 (Vary), RFC 9110 §12.5 (preferences). Of Accept-Encoding what counts is which
codings the client takes, of Accept-Language their order; of other fields the words.
"""

import re
from collections.abc import Iterable
from typing import Final

from stillfresh.http.fields import Raw, members, values

ENCODINGS: Final = ("br", "zstd", "gzip")
"""In the order in which an app is offered those that the client takes: eight variants at most."""
LONGEST_HEADER: Final = 1_024
WEIGHT: Final = re.compile(r";\s*q\s*=([^;]*)", re.IGNORECASE)
QUALITY: Final = re.compile(r"\s*[01](?:\.[0-9]{0,3})?\s*")


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
    """RFC 9110 §12.5.3: those of ours that the client takes; `*` is for those it does not name."""
    said: dict[str, bool] = {}
    for part in parts:
        name = part.partition(";")[0].strip().lower()
        said[name] = said.get(name, True) and _quality(part) > 0
    others = said.get("*", False)
    return ", ".join(it for it in ENCODINGS if said.get(it, said.get(f"x-{it}", others)))


def _languages(parts: Iterable[str]) -> str:
    """The best first; then those that a wider range would mean, and that are refused (§12.5.4).

    Of those that are as good as each other the order means nothing.
    """
    said = [(part.partition(";")[0].strip().lower(), _quality(part)) for part in parts]
    ranked = [it for it, _ in sorted((it for it in said if it[1]), key=lambda it: (-it[1], it[0]))]
    wide = tuple(f"{it}-" for it in ranked)
    refused = {it for it, quality in said if not quality and ("*" in ranked or it.startswith(wide))}
    return ", ".join([*ranked, *(f"{it};q=0" for it in sorted(refused))])


def _quality(part: str) -> float:
    """RFC 9110 §12.4.2; a weight that cannot be read is taken for a refusal."""
    if (found := WEIGHT.search(part)) is None:
        return 1.0
    return float(found[1]) if QUALITY.fullmatch(found[1]) else 0.0
