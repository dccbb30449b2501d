"""HTTP as data: header fields, freshness, validation, bodies of a bounded size. No server."""

__all__: list[str] = []
