"""Systems built on the engine, each from one of the seeds: coordinator, feed and waiting.

They are clients of the engine's public API. The fourth seed's system is `TtlCache`, at the top of
the package because the stores use it too; the fifth has a room of its own, `stillfresh.pages`.
"""

__all__: list[str] = []
