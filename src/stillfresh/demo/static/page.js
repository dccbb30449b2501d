// A page that takes seconds to render, served at once by the page cache: what its headers say.

import { byId, isShown, span, stamp, trouble, unknown, write } from "./fresh.js";

const freshFor = Number(document.body.dataset.pageFreshFor);
const SOON = 2; // seconds, until the page that is rendered behind a reader is looked for
let timer = null;

export function start() {
  byId("page-again").addEventListener("click", () => {
    write(byId("page-word"), "Asking …");
    read();
  });
  read();
}

/** The upstream was switched: what could not be rendered before may be now. */
export function switched() {
  read();
}

async function read() {
  clearTimeout(timer);
  let age = freshFor;
  const began = performance.now();
  try {
    const response = await fetch("/prices", { cache: "no-store" });
    const took = performance.now() - began;
    if (response.ok) {
      show(response.headers, await response.text(), took);
      age = Number(response.headers.get("Age") ?? 0);
    } else if (!byId("page").firstChild) {
      unknown(byId("page-badge"), "no copy");
      write(byId("page-word"), `There is no copy yet, and the upstream ${trouble()}.`);
    }
  } catch {
    write(byId("page-word"), "The demo does not answer.");
  }
  again(age);
}

/** Who looks at it asks again when its time is up; that read is answered at once, and rendered behind. */
function again(age) {
  clearTimeout(timer);
  timer = setTimeout(() => (isShown(byId("page")) ? read() : again(0)), Math.max(SOON, freshFor - age) * 1000);
}

function show(headers, text, took) {
  const page = new DOMParser().parseFromString(text, "text/html");
  const { took: rendering } = page.getElementById("prices").dataset;
  byId("page").replaceChildren(document.importNode(page.querySelector("#prices table"), true));
  const status = headers.get("Cache-Status") ?? "";
  const error = status.includes("refresh-failed");
  const age = Number(headers.get("Age") ?? 0);
  stamp(byId("page-badge"), { age, freshFor, error });
  const served = `Rendered in ${rendering} s, served in ${Math.max(1, Math.round(took))} ms`;
  write(byId("page-word"), `${served}${from(status, age, error)}.`);
  byId("page-word").title = `Cache-Status: ${status}`;
}

/** The page cache's own words (`Cache-Status`), in ours. */
function from(status, age, error) {
  if (!status.includes("; hit")) return ": rendered for you just now";
  const late = age - freshFor;
  if (late < 0) return " from the page cache";
  const behind = error ? "rendering it again failed, and is tried again" : "it is rendered again in the background";
  return ` from the page cache, ${span(late)} after it became stale: ${behind}`;
}
