/** Types of stillfresh-waiting.js, the Longest-Waiting cache. */

export type GameId = string | number;

/** What a player may be shown, and why that order is the backend's. */
export type Proof =
  /** Two games or fewer: any order leads to the same next game. */
  | "irrelevant"
  /** The last answer; games may have been removed since, which reorders nothing. */
  | "server"
  /** An earlier answer, restored because only its own game has come and gone since. */
  | "snapshot";

export interface Navigation {
  readonly games: readonly GameId[];
  readonly proof: Proof;
  /** True: a new answer is on its way or due. */
  readonly pending: boolean;
}

/** An answer of the backend, kept for the one game whose turn it was requested for. */
export interface Snapshot {
  readonly gameId: GameId;
  readonly pool: readonly GameId[];
  readonly isCompleteFromServer: boolean;
  /** Read while the turn continued: the order fits only until the turn comes again. */
  readonly isMidTurn: boolean;
}

export interface RefetchRequest {
  /** The game whose snapshot the answer becomes, if any. */
  readonly snapshotOf: GameId | null;
  readonly isMidTurn: boolean;
  readonly isEcho: boolean;
}

export interface Screen {
  readonly gameId: GameId;
  readonly myTurn: boolean;
  readonly openedAt: number | null;
  readonly version: number | null;
  readonly awaitsMessage: boolean;
}

/** Everything that the cache knows. Plain data: it may be stored as JSON. */
export interface State {
  readonly pool: readonly GameId[];
  readonly isCompleteFromServer: boolean;
  readonly snapshot: Snapshot | null;
  readonly played: "not since" | "since" | "before";
  readonly isRestored: boolean;
  readonly inFlight: RefetchRequest | null;
  readonly follows: RefetchRequest | null;
  readonly moves: readonly (readonly [GameId, number | null])[];
  readonly away: readonly GameId[];
  readonly screen: Screen | null;
  readonly versions: readonly (readonly [GameId, number])[];
  readonly limit: number;
}

export type Event =
  | { type: "started" | "invalidated" | "reconnected" | "failed" | "pause_over" }
  | { type: "opened" | "game_state"; gameId: GameId; myTurn: boolean; version?: number | null }
  | { type: "move_sent" | "your_turn" | "move_failed"; gameId: GameId; version?: number | null }
  | { type: "answered"; gameIds: readonly GameId[] };

/** "refetch": ask the backend, then `answered` or `failed`. "pause": wait, then `pause_over`. */
export type Effect = "refetch" | "pause";

export interface Step {
  readonly state: State;
  readonly effects: readonly Effect[];
}

/** Games in one answer of the backend: as many as this, and there may be more. */
export const LIMIT: number;
/** Nothing is known yet. */
export const INITIAL: State;

/** The next state after an event, and what to do. Pure. */
export function step(state: State, event: Event): Step;
/** The pool without the game on screen, and why its order may be trusted. */
export function navigation(state: State, current?: GameId | null): Navigation;
/** Games with a move of ours that the backend has not confirmed. */
export function pending(state: State): GameId[];
/** True: a request is under way, or follows. */
export function isBusy(state: State): boolean;

export interface WaitingOptions {
  /** Resolves after so many milliseconds, or when the signal is aborted. Default: a timer. */
  sleep?: (milliseconds: number, signal: AbortSignal) => Promise<unknown>;
}

/** Requests up to five ids from the backend, in its order. The signal is aborted by `close`. */
export type Fetch = (signal: AbortSignal) => Promise<readonly GameId[]>;

export class WaitingCache {
  constructor(fetch: Fetch, options?: WaitingOptions);
  /** Frozen, and the same object until something changes. */
  readonly state: State;
  navigation(current?: GameId | null): Navigation;
  /** Calls `listener(cache)` after every change; returns what ends it. Bound to this cache. */
  readonly subscribe: (listener: (cache: WaitingCache) => void) => () => void;
  /** Request the first order. */
  start(): void;
  /** A game is on screen; `version` is the one shown. */
  opened(gameId: GameId, myTurn?: boolean, version?: number | null): void;
  /** We have played, at this version; without one, at the version on screen. */
  moveSent(gameId: GameId, version?: number | null): void;
  /** The backend says that it is our turn in a game. */
  yourTurn(gameId: GameId, version?: number | null): void;
  /** The backend's state of a game: forward every one that arrives. */
  gameState(gameId: GameId, myTurn: boolean, version?: number | null): void;
  /** The backend refused our move, or the move did not end our turn. */
  moveFailed(gameId: GameId, version?: number | null): void;
  /** The connection was lost: messages may have been missed. */
  reconnected(): void;
  /** The backend sent `long_wait_invalidated`. */
  invalidated(): void;
  /** Any of the events above. */
  hear(event: Event): void;
  /** Resolves when no request is under way or due, except after a pause. */
  settled(): Promise<void>;
  /** Aborts a running request. Events are refused from then on. */
  close(): void;
}
