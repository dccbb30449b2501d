"""The HTTP cache of clients, without a client: RFC 9111 on the engine's resources.

`stillfresh.integrations.httpx` and `stillfresh.integrations.requests` are its faces. `keys` names
entries, `rules` decides, `site_load` sends one request, and `responses` is the story of a read.
"""

__all__: list[str] = []
