"""The HTTP server that `stillfresh serve` runs: uvicorn's, within limits, in workers."""

from stillfresh.errors import needs

with needs("web", "stillfresh.gateway.server"):
    from stillfresh.gateway.server.access import AccessLog
    from stillfresh.gateway.server.listening import (
        Server,
        address,
        begin_drain,
        bound,
        bound_path,
        forget_hits,
        is_on_loopback,
        server_config,
    )
    from stillfresh.gateway.server.open_files import raise_limit
    from stillfresh.gateway.server.worker_numbers import WorkerNumbers
    from stillfresh.gateway.server.workers import Worker, Workers

__all__ = ["Server", "Worker", "WorkerNumbers", "Workers", "address", "bound", "bound_path"]
__all__ += [
    "AccessLog",
    "begin_drain",
    "forget_hits",
    "is_on_loopback",
    "raise_limit",
    "server_config",
]
