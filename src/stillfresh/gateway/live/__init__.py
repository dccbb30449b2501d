"""Live: many viewers of one cache, each notified of changes of its items.

`Hub` keeps the viewers' items fresh; `Live` is the WebSocket over it, as an ASGI app.
"""

from stillfresh.gateway.live.app import Live
from stillfresh.gateway.live.connection import Connection, HubUpdate
from stillfresh.gateway.live.hub import Hub

__all__ = ["Connection", "Hub", "HubUpdate", "Live"]
