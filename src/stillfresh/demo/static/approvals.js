// Requests that wait for the visitor: each with what is left of its time.

import { byId, make, send, write } from "./fresh.js";

const items = new Map();
let ttl = 1;

/** Told with the state: what is pending now. What is missing is gone. */
export function told(state) {
  ttl = state.ttl;
  const ids = new Set(state.pending.map((ask) => ask.id));
  for (const [id, item] of items) {
    if (!ids.has(id)) {
      item.element.remove();
      items.delete(id);
    }
  }
  for (const ask of state.pending) {
    const item = items.get(ask.id) ?? added(ask);
    item.until = performance.now() + ask.left * 1000;
  }
  write(byId("approvals-count"), `${state.decided} decided, ${state.expired} expired`);
  tick();
}

function added(ask) {
  const element = make("li");
  const text = make("span");
  text.append(make("b", ask.who), ` ${ask.what}`);
  const yes = make("button", "Approve", { type: "button" });
  yes.addEventListener("click", () => decide(ask.id, yes));
  const left = make("span", "", { class: "muted small number" });
  const bar = make("progress", "", { max: "1", "aria-label": "Time left" });
  element.append(text, left, yes, bar);
  byId("approvals").append(element);
  const item = { element, left, bar, until: 0 };
  items.set(ask.id, item);
  return item;
}

async function decide(id, button) {
  button.disabled = true;
  const answer = await send(`/demo/approvals/${encodeURIComponent(id)}`);
  const item = items.get(id);
  items.delete(id);
  item?.element.remove();
  write(byId("approvals-word"), answer.done ? "Approved, once." : "Too late: it was gone already.");
}

function tick() {
  for (const { element, left, bar, until } of items.values()) {
    const seconds = Math.max(0, (until - performance.now()) / 1000);
    write(left, `${Math.ceil(seconds)} s`);
    bar.value = seconds / ttl;
    element.classList.toggle("soon", seconds < ttl / 4);
  }
}

setInterval(tick, 250);
