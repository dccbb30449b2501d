"""`redis://host:port/0`: copies and leases in Redis 7 or Valkey, for many machines (S5)."""

from stillfresh.stores.redis.store import RedisStore

__all__ = ["RedisStore"]
