"""`stillfresh demo`: the five systems in one running site, with an upstream that breaks.

Needs `stillfresh[demo]`.
"""

from stillfresh.errors import needs

with needs("demo", "stillfresh.demo"):
    from stillfresh.demo.running import run

__all__ = ["run"]
