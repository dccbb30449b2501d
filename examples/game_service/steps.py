"""The tables of games, the steps of players, and which messages each step sends.

Each step runs inside one transaction. A human that becomes the next actor gets `your_turn`. Every
human of a game that was started, ended or abandoned, or that a player left or rejoined, gets
`long_wait_invalidated`.

Triggers keep the number of human players with the game. So the order "with other humans first, then
longest waiting, then id" is an index, and a query reads only its first entries.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import apsw

from stillfresh.errors import ConfigError, StillfreshError, shown
from stillfresh.systems.waiting.messages import News
from stillfresh.systems.waiting.model import Invalidated, YourTurn

APPLICATION_ID: Final = 0x5F4E3003

_COUNT: Final = """
    UPDATE games SET humans = (
        SELECT count(*) FROM memberships m
        WHERE m.game_id = games.game_id AND m.is_human AND m.is_active
    ) WHERE game_id = new.game_id
"""
CREATE: Final = f"""
    CREATE TABLE games(
        game_id TEXT PRIMARY KEY NOT NULL,
        status TEXT NOT NULL CHECK (status IN ('active', 'ended', 'abandoned')),
        actor TEXT,
        waiting_since INTEGER NOT NULL,
        version INTEGER NOT NULL,
        humans INTEGER NOT NULL DEFAULT 0
    ) STRICT, WITHOUT ROWID;
    CREATE TABLE memberships(
        game_id TEXT NOT NULL REFERENCES games,
        user_id TEXT NOT NULL,
        seat INTEGER NOT NULL,
        is_human INTEGER NOT NULL,
        is_active INTEGER NOT NULL DEFAULT 1,
        PRIMARY KEY (game_id, user_id)
    ) STRICT, WITHOUT ROWID;
    CREATE INDEX games_waiting ON games(actor, humans < 2, waiting_since, game_id)
        WHERE status = 'active';
    CREATE TRIGGER member_came AFTER INSERT ON memberships BEGIN {_COUNT}; END;
    CREATE TRIGGER member_changed AFTER UPDATE ON memberships BEGIN {_COUNT}; END;
    PRAGMA application_id = {APPLICATION_ID};
"""

WAITING_LONGEST: Final = """
    SELECT g.game_id FROM games g CROSS JOIN memberships m
        ON m.game_id = g.game_id AND m.user_id = g.actor
    WHERE g.actor = ? AND g.status = 'active' AND m.is_human AND m.is_active
    ORDER BY g.humans < 2, g.waiting_since, g.game_id LIMIT ?
"""
GAME: Final = "SELECT status, actor, version FROM games WHERE game_id = ?"
NEXT_SEAT: Final = """
    SELECT user_id FROM memberships WHERE game_id = ?1 AND is_active
    ORDER BY seat <= (SELECT seat FROM memberships WHERE game_id = ?1 AND user_id = ?2), seat
    LIMIT 1
"""
IS_TOLD: Final = """
    SELECT count(*) FROM memberships WHERE game_id = ? AND user_id = ? AND is_human AND is_active
"""
HUMANS_OF: Final = "SELECT user_id FROM memberships WHERE game_id = ? AND is_human ORDER BY seat"
INSERT_GAME: Final = """
    INSERT INTO games(game_id, status, actor, waiting_since, version) VALUES (?, 'active', ?, ?, 1)
"""
INSERT_MEMBER: Final = """
    INSERT INTO memberships(game_id, user_id, seat, is_human) VALUES (?, ?, ?, ?)
"""
SET_ACTIVE: Final = """
    UPDATE memberships SET is_active = ?1 WHERE game_id = ?2 AND user_id = ?3 AND is_active <> ?1
"""
UPDATE_GAME: Final = """
    UPDATE games SET status = ?1, version = version + 1,
        waiting_since = CASE WHEN ?4 THEN ?3 ELSE waiting_since END, actor = ?2
    WHERE game_id = ?5
"""


class GameError(StillfreshError):
    """The game does not allow a step. The message says why."""


@dataclass(frozen=True, slots=True)
class Player:
    """A player of a game. Bots receive no messages."""

    user_id: str
    is_human: bool = True


@dataclass(frozen=True, slots=True)
class GameView:
    """The state of one game."""

    game_id: str
    status: str
    actor: str | None
    """The player whose turn it is; None if no player is left, or the game is over."""
    version: int


@dataclass(frozen=True, slots=True)
class Happened:
    """The game after a step, and the messages for single users."""

    game: GameView
    news: tuple[tuple[str, News], ...] = ()


def view(connection: apsw.Connection, game_id: str) -> GameView:
    row = connection.execute(GAME, (game_id,)).fetchone()
    if row is None:
        raise GameError(f"there is no game {game_id!r}")
    return GameView(game_id, *row)


def active(connection: apsw.Connection, game_id: str) -> GameView:
    game = view(connection, game_id)
    if game.status != "active":
        raise GameError(f"the game {game_id!r} is {game.status}")
    return game


def start(
    connection: apsw.Connection, game_id: str, players: Sequence[Player], now: int
) -> Happened:
    """The first player begins."""
    if not players:
        raise ConfigError(f"players: a game needs at least one, {game_id!r} has none")
    for name in (game_id, *(player.user_id for player in players)):
        if not isinstance(name, str):
            raise ConfigError(f"ids of games and users must be strings, not {shown(name)}")
    try:
        connection.execute(INSERT_GAME, (game_id, players[0].user_id, now))
        for number, player in enumerate(players):
            row = (game_id, player.user_id, number, int(player.is_human))
            connection.execute(INSERT_MEMBER, row)
    except apsw.ConstraintError as exc:
        raise GameError(f"the game {game_id!r} exists, or a player sits in it twice") from exc
    return structural(connection, view(connection, game_id), turns=True)


def move(
    connection: apsw.Connection,
    game_id: str,
    user_id: str,
    now: int,
    *,
    version: int | None = None,
    keeps_turn: bool = False,
) -> Happened:
    """The turn passes on or continues. If it continues, the game keeps its place, without news."""
    game = active(connection, game_id)
    if game.actor != user_id:
        raise GameError(f"it is not {user_id!r}'s turn in {game_id!r}")
    if version not in {None, game.version}:
        raise GameError(f"{game_id!r} is at version {game.version}, not {version}")
    if keeps_turn:
        connection.execute(UPDATE_GAME, ("active", user_id, now, False, game_id))
        return Happened(view(connection, game_id))
    actor = after(connection, game_id, user_id)
    connection.execute(UPDATE_GAME, ("active", actor, now, True, game_id))
    game = view(connection, game_id)
    return Happened(game, turn_news(connection, game))


def after(connection: apsw.Connection, game_id: str, user_id: str) -> str | None:
    """The next active seat, round the table; the same player if nobody else is there."""
    row = connection.execute(NEXT_SEAT, (game_id, user_id)).fetchone()
    return None if row is None else str(row[0])


def turn_news(connection: apsw.Connection, game: GameView) -> tuple[tuple[str, News], ...]:
    if game.actor is None or not connection.execute(IS_TOLD, (game.game_id, game.actor)).get:
        return ()
    return ((game.actor, YourTurn(game.game_id, game.version)),)


def structural(connection: apsw.Connection, game: GameView, *, turns: bool) -> Happened:
    """Notify all human players of the game, also those that have left it."""
    humans = [user for (user,) in connection.execute(HUMANS_OF, (game.game_id,))]
    news: list[tuple[str, News]] = [(user, Invalidated()) for user in humans]
    return Happened(game, (*news, *(turn_news(connection, game) if turns else ())))


def finish(connection: apsw.Connection, game_id: str, status: str, now: int) -> Happened:
    """End it: `ended`, or `abandoned`."""
    active(connection, game_id)
    connection.execute(UPDATE_GAME, (status, None, now, True, game_id))
    return structural(connection, view(connection, game_id), turns=False)


def seat(
    connection: apsw.Connection, game_id: str, user_id: str, now: int, *, is_active: bool
) -> Happened:
    """A player leaves or rejoins; the turn of a player that left passes on."""
    game = active(connection, game_id)
    connection.execute(SET_ACTIVE, (int(is_active), game_id, user_id))
    if not connection.changes():
        raise GameError(f"{user_id!r} has no such seat to leave or take in {game_id!r}")
    actor = game.actor
    if actor is None or actor == user_id:
        actor = after(connection, game_id, user_id)
    is_new = actor != game.actor
    connection.execute(UPDATE_GAME, ("active", actor, now, is_new, game_id))
    return structural(connection, view(connection, game_id), turns=is_new)
