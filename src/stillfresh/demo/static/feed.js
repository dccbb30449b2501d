// The feed: a post is watched while it is on screen, and drawn as it comes. Its author needs no code:
// `data-fresh` and `data-fresh-field` in the page say it all.

import { connect } from "/stillfresh.js";

import { announce, byId, make, stamp, write } from "./fresh.js";

const { token, postFreshFor } = document.body.dataset;
const MOST_CHIPS = 24;
const articles = new Map(); // by the post's id
const count = new Intl.NumberFormat("en").format;

export function start({ gameNews }) {
  const live = connect("/v1/live", { token });
  live.on("long_wait_invalidated", gameNews);
  live.on("welcome", gameNews); // whatever was told while nobody was connected
  for (const article of byId("feed").querySelectorAll("[data-post]")) {
    face(article);
    articles.set(article.dataset.post, article);
    live.watch(article, "post", article.dataset.post, draw);
  }
  live.on("error", ({ code, kind, id }) => {
    if (code === "load_failed" && kind === "post") unanswered(articles.get(id));
  });
  setInterval(() => showWatched(live), 500);
}

function draw(view, article) {
  const badge = article.querySelector("[data-badge]");
  if (!view.found) {
    write(badge, "deleted upstream");
    return;
  }
  announce(article.querySelector(".text"), view.value.details.content);
  for (const shown of article.querySelectorAll("[data-count]")) {
    announce(shown, count(view.value.counts[shown.dataset.count]));
  }
  stamp(badge, { age: view.age, freshFor: Number(postFreshFor) });
  write(article.querySelector(".why"), "refresh failed, this is the old copy");
}

/** Asked for, in vain, and nothing is kept of it. */
function unanswered(article) {
  if (!article || article.dataset.fetchedAt) return;
  write(article.querySelector("[data-badge]"), "no answer yet");
  write(article.querySelector(".why"), "load failed, will try again");
}

function asking(id) {
  const article = id.startsWith("post:") ? articles.get(id.slice(5)) : null;
  if (!article || article.dataset.fetchedAt || article.dataset.error) return;
  write(article.querySelector("[data-badge]"), "loading …");
}

function face(article) {
  const [name] = article.dataset.post.split(":");
  const circle = article.querySelector(".face");
  const hue = [...name].reduce((sum, letter) => (sum * 31 + letter.charCodeAt(0)) % 360, 7);
  write(circle, name[0].toUpperCase());
  circle.style.setProperty("--hue", hue);
}

/** Posts first; each in the order of its number. */
function byKind(one, other) {
  return one.slice(0, 4).localeCompare(other.slice(0, 4)) || one.localeCompare(other, "en", { numeric: true });
}

/** What this tab keeps fresh right now, by its own word. */
function showWatched(live) {
  const ids = live.subscribed.sort(byKind);
  ids.forEach(asking);
  const posts = ids.filter((id) => id.startsWith("post:")).length;
  const people = ids.length - posts;
  const text = `${posts} ${posts === 1 ? "post" : "posts"}, ${people} ${people === 1 ? "person" : "people"}`;
  write(byId("watched"), text);
  write(byId("watching-count"), text);
  const more = ids.length - MOST_CHIPS;
  const chips = more > 0 ? [...ids.slice(0, MOST_CHIPS), `and ${more} more`] : ids;
  if (chips.join() === byId("watching").dataset.shown) return;
  byId("watching").dataset.shown = chips.join();
  byId("watching").replaceChildren(...chips.map((id) => make("li", id)));
}
