"""A Flask view that is answered from a copy, and a change that the next visitor sees.

Use it when a view reads from something slow. Start it with `flask --app flask_site run`.
"""

from flask import Flask

from stillfresh.integrations.flask import Fresh

app = Flask(__name__)
app.config["STILLFRESH_STORE"] = "sqlite:///flask.db"
fresh = Fresh(app)
prices = {"tea": 300}  # your database


@app.get("/prices/<sku>")
@fresh.view("10m", stale_for="1h", error_for="1d", tags=lambda sku: [f"sku:{sku}"])
def price(sku: str) -> str:
    return f"{sku} costs {prices[sku]}"


@app.put("/prices/<sku>/<int:cents>")
def change(sku: str, cents: int) -> str:
    prices[sku] = cents  # first write, then invalidate
    fresh.cache.invalidate_tag(f"sku:{sku}")
    return f"{sku} costs {cents} from now on"
