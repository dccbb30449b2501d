// Topics and comments from the feed's file: at once, and read again when something new has come.

import { ask, byId, make, send, stamp, write } from "./fresh.js";

const freshFor = Number(document.body.dataset.feedFreshFor);
let news = 0;
let opened = null;
let timer = null;

export function start() {
  byId("say").addEventListener("submit", say);
  read();
}

/** The state tells how many revalidations brought something; a new number is read. */
export function told(number) {
  if (number === news) return;
  news = number;
  read();
}

async function read() {
  clearTimeout(timer);
  const [list, talk] = await Promise.all([
    ask("/demo/topics"),
    opened && ask(`/demo/topics/${encodeURIComponent(opened.id)}`),
  ]);
  showList(list);
  if (talk) showTalk(talk);
  again(list.age ?? 0);
}

/** Who looks at it asks again when its time is up; that read is answered at once, and refreshed behind. */
function again(age) {
  clearTimeout(timer);
  timer = setTimeout(() => (document.hidden ? again(0) : read()), Math.max(2, freshFor - age) * 1000);
}

function showList(answer) {
  if (!answer.topics) {
    write(byId("topics-word"), answer.refused);
    return;
  }
  stamp(byId("topics-badge"), { ...answer, freshFor });
  write(byId("topics-word"), answer.error ? "The last refresh failed; this is the copy before." : "");
  const known = new Map([...byId("topics").children].map((item) => [item.dataset.id, item]));
  byId("topics").replaceChildren(...answer.topics.map((topic) => known.get(topic.id) ?? row(topic)));
}

function row(topic) {
  const item = make("li", "", { "data-id": topic.id });
  const button = make("button", "", { type: "button", "aria-pressed": "false" });
  button.append(make("span", topic.title, { class: "cut" }), make("span", topic.author, { class: "muted small" }));
  button.addEventListener("click", () => open(topic));
  item.append(button);
  return item;
}

async function open(topic) {
  opened = opened?.id === topic.id ? null : topic;
  for (const item of byId("topics").children) {
    item.firstChild.setAttribute("aria-pressed", String(item.dataset.id === opened?.id));
  }
  byId("talk").hidden = !opened;
  if (!opened) return;
  write(byId("talk-title"), topic.title);
  byId("comments").replaceChildren(make("li", "Asking the upstream …", { class: "muted" }));
  const answer = await ask(`/demo/topics/${encodeURIComponent(topic.id)}`);
  if (opened?.id !== topic.id) return;
  showTalk(answer);
  byId("talk").scrollIntoView({ block: "nearest" });
}

function showTalk(answer) {
  if (!answer.comments) {
    byId("comments").replaceChildren(make("li", answer.refused, { class: "muted" }));
    return;
  }
  stamp(byId("talk-badge"), { ...answer, freshFor });
  byId("comments").replaceChildren(...answer.comments.toReversed().map(comment));
}

function comment({ author, body }) {
  const item = make("li");
  item.append(make("b", author), ` ${body}`);
  return item;
}

async function say(event) {
  event.preventDefault();
  const field = byId("said");
  const body = field.value.trim();
  if (!body || !opened) return;
  byId("comments").prepend(comment({ author: "you", body }));
  field.value = "";
  const answer = await send(`/demo/topics/${encodeURIComponent(opened.id)}/comments`, { body });
  write(byId("topics-word"), answer.refused ?? "");
  showTalk(answer.comments ? answer : await ask(`/demo/topics/${encodeURIComponent(opened.id)}`));
}
