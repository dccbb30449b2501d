"""Live: many viewers of one cache, each told what is new of what it looks at (C14, G3, G4).

`Hub` keeps what viewers look at fresh; `Live` is the WebSocket over it, as an ASGI app.
"""

from stillfresh.live.app import Live
from stillfresh.live.connection import Connection, HubUpdate
from stillfresh.live.hub import Hub

__all__ = ["Connection", "Hub", "HubUpdate", "Live"]
