"""`redis://host:port/0`: copies and leases in Redis 7 or Valkey, for many machines."""

from stillfresh.errors import needs

with needs("redis", "stillfresh.stores.redis"):
    from stillfresh.stores.redis.store import RedisStore

__all__ = ["RedisStore"]
