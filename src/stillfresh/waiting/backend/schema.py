"""The tables of games and memberships, and the one ordered query (W12). Text only.

How many humans play is kept with the game, by triggers, so that the order "with other humans
first, then longest waiting, then id" is an index, and asking is a walk along its first entries.
"""

from typing import Final

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
