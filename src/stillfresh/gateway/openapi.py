"""`/openapi.json`: the gateway's HTTP interface, as OpenAPI 3.1.

Made from the declared kinds, and from the types that `rest` decodes and encodes; a test compares it
with the real behaviour.
"""

from collections.abc import Mapping
from typing import Any, Final, Literal

import msgspec

from stillfresh.gateway.numbers import Reached
from stillfresh.gateway.purging import Purge, Purged
from stillfresh.gateway.replies import ProblemBody
from stillfresh.gateway.rules_rest import Id, Ids, Items

Schema = dict[str, Any]

REF: Final = "#/components/schemas/{name}"
WHOLE: Final = {"type": "integer", "minimum": 0}
TEXT: Final = {"type": "string"}
HEADERS: Final = {
    "Age": {"description": "Seconds since the upstream was asked for it.", "schema": WHOLE},
    "Cache-Control": {"description": "How caches between may keep it.", "schema": TEXT},
    "Cache-Status": {"description": "RFC 9211: a hit or not, and how fresh.", "schema": TEXT},
    "ETag": {"description": "Other bytes, another tag.", "schema": TEXT},
}
RETRY: Final = {
    "Retry-After": {
        "description": "Seconds after which to ask again.",
        "schema": {"type": "integer", "minimum": 1},
    }
}
ONE: Final = {
    200: "The view, as the upstream sent it.",
    304: "The view that you have is this one.",
    404: "It does not exist upstream.",
    422: "Not an id.",
    503: "The upstream failed, and nothing is kept.",
}
MANY: Final = {
    200: "Each, by itself.",
    400: "The request was cut off.",
    408: "The body did not arrive in time.",
    413: "Too long.",
    415: "Not application/json.",
    422: "Not a batch, or not an id in it.",
    503: "The upstream failed for all of them, and nothing is kept.",
}


PURGES: Final = {
    **{status: MANY[status] for status in (400, 408, 413, 415)},
    422: "Not a purge, or mistakes in it; each is named.",
    503: "The store is unavailable.",
}


class Ready(msgspec.Struct, omit_defaults=True):
    """`/readyz`: every store answers, and in time; no outbox's consumer is too far behind.

    And the site has a connection for the next visitor.
    """

    status: Literal["ready", "not ready", "draining"]
    stores: dict[str, Reached]
    lags: dict[str, float] = {}
    """Seconds, by consumer."""
    site: Literal["available", "full"] = "available"
    """`full`: all connections to the site are in use, and requests are refused."""


def openapi(
    kinds: Mapping[str, bool], *, version: str, root: str, has_token: bool, has_pages: bool
) -> Schema:
    """The document for these kinds, each per viewer or not, under the prefix `root`."""
    types = (Ids, Items, ProblemBody, Purge, Purged, Ready)
    _, schemas = msgspec.json.schema_components(types, ref_template=REF)
    schemas |= {"Id": msgspec.json.schema(Id), "Problem": schemas.pop("ProblemBody")}
    refused = {401: "A token is needed.", 429: "Too many wrong tokens."} if has_token else {}
    paths: Schema = {}
    for kind, per_viewer in kinds.items():
        signed = {401: "Sign in first."} if per_viewer else {}
        reads = ONE | signed
        parameter = {"name": "id", "in": "path", "required": True, "schema": _ref("Id")}
        paths[f"/v1/{kind}/{{id}}"] = {"parameters": [parameter], **_reads(kind, kind, reads)}
        batch = _batch(kind, MANY | signed)
        paths[f"/v1/{kind}/batch"] = {**batch, **_reads(kind, f"{kind}_called_batch", reads)}
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "stillfresh gateway",
            "version": version,
            "description": "Entities kept fresh: every answer says how fresh it is.",
        },
        "servers": [{"url": root or "/"}],
        "paths": {
            **paths,
            **_own(refused),
            **(_purging(refused) if has_pages else {}),
        },
        "components": {
            "schemas": schemas,
            "securitySchemes": {"bearer": {"type": "http", "scheme": "bearer"}},
        },
    }


def _ref(name: str) -> Schema:
    return {"$ref": REF.format(name=name)}


def _json(schema: Schema) -> Schema:
    return {"application/json": {"schema": schema}}


def _reads(kind: str, name: str, meanings: Mapping[int, str]) -> Schema:
    get = _operation(kind, f"get_{name}", f"One {kind}, as fresh as it is.", meanings, _json({}))
    get["parameters"] = [{"name": "If-None-Match", "in": "header", "schema": TEXT}]
    get["responses"]["200"]["headers"] = HEADERS
    head = {**get, "operationId": f"head_{name}", "summary": "Its header fields."}
    bodiless = {
        status: {part: content for part, content in response.items() if part != "content"}
        for status, response in get["responses"].items()
    }
    return {"get": get, "head": {**head, "responses": bodiless}}


def _batch(kind: str, meanings: Mapping[int, str]) -> Schema:
    summary = f"Many of {kind}, in one request."
    post = _operation(kind, f"batch_{kind}", summary, meanings, _json(_ref("Items")))
    return {"post": {**post, "requestBody": {"required": True, "content": _json(_ref("Ids"))}}}


def _own(refused: Mapping[int, str]) -> Schema:
    alive = _operation(
        "gateway", "healthz", "It runs.", {200: "It runs."}, _json({"type": "object"})
    )
    stores = _json(_ref("Ready"))
    ready = _operation("gateway", "readyz", "The stores answer.", {200: "Ready."}, stores)
    away = {"description": "A store does not answer.", "content": stores}
    ready["responses"]["503"] = away
    summary = "Counts, for Prometheus."
    text = {"text/plain": {"schema": TEXT}}
    metrics = _operation("gateway", "metrics", summary, {200: summary, **refused}, text)
    own = {"/healthz": alive, "/readyz": ready, "/metrics": metrics}
    return {path: {"get": operation} for path, operation in own.items()}


def _purging(refused: Mapping[int, str]) -> Schema:
    meanings = {200: "How many pages each reached.", 403: "Not from here.", **PURGES, **refused}
    summary = "Pages by URL or tag: gone, or stale."
    post = _operation("gateway", "purge", summary, meanings, _json(_ref("Purged")))
    if not refused:
        own = {"name": "X-Stillfresh", "in": "header", "required": True, "schema": TEXT}
        post["parameters"] = [own]
    body = {"required": True, "content": _json(_ref("Purge"))}
    return {"/_stillfresh/api/purge": {"post": {**post, "requestBody": body}}}


def _operation(
    tag: str, name: str, summary: str, meanings: Mapping[int, str], content: Schema
) -> Schema:
    """`meanings`: what each status means; `content`: the content of a 200."""
    responses: Schema = {}
    for status, meaning in meanings.items():
        response: Schema = {"description": meaning}
        if status == 200:
            response["content"] = content
        elif status >= 400:
            response["content"] = {"application/problem+json": {"schema": _ref("Problem")}}
        if status in {429, 503}:
            response["headers"] = RETRY
        responses[f"{status}"] = response
    operation = {"operationId": name, "summary": summary, "tags": [tag], "responses": responses}
    return {**operation, "security": [{"bearer": []}]} if 401 in meanings else operation
