// stillfresh.js: keeps what is on screen fresh, and nothing else.
//
//   <script type="module" src="/stillfresh.js"></script>
//   <span data-fresh="price:sku-1"></span>
//
// or, by code: connect("/v1/live"), then watch(element, "price", "sku-1", (view) => …).
// What is on screen is subscribed, what is not is unsubscribed: one message a frame. Values from
// upstream are shown as text, never as HTML. The messages are described in docs/live.md.

const LARGEST_MESSAGE = 50_000; // characters; the server takes more
const STABLE_AFTER = 10_000; // milliseconds; a connection that lasts so long starts the pauses anew
const MOST_WARNINGS = 100;
const KEPT_ALIVE = 25; // seconds, until the server says otherwise
const LONGEST_PATH = 2_000; // characters; the server refuses more
const LONGEST_ID = 1_000; // likewise
const MOST_REMEMBERED = 1_000; // mistakes of the page; the oldest are forgotten
const RENEWED_EVERY = 10_000; // milliseconds; a token that ends sooner is not replaced by itself
const CHANGES_FOR = 60_000; // milliseconds for which a token of changes is sent again
const LONGEST_CHANGES = 400; // characters of such a token
const MOST_CHANGES = 10; // tokens that are sent again

/** Connects, and watches every [data-fresh] of the document; see stillfresh.d.ts for the options. */
export function connect(url, options = {}) {
  if (automatic) automatic.close();
  automatic = null;
  const client = new Client(url, options);
  current = client;
  return client;
}

/** As client.watch, with the client made last. */
export function watch(element, kind, id, render) {
  return (current ?? connect()).watch(element, kind, id, render);
}

let current = null;
let automatic = null;
const warned = new Set();

export class Client {
  #url;
  #options;
  #listeners = new Map();
  #socket = null;
  #state = "closed";
  #isClosed = false;
  #attempts = 0;
  #openedAt = 0;
  #retry = null;
  #heardAt = 0;
  #heartbeat = KEPT_ALIVE;
  #pulse = null;
  #welcome = null; // the last one of this connection
  #isReady = false; // signed in, or nobody has to: subscriptions may be sent
  #viewer = null; // whose views are shown; null is a guest's
  #token = null; // the one that was sent last
  #renewedAt = -Infinity; // when a token that had ended was last replaced
  #again = null; // the timer of the next try, while the server cannot sign this viewer in
  #failures = 0; // tries of that kind since the last success
  #asked = 0; // counts the tokens; a sign-in with an older token is ignored
  #unanswered = 0; // sign_in and sign_out, before we are ready
  #topics = new Map(); // what is on screen: key -> Topic
  #sent = new Set(); // the keys that the server knows of
  #refused = new Set(); // keys that the server has no place for
  #bad = new Map(); // keys that are no ids, also for the next connection -> why
  #isFull = false;
  #isAnyGone = false; // something was taken out of the document
  #barred = new Set(); // kinds that a guest may not see
  #perViewer = new Set(); // kinds whose views differ by viewer
  #watches = new WeakMap(); // element -> Set of Watch; gone with the element
  #bound = new WeakMap(); // element -> the Watch of its data-fresh attribute
  #frame = null;
  #path = null;
  #told = null;
  #changes = []; // tokens of changes, each with the time at which it came
  #warned = new Map(); // kinds that there are not -> why
  #onScreen;
  #inDocument;
  #undo = [];

  constructor(url, options) {
    this.#url = addressOf(url);
    this.#options = { rootMargin: "0px", minPause: 500, maxPause: 30_000, bind: true, ...options };
    this.#onScreen = new IntersectionObserver((entries) => this.#moved(entries), {
      rootMargin: this.#options.rootMargin,
    });
    this.#inDocument = new MutationObserver((changes) => this.#changed(changes));
    this.#inDocument.observe(document, {
      subtree: true,
      childList: true,
      attributes: true,
      attributeFilter: ["data-fresh"],
    });
    this.#listen(document, "visibilitychange", () => this.#looked());
    this.#listen(window, "pageshow", () => this.#looked());
    this.#listen(window, "online", () => this.#open());
    this.#followRoute();
    const aging = setInterval(() => this.#age(), 1000);
    this.#undo.push(() => clearInterval(aging));
    if (this.#options.bind) this.bind(document);
    this.#open();
  }

  /** "connecting", "open", "waiting" (for the next attempt, or to be looked at) or "closed". */
  get state() {
    return this.#state;
  }

  /** Who the server takes us for; null is a guest. */
  get viewerId() {
    return this.#viewer;
  }

  /** The keys that are subscribed now, as "kind:id". */
  get subscribed() {
    return [...this.#sent].map((key) => key.replace("\n", ":"));
  }

  /** Tells `listener` of "state", "error", "update", or any message by its type; returns the off. */
  on(name, listener) {
    const listeners = this.#listeners.get(name) ?? new Set();
    this.#listeners.set(name, listeners.add(listener));
    return () => listeners.delete(listener);
  }

  /** Keeps `id` fresh while `element` is on screen; `render(view, element)` shows it. */
  watch(element, kind, id, render) {
    if (!(element instanceof Element)) throw new TypeError("watch: takes an element");
    if (!kind || !id || typeof kind !== "string" || typeof id !== "string") {
      throw new TypeError("watch: takes a kind and an id, both text and not empty");
    }
    const watching = { element, kind, id, key: `${kind}\n${id}`, render, view: null, isOn: false };
    const watches = this.#watches.get(element) ?? new Set();
    this.#watches.set(element, watches.add(watching));
    if (this.#isClosed) return () => this.#unwatch(watching);
    if (watches.size > 1) this.#onScreen.unobserve(element); // so that it is told of anew
    this.#onScreen.observe(element);
    return () => this.#unwatch(watching);
  }

  /** Watches the [data-fresh] elements in `root`, and `root` itself. */
  bind(root) {
    if (root instanceof Element && root.hasAttribute("data-fresh")) this.#bind(root);
    for (const element of root.querySelectorAll("[data-fresh]")) this.#bind(element);
  }

  /** From now on as this viewer; also after a reconnect. */
  async signIn(token) {
    this.#options.token = token;
    const [asked, socket] = [++this.#asked, this.#socket];
    if (!this.#isReady) return this.#begin();
    const given = await valueOf(token);
    if (asked !== this.#asked || socket !== this.#socket) return;
    this.#sendToken(given);
  }

  /** A guest again. */
  signOut() {
    this.#options.token = null;
    this.#asked += 1;
    if (this.#isReady) {
      this.#send([{ type: "sign_out" }]);
    } else {
      this.#settle(null);
      this.#begin();
    }
  }

  /**
   * The user has changed something: shows nothing from before that. `given` is a token, or the
   * Response to the request that made the change. For a minute, also after a reconnect.
   */
  atLeast(given) {
    const token = given instanceof Response ? given.headers.get("Stillfresh-Token") : given;
    if (!token || this.#isClosed) return;
    if (typeof token !== "string") throw new TypeError("atLeast: takes a token or a Response");
    const cameAt = performance.now();
    this.#changes = [...this.#lastChanges().slice(-MOST_CHANGES + 1), { token, cameAt }];
    if (this.#isReady) this.#send([changesMessage(token)]);
  }

  #lastChanges() {
    const oldest = performance.now() - CHANGES_FOR;
    return this.#changes.filter(({ cameAt }) => cameAt > oldest);
  }

  /** Asks for the operator's figures: "stats" events, now and every second. */
  stats(token) {
    this.#options.stats = { type: "stats", ...(token ? { token } : {}) };
    if (this.#isReady) this.#send([this.#options.stats]);
  }

  /** For good: nothing is watched or tried again. */
  close() {
    this.#isClosed = true;
    this.#onScreen.disconnect();
    this.#inDocument.disconnect();
    for (const undo of this.#undo.splice(0)) undo();
    clearTimeout(this.#retry);
    cancelAnimationFrame(this.#frame);
    this.#drop();
    for (const { watches } of this.#topics.values()) {
      for (const watching of watches) watching.isOn = false;
    }
    this.#topics.clear();
    this.#become("closed");
    if (current === this) current = null;
  }

  // ---- on screen, in the document, looked at

  #moved(entries) {
    for (const { target, isIntersecting } of entries) {
      for (const watching of this.#watches.get(target) ?? []) {
        if (isIntersecting) this.#enter(watching);
        else this.#leave(watching);
      }
    }
  }

  #enter(watching) {
    if (watching.isOn) return;
    watching.isOn = true;
    const { key, kind, id } = watching;
    if (watching.view !== null && this.#isOfAnother(watching)) {
      this.#show(watching, viewOf({ type: "absent", kind, id, fetched_at: 0 }));
      watching.view = null;
    }
    const topic = this.#topics.get(key) ?? { kind, id, view: null, watches: new Set() };
    this.#topics.set(key, topic);
    topic.watches.add(watching);
    if (isNewer(watching.view, topic.view)) topic.view = watching.view;
    else if (topic.view !== null) this.#show(watching, topic.view);
    this.#flushSoon();
  }

  /** Seen by somebody else, before it went off the screen. */
  #isOfAnother({ kind, viewer }) {
    return this.#perViewer.has(kind) && viewer !== this.#viewer;
  }

  #leave(watching) {
    if (!watching.isOn) return;
    watching.isOn = false;
    const topic = this.#topics.get(watching.key);
    topic.watches.delete(watching);
    if (topic.watches.size === 0) this.#topics.delete(watching.key);
    this.#flushSoon();
  }

  #unwatch(watching) {
    const watches = this.#watches.get(watching.element);
    if (!watches?.delete(watching)) return;
    if (watches.size === 0) this.#onScreen.unobserve(watching.element);
    this.#leave(watching);
  }

  #changed(changes) {
    for (const change of changes) {
      if (change.type === "attributes") this.#bind(change.target);
      for (const node of change.addedNodes) {
        if (node instanceof Element && this.#options.bind) this.bind(node);
      }
      for (const node of change.removedNodes) this.#isAnyGone ||= node instanceof Element;
    }
    if (this.#isAnyGone) this.#flushSoon(); // by then it may be back, somewhere else
  }

  #leaveGone() {
    if (!this.#isAnyGone) return;
    this.#isAnyGone = false;
    for (const { watches } of [...this.#topics.values()]) {
      for (const watching of [...watches]) {
        if (watching.element.isConnected) continue;
        this.#leave(watching);
        this.#onScreen.unobserve(watching.element); // put back within this frame, nothing
        this.#onScreen.observe(watching.element); //   would have changed: it is told of anew
      }
    }
  }

  #bind(element) {
    if (!this.#options.bind) return;
    const [, kind, id] = /^([^:]+):(.+)$/s.exec(element.dataset.fresh ?? "") ?? [];
    const before = this.#bound.get(element);
    if (before?.watching === `${kind}\n${id}`) return;
    before?.off();
    this.#bound.delete(element);
    if (!kind && element.dataset.fresh) {
      warn(`data-fresh="${element.dataset.fresh}": write it as kind:id`);
    }
    if (kind) {
      const off = this.watch(element, kind, id, bindText);
      this.#bound.set(element, { watching: `${kind}\n${id}`, off });
    }
  }

  #looked() {
    const isVisible = document.visibilityState === "visible";
    if (this.#isReady && this.#told !== isVisible) {
      this.#told = isVisible;
      this.#send([{ type: "visible", visible: isVisible }]);
    }
    if (isVisible) {
      this.#open();
      this.#flushSoon();
    }
  }

  #followRoute() {
    const went = () => {
      if (pathHere() !== this.#path) this.#flushSoon();
    };
    if (window.navigation) {
      this.#listen(window.navigation, "currententrychange", went);
      return;
    }
    this.#listen(window, "popstate", went);
    for (const name of ["pushState", "replaceState"]) {
      const original = history[name];
      const told = function (...given) {
        original.apply(this, given);
        went();
      };
      history[name] = told;
      this.#undo.push(() => {
        if (history[name] === told) history[name] = original;
      });
    }
  }

  #listen(target, name, listener) {
    target.addEventListener(name, listener);
    this.#undo.push(() => target.removeEventListener(name, listener));
  }

  // ---- what is told to the server: at most once a frame

  #flushSoon() {
    if (this.#frame !== null || this.#isClosed) return;
    this.#frame = requestAnimationFrame(() => {
      this.#frame = null;
      this.#flush();
    });
  }

  #flush() {
    this.#leaveGone();
    if (!this.#isReady) return;
    const messages = [];
    if (pathHere() !== this.#path) {
      if (this.#path !== null) {
        this.#sent.clear(); // another route ends all subscriptions
        this.#refused.clear();
      }
      this.#path = pathHere();
      messages.push({ type: "route", path: this.#path });
    }
    const gone = [...this.#sent].filter((key) => !this.#topics.has(key));
    if (gone.length > 0) {
      messages.push({ type: "unsubscribe", items: gone.map(itemOf) });
      for (const key of gone) this.#sent.delete(key);
      this.#refused.clear(); // there may be a place now
    }
    const items = this.#wanted();
    if (items.length > 0) messages.push({ type: "subscribe", items });
    if (messages.length > 0) this.#send(messages);
  }

  /** What is on screen and not subscribed yet, as far as there are places; the others wait. */
  #wanted() {
    const most = this.#welcome.max_subscriptions;
    const items = [];
    const waiting = [];
    for (const [key, topic] of this.#topics) {
      if (this.#sent.has(key) || this.#refused.has(key) || !this.#mayAsk(key, topic)) continue;
      const { kind, id, view } = topic;
      if (this.#sent.size >= most) {
        waiting.push(key);
        continue;
      }
      this.#sent.add(key);
      items.push(view === null ? [kind, id] : [kind, id, view.fetched_at]);
    }
    const wasFull = this.#isFull;
    this.#isFull = waiting.length > 0;
    if (this.#isFull && !wasFull) {
      const message = `at most ${most} at once: ${waiting.length} wait for a place`;
      warn(message);
      this.#emit("error", { type: "error", code: "too_many_subscriptions", message });
    }
    this.#fault(waiting, `waits for a place: at most ${most} at once`);
    return items;
  }

  /** Do not send what the server would refuse: it closes a connection that makes many mistakes. */
  #mayAsk(key, topic) {
    if (!this.#isOpen(topic)) return false;
    const { kind, id, watches } = topic;
    const message = `an id is text of 1 to ${LONGEST_ID} characters, none of them a control character`;
    if (isId(id) && !this.#bad.has(key)) return true;
    fault(watches, this.#bad.get(key) ?? message);
    if (!this.#bad.has(key)) {
      remember(this.#bad, key, message);
      warn(`data-fresh of ${kind}: ${message}`);
      this.#emit("error", { type: "error", code: "bad_id", message, kind, id });
    }
    return false;
  }

  #isOpen({ kind, watches }) {
    const { kinds } = this.#welcome;
    if (kinds.includes(kind)) return !this.#barred.has(kind);
    const message = `no such kind: ${kind}`;
    fault(watches, message);
    if (!this.#warned.has(kind)) {
      remember(this.#warned, kind, message);
      warn(`${message}; there are: ${kinds.join(", ") || "none"}`);
      this.#emit("error", { type: "error", code: "unknown_kind", message, kind });
    }
    return false;
  }

  #send(messages) {
    if (this.#socket?.readyState !== WebSocket.OPEN) return;
    for (const some of inSize(messages)) {
      this.#socket.send(JSON.stringify(some.length === 1 ? some[0] : some));
    }
  }

  // ---- the connection

  #open() {
    if (this.#isClosed || this.#socket !== null) return;
    clearTimeout(this.#retry);
    if (document.visibilityState !== "visible") {
      this.#become("waiting"); // until somebody looks
      return;
    }
    this.#become("connecting");
    const socket = new WebSocket(this.#url);
    this.#socket = socket;
    socket.onopen = () => {
      this.#openedAt = this.#heardAt = performance.now();
      this.#become("open");
      this.#watchPulse();
    };
    socket.onmessage = ({ data }) => this.#heard(data, socket);
    socket.onclose = ({ code, reason }) => this.#lost(code, reason);
  }

  #lost(code, reason) {
    const lasted = this.#state === "open" ? performance.now() - this.#openedAt : 0;
    this.#attempts = lasted > STABLE_AFTER ? 0 : this.#attempts + 1;
    this.#drop();
    if (this.#isClosed) return;
    this.#retry = setTimeout(() => this.#open(), this.#pauseAfter(this.#attempts - 1));
    this.#become("waiting", { code, reason });
  }

  /** Milliseconds: twice as long after each failure, and never the same for everybody. */
  #pauseAfter(failures) {
    const { minPause, maxPause } = this.#options;
    const pause = Math.min(maxPause, minPause * 2 ** Math.min(failures, 20));
    return Math.max(0, pause) * (0.5 + Math.random() / 2);
  }

  #drop() {
    clearInterval(this.#pulse);
    clearTimeout(this.#again);
    this.#failures = 0;
    if (this.#socket !== null) {
      this.#socket.onopen = this.#socket.onmessage = this.#socket.onclose = null;
      this.#socket.close();
    }
    this.#socket = null;
    this.#isReady = this.#isFull = false;
    this.#unanswered = 0;
    this.#welcome = null;
    this.#sent.clear();
    this.#refused.clear();
    this.#barred.clear();
    this.#path = this.#told = null;
  }

  #watchPulse() {
    clearInterval(this.#pulse);
    this.#pulse = setInterval(() => {
      const silence = (performance.now() - this.#heardAt) / 1000;
      if (silence > 2 * this.#heartbeat) this.#lost(4408, "nothing was heard");
      else if (silence > this.#heartbeat) this.#send([{ type: "ping" }]);
    }, (this.#heartbeat * 1000) / 2);
  }

  #become(state, why = {}) {
    if (state === this.#state) return;
    this.#state = state;
    this.#emit("state", { state, ...why });
  }

  #emit(name, event) {
    for (const listener of [...(this.#listeners.get(name) ?? [])]) attempt(listener, event);
  }

  // ---- what the server says

  #heard(data, socket) {
    this.#heardAt = performance.now();
    const frame = JSON.parse(data);
    for (const message of Array.isArray(frame) ? frame : [frame]) {
      if (socket === this.#socket) this.#hear(message); // a listener may have closed it
    }
  }

  #hear(message) {
    switch (message.type) {
      case "update":
      case "absent":
        this.#update(message);
        break;
      case "welcome":
        this.#welcomed(message);
        break;
      case "error":
        this.#failed(message);
        break;
      case "ping":
        this.#send([{ type: "pong" }]);
        return;
      case "pong":
        return;
    }
    this.#emit(message.type, message);
  }

  #update(message) {
    const topic = this.#topics.get(`${message.kind}\n${message.id}`);
    if (topic) this.#tell(topic, viewOf(message));
  }

  #tell(topic, view) {
    topic.view = view;
    for (const watching of topic.watches) this.#show(watching, view);
  }

  #show(watching, view) {
    watching.view = view;
    watching.viewer = this.#viewer;
    mark(watching.element, view);
    if (watching.render) attempt(watching.render, view, watching.element);
    watching.element.dispatchEvent(
      new CustomEvent("stillfresh:update", { bubbles: true, detail: view }),
    );
  }

  #welcomed(message) {
    const isFirst = this.#welcome === null;
    this.#welcome = message;
    this.#perViewer = new Set(message.per_viewer);
    this.#heartbeat = message.heartbeat;
    this.#watchPulse();
    if (isFirst) this.#begin();
    else if (this.#isReady) this.#settle(message.viewer_id);
    else this.#answered();
  }

  /** Sign in first. What is on screen is requested when the server has answered. */
  async #begin() {
    if (this.#welcome === null) return;
    const [asked, socket] = [this.#asked, this.#socket];
    const token = await valueOf(this.#options.token);
    if (asked !== this.#asked || socket !== this.#socket || this.#isReady) return;
    if (!token && this.#unanswered === 0) {
      this.#start();
      return;
    }
    this.#unanswered += 1;
    this.#sendToken(token);
  }

  #sendToken(token) {
    this.#token = token;
    this.#send([token ? { type: "sign_in", token } : { type: "sign_out" }]);
  }

  /** The token is not valid any more: a page that can give another one is asked for it. */
  async #renew() {
    const { token } = this.#options;
    if (typeof token !== "function") {
      this.#options.token = null; // the next connection is a guest's
      return;
    }
    const now = performance.now();
    if (now - this.#renewedAt < RENEWED_EVERY) return;
    this.#renewedAt = now;
    const [asked, socket] = [++this.#asked, this.#socket];
    const given = await valueOf(token);
    if (asked !== this.#asked || socket !== this.#socket) return;
    if (given && given !== this.#token) this.#sendToken(given);
  }

  /** The server cannot sign this viewer in just now: try again, after growing pauses. */
  #tryAgain() {
    clearTimeout(this.#again);
    this.#again = setTimeout(() => {
      this.#refused.clear();
      if (this.#viewer === null && this.#options.token) this.signIn(this.#options.token);
      else this.#flushSoon();
    }, this.#pauseAfter(this.#failures));
    this.#failures += 1;
  }

  #answered() {
    this.#unanswered = Math.max(0, this.#unanswered - 1);
    if (this.#unanswered === 0) this.#start();
  }

  #start() {
    this.#isReady = true;
    this.#told = document.visibilityState === "visible";
    const messages = this.#told ? [] : [{ type: "visible", visible: false }];
    for (const { token } of this.#lastChanges()) messages.push(changesMessage(token));
    if (this.#options.stats) messages.push(this.#options.stats);
    if (messages.length > 0) this.#send(messages);
    this.#settle(this.#welcome.viewer_id);
    this.#flush();
  }

  /** Another viewer's views are neither shown nor taken for known. */
  #settle(viewer) {
    if (viewer === this.#viewer) return;
    this.#viewer = viewer;
    if (viewer !== null) this.#failures = 0;
    this.#barred.clear();
    for (const [key, topic] of this.#topics) {
      if (!this.#perViewer.has(topic.kind)) continue;
      this.#sent.delete(key);
      if (topic.view === null) continue;
      const { kind, id } = topic;
      this.#tell(topic, viewOf({ type: "absent", kind, id, fetched_at: 0 }));
      topic.view = null;
    }
    this.#flush();
  }

  #failed(error) {
    const { code, kind, id } = error;
    const items = error.items ?? (id === undefined ? [] : [[kind, id]]);
    const keys = items.map(([kind, id]) => `${kind}\n${id}`);
    if (code === "load_failed") {
      this.#fault(keys, error.message);
      return;
    }
    if (code === "signed_out") {
      this.#renew(); // a welcome follows, which makes us a guest
      return;
    }
    if (code === "sign_in_unavailable") this.#tryAgain();
    if (code === "bad_id") {
      for (const key of keys) remember(this.#bad, key, error.message);
    } else if (keys.length > 0 && (code === "too_many_subscriptions" || code === "sign_in_unavailable")) {
      for (const key of keys) this.#refused.add(key); // until there may be a place, or an answer
    } else if (kind !== undefined) {
      this.#barred.add(kind);
      for (const [key, topic] of this.#topics) if (topic.kind === kind) keys.push(key);
    } else if (!this.#isReady && this.#unanswered > 0) {
      this.#answered();
    }
    for (const key of keys) this.#sent.delete(key);
    this.#fault(keys, error.message);
    if (keys.length > 0) this.#flushSoon(); // for those that wait
  }

  #fault(keys, message) {
    for (const key of keys) fault(this.#topics.get(key)?.watches ?? [], message);
  }

  #age() {
    if (document.visibilityState !== "visible") return;
    for (const { watches, view } of this.#topics.values()) {
      if (view === null) continue;
      for (const { element } of watches) element.dataset.age = Math.floor(view.age);
    }
  }
}

function addressOf(url) {
  const address = new URL(url ?? new URL("v1/live", import.meta.url), location.href);
  address.protocol = address.protocol.replace(/^http/, "ws");
  address.searchParams.set("batch", "1");
  address.hash = "";
  return address.href;
}

/** One that is too long counts at the server as a change by anybody, and so does an unreadable one. */
function changesMessage(token) {
  return { type: "at_least", token: token.slice(0, LONGEST_CHANGES + 1) };
}

function pathHere() {
  return location.pathname.slice(0, LONGEST_PATH);
}

function itemOf(key) {
  return key.split(/\n(.*)/s, 2);
}

/** As the server has it: some text, no control character, no line end, no half of a character. */
function isId(id) {
  if (id === "" || id.length > 2 * LONGEST_ID) return false;
  return [...id].length <= LONGEST_ID && !NOT_IN_IDS.test(id);
}

const NOT_IN_IDS = /[\p{Cc}\p{Cs}\p{Zl}\p{Zp}]/u;

function remember(some, key, why) {
  some.set(key, why);
  if (some.size > MOST_REMEMBERED) some.delete(some.keys().next().value);
}

function viewOf(message) {
  const { kind, id, fetched_at, error = null } = message;
  const found = message.type === "update";
  const age = message.age ?? 0;
  const heardAt = performance.now();
  return Object.freeze({
    kind,
    id,
    found,
    value: found ? message.value : null,
    verdict: found ? message.verdict : "absent",
    fetched_at,
    error,
    get age() {
      return age + (performance.now() - heardAt) / 1000;
    },
  });
}

function isNewer(view, than) {
  return view !== null && (than === null || view.fetched_at > than.fetched_at);
}

/** The attributes that a stylesheet may speak of. */
function mark(element, view) {
  element.dataset.verdict = view.verdict;
  element.dataset.fetchedAt = view.fetched_at;
  element.dataset.age = Math.floor(view.age);
  if (view.error === null) delete element.dataset.error;
  else element.dataset.error = view.error;
}

/** Note why nothing is shown, for stylesheets and people. The next view removes the note. */
function fault(watches, message) {
  for (const { element } of watches) element.dataset.error = message;
}

/** Tell the page's author of a mistake in the page, once. */
function warn(message) {
  if (warned.size < MOST_WARNINGS && !warned.has(message)) {
    warned.add(message);
    console.warn(`stillfresh: ${message}`);
  }
}

/** As text: the fields that are named, or the whole value where none is. */
function bindText(view, element) {
  const fields = [...element.querySelectorAll("[data-fresh-field]")].filter(
    (inner) => inner.parentElement.closest("[data-fresh]") === element,
  );
  if (element.hasAttribute("data-fresh-field")) fields.push(element);
  for (const inner of fields) {
    const path = inner.dataset.freshField;
    const value = valueAt(view.value, path);
    if (view.found && value === undefined) warn(`a view of ${view.kind} has no field ${path}`);
    inner.textContent = textOf(value);
  }
  if (fields.length === 0 && typeof view.value !== "object") element.textContent = view.value;
  else if (fields.length === 0 && !view.found) element.textContent = "";
}

/** What stands there; undefined if nothing does. */
function valueAt(value, path) {
  for (const name of path === "" ? [] : path.split(".")) {
    value = value !== null && Object.hasOwn(Object(value), name) ? value[name] : undefined;
  }
  return value;
}

function textOf(value) {
  return value === null || value === undefined || typeof value === "object" ? "" : String(value);
}

/** Messages in arrays that the server takes: lists of items are cut where they grow too long. */
function* inSize(messages) {
  let some = [];
  let size = 0;
  for (const message of messages.flatMap(cut)) {
    const length = JSON.stringify(message).length;
    if (some.length > 0 && size + length > LARGEST_MESSAGE) {
      yield some;
      some = [];
      size = 0;
    }
    some.push(message);
    size += length;
  }
  if (some.length > 0) yield some;
}

function cut(message) {
  if (!message.items || JSON.stringify(message).length <= LARGEST_MESSAGE) return [message];
  const half = Math.ceil(message.items.length / 2);
  if (half === message.items.length) return [message];
  return [message.items.slice(0, half), message.items.slice(half)]
    .map((items) => ({ ...message, items }))
    .flatMap(cut);
}

async function valueOf(token) {
  try {
    return typeof token === "function" ? await token() : token;
  } catch (error) {
    reportError(error);
    return null;
  }
}

/** A listener that throws is reported, and the others still run. */
function attempt(listener, ...given) {
  try {
    listener(...given);
  } catch (error) {
    reportError(error);
  }
}

// A page that only has attributes needs no code: if nobody has connected when it is there, we do.
function begin() {
  if (current === null && document.querySelector("[data-fresh]") !== null) {
    automatic = current = new Client(undefined, {});
  }
}
function beginWhenLoaded() {
  if (document.readyState === "complete") setTimeout(begin);
  else for (const name of ["DOMContentLoaded", "load"]) window.addEventListener(name, begin);
}
if (typeof document !== "undefined") beginWhenLoaded(); // a server that renders React has none
