"""The HTTP server that `stillfresh serve` runs: uvicorn's, within limits, and hits first."""

__all__: list[str] = []
