"""`/openapi.json`: what the gateway's HTTP takes and answers, as OpenAPI 3.1 (G2).

Made of the kinds that there are; a test compares it with what `rest` really does.
"""

from collections.abc import Mapping
from typing import Any, Final

from stillfresh.live.messages import ID, MAX_ID
from stillfresh.web.rules_rest import MAX_IDS

Schema = dict[str, Any]

PROBLEM: Final = {"$ref": "#/components/schemas/Problem"}
HEADERS: Final = {
    "Age": ("Seconds since the upstream was asked for it.", {"type": "integer", "minimum": 0}),
    "Cache-Control": ("How caches between may keep it.", {"type": "string"}),
    "Cache-Status": ("RFC 9211: a hit or not, and how fresh.", {"type": "string"}),
    "ETag": ("Other bytes, another tag.", {"type": "string"}),
}
RETRY: Final = {
    "Retry-After": {
        "description": "Seconds after which to ask again.",
        "schema": {"type": "integer", "minimum": 1},
    }
}
SCHEMAS: Final = {
    "Id": {"type": "string", "minLength": 1, "maxLength": MAX_ID, "pattern": ID.pattern},
    "Ids": {
        "type": "object",
        "properties": {
            "ids": {
                "type": "array",
                "items": {"$ref": "#/components/schemas/Id"},
                "minItems": 1,
                "maxItems": MAX_IDS,
            }
        },
        "required": ["ids"],
        "additionalProperties": False,
    },
    "Item": {
        "type": "object",
        "properties": {
            "id": {"type": "string"},
            "status": {"enum": ["found", "absent", "failed"]},
            "value": {"description": "As the upstream sent it; with `found` only."},
            "fetched_at": {"type": "number", "description": "Seconds since 1970."},
            "age": {"type": "number", "minimum": 0},
            "verdict": {"enum": ["fresh", "stale", "expired", "gone"]},
            "error": {"type": "string", "description": "Why it is not newer, or not there."},
            "retry_after": {"type": "integer", "minimum": 1},
        },
        "required": ["id", "status"],
    },
    "Items": {
        "type": "object",
        "properties": {"items": {"type": "array", "items": {"$ref": "#/components/schemas/Item"}}},
        "required": ["items"],
    },
    "Problem": {
        "type": "object",
        "description": "RFC 9457.",
        "properties": {
            "type": {"type": "string"},
            "title": {"type": "string"},
            "status": {"type": "integer"},
            "detail": {"type": "string"},
            "code": {"type": "string", "description": "For programs: absent, bad_id, …"},
        },
        "required": ["type", "title", "status", "detail", "code"],
    },
    "Ready": {
        "type": "object",
        "properties": {
            "status": {"enum": ["ready", "not ready"]},
            "stores": {
                "type": "object",
                "additionalProperties": {"enum": ["reachable", "unreachable"]},
            },
        },
        "required": ["status", "stores"],
    },
}


def openapi(kinds: Mapping[str, bool], *, version: str, root: str, has_token: bool) -> Schema:
    """Of these kinds, each per viewer or not, under the prefix `root`."""
    paths: Schema = {}
    for kind, per_viewer in kinds.items():
        paths[f"/v1/{kind}/{{id}}"] = _one(kind, per_viewer=per_viewer)
        paths[f"/v1/{kind}/batch"] = _batch(kind, per_viewer=per_viewer)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "stillfresh gateway",
            "version": version,
            "description": "Entities kept fresh: every answer says how fresh it is.",
        },
        "servers": [{"url": root or "/"}],
        "paths": {**paths, **_own(has_token=has_token)},
        "components": {
            "schemas": SCHEMAS,
            "securitySchemes": {"bearer": {"type": "http", "scheme": "bearer"}},
        },
    }


def _one(kind: str, *, per_viewer: bool) -> Schema:
    named = {"name": "id", "in": "path", "required": True}
    id_ = {**named, "schema": {"$ref": "#/components/schemas/Id"}}
    return {"parameters": [id_], **_reads(kind, kind, per_viewer=per_viewer)}


def _reads(kind: str, name: str, *, per_viewer: bool) -> Schema:
    asked = {"name": "If-None-Match", "in": "header", "schema": {"type": "string"}}
    summaries = {"get": f"One {kind}, as fresh as it is.", "head": "Its header fields."}
    return {
        method: {
            **_signed(_read(kind, f"{method}_{name}", method, summary), per_viewer),
            "parameters": [asked],
        }
        for method, summary in summaries.items()
    }


def _read(kind: str, name: str, method: str, summary: str) -> Schema:
    headers = {
        name: {"description": what, "schema": schema} for name, (what, schema) in HEADERS.items()
    }
    found: Schema = {"description": "The view, as the upstream sent it.", "headers": headers}
    if method == "get":
        found["content"] = {"application/json": {"schema": {}}}
    responses = {
        "200": found,
        "304": {"description": "The view that you have is this one."},
        "404": _problem("It does not exist upstream.", method),
        "422": _problem("Not an id.", method),
        "503": _problem("The upstream failed, and nothing is kept.", method, RETRY),
    }
    return _operation(kind, name, summary, responses)


def _batch(kind: str, *, per_viewer: bool) -> Schema:
    items = {"schema": {"$ref": "#/components/schemas/Items"}}
    responses = {
        "200": {"description": "Each, by itself.", "content": {"application/json": items}},
        "400": _problem("The request broke off."),
        "408": _problem("It did not come whole in time."),
        "413": _problem("Too long."),
        "415": _problem("Not application/json."),
        "422": _problem("Not a batch, or not an id in it."),
        "503": _problem("The upstream failed for all of them, and nothing is kept.", "post", RETRY),
    }
    summary = f"Many of {kind}, in one request."
    operation = _operation(kind, f"batch_{kind}", summary, responses)
    asked = {"schema": {"$ref": "#/components/schemas/Ids"}}
    body = {"required": True, "content": {"application/json": asked}}
    return {
        "post": _signed({**operation, "requestBody": body}, per_viewer),
        **_reads(kind, f"{kind}_called_batch", per_viewer=per_viewer),
    }


def _operation(kind: str, name: str, summary: str, responses: Schema) -> Schema:
    return {"operationId": name, "summary": summary, "tags": [kind], "responses": responses}


def _signed(operation: Schema, per_viewer: bool) -> Schema:
    """Views that differ by viewer are for who has signed in."""
    if not per_viewer:
        return operation
    responses = {**operation["responses"], "401": _problem("Sign in first.")}
    return {**operation, "responses": responses, "security": [{"bearer": []}]}


def _problem(what: str, method: str = "post", headers: Schema | None = None) -> Schema:
    told: Schema = {"description": what, **({"headers": headers} if headers else {})}
    if method != "head":
        told["content"] = {"application/problem+json": {"schema": PROBLEM}}
    return told


def _own(*, has_token: bool) -> Schema:
    ready = {"application/json": {"schema": {"$ref": "#/components/schemas/Ready"}}}
    metrics = _plain("metrics", "Counts, for Prometheus.", "text/plain", {"type": "string"})
    if has_token:
        metrics["get"]["security"] = [{"bearer": []}]
        metrics["get"]["responses"]["401"] = _problem("A token is needed.")
        metrics["get"]["responses"]["429"] = _problem("Too many wrong tokens.", headers=RETRY)
    readyz = _plain("readyz", "The stores answer.", "application/json", {})
    readyz["get"]["responses"] = {
        "200": {"description": "Ready.", "content": ready},
        "503": {"description": "A store does not answer.", "content": ready},
    }
    return {
        "/healthz": _plain("healthz", "It runs.", "application/json", {"type": "object"}),
        "/readyz": readyz,
        "/metrics": metrics,
    }


def _plain(name: str, summary: str, media: str, schema: Schema) -> Schema:
    content = {media: {"schema": schema}}
    found = {"description": summary, "content": content}
    return {
        "get": {
            "operationId": name,
            "summary": summary,
            "tags": ["gateway"],
            "responses": {"200": found},
        }
    }
