// A page that takes seconds to render, served at once by the page cache: what its headers say.

import { byId, stamp, write } from "./fresh.js";

const freshFor = Number(document.body.dataset.pageFreshFor);
let timer = null;

export function start() {
  byId("page-again").addEventListener("click", () => read());
  read();
}

async function read() {
  clearTimeout(timer);
  const began = performance.now();
  try {
    const response = await fetch("/prices", { cache: "no-store" });
    const took = performance.now() - began;
    if (response.ok) show(response.headers, await response.text(), took);
    else write(byId("page-word"), "No copy is kept yet, and the upstream is away.");
  } catch {
    write(byId("page-word"), "The demo itself does not answer.");
  }
  timer = setTimeout(again, freshFor * 1000);
}

function again() {
  if (document.hidden) timer = setTimeout(again, freshFor * 1000);
  else read();
}

function show(headers, text, took) {
  const page = new DOMParser().parseFromString(text, "text/html");
  const { took: rendering } = page.getElementById("prices").dataset;
  byId("page").replaceChildren(document.importNode(page.querySelector("#prices table"), true));
  const status = headers.get("Cache-Status") ?? "";
  const error = status.includes("refresh-failed");
  stamp(byId("page-badge"), { age: Number(headers.get("Age") ?? 0), freshFor, error });
  write(byId("page-word"), `Rendered in ${rendering} s, served in ${Math.max(1, Math.round(took))} ms. ${status}`);
}
