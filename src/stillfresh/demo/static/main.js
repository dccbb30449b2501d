// The demo's page: its switch, its numbers, and the parts that are told the state.

import * as approvals from "./approvals.js";
import * as feed from "./feed.js";
import { byId, send, showPart, write } from "./fresh.js";
import * as games from "./games.js";
import * as page from "./page.js";
import * as rate from "./rate.js";
import * as topics from "./topics.js";

const WORDS = {
  fine: ["ok", "The upstream is fine: a lookup takes 1 to 3 s."],
  slow: ["warn", "The upstream is slow (5 to 8 s). The site is not."],
  failing: ["bad", "The upstream answers with errors. The site stays up."],
  down: ["bad", "The upstream is down. The site stays up."],
};
const number = new Intl.NumberFormat("en").format;
let events = null;

function told(state) {
  const [level, text] = WORDS[state.mode];
  const before = byId("word").dataset.mode;
  byId("word").dataset.mode = state.mode;
  document.body.dataset.mode = state.mode;
  byId("word").dataset.level = level;
  write(byId("word"), text);
  const chosen = document.querySelector(`#switch [value="${state.mode}"]`);
  if (chosen && !byId("switch").disabled) chosen.checked = true;
  write(byId("asked"), number(state.asked));
  write(byId("polled"), number(state.polled));
  write(byId("polled-in-batches"), number(state.polled_in_batches));
  if (state.approvals) approvals.told(state.approvals);
  topics.told(state.news);
  if (before && before !== state.mode) for (const part of [games, topics, page, rate]) part.switched();
}

/** One stream, and only while somebody looks: a hidden tab holds no connection for it. */
function listen() {
  events?.close();
  events = null;
  if (document.hidden) return;
  events = new EventSource("/demo/events");
  events.onmessage = (event) => told(JSON.parse(event.data));
  events.onerror = () => {
    byId("word").dataset.level = "bad";
    write(byId("word"), "The demo does not answer; trying again …");
  };
}

byId("switch").addEventListener("change", async (event) => {
  byId("switch").disabled = true;
  const state = await send("/demo/upstream", { mode: event.target.value });
  byId("switch").disabled = false;
  document.querySelector("#switch :checked")?.focus();
  if (state.mode) told(state);
});

byId("got-it").addEventListener("click", () => {
  byId("try").hidden = true;
  document.cookie = "stillfresh_demo_tried=1; path=/; SameSite=Strict; Max-Age=31536000";
  byId("feed").focus({ preventScroll: true });
});

for (const tab of document.querySelectorAll(".tabs a")) {
  tab.addEventListener("click", (event) => {
    event.preventDefault();
    showPart(tab.dataset.view);
    scrollTo(0, 0);
  });
}

new ResizeObserver(([top]) => {
  document.documentElement.style.setProperty("--top", `${top.target.offsetHeight}px`);
}).observe(document.querySelector(".top"));

document.addEventListener("visibilitychange", listen);
approvals.start();
listen();
feed.start({ gameNews: games.changed });
games.start();
topics.start();
page.start();
rate.start();
