// Topics and comments from the feed's file: at once, and read again when something new has come.

import { ask, byId, isHeld, make, send, stamp, unknown, write } from "./fresh.js";

const freshFor = Number(document.body.dataset.feedFreshFor);
let news = 0;
let opened = null;
let timer = null;
const drafts = new Map(); // by topic: what was typed, and not sent or not taken

export function start() {
  byId("say").addEventListener("submit", say);
  read();
}

/** The upstream was switched: what is shown may be old news. */
export function switched() {
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
  const topic = opened;
  const [list, talk] = await Promise.all([ask("/demo/topics"), topic && ask(address(topic))]);
  showList(list);
  if (talk && opened === topic) showTalk(talk);
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
    if (!byId("topics").children.length) unknown(byId("topics-badge"), "no copy");
    return;
  }
  stamp(byId("topics-badge"), { ...answer, freshFor });
  write(byId("topics-word"), answer.error ? "The last refresh failed; this is the old copy." : "");
  const known = new Map([...byId("topics").children].map((item) => [item.dataset.id, item]));
  if (known.size && isHeld(byId("topics"))) return; // what somebody points at stays, until the next read
  if (answer.topics.map(({ id }) => id).join() === [...known.keys()].join()) return;
  byId("topics").replaceChildren(...answer.topics.map((topic) => known.get(topic.id) ?? row(topic)));
}

function row(topic) {
  const item = make("li", "", { "data-id": topic.id });
  const button = make("button", "", { type: "button", "aria-pressed": "false" });
  button.append(make("span", topic.title, { class: "cut", title: topic.title }), make("span", topic.author, { class: "muted small" }));
  button.addEventListener("click", () => open(topic));
  item.append(button);
  return item;
}

const address = (topic) => `/demo/topics/${encodeURIComponent(topic.id)}`;

async function open(topic) {
  if (opened) keep(opened, byId("said").value);
  opened = opened?.id === topic.id ? null : topic;
  for (const item of byId("topics").children) {
    item.firstChild.setAttribute("aria-pressed", String(item.dataset.id === opened?.id));
  }
  byId("talk").hidden = !opened;
  if (!opened) return;
  write(byId("talk-title"), topic.title);
  byId("talk-title").title = topic.title;
  write(byId("say-word"), "");
  unknown(byId("talk-badge"), "loading …");
  byId("said").value = drafts.get(topic.id) ?? "";
  byId("comments").replaceChildren(make("li", "Asking the upstream …", { class: "muted" }));
  byId("talk").scrollIntoView({ block: "nearest" }); // with the click: later it would move under the pointer
  const answer = await ask(address(topic));
  if (opened?.id !== topic.id) return;
  showTalk(answer);
}

function showTalk(answer) {
  if (!answer.comments) {
    unknown(byId("talk-badge"), "no copy");
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

function keep(topic, text) {
  if (text.trim()) drafts.set(topic.id, text);
  else drafts.delete(topic.id);
}

/** At once on the page; what the upstream does not take is typed text again, not lost. */
async function say(event) {
  event.preventDefault();
  const [field, topic] = [byId("said"), opened];
  const body = field.value.trim();
  field.focus();
  if (!topic) return;
  if (!body) {
    write(byId("say-word"), "Not sent: the comment is empty. Write something first.");
    return;
  }
  byId("comments").prepend(comment({ author: "you", body }));
  field.value = "";
  write(byId("say-word"), "Sending …");
  const answer = await send(`${address(topic)}/comments`, { body });
  if (answer.refused) putBack(topic, body);
  const talk = answer.comments ? answer : await ask(address(topic));
  if (opened !== topic) return;
  write(byId("say-word"), answer.refused ? `Not sent: ${answer.refused}. Your text is in the field again.` : "");
  showTalk(talk);
}

/** Before what was typed meanwhile. */
function putBack(topic, body) {
  const field = byId("said");
  const typed = opened === topic ? field.value : drafts.get(topic.id) ?? "";
  const text = typed ? `${body} ${typed}` : body;
  if (opened === topic) field.value = text;
  else keep(topic, text);
}
