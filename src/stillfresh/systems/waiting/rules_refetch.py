"""One refetch at a time, and what its answer does to the pool of games.

Pure: no clock, no asyncio, no requests. `rules` has the effects of events.
"""

from typing import Final

from msgspec.structs import replace

from stillfresh.backoff import pause_after
from stillfresh.systems.waiting.model import (
    Answered,
    Failed,
    GameId,
    Pause,
    PauseOver,
    Played,
    Pool,
    Refetch,
    RefetchRequest,
    Snapshot,
    State,
    Step,
)

PAUSE: Final = 0.5
"""Seconds before a failed refetch is tried again; doubled with every failure in a row."""
LONGEST_PAUSE: Final = 30.0
PLAIN: Final = RefetchRequest()
"""A refetch that creates no snapshot."""


def retry_pause(failures: int) -> float:
    """How long to wait after so many failures in a row."""
    return pause_after(failures, first=PAUSE, longest=LONGEST_PAUSE)


def request(state: State, wanted: RefetchRequest = PLAIN) -> Step:
    """Ask now. While an answer is in flight, which may be older than the event, ask after it.

    The last request decides whether there will be a snapshot. A pause ends here.
    """
    if state.in_flight is None:
        return begin(state, wanted)
    return Step(replace(state, follows=wanted))


def begin(state: State, wanted: RefetchRequest) -> Step:
    """Send the refetch now."""
    return Step(replace(state, in_flight=wanted, follows=None), (Refetch(),))


def answered(state: State, event: Answered) -> Step:
    """The answer becomes the pool, without games that we know to be played since."""
    refetch = state.in_flight
    if refetch is None:
        return Step(state)
    state = applied(state, event.game_ids, refetch)
    if state.follows is not None:
        return begin(state, state.follows)
    if is_starved(state):
        return look_again(state, refetch)
    return Step(state)


def applied(state: State, game_ids: Pool, refetch: RefetchRequest) -> State:
    """An answer replaces the snapshot by its own, or by none."""
    pool = still_ours(state, tuple(dict.fromkeys(game_ids))[: state.limit])
    is_complete = len(game_ids) < state.limit
    snapshot: Snapshot | None = None
    if refetch.snapshot_of is not None:
        snapshot = Snapshot(refetch.snapshot_of, pool, is_complete, refetch.is_mid_turn)
    return replace(
        state,
        pool=pool,
        is_complete_from_server=is_complete,
        snapshot=snapshot,
        played=Played.BEFORE if is_blind(state, snapshot) else Played.NOT_SINCE,
        is_restored=False,
        in_flight=None,
        away=(),
    )


def still_ours(state: State, pool: Pool) -> Pool:
    """The answer may be older than a move that we sent or heard of."""
    played = state.pending + state.away
    return tuple(game for game in pool if game not in played)


def is_blind(state: State, snapshot: Snapshot | None) -> bool:
    """True if its game was played while the answer was in flight, here or probably elsewhere."""
    if snapshot is None:
        return False
    is_missing = snapshot.is_complete_from_server and snapshot.game_id not in snapshot.pool
    return is_missing or snapshot.game_id in state.pending + state.away


def is_starved(state: State) -> bool:
    """True if fewer than two games are left, and there may be others."""
    return len(state.pool) < 2 and not state.is_complete_from_server


def look_again(state: State, refetch: RefetchRequest) -> Step:
    """Our moves emptied the answer. Ask once at once, then slower until they are confirmed."""
    wanted = RefetchRequest(is_echo=True)
    if refetch.is_echo:
        return Step(replace(state, follows=wanted), (Pause(),))
    return begin(state, wanted)


def failed(state: State, _event: Failed) -> Step:
    """The pool stays. The refetch is still wanted; newer news asks at once."""
    refetch = state.in_flight
    if refetch is None:
        return Step(state)
    state = replace(state, in_flight=None, away=())
    if state.follows is not None:
        return begin(state, state.follows)
    return Step(replace(state, follows=refetch), (Pause(),))


def pause_over(state: State, _event: PauseOver) -> Step:
    """A wanted refetch always comes."""
    if state.in_flight is not None or state.follows is None:
        return Step(state)
    return begin(state, state.follows)


def without(pool: Pool, game_id: GameId | None) -> Pool:
    return tuple(game for game in pool if game != game_id)
