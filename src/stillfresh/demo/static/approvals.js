// Requests that wait for the visitor: each in a place of its own, with what is left of its time.
// A place that empties stays where it is, and is not filled again under a pointer: the button that is
// pressed is the one that was aimed at.

import { byId, isHeld, make, send, write } from "./fresh.js";

const PLACES = 3; // as many as wait at once
const places = Array.from({ length: PLACES }, () => ({ element: make("li"), id: null, until: 0 }));
let ttl = 1;

export function start() {
  byId("approvals").append(...places.map(({ element }) => element));
}

/** Told with the state: what is pending now. What is missing is gone. */
export function told(state) {
  ttl = state.ttl;
  const pending = new Map(state.pending.map((ask) => [ask.id, ask]));
  for (const place of places) {
    if (pending.has(place.id)) place.until = performance.now() + pending.get(place.id).left * 1000;
    else if (place.id) clear(place);
    pending.delete(place.id);
  }
  for (const ask of pending.values()) {
    const free = places.find((place) => !place.id && !isHeld(place.element));
    if (free) fill(free, ask);
  }
  write(byId("approvals-count"), `${state.decided} decided, ${state.expired} expired`);
  tick();
}

function fill(place, ask) {
  const text = make("span");
  text.append(make("b", ask.who), ` ${ask.what}`);
  const yes = make("button", "Approve", { type: "button" });
  yes.addEventListener("click", () => decide(place, yes));
  place.left = make("span", "", { class: "muted small" });
  place.bar = make("progress", "", { max: "1", "aria-label": "Time left" });
  place.element.replaceChildren(text, place.bar, place.left, yes);
  Object.assign(place, { id: ask.id, until: performance.now() + ask.left * 1000 });
}

/** Focus that was in it goes on to the next request, or to the line below. */
function clear(place) {
  const isFocused = place.element.contains(document.activeElement);
  place.id = null;
  place.element.className = "";
  place.element.replaceChildren();
  if (isFocused) (byId("approvals").querySelector("button") ?? byId("approvals-word")).focus();
}

async function decide(place, button) {
  const { id } = place;
  if (button.getAttribute("aria-disabled") === "true") return;
  button.setAttribute("aria-disabled", "true");
  const answer = await send(`/demo/approvals/${encodeURIComponent(id)}`);
  if (place.id === id) clear(place);
  write(byId("approvals-word"), answer.done ? "Approved." : "Too late: it had expired.");
}

function tick() {
  for (const { element, id, left, bar, until } of places) {
    if (!id) continue;
    const seconds = Math.max(0, (until - performance.now()) / 1000);
    write(left, `${Math.ceil(seconds)} s`);
    bar.value = seconds / ttl;
    element.classList.toggle("soon", seconds < ttl / 4);
  }
}

setInterval(tick, 250);
