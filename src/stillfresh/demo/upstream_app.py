"""What the upstream answers, over its own data (G8): the APIs of the seeds' backends.

Posts and users by ids (C12), a feed's days, topics and comments (F), prices for a page (I), and the
games with their events (W12). How late, and whether at all, is the switch's affair.
"""

from datetime import date
from typing import Any, TypeAlias

import msgspec
from starlette.applications import Starlette
from starlette.requests import HTTPConnection, Request
from starlette.responses import Response
from starlette.routing import Mount, Route

from stillfresh.demo.tables import Tables
from stillfresh.demo.world import World
from stillfresh.feed import Comment, Topic
from stillfresh.waiting.backend import Games
from stillfresh.waiting.backend.app import games_app
from stillfresh.waiting.backend.steps import GameError

PLAYER = "x-player"
"""The header by which the site tells the game service who plays."""

Ids: TypeAlias = dict[str, Any]


def upstream_app(world: World, games: Games, tables: Tables) -> Starlette:
    """One ASGI app, to be made breakable."""
    network, play = _Network(world), _Play(tables)
    routes = [
        Route("/v0/stream/posts/by_ids", network.posts, methods=["POST"]),
        Route("/v0/stream/users/by_ids", network.users, methods=["POST"]),
        Route("/prices", network.prices),
        Route("/days/{day}", network.day),
        Route("/topics", network.create, methods=["POST"]),
        Route("/topics/{uuid}", network.topic, methods=["GET", "DELETE"]),
        Route("/topics/{uuid}/comments", network.comments, methods=["GET", "POST"]),
        Route("/games", play.sit, methods=["POST"]),
        Route("/games", play.leave, methods=["DELETE"]),
        Route("/games/{id}", play.show),
        Route("/games/{id}/play", play.play, methods=["POST"]),
        Mount("/", games_app(games, _player)),
    ]
    return Starlette(routes=routes)


def _player(connection: HTTPConnection) -> str | None:
    return connection.headers.get(PLAYER) or None


def _json(content: object, status: int = 200) -> Response:
    return Response(msgspec.json.encode(content), status, media_type="application/json")


class _Network:
    def __init__(self, world: World) -> None:
        self._world = world

    async def posts(self, request: Request) -> Response:
        asked: Ids = await request.json()
        known = self._world.posts
        return _json([known[id_] for id_ in asked["post_ids"] if id_ in known])

    async def users(self, request: Request) -> Response:
        asked: Ids = await request.json()
        known = self._world.users
        return _json([known[id_] for id_ in asked["user_ids"] if id_ in known])

    async def prices(self, _: Request) -> Response:
        return _json({"prices": self._world.prices, "changes": self._world.changes})

    async def day(self, request: Request) -> Response:
        day = date.fromisoformat(request.path_params["day"])
        return _json(self._world.topics_of(day, request.query_params.get("category")))

    async def topic(self, request: Request) -> Response:
        uuid = request.path_params["uuid"]
        if request.method == "DELETE":
            return Response(status_code=204 if self._world.remove_topic(uuid) else 404)
        found = self._world.topics.get(uuid)
        return _json(found) if found else Response(status_code=404)

    async def create(self, request: Request) -> Response:
        self._world.add_topic(msgspec.json.decode(await request.body(), type=Topic))
        return Response(status_code=201)

    async def comments(self, request: Request) -> Response:
        uuid = request.path_params["uuid"]
        if request.method == "GET":
            return _json(self._world.comments.get(uuid, []))
        comment = msgspec.json.decode(await request.body(), type=Comment)
        return Response(status_code=201 if self._world.add_comment(uuid, comment) else 404)


class _Play:
    def __init__(self, tables: Tables) -> None:
        self._tables = tables

    async def sit(self, request: Request) -> Response:
        user = request.headers[PLAYER]
        ids = await self._tables.sit(user)
        return _json([self._tables.shown(user, game_id) for game_id in ids])

    async def leave(self, request: Request) -> Response:
        await self._tables.leave(request.headers[PLAYER])
        return Response(status_code=204)

    async def show(self, request: Request) -> Response:
        shown = self._tables.shown(request.headers[PLAYER], request.path_params["id"])
        return Response(status_code=404) if shown is None else _json(shown)

    async def play(self, request: Request) -> Response:
        user, game_id = request.headers[PLAYER], request.path_params["id"]
        asked = await request.json()
        try:
            await self._tables.play(user, game_id, asked["cell"], asked["version"])
        except GameError as exc:
            return _json({"error": str(exc)}, 409)
        return _json(self._tables.shown(user, game_id))
