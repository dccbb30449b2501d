"""An outbox: changes in a PostgreSQL database invalidate tags.

```python
await create_outbox(DATABASE, {"products": "product:{id}"})      # once, or in a migration

async with cache, OutboxConsumer(cache, DATABASE, "shop"):       # in every process, or in one
    ...
```

A trigger writes the tags of changed rows into an outbox, in the transaction of the change. The
consumer invalidates them in a cache, with any store. Needs `stillfresh[postgres]`.
"""

from stillfresh.errors import needs

with needs("postgres", "stillfresh.integrations.postgres"):
    from stillfresh.integrations.postgres.consumer import OutboxConsumer
    from stillfresh.integrations.postgres.rules import outbox_sql
    from stillfresh.integrations.postgres.setup import consumer_lags, create_outbox, drop_outbox

__all__ = ["OutboxConsumer", "consumer_lags", "create_outbox", "drop_outbox", "outbox_sql"]
