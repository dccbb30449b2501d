// The feed: each post and its author are watched while they are on screen, and drawn as they come.

import { connect } from "/stillfresh.js";

import { announce, byId, make, stamp, write } from "./fresh.js";

const { token, postFreshFor, userFreshFor } = document.body.dataset;
const MOST_CHIPS = 24;
const count = new Intl.NumberFormat("en").format;

export function start({ gameNews }) {
  const live = connect("/v1/live", { token });
  live.on("long_wait_invalidated", gameNews);
  for (const article of byId("feed").querySelectorAll("[data-post]")) {
    const { post } = article.dataset;
    const author = article.querySelector("[data-user]");
    face(article, author.dataset.user);
    live.watch(article, "post", post, drawPost);
    live.watch(author, "user", author.dataset.user, drawUser);
  }
  setInterval(() => showWatched(live), 500);
}

function drawPost(article, update) {
  const { value } = update;
  const badge = article.querySelector("[data-badge]");
  if (!value) {
    write(badge, update.type === "absent" ? "gone" : "not here yet");
    return;
  }
  announce(article.querySelector(".text"), value.details.content);
  for (const shown of article.querySelectorAll("[data-count]")) {
    announce(shown, count(value.counts[shown.dataset.count]));
  }
  stamp(badge, { ...update, verdict: null, freshFor: Number(postFreshFor) });
  write(article.querySelector(".why"), update.error ? "upstream away: shown as it was" : "");
}

function drawUser(who, { value }) {
  if (!value) return;
  write(who.querySelector(".name"), value.details.name);
  announce(who.querySelector(".followers"), `${count(value.counts.followers)} followers`);
}

function face(article, name) {
  const face = article.querySelector(".face");
  write(face, name[0].toUpperCase());
  const hue = [...name].reduce((sum, letter) => (sum * 31 + letter.charCodeAt(0)) % 360, 7);
  face.style.setProperty("--hue", hue);
}

/** What this tab keeps fresh right now, by its own word. */
function showWatched(live) {
  const ids = live.subscriptions.map(([kind, id]) => `${kind}:${id}`);
  const posts = ids.filter((id) => id.startsWith("post:")).length;
  const text = `${posts} posts, ${ids.length - posts} people`;
  write(byId("watched"), text);
  write(byId("watching-count"), text);
  const shown = ids.slice(0, MOST_CHIPS);
  const more = ids.length - shown.length;
  const chips = more > 0 ? [...shown, `and ${more} more`] : shown;
  if (chips.join() === byId("watching").dataset.shown) return;
  byId("watching").dataset.shown = chips.join();
  byId("watching").replaceChildren(...chips.map((id) => make("li", id)));
}
