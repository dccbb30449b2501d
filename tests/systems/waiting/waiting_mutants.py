"""The rules with a correction taken back: the exploration must catch each of them (W13).

A mutant replaces one function of the rules by what the seed, or a hasty reader, would write.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

from msgspec.structs import replace

from stillfresh.systems.waiting import rules, rules_refetch
from stillfresh.systems.waiting.model import (
    Failed,
    GameState,
    Moves,
    Opened,
    Played,
    Reconnected,
    RefetchRequest,
    Screen,
    Snapshot,
    State,
    Step,
    UnconfirmedMove,
)
from stillfresh.testing import PromiseBroken
from tests.systems.waiting.waiting_explorations import (
    BLIND,
    CUT,
    FORWARDED,
    FORWARDED_LOOP,
    FRESH,
    GOES_ON,
    LOOP,
    PAIR,
    TURN,
    WISHES,
    Exploration,
)

__all__ = ["MUTANTS", "Mutant"]


@dataclass(frozen=True, slots=True)
class Mutant:
    """`changes` maps a function's name to its replacement, in both modules of rules."""

    rule: str
    what: str
    changes: dict[str, Callable[..., Any]]
    where: Exploration
    """The exploration that catches it."""

    def caught(self) -> PromiseBroken | None:
        with self.applied():
            try:
                self.where.run()
            except PromiseBroken as broken:
                return broken
        return None

    @contextmanager
    def applied(self) -> Iterator[None]:
        with ExitStack() as stack:
            table = dict(rules.RULES)
            for name, change in self.changes.items():
                table |= {event: change for event, rule in table.items() if rule.__name__ == name}
                for module in (rules, rules_refetch):
                    if hasattr(module, name):
                        stack.enter_context(patch.object(module, name, change))
            stack.enter_context(patch.object(rules, "RULES", table))
            yield


def forgets(state: State, _event: Failed) -> Step:
    return Step(replace(state, in_flight=None, follows=None))


def keeps_pending(state: State, pool: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(game for game in pool if game not in state.away)


def does_nothing(state: State, *_rest: object) -> Step:
    return Step(state)


def never_asks(state: State, game_id: str, _wanted: RefetchRequest) -> Step:
    pool = state.pool if game_id in state.pool else (*state.pool, game_id)
    return Step(replace(state, pool=pool, snapshot=rules.kept_for(state.snapshot, game_id)))


def played_or_not(state: State, wanted: RefetchRequest) -> bool:
    return IS_PROVABLE(replace(state, played=Played.SINCE), wanted)


def in_any_flight(state: State, wanted: RefetchRequest) -> bool:
    return IS_PROVABLE(replace(state, in_flight=None, follows=None), wanted)


def in_any_turn(state: State, wanted: RefetchRequest) -> bool:
    return IS_PROVABLE(state, replace(wanted, is_mid_turn=True))


def never(*_any: object) -> bool:
    return False


def always_complete(state: State, *rest: Any) -> State:
    return replace(APPLIED(state, *rest), is_complete_from_server=True)


def always_anew(
    state: State, game_id: str, version: int | None, *, is_new_turn: bool = True
) -> Step:
    return TURN_CAME(state, game_id, version, is_new_turn=is_new_turn or True)


def keeps_old(state: State, *rest: Any) -> State:
    after = APPLIED(state, *rest)
    return after if after.snapshot else replace(after, snapshot=state.snapshot)


def keeps_snapshot(state: State, game_id: str) -> Step:
    """R2, but for the snapshots of other games."""
    after, effects = TAKEN_OUT(state, game_id)
    return Step(replace(after, snapshot=state.snapshot), effects)


def appends_to_any(state: State, game_id: str, wanted: RefetchRequest) -> Step:
    after, effects = APPENDED(state, game_id, wanted)
    return Step(replace(after, snapshot=state.snapshot), effects)


def drops(state: State, wanted: RefetchRequest = rules_refetch.PLAIN) -> Step:
    if state.in_flight is not None:
        return Step(state)
    return rules_refetch.begin(state, wanted)


def keeps_mid_turn(snapshot: Snapshot | None, _game_id: str) -> Snapshot | None:
    return snapshot


def only_the_pool(state: State, event: GameState) -> Step:
    return NOT_MY_TURN(replace(state, in_flight=None), event)


def trusts_the_answer(state: State, event: GameState) -> Step:
    after, effects = NOT_MY_TURN(state, event)
    return Step(replace(after, away=()), effects)


def up_to_its_own(_screen: Screen, version: int | None, *, turn_continues: bool) -> int | None:
    return version


def stays_pending(state: State, event: Reconnected) -> Step:
    after, effects = RECONNECTED(state, event)
    return Step(replace(after, moves=state.moves), effects)


def of_every_move(moves: Moves, game_id: str, _version: int | None) -> Moves:
    return tuple(move for move in moves if move[0] != game_id)


def of_any_move(moves: Moves, game_id: str, _version: int | None) -> Moves:
    return WITHOUT_MOVE(moves, game_id, None)


def asks_nothing(state: State, event: Reconnected) -> Step:
    return Step(RECONNECTED(state, event).state if state.in_flight else state)


def only_looks(state: State, event: Opened) -> Step:
    """The event names a game of which nothing is pending, so only the screen changes."""
    after, effects = OPENED(replace(state, moves=()), event)
    return Step(replace(after, moves=state.moves), effects)


def confirms_only(state: State, event: GameState | Opened) -> Step:
    """The moves, and nothing else."""
    return Step(replace(state, moves=CONFIRMED(state, event).state.moves))


def trusts_answers(state: State, event: GameState | Opened) -> Step:
    after, effects = CONFIRMED(state, event)
    return Step(replace(after, away=state.away), effects)


def by_any_state(_state: State, move: UnconfirmedMove, event: GameState | Opened) -> bool:
    return move[0] == event.game_id


TURN_CAME, NOT_MY_TURN = rules.turn_came, rules.not_my_turn
APPLIED, WITHOUT_MOVE = rules_refetch.applied, rules.without_move
RECONNECTED, TAKEN_OUT, APPENDED = rules.reconnected, rules.taken_out, rules.appended
IS_PROVABLE, OPENED, CONFIRMED = rules.is_provable, rules.opened, rules.confirmed

MUTANTS = [
    Mutant("W2", "an answer that was cut counts as complete", {"applied": always_complete}, CUT),
    Mutant("W3", "a failed refetch is forgotten", {"failed": forgets}, FRESH),
    Mutant("W3", "what is asked during a flight is not asked after it", {"request": drops}, CUT),
    Mutant("W5", "an answer shows games with a pending move", {"still_ours": keeps_pending}, TURN),
    Mutant("W5", "an answer that our moves emptied will do", {"look_again": does_nothing}, CUT),
    Mutant("W5", "a snapshot survives a move elsewhere", {"taken_out": keeps_snapshot}, LOOP),
    Mutant("W6", "a game played on another device stays", {"not_my_turn": does_nothing}, CUT),
    Mutant("W6", "an answer under way brings it back", {"not_my_turn": trusts_the_answer}, CUT),
    Mutant("W7", "with fewer than two games nobody is asked", {"appended": never_asks}, PAIR),
    Mutant("W7", "a snapshot is put back unplayed", {"is_provable": played_or_not}, LOOP),
    Mutant("W7", "a snapshot is put back during a flight", {"is_provable": in_any_flight}, LOOP),
    Mutant("W7", "a snapshot counts though it misses its game", {"is_blind": never}, BLIND),
    Mutant("W7", "a turn that is told twice counts twice", {"is_late": never}, PAIR),
    Mutant("W8", "a turn that never left us makes a snapshot", {"turn_came": always_anew}, PAIR),
    Mutant("W9", "a failed move asks nobody", {"move_failed": does_nothing}, TURN),
    Mutant("W9", "a refusal is of every move", {"without_move": of_every_move}, CUT),
    Mutant("W9", "a late refusal is of a newer move", {"without_move": of_any_move}, LOOP),
    Mutant("W9", "after reconnecting, moves stay pending", {"reconnected": stays_pending}, CUT),
    Mutant("W9", "after reconnecting, nobody is asked", {"reconnected": asks_nothing}, CUT),
    Mutant("W10", "an answer without a snapshot keeps the old", {"applied": keeps_old}, WISHES),
    Mutant("W10", "a snapshot survives a game added here", {"appended": appends_to_any}, PAIR),
    Mutant("W15", "an order of mid-turn fits every turn", {"is_provable": in_any_turn}, GOES_ON),
    Mutant("W15", "it survives late news", {"without_mid_turn": keeps_mid_turn}, GOES_ON),
    Mutant("W15", "a state makes its own message late", {"overtaken": up_to_its_own}, GOES_ON),
    Mutant("W16", "states of other games confirm nothing", {"confirmed": does_nothing}, FORWARDED),
    Mutant("W16", "opening a game confirms nothing", {"opened": only_looks}, FORWARDED),
    Mutant("W16", "a confirmed game is not asked for", {"confirmed": confirms_only}, FORWARDED),
    Mutant("W16", "an answer brings it back", {"confirmed": trusts_answers}, FORWARDED),
    Mutant("W16", "an old state confirms", {"is_confirmed": by_any_state}, FORWARDED_LOOP),
]
