"""Systems built on the engine, each from one of the seeds: coordinator, feed and waiting.

They are clients of the engine's public API. Two of the five designs are elsewhere: `TtlCache` is at
the top of the package, because the stores use it too, and pages have the room `stillfresh.pages`.
"""

__all__: list[str] = []
