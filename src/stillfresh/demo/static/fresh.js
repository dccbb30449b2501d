// Freshness, shown: a badge with a verdict and an age that ticks; and the requests of this page.

const stamps = new Map();

/** Shows on `badge` how fresh a copy is, from now on: its age ticks, and past `freshFor` it is stale. */
export function stamp(badge, { age, freshFor, verdict = null, error = null }) {
  stamps.set(badge, { since: performance.now() - age * 1000, freshFor, verdict, error: Boolean(error) });
  show(badge);
}

/** There is no copy whose age could be told: the badge says why, and ticks no more. */
export function unknown(badge, text) {
  stamps.delete(badge);
  badge.dataset.verdict = "gone";
  write(badge, text);
}

/** Somebody may be looking at it: the tab is in front, and no other part is shown in its place. */
export function isShown(element) {
  return !document.hidden && element.checkVisibility();
}

/** Somebody points at it, or has come to it by keyboard: it must not change under them. */
export function isHeld(element) {
  return element.matches(":hover, :focus-within");
}

/** On a telephone one part is shown at a time. */
export function showPart(name) {
  document.body.dataset.view = name;
  for (const tab of document.querySelectorAll(".tabs a")) {
    if (tab.dataset.view === name) tab.setAttribute("aria-current", "true");
    else tab.removeAttribute("aria-current");
  }
}

/** What is the matter with the upstream, as its switch says. */
export function trouble() {
  return { failing: "answers with errors", down: "does not answer" }[document.body.dataset.mode] ?? "has not answered yet";
}

function show(badge) {
  const { since, freshFor, verdict, error } = stamps.get(badge);
  const age = Math.max(0, (performance.now() - since) / 1000);
  const is = verdict === "expired" || age < freshFor ? verdict ?? "fresh" : "stale";
  const now = is === "fresh" && error ? "stale" : is;
  write(badge, `${now}, ${span(age)} old`);
  if (badge.dataset.verdict !== now) badge.dataset.verdict = now;
}

/** 7 s, 3 min, 2 h */
export function span(seconds) {
  if (seconds < 120) return `${Math.floor(seconds)} s`;
  return seconds < 7200 ? `${Math.floor(seconds / 60)} min` : `${Math.floor(seconds / 3600)} h`;
}

/** Touches the document only where something changes. */
export function write(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

/** The same, and a change is seen. */
export function announce(element, text) {
  const before = element.textContent;
  if (before === text) return;
  element.textContent = text;
  if (before === "" || before === "–") return;
  element.classList.remove("new");
  void element.offsetWidth; // begins the animation anew
  element.classList.add("new");
}

setInterval(() => {
  if (document.hidden) return;
  for (const badge of stamps.keys()) {
    if (badge.isConnected) show(badge);
    else stamps.delete(badge);
  }
}, 1000);

export async function ask(path) {
  return answered(fetch(path));
}

/** Says by a header that it is this page that wants it. */
export async function send(path, body = {}) {
  const headers = { "Content-Type": "application/json", "X-Stillfresh-Demo": "1" };
  return answered(fetch(path, { method: "POST", headers, body: JSON.stringify(body) }));
}

async function answered(response) {
  try {
    const got = await response;
    return got.ok ? await got.json() : { refused: `the demo answered ${got.status}` };
  } catch {
    return { refused: "the demo itself does not answer" };
  }
}

export function make(tag, text = "", attributes = {}) {
  const element = document.createElement(tag);
  element.textContent = text;
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  return element;
}

export const byId = (id) => document.getElementById(id);
