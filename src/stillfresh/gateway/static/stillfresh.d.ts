/** Types of stillfresh.js. The messages are described in docs/live.md. */

export type Verdict = "fresh" | "stale" | "expired" | "gone";

/** A view of something, as it was when it came; `age` is as old as it is when you look. */
export interface View<T = unknown> {
  readonly kind: string;
  readonly id: string;
  /** False: it does not exist, or not any more. */
  readonly found: boolean;
  /** null where it was not found. */
  readonly value: T | null;
  readonly verdict: Verdict | "absent";
  /** When the copy was asked for, in seconds since 1970. */
  readonly fetched_at: number;
  /** Why it is not newer: the last refresh failed. */
  readonly error: string | null;
  /** Seconds since the copy was asked for, at the moment you look. */
  readonly age: number;
}

export type Render<T = unknown> = (view: View<T>, element: Element) => void;

/** A token, or a function that gives one: at each connect, and when the server says `signed_out`. */
export type Token = string | null | undefined | (() => string | null | Promise<string | null>);

export interface Options {
  /** How far around the screen counts as on it, as CSS has margins. Default "0px". */
  rootMargin?: string;
  /** Signs in at each connect. */
  token?: Token;
  /** Watch the elements with a data-fresh attribute. Default true. */
  bind?: boolean;
  /** Milliseconds before the second attempt to connect; each next pause is twice as long. Default 500. */
  minPause?: number;
  /** The longest pause, in milliseconds. Default 30000. */
  maxPause?: number;
}

export type State = "connecting" | "open" | "waiting" | "closed";

export interface StateEvent {
  state: State;
  /** Why the connection was lost, where it was. */
  code?: number;
  reason?: string;
}

/** A kind, an id and, if a copy is there already, its fetched_at. */
export type Item = [kind: string, id: string] | [kind: string, id: string, fetched_at: number | null];

// What is told to the server: one message, or several in an array.

export interface SubscribeMessage {
  type: "subscribe";
  items: Item[];
}
export interface UnsubscribeMessage {
  type: "unsubscribe";
  items: Item[];
}
export interface VisibleMessage {
  type: "visible";
  visible: boolean;
}
export interface RouteMessage {
  type: "route";
  path: string;
}
export interface AtLeastMessage {
  type: "at_least";
  /** Of changes: `Stillfresh-Token` of a response. */
  token: string;
}
export interface SignInMessage {
  type: "sign_in";
  token: string;
}
export interface SignOutMessage {
  type: "sign_out";
}
export interface AskStatsMessage {
  type: "stats";
  token?: string | null;
}
export interface PingMessage {
  type: "ping";
}
export interface PongMessage {
  type: "pong";
}

export type ClientMessage =
  | SubscribeMessage
  | UnsubscribeMessage
  | VisibleMessage
  | RouteMessage
  | AtLeastMessage
  | SignInMessage
  | SignOutMessage
  | AskStatsMessage
  | PingMessage
  | PongMessage;

// What the server tells: one message, or (with ?batch=1) several in an array.

export interface WelcomeMessage {
  type: "welcome";
  /** null is a guest. */
  viewer_id: string | null;
  kinds: string[];
  /** Those of the kinds whose views differ by viewer. */
  per_viewer: string[];
  /** Seconds of silence after which either side asks whether the other is there. */
  heartbeat: number;
  max_subscriptions: number;
}
export interface UpdateMessage<T = unknown> {
  type: "update";
  kind: string;
  id: string;
  value: T;
  fetched_at: number;
  verdict: Verdict;
  /** Seconds, when it was sent. */
  age: number;
  error?: string;
}
export interface AbsentMessage {
  type: "absent";
  kind: string;
  id: string;
  fetched_at: number;
}
export type ErrorCode =
  | "bad_message"
  | "unknown_kind"
  | "bad_id"
  | "sign_in_needed"
  | "sign_in_failed"
  | "sign_in_unavailable"
  | "signed_out"
  | "too_many_subscriptions"
  | "load_failed"
  | "forbidden"
  | "flood";
export interface ErrorMessage {
  type: "error";
  code: ErrorCode;
  message: string;
  kind?: string;
  id?: string;
  /** All items that were not subscribed: `too_many_subscriptions`, `sign_in_unavailable`. */
  items?: [kind: string, id: string][];
}
// Notices: an application registers their types at the server (docs/live.md) and extends `Notices` with its own.

export interface YourTurnMessage {
  type: "your_turn";
  game_id: string;
  version: number;
}
export interface LongWaitInvalidatedMessage {
  type: "long_wait_invalidated";
}
export interface GameStateMessage {
  type: "game_state";
  game_id: string;
  my_turn: boolean;
  version: number;
}
export interface Notices {
  your_turn: YourTurnMessage;
  long_wait_invalidated: LongWaitInvalidatedMessage;
  game_state: GameStateMessage;
}

export interface StatsMessage {
  type: "stats";
  [figure: string]: unknown;
}

export type ServerMessage =
  | WelcomeMessage
  | UpdateMessage
  | AbsentMessage
  | ErrorMessage
  | Notices[keyof Notices]
  | StatsMessage
  | PingMessage
  | PongMessage;

export interface Events extends Notices {
  state: StateEvent;
  welcome: WelcomeMessage;
  update: UpdateMessage;
  absent: AbsentMessage;
  error: ErrorMessage;
  stats: StatsMessage;
}

export class Client {
  constructor(url: string | URL | undefined, options: Options);
  readonly state: State;
  /** Who the server takes us for; null is a guest. */
  readonly viewerId: string | null;
  /** What is subscribed now, as "kind:id". */
  readonly subscribed: string[];
  /** Returns what ends it. */
  on<Name extends keyof Events>(name: Name, listener: (event: Events[Name]) => void): () => boolean;
  /** Keeps `id` fresh while `element` is on screen; returns what ends it. */
  watch<T = unknown>(
    element: Element,
    kind: string,
    id: string,
    render?: Render<T> | null,
  ): () => void;
  /** Watches the [data-fresh] elements in `root`, and `root` itself. */
  bind(root: Document | DocumentFragment | Element): void;
  /** From now on as this viewer, also after a reconnect; without a token, a guest. */
  signIn(token: Token): Promise<void>;
  /** A guest again; a token that is still on its way is not used. */
  signOut(): void;
  /** The user has changed something: shows nothing older, for a minute. Takes its token, or the Response. */
  atLeast(given: string | Response | null): void;
  /** Asks for the operator's figures: "stats" events, now and every second. */
  stats(token?: string | null): void;
  /** For good. */
  close(): void;
}

/** Default address: v1/live beside this module. */
export function connect(url?: string | URL, options?: Options): Client;

/** With the client made last, or one made now. */
export function watch<T = unknown>(
  element: Element,
  kind: string,
  id: string,
  render?: Render<T> | null,
): () => void;

declare global {
  interface HTMLElementEventMap {
    "stillfresh:update": CustomEvent<View>;
  }
}
