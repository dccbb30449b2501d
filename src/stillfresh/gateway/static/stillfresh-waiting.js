// stillfresh-waiting.js: the Longest-Waiting cache in JavaScript. For browsers, bundlers and Node.
//
// The backend returns up to five games that wait for the player, in its order. `step` says what
// each event does to that list, and never guesses the order; `WaitingCache` carries it out.
//
// The rules are those of stillfresh.systems.waiting in Python, function by function, with the same
// names in camelCase. A test gives both the same histories and compares every state. Change both.
//
// The rules are pure: no clock, no requests. A state is frozen and plain data: it survives
// JSON.stringify and structuredClone. What is not known is null, never undefined.

/** Games in one answer of the backend: as many as this, and there may be more. */
export const LIMIT = 5;

/** Unconfirmed moves, and versions of games, that are remembered; the oldest are dropped first. */
const MEMORY = 64;

/** Milliseconds before a failed refetch is tried again; doubled with every failure in a row. */
const PAUSE = 500;
const LONGEST_PAUSE = 30_000;

/** A refetch that creates no snapshot. */
const PLAIN = Object.freeze({ snapshotOf: null, isMidTurn: false, isEcho: false });

/** Nothing is known yet. */
export const INITIAL = Object.freeze({
  pool: Object.freeze([]),
  isCompleteFromServer: false, // the last answer was not cut: there are no other games
  snapshot: null,
  played: "not since", // when we played the snapshot's game: "not since", "since" or "before"
  isRestored: false, // the pool came from a snapshot, not from an answer
  inFlight: null,
  follows: null, // the next request: after the answer in flight, or after a pause
  moves: Object.freeze([]), // our unconfirmed moves, [gameId, version]; oldest first
  away: Object.freeze([]), // not ours to play, though the answer in flight may list them
  screen: null,
  versions: Object.freeze([]), // [gameId, version] up to which news of a turn is old
  limit: LIMIT,
});

const NO_EFFECTS = Object.freeze([]);
const REFETCH = Object.freeze(["refetch"]);
const PAUSED = Object.freeze(["pause"]);

function result(state, effects = NO_EFFECTS) {
  return { state, effects };
}

/** A copy with these fields; whatever it holds is frozen. */
function replace(record, changes) {
  return frozen({ ...record, ...changes });
}

function frozen(value) {
  if (typeof value !== "object" || value === null || Object.isFrozen(value)) return value;
  for (const part of Object.values(value)) frozen(part);
  return Object.freeze(value);
}

// ---- one refetch at a time

/** Ask now. While an answer is in flight, which may be older than the event, ask after it. */
function request(state, wanted = PLAIN) {
  if (state.inFlight === null) return begin(state, wanted);
  return result(replace(state, { follows: wanted }));
}

function begin(state, wanted) {
  return result(replace(state, { inFlight: wanted, follows: null }), REFETCH);
}

/** The answer becomes the pool, without games that we know to be played since. */
function answered(state, { gameIds }) {
  const refetch = state.inFlight;
  if (refetch === null) return result(state);
  state = applied(state, gameIds, refetch);
  if (state.follows !== null) return begin(state, state.follows);
  if (isStarved(state)) return lookAgain(state, refetch);
  return result(state);
}

/** An answer replaces the snapshot by its own, or by none. */
function applied(state, gameIds, refetch) {
  const pool = stillOurs(state, [...new Set(gameIds)].slice(0, state.limit));
  const isComplete = gameIds.length < state.limit;
  let snapshot = null;
  if (refetch.snapshotOf !== null) {
    snapshot = {
      gameId: refetch.snapshotOf,
      pool,
      isCompleteFromServer: isComplete,
      isMidTurn: refetch.isMidTurn,
    };
  }
  return replace(state, {
    pool,
    isCompleteFromServer: isComplete,
    snapshot,
    played: isBlind(state, snapshot) ? "before" : "not since",
    isRestored: false,
    inFlight: null,
    away: [],
  });
}

/** The answer may be older than a move that we sent or heard of. */
function stillOurs(state, pool) {
  const played = [...pending(state), ...state.away];
  return pool.filter((gameId) => !played.includes(gameId));
}

/** True if its game was played while the answer was in flight, here or probably elsewhere. */
function isBlind(state, snapshot) {
  if (snapshot === null) return false;
  const isMissing = snapshot.isCompleteFromServer && !snapshot.pool.includes(snapshot.gameId);
  return isMissing || [...pending(state), ...state.away].includes(snapshot.gameId);
}

/** True if fewer than two games are left, and there may be others. */
function isStarved(state) {
  return state.pool.length < 2 && !state.isCompleteFromServer;
}

/** Our moves emptied the answer. Ask once at once, then slower until they are confirmed. */
function lookAgain(state, refetch) {
  const wanted = replace(PLAIN, { isEcho: true });
  if (refetch.isEcho) return result(replace(state, { follows: wanted }), PAUSED);
  return begin(state, wanted);
}

/** The pool stays. The refetch is still wanted; newer news asks at once. */
function failed(state) {
  const refetch = state.inFlight;
  if (refetch === null) return result(state);
  state = replace(state, { inFlight: null, away: [] });
  if (state.follows !== null) return begin(state, state.follows);
  return result(replace(state, { follows: refetch }), PAUSED);
}

/** A wanted refetch always comes. */
function pauseOver(state) {
  if (state.inFlight !== null || state.follows === null) return result(state);
  return begin(state, state.follows);
}

// ---- what events do

/** The first refetch. */
function started(state) {
  return request(state);
}

/** Looking at a game changes which game is on screen; it may confirm a move. */
function opened(state, event) {
  const screen = {
    gameId: event.gameId,
    myTurn: event.myTurn,
    openedAt: event.version,
    version: null,
    awaitsMessage: false,
  };
  return confirmed(replace(state, { screen }), event);
}

/**
 * A newer state confirms our moves in its game, whichever game is on screen.
 *
 * The pool, the screen and the snapshot stay as they are.
 */
function confirmed(state, event) {
  const moves = state.moves.filter((move) => !isConfirmed(state, move, event));
  if (moves.length === state.moves.length) return result(state);
  state = replace(state, { moves });
  // The game left the pool on trust. If it is still ours, only the backend knows its place.
  if (event.myTurn) return request(state);
  return result(replace(state, { away: nowAway(state, event.gameId) }));
}

/**
 * True if the event is newer than all that was known of the game when the move was sent.
 *
 * Without versions, only a state that the backend pushes is newer: what the player opens may have
 * been read before the move.
 */
function isConfirmed(state, [gameId, madeFor], event) {
  if (gameId !== event.gameId) return false;
  // News that comes after a move either confirms it or leaves the known version as it was.
  const knownBefore = [madeFor, versionOf(state, gameId)].filter((version) => version !== null);
  if (event.version === null || knownBefore.length === 0) return event.type === "game_state";
  return event.version > Math.max(...knownBefore);
}

/** Games that are not ours to play, with this one; they matter to an answer in flight only. */
function nowAway(state, gameId) {
  if (state.inFlight === null) return state.away;
  return [...without(state.away, gameId), gameId];
}

/** No snapshot survives it, not even the one being requested. */
function invalidated(state) {
  const inFlight = state.inFlight === null ? null : PLAIN;
  return request(replace(state, { snapshot: null, inFlight }));
}

/** Removing a game never reorders the rest, so it is always safe. */
function moveSent(state, event) {
  const { gameId } = event;
  const isOwn = keptFor(state.snapshot, gameId) !== null;
  const counts = isOwn && state.played === "not since";
  const onScreen = versionOnScreen(state.screen, gameId);
  state = replace(state, {
    moves: withMove(state.moves, gameId, event.version ?? onScreen),
    played: counts ? "since" : state.played,
    versions: withVersion(state.versions, gameId, onScreen),
  });
  return takenOut(state, gameId);
}

/** The version on screen: once we have played it, news of its turn is old. */
function versionOnScreen(screen, gameId) {
  if (screen === null || screen.gameId !== gameId) return null;
  return screen.version ?? screen.openedAt;
}

/** A move at a newer version has seen the result of the moves before. */
function withMove(moves, gameId, version) {
  const others = version === null ? moves : unsettled(moves, gameId, version);
  return [...others, [gameId, version]].slice(-MEMORY);
}

/** A game that has moved on settles earlier moves: each was made, or will be refused. */
function unsettled(moves, gameId, version) {
  return moves.filter(([game, madeFor]) => game !== gameId || !isOlder(madeFor, version));
}

/** Without versions, all news counts as later. */
function isOlder(madeFor, version) {
  return madeFor === null || version === null || madeFor < version;
}

/** The game leaves the pool, and so does a snapshot that may contain it. */
function takenOut(state, gameId) {
  const pool = without(state.pool, gameId);
  state = replace(state, { pool, snapshot: keptFor(state.snapshot, gameId) });
  return isStarved(state) ? request(state) : result(state);
}

/** A snapshot belongs to one game; an event in another game ends it. */
function keptFor(snapshot, gameId) {
  return snapshot !== null && snapshot.gameId === gameId ? snapshot : null;
}

/** Our move is confirmed. A game that is still in the pool was played on another device. */
function notMyTurn(state, event) {
  const { gameId, version } = event;
  state = replace(state, {
    moves: unsettled(state.moves, gameId, version),
    away: nowAway(state, gameId),
    versions: withVersion(state.versions, gameId, version),
  });
  return state.pool.includes(gameId) ? takenOut(state, gameId) : result(state);
}

/** A turn counts once, by whichever message comes first; old news does not count. */
function yourTurn(state, event) {
  const { gameId, version } = event;
  if (isLate(state, gameId, version)) {
    return result(replace(state, { snapshot: withoutMidTurn(state.snapshot, gameId) }));
  }
  const { screen } = state;
  if (screen === null || screen.gameId !== gameId) return turnCame(state, gameId, version);
  // Without versions, a message that the screen awaits is taken for that of the counted turn.
  const isCounted = screen.awaitsMessage && (version === null || screen.version === null);
  state = replace(state, { screen: replace(screen, { myTurn: true, awaitsMessage: false }) });
  return isCounted ? result(state) : turnCame(state, gameId, version);
}

/** The turn came again, however late the news is: the game has left its old place. */
function withoutMidTurn(snapshot, gameId) {
  return keptFor(snapshot, gameId)?.isMidTurn ? null : snapshot;
}

/**
 * Two games need no order; an order is restored if only its game has gone and come.
 *
 * `isNewTurn` is false if, for all we know, the turn never left us. The game may then have kept
 * its place, so the answer fits while the turn continues, but not when it comes again.
 */
function turnCame(state, gameId, version, isNewTurn = true) {
  state = replace(state, {
    moves: unsettled(state.moves, gameId, version),
    away: without(state.away, gameId),
    versions: isNewTurn ? withVersion(state.versions, gameId, version) : state.versions,
  });
  const wanted = replace(PLAIN, { snapshotOf: gameId, isMidTurn: !isNewTurn });
  if (state.pool.length < 2) return appended(state, gameId, wanted);
  if (isProvable(state, wanted)) return restored(state, isNewTurn);
  return request(state, wanted);
}

/** Add the game: two games need no order. But an answer in flight may not know it. */
function appended(state, gameId, wanted) {
  const pool = state.pool.includes(gameId) ? state.pool : [...state.pool, gameId];
  state = replace(state, { pool, snapshot: keptFor(state.snapshot, gameId) });
  if (state.isCompleteFromServer && !isBusy(state)) return result(state);
  return request(state, wanted);
}

/** True with a snapshot of this game, which we played since, and no answer in flight. */
function isProvable(state, wanted) {
  const { snapshot } = state;
  if (snapshot === null || snapshot.gameId !== wanted.snapshotOf) return false;
  const fits = wanted.isMidTurn || !snapshot.isMidTurn;
  return fits && state.played === "since" && !isBusy(state);
}

/** A turn that continues may be announced again, by its `your_turn`, at no cost. */
function restored(state, isNewTurn) {
  const { pool, isCompleteFromServer } = state.snapshot;
  const played = isNewTurn ? "not since" : state.played;
  return result(replace(state, { pool, isCompleteFromServer, played, isRestored: true }));
}

/**
 * Apply a newer state of the game on screen. One of any other game may confirm a move.
 *
 * What a state of the game on screen means:
 *
 * - It is not our turn: our move is confirmed.
 * - It is our turn, and was not: the turn begins. It counts, unless its message came first;
 *   otherwise that message is still to come.
 * - It is our turn, as before, and a move of ours is pending: the turn continues, or it has gone
 *   and come meanwhile. It counts, but the game may have kept its place.
 * - It is our turn, as before, and no move is pending: nothing has happened.
 */
function gameState(state, event) {
  const { screen } = state;
  const { gameId, myTurn, version } = event;
  if (screen === null || screen.gameId !== gameId) return confirmed(state, event);
  // The screen knows better whose turn it is.
  if (isOld(state, screen, version)) return confirmed(state, { ...event, myTurn: screen.myTurn });
  const turnBegins = myTurn && !screen.myTurn;
  const turnContinues = myTurn && !turnBegins && pending(state).includes(gameId);
  const isUncounted = !isLate(state, gameId, version);
  const overtakenUpTo = overtaken(screen, version, turnContinues);
  state = replace(state, {
    screen: replace(screen, {
      myTurn,
      version: version ?? screen.version,
      awaitsMessage: turnBegins && isUncounted,
    }),
    versions: withVersion(state.versions, gameId, overtakenUpTo),
  });
  if (!myTurn) return notMyTurn(state, event);
  if (isUncounted && (turnBegins || turnContinues)) {
    return turnCame(state, gameId, version, turnBegins);
  }
  return result(state);
}

/**
 * The version up to which a state makes messages old.
 *
 * Its own message may still count: where we know at which version the game was opened, and where
 * our turn seems to continue but may have gone and come.
 */
function overtaken(screen, version, turnContinues) {
  const countsLater = turnContinues || screen.openedAt !== null;
  return version !== null && countsLater ? version - 1 : version;
}

/** True if not newer than the last state, or older than the opened version or a message. */
function isOld(state, screen, version) {
  if (version === null) return false;
  const counted = versionOf(state, screen.gameId) ?? version;
  const newest = Math.max(counted, screen.openedAt ?? counted);
  if (version < newest) return true;
  return screen.version !== null && version <= screen.version;
}

/** True if the version is not newer than the last counted turn. */
function isLate(state, gameId, version) {
  const counted = versionOf(state, gameId);
  return version !== null && counted !== null && version <= counted;
}

/** The versions with this one, unless a newer one is known; the newest entry is last. */
function withVersion(versions, gameId, version) {
  if (version === null) return versions;
  const known = versions.find(([game]) => game === gameId);
  if (known !== undefined && version <= known[1]) return versions;
  const others = versions.filter(([game]) => game !== gameId);
  return [...others, [gameId, version]].slice(-MEMORY);
}

function versionOf(state, gameId) {
  return state.versions.find(([game]) => game === gameId)?.[1] ?? null;
}

/** The game was removed on trust; a later move in it is still pending. */
function moveFailed(state, event) {
  return request(replace(state, { moves: withoutMove(state.moves, event.gameId, event.version) }));
}

/** Remove the oldest move that it can be: an old refusal must not count for a newer move. */
function withoutMove(moves, gameId, version) {
  const at = moves.findIndex(
    ([game, madeFor]) =>
      game === gameId && (version === null || madeFor === null || madeFor === version),
  );
  return at < 0 ? moves : moves.toSpliced(at, 1);
}

/** Messages on their way may have been lost. */
function reconnected(state) {
  const screen = state.screen === null ? null : replace(state.screen, { awaitsMessage: false });
  return request(replace(state, { moves: [], away: [], snapshot: null, screen }));
}

function without(pool, gameId) {
  return pool.filter((game) => game !== gameId);
}

const RULES = {
  started,
  opened,
  invalidated,
  move_sent: moveSent,
  your_turn: yourTurn,
  game_state: gameState,
  move_failed: moveFailed,
  reconnected,
  answered,
  failed,
  pause_over: pauseOver,
};

/** Events that name a game, and those that say whose turn it is. */
const OF_A_GAME = new Set(["opened", "move_sent", "your_turn", "game_state", "move_failed"]);
const OF_A_STATE = new Set(["opened", "game_state"]);

/** The next state and what to do: "refetch" or "pause". The state changes in no other way. */
export function step(state, event) {
  return RULES[event.type](state, { ...event, version: event.version ?? null });
}

/** Games with a move of ours that the backend has not confirmed. */
export function pending(state) {
  return [...new Set(state.moves.map(([gameId]) => gameId))];
}

/** True: a request is under way, or follows. */
export function isBusy(state) {
  return state.inFlight !== null || state.follows !== null;
}

/** The pool without the game on screen, and why its order may be trusted. */
export function navigation(state, current = null) {
  let proof = state.isRestored ? "snapshot" : "server";
  if (state.pool.length <= 2) proof = "irrelevant";
  return { games: without(state.pool, current), proof, pending: isBusy(state) };
}

// ---- the driver

/**
 * The order of the games that wait for a player. Call `start` first.
 *
 * `fetch(signal)` requests up to five ids from the backend, in its order. It holds no policy: the
 * rules decide.
 */
export class WaitingCache {
  #fetch;
  #sleep;
  #state = INITIAL;
  #failures = 0; // pauses in a row
  #pause = null; // the AbortController of the pause that runs
  #closing = new AbortController();
  #listeners = new Set();
  #settled = []; // those that wait until nothing is under way

  constructor(fetch, { sleep = sleepFor } = {}) {
    if (typeof fetch !== "function") throw new TypeError("fetch: must be an async function");
    if (typeof sleep !== "function") throw new TypeError("sleep: must be an async function");
    this.#fetch = fetch;
    this.#sleep = sleep;
  }

  /** Everything that is known, frozen; the same object until something changes. */
  get state() {
    return this.#state;
  }

  /** Where "next game" leads, and why that order can be trusted. */
  navigation(current = null) {
    return navigation(this.#state, current);
  }

  /** Calls `listener(cache)` after every change. Returns a function that ends it. */
  subscribe = (listener) => {
    const subscription = { listener }; // a listener may be given twice
    this.#listeners.add(subscription);
    return () => {
      this.#listeners.delete(subscription);
    };
  };

  /** Request the first order. */
  start() {
    this.hear({ type: "started" });
  }

  /** A game is on screen; `version` is the one shown, if games have versions. */
  opened(gameId, myTurn = true, version = null) {
    this.hear({ type: "opened", gameId, myTurn, version });
  }

  /** We have played, at this version; without one, at the version on screen. */
  moveSent(gameId, version = null) {
    this.hear({ type: "move_sent", gameId, version });
  }

  /** The backend says that it is our turn in a game. */
  yourTurn(gameId, version = null) {
    this.hear({ type: "your_turn", gameId, version });
  }

  /** The backend's state of a game: forward every one that arrives. */
  gameState(gameId, myTurn, version = null) {
    this.hear({ type: "game_state", gameId, myTurn, version });
  }

  /** The backend refused our move, or the move did not end our turn. */
  moveFailed(gameId, version = null) {
    this.hear({ type: "move_failed", gameId, version });
  }

  /** The connection was lost: messages may have been missed. */
  reconnected() {
    this.hear({ type: "reconnected" });
  }

  /** The backend sent `long_wait_invalidated`. */
  invalidated() {
    this.hear({ type: "invalidated" });
  }

  /** Resolves when no request is under way or due, except after a pause. */
  settled() {
    if (this.#isResting()) return Promise.resolve();
    return new Promise((resolve) => this.#settled.push(resolve));
  }

  /** Aborts a running request. Events are refused from then on. */
  close() {
    this.#closing.abort();
    this.#pause?.abort();
    this.#tellSettled();
  }

  /** Handle any of the events above. */
  hear(event) {
    checkEvent(event);
    if (this.#closing.signal.aborted) throw new Error("this WaitingCache is closed; make another one");
    const { state, effects } = step(this.#state, event);
    const isChanged = !isEqual(state, this.#state);
    if (isChanged) this.#state = state;
    for (const effect of effects) {
      this.#pause?.abort();
      this.#pause = null;
      if (effect === "refetch") this.#refetch();
      else this.#waitBeforeRetry();
    }
    if (this.#isResting()) this.#tellSettled();
    if (!isChanged) return;
    for (const { listener } of [...this.#listeners]) attempt(listener, this);
  }

  #isResting() {
    return this.#state.inFlight === null || this.#closing.signal.aborted;
  }

  #tellSettled() {
    for (const resolve of this.#settled.splice(0)) resolve();
  }

  /** Ask the backend, and handle its answer as an event. */
  async #refetch() {
    let event;
    try {
      // After the caller's event has been handled, whatever `fetch` does.
      await null;
      if (this.#closing.signal.aborted) return;
      const answer = await this.#fetch(this.#closing.signal);
      event = { type: "answered", gameIds: checkedAnswer(answer) };
    } catch (error) {
      if (!this.#closing.signal.aborted) {
        console.warn("stillfresh: refetching failed; it is tried again:", error);
      }
      event = { type: "failed" };
    }
    if (this.#closing.signal.aborted) return;
    this.hear(event);
    if (event.type === "answered" && this.#pause === null) this.#failures = 0;
  }

  /** Wait before a refetch is tried again; the pause grows with every failure. */
  async #waitBeforeRetry() {
    const pause = new AbortController();
    this.#pause = pause;
    const milliseconds = Math.min(PAUSE * 2 ** this.#failures, LONGEST_PAUSE);
    this.#failures += 1;
    try {
      await this.#sleep(milliseconds, pause.signal);
    } catch (error) {
      if (!pause.signal.aborted) {
        console.warn("stillfresh: the pause before a refetch failed; the next event asks again:", error);
      }
      return;
    }
    if (pause.signal.aborted) return;
    this.#pause = null;
    this.hear({ type: "pause_over" });
  }
}

/** Resolves after so many milliseconds, or as soon as the signal says that nobody waits. */
function sleepFor(milliseconds, signal) {
  return new Promise((resolve) => {
    const timer = setTimeout(resolve, milliseconds);
    signal.addEventListener("abort", () => {
      clearTimeout(timer);
      resolve();
    });
  });
}

/** A listener that throws is reported, and the others still run. */
function attempt(listener, ...given) {
  try {
    listener(...given);
  } catch (error) {
    if (typeof reportError === "function") reportError(error);
    else console.error(error);
  }
}

function isEqual(one, other) {
  return JSON.stringify(one) === JSON.stringify(other);
}

function isId(gameId) {
  return typeof gameId === "string" || Number.isSafeInteger(gameId);
}

function areIds(gameIds) {
  return Array.isArray(gameIds) && gameIds.every(isId);
}

/** A field that is missing, perhaps because of its spelling, is refused: it would become a game. */
function checkEvent(event) {
  if (!Object.hasOwn(RULES, event.type)) throw new TypeError(`no such event: ${event.type}`);
  const { gameId, myTurn, gameIds, version = null } = event;
  if (OF_A_GAME.has(event.type) && !isId(gameId)) {
    throw new TypeError(`gameId: must be a string or a whole number, not ${String(gameId)}`);
  }
  if (OF_A_STATE.has(event.type) && typeof myTurn !== "boolean") {
    throw new TypeError(`myTurn: must be true or false, not ${String(myTurn)}`);
  }
  if (event.type === "answered" && !areIds(gameIds)) {
    throw new TypeError("gameIds: must be the ids of games, in order, as an array");
  }
  if (version !== null && !Number.isSafeInteger(version)) {
    throw new TypeError(`version: must be a whole number or null, not ${String(version)}`);
  }
}

function checkedAnswer(answer) {
  if (areIds(answer)) return answer;
  throw new TypeError("fetch: must return the ids of games, in order, as an array");
}
