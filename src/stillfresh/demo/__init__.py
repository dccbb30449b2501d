"""`stillfresh demo`: the five systems in one running site, with an upstream that breaks (G8).

Needs `stillfresh[web]`.
"""

from stillfresh.errors import needs

with needs("web", "stillfresh.demo"):
    from stillfresh.demo.running import run

__all__ = ["run"]
