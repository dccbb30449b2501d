"""`[kinds.NAME]`: entities of an upstream API as kinds of a hub, fetched in batches (G1).

POST `{"<ids_field>": […]}`; the answer is a JSON list of views, or an object that has the list
under `list_field`. A view's id is built from its own fields. An id without a view does not exist.
"""

from collections.abc import Callable, Iterable
from string import Formatter
from typing import Any, TypeAlias

import httpx
import msgspec

from stillfresh.coordinator import Kind
from stillfresh.coordinator.endpoint import Endpoint
from stillfresh.errors import LoadFailed, shown
from stillfresh.web.config import KindSettings

IdOf: TypeAlias = Callable[[object], str]


def kind_for(settings: KindSettings, client: httpx.AsyncClient, memory_for: float) -> Kind:
    endpoint = Endpoint(
        client,
        settings.batch_url,
        timeout=settings.timeout,
        max_bytes=settings.max_bytes,
        headers=settings.headers,
    )
    id_of = id_maker(settings.id)

    async def fetch(ids: list[str], viewer_id: str | None = None) -> dict[str, Any]:
        asked: dict[str, Any] = {settings.ids_field: ids}
        if viewer_id is not None:
            asked[settings.viewer_field] = viewer_id
        views = listed(await endpoint.ask(asked), settings.list_field)
        return views_by_id(ids, views, id_of)

    return Kind(
        settings.name,
        fetch=fetch,
        fresh_for=settings.fresh_for,
        max_batch=settings.max_batch,
        per_viewer=settings.per_viewer,
        stale_for=settings.stale_for,
        error_for=settings.error_for,
        absent_for=settings.absent_for,
        memory_for=memory_for,
    )


def listed(body: bytes, list_field: str | None) -> list[Any]:
    """The views of an answer; one that has no list of them has failed."""
    try:
        answer = msgspec.json.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as exc:
        raise LoadFailed(f"the answer is not JSON: {exc}") from exc
    found = answer if list_field is None else inside(answer, list_field)
    if not isinstance(found, list):
        where = f" under {list_field}" if list_field is not None else ""
        raise LoadFailed(f"the answer has no list of views{where}, but {shown(found)}")
    return found


def inside(view: object, path: str) -> object:
    """What stands there; None if nothing does."""
    for name in path.split("."):
        view = view.get(name) if isinstance(view, dict) else None
    return view


def id_maker(template: str) -> IdOf:
    """`"{details.author}:{details.id}"`: texts and whole numbers of the view, put together."""
    pieces = [(literal, field) for literal, field, _, _ in Formatter().parse(template)]

    def id_of(view: object) -> str:
        return "".join(
            literal + ("" if field is None else part(view, field)) for literal, field in pieces
        )

    return id_of


def part(view: object, path: str) -> str:
    match inside(view, path):
        case bool():
            raise LoadFailed(f"a view's {path} is true or false, no part of an id")
        case str(text) if text:
            return text
        case int(number):
            return str(number)
        case other:
            raise LoadFailed(f"a view's {path} is no part of an id: {shown(other)}")


def views_by_id(ids: Iterable[str], views: list[Any], id_of: IdOf) -> dict[str, Any]:
    """Each view by its id; `null` is no view.

    A view that has no id could be any of those that are missing: these have failed, and are not
    taken for absent.
    """
    found: dict[str, Any] = {}
    broken: LoadFailed | None = None
    for view in views:
        try:
            if view is not None:
                found[id_of(view)] = view
        except LoadFailed as exc:
            broken = exc
    if broken is not None:
        found |= {id_: broken for id_ in ids if id_ not in found}
    return found
