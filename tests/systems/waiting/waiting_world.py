"""A model of what surrounds the cache: a backend, its messages, another device, bad luck (W13).

Four games and answers of three, so that truncation matters. D is against bots only, so the others
come before it. Times are an order: whose turn came last waits last. Versions are renumbered after
every step, since only their order matters: that keeps the world finite.
"""

from collections.abc import Callable, Iterator
from typing import Any, TypeAlias, TypeVar

from msgspec import Struct
from msgspec.structs import replace

from stillfresh.systems.waiting import rules
from stillfresh.systems.waiting.model import (
    Answered,
    Event,
    Failed,
    GameState,
    Invalidated,
    MoveFailed,
    MoveSent,
    Opened,
    PauseOver,
    Reconnected,
    Refetch,
    Screen,
    Started,
    State,
    YourTurn,
)

__all__ = [
    "ALL",
    "PROMISES",
    "Happening",
    "World",
    "after",
    "begin",
    "settled",
    "steps",
    "turn",
]


class Kept(Struct, frozen=True):
    """The backend's answer to a move after which it is our turn still."""

    game_id: str
    version: int
    made_for: int


V = TypeVar("V", bound="YourTurn | GameState | Kept | MoveFailed | Screen")
Message: TypeAlias = YourTurn | GameState | Kept | Invalidated | MoveFailed
Next: TypeAlias = tuple[str, "World"]
Happening: TypeAlias = Callable[["World"], Iterator[Next]]

ALONE = "D"
PLAYED = ("A", "B")
"""Looked at, and played here and elsewhere; the others only wait, and C may end."""
ROOM = 3
"""Messages on the wire at once."""
TAPS = 2
"""Moves on their way at once."""


class Unconfirmed(Struct, frozen=True):
    """A move of ours, as the promise of W16 sees it."""

    game_id: str
    made_for: int
    known: int
    """The newest version that we had heard of when we sent it."""


class World(Struct, frozen=True):
    """The backend, what is under way, and the cache."""

    client: State
    ours: tuple[str, ...]
    """Games where it is our turn, in the backend's order."""
    ended: bool = False
    """C."""
    versions: tuple[int, ...] = (0,) * len(PLAYED)
    wire: tuple[Message, ...] = ()
    """From the backend to us, in order."""
    moves: tuple[tuple[str, int], ...] = ()
    """From us to the backend, in order, each with the version that it was made for."""
    answer: tuple[str, ...] | None = None
    """What the backend read for the refetch in flight; it may be out of date on arrival."""
    flights: int = 0
    """Refetches in flight, as a driver counts them."""
    pausing: bool = False
    connected: bool = True
    untold: tuple[str, ...] = ()
    """Played elsewhere while nobody here looked: the backend has no message for that."""
    renews: bool = False
    """A game whose turn goes on waits from that move on; else it keeps its place."""
    forwards: bool = False
    """The client hears the states of all games; else only those of the game on screen."""
    named: tuple[str, ...] = ()
    """Games that the last answer named, but for those that a state called theirs since."""
    unconfirmed: tuple[Unconfirmed, ...] = ()
    """Our moves of which we have heard nothing: a promise compares the cache with it (W16)."""


def begin(*ours: str, limit: int, renews: bool = False, forwards: bool = False) -> World:
    """Nothing known yet, the first refetch in flight."""
    world = World(State(limit=limit), ours=ours, renews=renews, forwards=forwards)
    return heard(world, Started())


def settled(*ours: str, limit: int, renews: bool = False, forwards: bool = False) -> World:
    """The first answer is here, and A is being looked at."""
    world = landed(begin(*ours, limit=limit, renews=renews, forwards=forwards))
    return looking(heard(world, Answered(ours[:limit])), "A")


def turn(*ours: str, limit: int, renews: bool = False, forwards: bool = False) -> World:
    """A, which is being looked at, has just become ours: a snapshot has been asked for."""
    world = settled(*left(ours, "A"), limit=limit, renews=renews, forwards=forwards)
    world = looking(world, "A")
    world = newer(replace(world, ours=ours), "A")
    message, state = (
        YourTurn("A", version(world, "A")),
        GameState("A", my_turn=True, version=version(world, "A")),
    )
    return renumbered(heard(heard(world, message), state))


def after(world: World, *labels: str) -> World:
    """The world that a history leads to."""
    for label in labels:
        world = dict(steps(*ALL)(world))[label]
    return world


def steps(*happenings: Happening) -> Callable[[World], Iterator[Next]]:
    """All that may happen next, of these kinds."""

    def of(world: World) -> Iterator[Next]:
        for happens in happenings:
            for label, after in happens(world):
                yield label, after if same_versions(world, after) else renumbered(after)

    return of


def same_versions(before: World, after: World) -> bool:
    """Most steps leave all that holds a version as it was: nothing to renumber."""
    return (
        after.wire is before.wire
        and after.versions is before.versions
        and after.moves is before.moves
        and after.client.moves is before.client.moves
        and after.client.versions is before.client.versions
        and after.client.screen is before.client.screen
        and after.unconfirmed is before.unconfirmed
    )


def messages(world: World) -> Iterator[Next]:
    if world.wire:
        yield f"hears {named(world.wire[0])}", delivered(world)


def delivered(world: World) -> World:
    message, *rest = world.wire
    world = replace(world, wire=tuple(rest))
    if isinstance(message, Kept):
        return heard(world, kept(world, message))
    our_moves = {move.game_id for move in world.unconfirmed}
    world = heard(world, message)
    known = {watched(world), *world.ours, *our_moves}
    if isinstance(message, GameState) and message.game_id not in known:
        # A state of another game only confirms our moves, so it tells of no other play.
        return unheard(world, str(message.game_id))
    return world


def kept(world: World, message: Kept) -> Event:
    """As a client takes it: a state, or for a game that we left, a move that ended nothing."""
    if is_shown(world, message.game_id):
        return GameState(message.game_id, my_turn=True, version=message.version)
    return MoveFailed(message.game_id, message.made_for)


def heard(world: World, event: Event) -> World:
    """What a driver does: step, then carry out the effects."""
    client, effects = rules.step(world.client, event)
    world = replace(
        world,
        client=client,
        named=still_named(world, event),
        unconfirmed=still_unconfirmed(world, event),
    )
    for effect in effects:
        if isinstance(effect, Refetch):
            world = replace(world, flights=world.flights + 1, answer=None, pausing=False)
        else:
            world = replace(world, pausing=True)
    return world


def still_named(world: World, event: Event) -> tuple[str, ...]:
    """Of the games that are played: the others are never hidden."""
    if isinstance(event, Answered):
        read = event.game_ids[: world.client.limit]
        return tuple(game for game in PLAYED if game in read and game not in world.client.away)
    if isinstance(event, GameState | Opened) and not event.my_turn and event.game_id in world.named:
        return left(world.named, str(event.game_id))
    return world.named


def still_unconfirmed(world: World, event: Event) -> tuple[Unconfirmed, ...]:
    """Until we hear of a newer version, or that the move failed, or until we reconnect."""
    moves = world.unconfirmed
    match event:
        case MoveSent():
            return (*moves, sent(world.client, str(event.game_id)))
        case Reconnected():
            return ()
        case GameState() | Opened() | YourTurn():
            assert event.version is not None
            settled = [
                move
                for move in moves
                if move.game_id == event.game_id and move.known < event.version
            ]
        case MoveFailed():
            fits = (event.game_id, event.version)
            settled = [move for move in moves if (move.game_id, move.made_for) == fits][:1]
        case _:
            return moves
    if not settled:
        return moves
    remaining = list(moves)
    for move in settled:
        remaining.remove(move)
    return tuple(remaining)


def sent(client: State, game: str) -> Unconfirmed:
    made_for = rules.version_on_screen(client.screen, game)
    assert made_for is not None
    return Unconfirmed(game, made_for, max(made_for, dict(client.versions).get(game, made_for)))


def told(world: World, *messages: Message) -> World:
    """Who is not connected misses it."""
    return replace(world, wire=world.wire + messages) if world.connected else world


def watched(world: World) -> str | None:
    screen = world.client.screen
    return None if screen is None else str(screen.game_id)


def is_shown(world: World, game: str) -> bool:
    """Whether the client hears the states of this game."""
    return world.forwards or watched(world) == game


def version(world: World, game: str) -> int:
    return world.versions[PLAYED.index(game)]


def newer(world: World, game: str) -> World:
    at = PLAYED.index(game)
    versions = (*world.versions[:at], world.versions[at] + 2, *world.versions[at + 1 :])
    return replace(world, versions=versions)


def came(ours: tuple[str, ...], game: str) -> tuple[str, ...]:
    """Where the backend's order has a game whose turn has just become ours."""
    last = len(ours) - (ALONE in ours and game != ALONE)
    return (*ours[:last], game, *ours[last:])


def left(ours: tuple[str, ...], game: str) -> tuple[str, ...]:
    return tuple(one for one in ours if one != game)


def user(world: World) -> Iterator[Next]:
    screen = world.client.screen
    for game in PLAYED:
        if watched(world) != game:
            yield f"looks at {game}", looking(world, game)
        elif (
            screen is not None
            and screen.my_turn
            and world.connected
            and len(world.moves) < TAPS
            and len(world.client.moves) < TAPS
        ):
            made_for = rules.version_on_screen(screen, game)
            assert made_for is not None
            after = replace(world, moves=(*world.moves, (game, made_for)))
            yield f"plays {game}", heard(after, MoveSent(game))


def looking(world: World, game: str) -> World:
    return heard(world, Opened(game, game in world.ours, version(world, game)))


def elsewhere(world: World) -> Iterator[Next]:
    for game in PLAYED:
        if game in world.ours and len(world.wire) < ROOM:
            yield f"{game} is played elsewhere", played(world, game, here=False)


def opponents(world: World) -> Iterator[Next]:
    for game in PLAYED:
        if game not in world.ours and len(world.wire) < ROOM - 1:
            yield from turns(world, game)


def structure(world: World) -> Iterator[Next]:
    if len(world.wire) < ROOM:
        ours = ("C", *world.ours) if world.ended else left(world.ours, "C")
        what = "C is rejoined" if world.ended else "C ends"
        yield what, told(replace(world, ours=ours, ended=not world.ended), Invalidated())


def turns(world: World, game: str) -> Iterator[Next]:
    """The opponents play, so that it is our turn: a message, and a state if we hear of it."""
    untold = left(world.untold, game)
    world = newer(replace(world, ours=came(world.ours, game), untold=untold), game)
    message = YourTurn(game, version(world, game))
    if not is_shown(world, game):
        yield f"{game} becomes ours", told(world, message)
        return
    state = GameState(game, my_turn=True, version=version(world, game))
    yield f"{game} becomes ours", told(world, message, state)
    if world.connected:
        yield f"{game} becomes ours (state first)", told(world, state, message)


def played(world: World, game: str, *, here: bool) -> World:
    world = newer(replace(world, ours=left(world.ours, game)), game)
    if is_shown(world, game):
        return told(world, GameState(game, my_turn=False, version=version(world, game)))
    return world if here else unheard(world, game)


def unheard(world: World, game: str) -> World:
    return replace(world, untold=(*left(world.untold, game), game))


def moves(world: World) -> Iterator[Next]:
    if not world.moves or len(world.wire) == ROOM:
        return
    (game, made_for), *rest = world.moves
    after = replace(world, moves=tuple(rest))
    if not is_accepted(world, game, made_for):
        yield f"the move in {game} is refused", told(after, MoveFailed(game, made_for))
        return
    yield f"the move in {game} is made", played(after, game, here=True)
    if after.renews:
        after = replace(after, ours=came(left(after.ours, game), game))
    after = newer(after, game)
    reply = Kept(game, version(after, game), made_for)
    yield f"the move in {game} is made, our turn goes on", told(after, reply)


def returns(world: World) -> Iterator[Next]:
    """Bots answer our move at once: it is our turn anew, and no state says that it was theirs."""
    if not world.moves or len(world.wire) >= ROOM - 1 or not is_accepted(world, *world.moves[0]):
        return
    (game, _), *rest = world.moves
    after = replace(world, moves=tuple(rest), ours=left(world.ours, game))
    for label, back in turns(after, game):
        yield f"the move in {game} is made, {label}", back


def is_accepted(world: World, game: str, made_for: int) -> bool:
    """A game that has moved on refuses the move."""
    return game in world.ours and made_for == version(world, game)


def refetches(world: World) -> Iterator[Next]:
    if not world.flights:
        return
    if world.answer is None:
        read = world.ours[: world.client.limit]
        # An older message that says "yours" may still come after the answer.
        on_the_wire = {message.game_id for message in world.wire if isinstance(message, YourTurn)}
        untold = tuple(game for game in world.untold if game in on_the_wire)
        yield f"the backend reads {' '.join(read)}", replace(world, answer=read, untold=untold)
    else:
        yield "the answer comes", heard(landed(world), Answered(world.answer))


def landed(world: World) -> World:
    return replace(world, flights=world.flights - 1, answer=None)


def failures(world: World) -> Iterator[Next]:
    if world.flights:
        yield "the refetch fails", heard(landed(world), Failed())
    if world.moves and is_accepted(world, *world.moves[0]) and len(world.wire) < ROOM:
        (game, made_for), *rest = world.moves
        after = replace(world, moves=tuple(rest))
        yield f"the move in {game} fails", told(after, MoveFailed(game, made_for))
    if world.pausing:
        yield "the pause is over", heard(replace(world, pausing=False), PauseOver())


def connection(world: World) -> Iterator[Next]:
    if not world.connected:
        game, back = watched(world), replace(world, connected=True)
        back = heard(back if game is None else looking(back, game), Reconnected())
        yield "reconnects", back
        return
    lost = replace(world, connected=False, wire=(), moves=())
    yield "the connection is lost", lost
    if world.moves and is_accepted(world, *world.moves[0]):
        yield "the connection is lost after the move", played(lost, world.moves[0][0], here=True)


def named(message: Message) -> str:
    values = [f"{getattr(message, name)}" for name in message.__struct_fields__]
    return f"{type(message).__name__}({', '.join(filter(None, values))})"


def renumbered(world: World) -> World:
    """Versions by rank, game by game: equal worlds become the same world.

    By twos, since the rules may speak of the version before one.
    """
    for at, game in enumerate(PLAYED):
        known = sorted(versions_of(world, at, game))
        ranks = range(0, 2 * len(known), 2)
        if known != list(ranks):
            world = ranked(world, at, game, dict(zip(known, ranks, strict=True)))
    return world


def versions_of(world: World, at: int, game: str) -> set[int]:
    """Plain loops, since a third of an exploration's time goes here."""
    client, screen = world.client, world.client.screen
    found: set[int | None] = {world.versions[at]}
    for held in (client.versions, client.moves, world.moves):
        for one, number in held:
            if one == game:
                found.add(number)
    for move in world.unconfirmed:
        if move.game_id == game:
            found |= {move.made_for, move.known}
    if screen is not None and screen.game_id == game:
        found |= {screen.version, screen.opened_at}
    for message in world.wire:
        if not isinstance(message, Invalidated) and message.game_id == game:
            found.add(message.version)
            if isinstance(message, Kept):
                found.add(message.made_for)
    return {number for number in found if number is not None}


def ranked(world: World, at: int, game: str, ranks: dict[int, int]) -> World:
    client, screen = world.client, world.client.screen
    if screen is not None and screen.game_id == game:
        screen = ranked_version(screen, ranks)
        assert screen.opened_at is not None
        screen = replace(screen, opened_at=ranks[screen.opened_at])

    def pairs(held: tuple[tuple[Any, Any], ...]) -> tuple[tuple[Any, Any], ...]:
        return tuple((one, ranks[v] if one == game else v) for one, v in held)

    wire = tuple(
        message
        if isinstance(message, Invalidated) or message.game_id != game
        else ranked_version(message, ranks)
        for message in world.wire
    )
    versions = (*world.versions[:at], ranks[world.versions[at]], *world.versions[at + 1 :])
    client = replace(
        client, screen=screen, versions=pairs(client.versions), moves=pairs(client.moves)
    )
    unconfirmed = tuple(
        Unconfirmed(game, ranks[move.made_for], ranks[move.known]) if move.game_id == game else move
        for move in world.unconfirmed
    )
    return replace(
        world,
        client=client,
        wire=wire,
        versions=versions,
        moves=pairs(world.moves),
        unconfirmed=unconfirmed,
    )


def ranked_version(holder: V, ranks: dict[int, int]) -> V:
    if isinstance(holder, Kept):
        holder = replace(holder, made_for=ranks[holder.made_for])
    return holder if holder.version is None else replace(holder, version=ranks[holder.version])


def is_at_rest(world: World) -> bool:
    """Nothing is under way, in any direction."""
    is_quiet = world.connected and not world.wire and not world.moves
    return is_quiet and not world.client.is_busy


def in_order(world: World) -> bool:
    if len(world.client.pool) < 3 or not is_at_rest(world):
        return True
    pool = [game for game in world.client.pool if game in world.ours]
    return pool == [game for game in world.ours if game in pool]


def all_ours(world: World) -> bool:
    return not is_at_rest(world) or not {*world.client.pool} - {*world.ours} - {*world.untold}


def misses_none(world: World) -> bool:
    claims = is_at_rest(world) and world.client.is_complete_from_server
    return not claims or {*world.ours} <= {*world.client.pool}


def hides_none(world: World) -> bool:
    """W16: what the backend names is shown, unless we wait for news of a move in it."""
    client = world.client
    if client.is_busy or not world.connected:
        return True
    unconfirmed = {move.game_id for move in world.unconfirmed}
    hidden = {*world.named} & {*world.ours} - {*client.pool} - unconfirmed
    return all(is_news_under_way(world, game) for game in hidden)


def is_news_under_way(world: World, game: str) -> bool:
    """A message that tells more of the game than the screen shows."""
    shown = rules.version_on_screen(world.client.screen, game)
    return any(
        message.game_id == game and (shown is None or (message.version or 0) > shown)
        for message in world.wire
        if not isinstance(message, Invalidated)
    )


def one_in_flight(world: World) -> bool:
    return world.flights == (world.client.in_flight is not None)


def comes(world: World) -> bool:
    """What is wanted has a flight before it or a pause; a starved pool always wants."""
    client = world.client
    is_put_off = client.follows is not None and client.in_flight is None
    has_begun = client.screen is not None or client.pool
    starves = len(client.pool) < 2 and not client.is_complete_from_server and not client.is_busy
    return (not is_put_off or world.pausing) and not (starves and has_begun)


ALL: tuple[Happening, ...] = (
    messages,
    refetches,
    user,
    moves,
    returns,
    opponents,
    elsewhere,
    structure,
    failures,
    connection,
)

PROMISES: dict[str, Callable[[World], bool]] = {
    "each game is ours to play": all_ours,
    "three games or more are in the backend's order": in_order,
    "a complete pool misses none": misses_none,
    "a game that the backend names is hidden only by an unconfirmed move": hides_none,
    "at most one refetch is in flight": one_in_flight,
    "a wanted refetch comes": comes,
}
