"""Flask views that keep their answers fresh: the extension, and `@fresh.view`.

```python
app.config["STILLFRESH_STORE"] = "sqlite:///app.db"
fresh = Fresh(app)                                   # or fresh = Fresh(); fresh.init_app(app)

@app.get("/items/<int:id>")
@fresh.view("10m", stale_for="1h", tags=lambda id: [f"item:{id}"])
def item(id: int) -> str: ...

@app.put("/items/<int:id>")
def change(id: int) -> str:
    fresh.cache.invalidate_tag(f"item:{id}")
```

Needs `stillfresh[flask]`.
"""

from stillfresh.errors import needs

with needs("flask", "stillfresh.integrations.flask"):
    from stillfresh.integrations.flask.errors import unavailable
    from stillfresh.integrations.flask.extension import Fresh
    from stillfresh.integrations.flask.view import FreshView

__all__ = ["Fresh", "FreshView", "unavailable"]
