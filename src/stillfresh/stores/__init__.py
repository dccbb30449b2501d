"""Where copies and leases are kept: one contract, one conformance suite, several stores."""

__all__: list[str] = []
