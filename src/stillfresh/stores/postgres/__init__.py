"""`postgresql://user@host/database`: copies and leases in PostgreSQL, for many machines."""

from stillfresh.errors import needs

with needs("postgres", "stillfresh.stores.postgres"):
    from stillfresh.stores.postgres.address import store_at
    from stillfresh.stores.postgres.admin import SchemaState, create, describe
    from stillfresh.stores.postgres.link import PgConnection, said_by
    from stillfresh.stores.postgres.store import PostgresStore

__all__ = [
    "PgConnection",
    "PostgresStore",
    "SchemaState",
    "create",
    "describe",
    "said_by",
    "store_at",
]
