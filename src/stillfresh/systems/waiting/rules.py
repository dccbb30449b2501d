"""What each event does to the pool of games, one function for each event.

All decisions of the Longest-Waiting cache are in this file and in `rules_refetch`. Both are pure:
no clock, no asyncio. They keep the rules of seed 003: R0 (one refetch at a time) in
`rules_refetch`, R1 in `invalidated`, R2 in `move_sent`, R3 and R5 in `game_state`, and R4 in
`your_turn`.

The order of the games is never guessed. Two games or fewer need no order. More have the order of
the backend's last answer, or of a snapshot: an answer that is right again, because the one game
that left the list since is back. In every other case the rules ask for a refetch.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Final

from msgspec.structs import replace

from stillfresh.systems.waiting.model import (
    Answered,
    Event,
    Failed,
    GameId,
    GameState,
    Invalidated,
    MoveFailed,
    Moves,
    MoveSent,
    Navigation,
    Opened,
    PauseOver,
    Played,
    Pool,
    Proof,
    Reconnected,
    RefetchRequest,
    Screen,
    Snapshot,
    Started,
    State,
    Step,
    UnconfirmedMove,
    Versions,
    YourTurn,
)
from stillfresh.systems.waiting.rules_refetch import (
    answered,
    failed,
    is_starved,
    pause_over,
    request,
    without,
)

MEMORY: Final = 64
"""Unconfirmed moves, and versions of games, that are remembered; the oldest are dropped first."""


def started(state: State, _event: Started) -> Step:
    """The first refetch."""
    return request(state)


def opened(state: State, event: Opened) -> Step:
    """Looking at a game changes which game is on screen; it may confirm a move."""
    screen = Screen(event.game_id, event.my_turn, event.version)
    return confirmed(replace(state, screen=screen), event)


def confirmed(state: State, event: GameState | Opened) -> Step:
    """A newer state confirms our moves in its game, whichever game is on screen.

    The pool, the screen and the snapshot stay as they are.
    """
    moves = tuple(move for move in state.moves if not is_confirmed(state, move, event))
    if len(moves) == len(state.moves):
        return Step(state)
    state = replace(state, moves=moves)
    if event.my_turn:
        # The game left the pool on trust and is still ours: only the backend knows its place.
        return request(state)
    return Step(replace(state, away=now_away(state, event.game_id)))


def is_confirmed(state: State, move: UnconfirmedMove, event: GameState | Opened) -> bool:
    """True if the event is newer than all that was known of the game when the move was sent.

    Without versions, only a state that the backend pushes is newer: what the player opens may have
    been read before the move.
    """
    game_id, made_for = move
    if game_id != event.game_id:
        return False
    # News that comes after a move either confirms it or leaves the known version as it was.
    known_versions = [made_for, dict(state.versions).get(game_id)]
    known_before = [version for version in known_versions if version is not None]
    if event.version is None or not known_before:
        return isinstance(event, GameState)
    return event.version > max(known_before)


def now_away(state: State, game_id: GameId) -> Pool:
    """Games that are not ours to play, with this one; they matter to an answer in flight only."""
    if state.in_flight is None:
        return state.away
    return (*without(state.away, game_id), game_id)


def invalidated(state: State, _event: Invalidated) -> Step:
    """No snapshot survives it, not even the one being requested."""
    in_flight = None if state.in_flight is None else RefetchRequest()
    return request(replace(state, snapshot=None, in_flight=in_flight))


def move_sent(state: State, event: MoveSent) -> Step:
    """Removing a game never reorders the rest, so it is always safe."""
    game_id = event.game_id
    is_own = kept_for(state.snapshot, game_id) is not None
    counts = is_own and state.played is Played.NOT_SINCE
    version = version_on_screen(state.screen, game_id) if event.version is None else event.version
    state = replace(
        state,
        moves=with_move(state.moves, game_id, version),
        played=Played.SINCE if counts else state.played,
        versions=with_version(state.versions, game_id, version_on_screen(state.screen, game_id)),
    )
    return taken_out(state, game_id)


def version_on_screen(screen: Screen | None, game_id: GameId) -> int | None:
    """The version on screen: once we have played it, news of its turn is old."""
    if screen is None or screen.game_id != game_id:
        return None
    return screen.opened_at if screen.version is None else screen.version


def with_move(moves: Moves, game_id: GameId, version: int | None) -> Moves:
    """A move at a newer version has seen the result of the moves before."""
    others = moves if version is None else unsettled(moves, game_id, version)
    return (*others, (game_id, version))[-MEMORY:]


def unsettled(moves: Moves, game_id: GameId, version: int | None) -> Moves:
    """A game that has moved on settles earlier moves: each was made, or will be refused."""
    return tuple(
        (game, made_for)
        for game, made_for in moves
        if game != game_id or not is_older(made_for, version)
    )


def is_older(made_for: int | None, version: int | None) -> bool:
    """Without versions, all news counts as later."""
    return made_for is None or version is None or made_for < version


def taken_out(state: State, game_id: GameId) -> Step:
    """The game leaves the pool, and so does a snapshot that may contain it."""
    state = replace(
        state,
        pool=without(state.pool, game_id),
        snapshot=kept_for(state.snapshot, game_id),
    )
    return request(state) if is_starved(state) else Step(state)


def kept_for(snapshot: Snapshot | None, game_id: GameId) -> Snapshot | None:
    """A snapshot belongs to one game; an event in another game ends it."""
    return snapshot if snapshot is not None and snapshot.game_id == game_id else None


def not_my_turn(state: State, event: GameState) -> Step:
    """Our move is confirmed.

    A game that is still in the pool was played on another device.
    """
    game_id = event.game_id
    state = replace(
        state,
        moves=unsettled(state.moves, game_id, event.version),
        away=now_away(state, game_id),
        versions=with_version(state.versions, game_id, event.version),
    )
    return taken_out(state, game_id) if game_id in state.pool else Step(state)


def your_turn(state: State, event: YourTurn) -> Step:
    """A turn counts once, by whichever message comes first; old news does not count."""
    if is_late(state, event.game_id, event.version):
        return Step(replace(state, snapshot=without_mid_turn(state.snapshot, event.game_id)))
    screen = state.screen
    if screen is None or screen.game_id != event.game_id:
        return turn_came(state, event.game_id, event.version)
    # Without versions, a message that the screen awaits is taken for that of the counted turn.
    is_awaited = screen.awaits_message and None in {event.version, screen.version}
    screen = replace(screen, my_turn=True, awaits_message=False)
    state = replace(state, screen=screen)
    return Step(state) if is_awaited else turn_came(state, event.game_id, event.version)


def without_mid_turn(snapshot: Snapshot | None, game_id: GameId) -> Snapshot | None:
    """The turn came again, however late the news is: the game has left its old place."""
    is_over = snapshot is not None and snapshot.is_mid_turn and snapshot.game_id == game_id
    return None if is_over else snapshot


def turn_came(
    state: State, game_id: GameId, version: int | None, *, is_new_turn: bool = True
) -> Step:
    """Two games need no order; an order is restored if only its game has gone and come.

    `is_new_turn` is false if, for all we know, the turn never left us. The game may then have
    kept its place, so the answer fits while the turn continues, but not when it comes again.
    """
    state = replace(
        state,
        moves=unsettled(state.moves, game_id, version),
        away=without(state.away, game_id),
        versions=with_version(state.versions, game_id, version) if is_new_turn else state.versions,
    )
    wanted = RefetchRequest(game_id, is_mid_turn=not is_new_turn)
    if len(state.pool) < 2:
        return appended(state, game_id, wanted)
    if is_provable(state, wanted):
        return restored(state, is_new_turn=is_new_turn)
    return request(state, wanted)


def appended(state: State, game_id: GameId, wanted: RefetchRequest) -> Step:
    """Add the game: two games need no order. But an answer in flight may not know it."""
    pool = state.pool if game_id in state.pool else (*state.pool, game_id)
    state = replace(state, pool=pool, snapshot=kept_for(state.snapshot, game_id))
    if state.is_complete_from_server and not state.is_busy:
        return Step(state)
    return request(state, wanted)


def is_provable(state: State, wanted: RefetchRequest) -> bool:
    """True with a snapshot of this game, which we played since, and no answer in flight."""
    snapshot = state.snapshot
    if snapshot is None or snapshot.game_id != wanted.snapshot_of:
        return False
    fits = wanted.is_mid_turn or not snapshot.is_mid_turn
    return fits and state.played is Played.SINCE and not state.is_busy


def restored(state: State, *, is_new_turn: bool) -> Step:
    """A turn that continues may be announced again, by its `your_turn`, at no cost."""
    assert state.snapshot is not None  # noqa: S101 (is_provable has looked)
    return Step(
        replace(
            state,
            pool=state.snapshot.pool,
            is_complete_from_server=state.snapshot.is_complete_from_server,
            played=Played.NOT_SINCE if is_new_turn else state.played,
            is_restored=True,
        )
    )


def game_state(state: State, event: GameState) -> Step:
    """Apply a newer state of the game on screen. One of any other game may confirm a move.

    What a state of the game on screen means:

    - It is not our turn: our move is confirmed.
    - It is our turn, and was not: the turn begins. It counts, unless its message came first;
      otherwise that message is still to come.
    - It is our turn, as before, and a move of ours is pending: the turn continues, or it has gone
      and come meanwhile. It counts, but the game may have kept its place.
    - It is our turn, as before, and no move is pending: nothing has happened.
    """
    screen = state.screen
    if screen is None or screen.game_id != event.game_id:
        return confirmed(state, event)
    if is_old(state, screen, event.version):
        # The screen knows better whose turn it is.
        return confirmed(state, replace(event, my_turn=screen.my_turn))
    turn_begins = event.my_turn and not screen.my_turn
    turn_continues = event.my_turn and not turn_begins and event.game_id in state.pending
    is_new_turn = not is_late(state, event.game_id, event.version)
    overtaken_up_to = overtaken(screen, event.version, turn_continues=turn_continues)
    version = screen.version if event.version is None else event.version
    awaits_message = turn_begins and is_new_turn
    state = replace(
        state,
        screen=replace(
            screen, my_turn=event.my_turn, version=version, awaits_message=awaits_message
        ),
        versions=with_version(state.versions, event.game_id, overtaken_up_to),
    )
    if not event.my_turn:
        return not_my_turn(state, event)
    if is_new_turn and (turn_begins or turn_continues):
        return turn_came(state, event.game_id, event.version, is_new_turn=turn_begins)
    return Step(state)


def overtaken(screen: Screen, version: int | None, *, turn_continues: bool) -> int | None:
    """The version up to which a state makes messages old.

    Its own message may still count: where we know at which version the game was opened, and where
    our turn seems to continue but may have gone and come.
    """
    counts_later = turn_continues or screen.opened_at is not None
    return version - 1 if version is not None and counts_later else version


def is_old(state: State, screen: Screen, version: int | None) -> bool:
    """True if not newer than the last state, or older than the opened version or a message."""
    if version is None:
        return False
    newest = dict(state.versions).get(screen.game_id, version)
    if screen.opened_at is not None:
        newest = max(newest, screen.opened_at)
    if version < newest:
        return True
    return screen.version is not None and version <= screen.version


def is_late(state: State, game_id: GameId, version: int | None) -> bool:
    """True if the version is not newer than the last counted turn."""
    counted = dict(state.versions).get(game_id)
    return version is not None and counted is not None and version <= counted


def with_version(versions: Versions, game_id: GameId, version: int | None) -> Versions:
    """The versions with this one, unless a newer one is known; the newest entry is last."""
    if version is None or version <= dict(versions).get(game_id, version - 1):
        return versions
    others = tuple(pair for pair in versions if pair[0] != game_id)
    return (*others, (game_id, version))[-MEMORY:]


def move_failed(state: State, event: MoveFailed) -> Step:
    """The game was removed on trust; a later move in it is still pending."""
    return request(replace(state, moves=without_move(state.moves, event.game_id, event.version)))


def without_move(moves: Moves, game_id: GameId, version: int | None) -> Moves:
    """Remove the oldest move that it can be: an old refusal must not count for a newer move."""
    fits = {version, None}
    for at, (game, made_for) in enumerate(moves):
        if game == game_id and (version is None or made_for in fits):
            return moves[:at] + moves[at + 1 :]
    return moves


def reconnected(state: State, _event: Reconnected) -> Step:
    """Messages on their way may have been lost."""
    screen = None if state.screen is None else replace(state.screen, awaits_message=False)
    return request(replace(state, moves=(), away=(), snapshot=None, screen=screen))


RULES: Final[Mapping[type[Event], Callable[[State, Any], Step]]] = MappingProxyType(
    {
        Started: started,
        Opened: opened,
        Invalidated: invalidated,
        MoveSent: move_sent,
        YourTurn: your_turn,
        GameState: game_state,
        MoveFailed: move_failed,
        Reconnected: reconnected,
        Answered: answered,
        Failed: failed,
        PauseOver: pause_over,
    }
)
"""The rule for each event."""


def step(state: State, event: Event) -> Step:
    """Return the next state and what to do. The state changes in no other way."""
    return RULES[type(event)](state, event)


def navigation(state: State, current: GameId | None) -> Navigation:
    """The pool without the game on screen, and why its order may be trusted."""
    proof = Proof.SNAPSHOT if state.is_restored else Proof.SERVER
    if len(state.pool) <= 2:
        proof = Proof.IRRELEVANT
    return Navigation(without(state.pool, current), proof, state.is_busy)
