"""FastAPI routes that keep their answers fresh: `@fresh`, and the cache's life in the app's.

```python
cache = Cache("sqlite:///app.db")
app = FastAPI(lifespan=lifespan(cache))
app.mount("/_stillfresh", Dashboard(cache, token="…"))

@app.get("/items/{id}")
@fresh(cache, "10m", ignore=("db",), tags=lambda id: [f"item:{id}"])
async def item(id: int, db: Annotated[Session, Depends(session)]) -> Item: ...
```

Needs `stillfresh[fastapi]`.
"""

from stillfresh.errors import needs

with needs("fastapi", "stillfresh.integrations.fastapi"):
    from stillfresh.gateway import Dashboard
    from stillfresh.integrations.fastapi.errors import unavailable
    from stillfresh.integrations.fastapi.life import lifespan
    from stillfresh.integrations.fastapi.route import FreshRoute, fresh

__all__ = ["Dashboard", "FreshRoute", "fresh", "lifespan", "unavailable"]
