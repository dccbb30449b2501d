// The table of entries, and one of them at the side: what it is, why, and what can be done to it.

import { age, byId, bytes, duration, element, plural, put, visible } from "./dashboard-draw.js";

const SEARCH_PAUSE = 200;
const REFRESH = 5_000;
const SOON = 900; // what was fresh is not any more: see what it is
const TAIL = 12; // the last characters of a long id
const SLOW = 250; // a listing that takes longer is not repeated by itself

const nameOf = (entry) => `${entry.kind}\n${entry.id}`;

export class Entries {
  #ask;
  #rows = new Map(); // by kind and id: the row, what was told of it, and when
  #before = []; // where each earlier page began
  #after = null;
  #next = null;
  #asked = 0; // only the last question's answer counts
  #took = 0;
  #loadedAt = 0;
  #paid = false;
  #typing = null;
  #open = null;
  #looked = 0;
  #isActing = false;

  constructor(ask) {
    this.#ask = ask;
    byId("search").addEventListener("input", () => {
      clearTimeout(this.#typing);
      this.#typing = setTimeout(() => this.#begin(), SEARCH_PAUSE);
    });
    byId("kind").addEventListener("change", () => this.#begin());
    byId("reload").addEventListener("click", () => this.load());
    byId("next").addEventListener("click", () => this.#turn(this.#next, [...this.#before, this.#after]));
    byId("previous").addEventListener("click", () => this.#turn(this.#before.at(-1), this.#before.slice(0, -1)));
    byId("entries").addEventListener("keydown", (event) => this.#move(event));
    byId("entries").addEventListener("click", (event) => this.#click(event));
    byId("entries").addEventListener("focusin", (event) => this.#rove(event.target));
    byId("panel-close").addEventListener("click", () => this.close());
    for (const action of ["refresh", "invalidate"]) byId(action).addEventListener("click", () => this.#act(action));
    byId("delete").addEventListener("click", () => this.#confirm());
    byId("confirm-no").addEventListener("click", () => byId("confirm").close());
    byId("confirm-yes").addEventListener("click", () => {
      byId("confirm").close();
      this.#act("delete");
    });
    document.addEventListener("keydown", (event) => this.#key(event));
    setInterval(() => this.#tick(), 1_000);
  }

  /** New numbers came: stores that are paid by the request are not listed again by themselves. */
  told(numbers) {
    this.#paid = Object.values(numbers.stores).some((store) => store.is_paid);
  }

  async load({ quietly = false } = {}) {
    const asked = ++this.#asked;
    const began = performance.now();
    const query = new URLSearchParams({ search: byId("search").value, kind: byId("kind").value });
    for (const part of this.#after ?? []) query.append("after", part);
    try {
      const told = await this.#ask(`api/entries?${query}`);
      if (asked !== this.#asked) return;
      if (!told.entries.length && told.next) {
        this.#after = told.next; // a long way without one that is to be shown
        return this.load({ quietly });
      }
      this.#took = performance.now() - began;
      this.#loadedAt = performance.now();
      this.#draw(told);
    } catch (error) {
      if (asked === this.#asked && !quietly) this.#missing(error.message);
    }
  }

  close() {
    if (this.#open === null) return;
    const row = this.#rows.get(nameOf(this.#open));
    this.#open = null;
    byId("panel").hidden = true;
    for (const { row: each } of this.#rows.values()) delete each.dataset.open;
    (row?.button ?? byId("search")).focus();
  }

  #begin() {
    this.#turn(null, []);
  }

  #turn(after, before) {
    this.#after = after ?? null;
    this.#before = before;
    return this.load();
  }

  #draw({ entries, next, kinds }) {
    const now = performance.now();
    const body = byId("entries");
    const focused = document.activeElement;
    const rows = new Map();
    for (const entry of entries) {
      const known = this.#rows.get(nameOf(entry)) ?? this.#row(entry);
      rows.set(nameOf(entry), Object.assign(known, { entry, at: now }));
    }
    this.#rows = rows;
    const wanted = [...rows.values()].map(({ row }) => row);
    if (wanted.length !== body.childElementCount || wanted.some((row, at) => body.children[at] !== row)) {
      body.replaceChildren(...wanted);
      if (body.contains(focused)) focused.focus();
    }
    for (const known of rows.values()) this.#fill(known, now);
    if (this.#open) rows.get(nameOf(this.#open))?.row.setAttribute("data-open", "");
    this.#rove(body.contains(focused) ? focused : [...rows.values()][0]?.button);
    this.#kinds(kinds);
    this.#next = next;
    byId("next").disabled = next === null;
    byId("previous").disabled = !this.#before.length;
    this.#note(entries.length);
  }

  #missing(why) {
    put(byId("entries-note"), "");
    put(byId("entries-empty"), `The entries could not be listed: ${why}`);
    byId("entries-empty").hidden = false;
    document.querySelector("table.entries").hidden = true;
  }

  #note(shown) {
    const isSearch = byId("search").value || byId("kind").value;
    const empty = byId("entries-empty");
    empty.hidden = shown > 0;
    document.querySelector("table.entries").hidden = shown === 0;
    put(empty, isSearch ? "No entry matches. The search looks for exactly this text in the ids." : "The store is empty: entries appear here with the first read.");
    const many = this.#next || this.#before.length ? `page ${this.#before.length + 1}, ${plural(shown, "entry", "entries")}` : plural(shown, "entry", "entries");
    put(byId("entries-note"), shown ? many : "");
  }

  #kinds(kinds) {
    const select = byId("kind");
    if (kinds.join() === [...select.options].slice(1).map((it) => it.value).join()) return;
    const chosen = select.value;
    select.replaceChildren(new Option("all kinds", ""), ...kinds.map((kind) => new Option(kind, kind)));
    select.value = kinds.includes(chosen) ? chosen : "";
  }

  #row(entry) {
    const button = element("button", { className: "entry-name", tabIndex: -1 },
      element("span", { className: "kind cut", textContent: entry.kind, title: entry.kind }),
      element("span", { className: "id mono", title: visible(entry.id) }, ...ends(visible(entry.id))));
    const row = element("tr", {}, element("td", {}, button),
      element("td", {}, element("span", { className: "badge" })),
      element("td", { className: "number" }),
      element("td", { className: "number wide" }),
      element("td", { className: "number wide" }),
      element("td", { className: "wide muted small" }, element("span", { className: "clamp" })));
    return { row, button };
  }

  #fill({ row, entry, at }, now) {
    const passed = (now - at) / 1000;
    const badge = row.children[1].firstChild;
    const verdict = entry.failures ? "failed" : entry.verdict;
    badge.dataset.verdict = verdict;
    put(badge, wordsOf(entry));
    put(row.children[2], entry.age === null ? "–" : age(entry.age + passed));
    put(row.children[3], freshness(entry, passed));
    put(row.children[4], entry.size === null ? "–" : bytes(entry.size));
    put(row.children[5].firstChild, noteOf(entry, passed));
    row.children[5].title = row.children[5].textContent;
  }

  #tick() {
    if (document.hidden) return;
    const now = performance.now();
    for (const known of this.#rows.values()) this.#fill(known, now);
    const isOver = ({ entry, at }) => entry.verdict === "fresh" && entry.fresh_for < (now - at) / 1000;
    const pause = [...this.#rows.values()].some(isOver) ? SOON : REFRESH;
    const mayAsk = this.#loadedAt && this.#took < SLOW && !this.#paid;
    if (mayAsk && now - this.#loadedAt > pause) this.load({ quietly: true });
    if (mayAsk && this.#open && !this.#isActing) this.#look(this.#open, { quietly: true });
  }

  /* ---- keyboard ---- */

  #key(event) {
    const typing = event.target.matches?.("input, select, textarea");
    if (event.key === "/" && !typing && !event.ctrlKey && !event.metaKey && !event.altKey && !document.querySelector("dialog[open]")) {
      event.preventDefault();
      byId("search").focus();
      byId("search").select();
    } else if (event.key === "Escape" && !document.querySelector("dialog[open]")) {
      if (this.#open) this.close();
      else if (event.target === byId("search")) byId("search").blur();
    } else if (event.key === "ArrowDown" && event.target === byId("search")) {
      event.preventDefault();
      [...this.#rows.values()][0]?.button.focus();
    }
  }

  #move(event) {
    const buttons = [...this.#rows.values()].map(({ button }) => button);
    const at = buttons.indexOf(event.target);
    const to = { ArrowDown: at + 1, ArrowUp: at - 1, Home: 0, End: buttons.length - 1 }[event.key];
    if (at < 0 || to === undefined) return;
    event.preventDefault();
    if (to < 0) byId("search").focus();
    else buttons[Math.min(to, buttons.length - 1)].focus();
  }

  #rove(target) {
    if (!target?.classList?.contains("entry-name")) return;
    for (const { button } of this.#rows.values()) button.tabIndex = button === target ? 0 : -1;
  }

  #click(event) {
    const row = event.target.closest("tr");
    const known = [...this.#rows.values()].find((it) => it.row === row);
    if (known) this.#show(known.entry);
  }

  /* ---- one entry ---- */

  #path(entry, action = "") {
    const isStep = entry.id === "." || entry.id === "..";
    const id = isStep ? "" : encodeURIComponent(entry.id);
    const end = action ? `/${action}` : "";
    return `api/entries/${encodeURIComponent(entry.kind)}/${id}${end}${isStep ? `?id=${entry.id}` : ""}`;
  }

  async #show(entry) {
    this.#open = entry;
    for (const [name, { row }] of this.#rows) row.toggleAttribute("data-open", name === nameOf(entry));
    this.#said("");
    put(byId("panel-kind"), entry.kind);
    put(byId("panel-title"), visible(entry.id));
    for (const name of ["panel-text", "panel-value", "panel-state"]) put(byId(name), "");
    byId("panel-facts").replaceChildren();
    byId("panel-verdict").hidden = true;
    byId("panel").hidden = false;
    byId("panel-title").focus();
    await this.#look(entry);
  }

  async #look(entry, { quietly = false } = {}) {
    const looked = ++this.#looked;
    const isAsked = () => this.#open === entry && this.#looked === looked;
    try {
      const told = await this.#ask(this.#path(entry));
      if (isAsked()) this.#explain(told);
    } catch (error) {
      if (isAsked() && !quietly) this.#said(error.message, true);
    }
  }

  #explain(told) {
    byId("panel-verdict").hidden = false;
    byId("panel-verdict").dataset.verdict = told.failures ? "failed" : told.verdict;
    put(byId("panel-verdict"), wordsOf(told));
    put(byId("panel-state"), told.age === null ? "no copy" : `${age(told.age)} old`);
    put(byId("panel-text"), visible(told.text));
    put(byId("refresh"), told.can_refresh ? "Refresh" : "Mark stale");
    byId("refresh").disabled = !told.is_declared;
    byId("panel-facts").replaceChildren(...facts(told).flatMap(([name, value]) => [
      element("dt", { textContent: name }),
      element("dd", { textContent: value }),
    ]));
    const [title, text] = valueOf(told.value, told.cache === "pages");
    put(byId("panel-value-title"), title);
    put(byId("panel-value"), text);
    byId("panel-value").hidden = !text;
  }

  #said(text, isBad = false) {
    byId("panel-said").classList.toggle("bad", isBad);
    put(byId("panel-said"), text);
  }

  #confirm() {
    put(byId("confirm-what"), `${this.#open.kind} ${visible(this.#open.id)}`);
    byId("confirm").showModal();
  }

  async #act(action) {
    const entry = this.#open;
    const buttons = ["refresh", "invalidate", "delete"].map(byId);
    const focused = document.activeElement;
    for (const button of buttons) button.disabled = true;
    this.#isActing = true;
    this.#looked += 1;
    this.#said(action === "refresh" ? "Asking the upstream …" : "");
    let told = null;
    try {
      told = await this.#ask(this.#path(entry, action), { method: "POST" });
    } catch (error) {
      if (this.#open === entry) this.#said(error.message, true);
    }
    for (const button of buttons) button.disabled = false;
    this.#isActing = false;
    if (this.#open !== entry) return;
    if (told) {
      this.#explain(told.entry);
      this.#said(told.said);
    }
    if (buttons.includes(focused) && !byId("panel").hidden) focused.focus();
    this.load({ quietly: true });
  }
}

/** A long id is cut in the middle: two that differ in their end are told apart. */
function ends(id) {
  const letters = [...id];
  if (letters.length <= TAIL * 2) return [id];
  return [letters.slice(0, -TAIL).join(""), letters.slice(-TAIL).join("")].map((part) => element("span", { textContent: part }));
}

/** What was never loaded is not gone. */
function wordsOf(entry) {
  const verdict = entry.verdict === "gone" && entry.age === null ? "no copy" : entry.verdict;
  return entry.failures ? `${verdict}, failing` : verdict;
}

function noteOf(entry, passed) {
  if (entry.held_for > passed) return "being loaded";
  if (entry.failures) {
    const left = (entry.retry_in ?? 0) - passed;
    return `${visible(entry.error ?? "")}${left > 0 ? `; next try in ${duration(left)}` : ""}`;
  }
  if (entry.is_absent) return entry.cache === "pages" ? "not shared: each visitor is sent their own" : "does not exist upstream";
  return entry.is_invalidated ? "invalidated" : "";
}

function freshness(entry, passed) {
  if (entry.fresh_for === null) return "–";
  if (entry.is_invalidated) return "no longer";
  const left = entry.fresh_for - passed;
  return left > 0 ? age(left) : "no longer";
}

function facts(told) {
  const found = [];
  if (told.terms) {
    found.push(["fresh for", span(told.terms.fresh_for)], ["then stale for", span(told.terms.stale_for)]);
    found.push(["kept against errors", span(told.terms.error_for)]);
  }
  if (told.fresh_for !== null) {
    const when = new Date(Date.now() + 1000 * told.fresh_for).toLocaleString();
    found.push([told.fresh_for > 0 ? "fresh until" : "was fresh until", when]);
  }
  if (told.is_invalidated) found.push(["invalidated", "yes"]);
  found.push(["in memory here", told.in_memory ? "yes" : "no"]);
  if (told.loading_here) found.push(["loading", "by this process"]);
  else if (told.held_for !== null) found.push(["loading", `by another process, whose lease ends in ${duration(told.held_for)}`]);
  if (told.failures) found.push(["failed", plural(told.failures, "time")], ["last error", visible(told.error ?? "")]);
  if (told.retry_in > 0) found.push(["next try", `in ${duration(told.retry_in)}`]);
  if (!told.is_declared) found.push(["declared", "no: it only lies in the store"]);
  return found;
}

function span(seconds) {
  return seconds ? duration(seconds) : "–";
}

function valueOf(value, isPage) {
  switch (value?.kind) {
    case "json":
      return [`Value, ${bytes(value.size)}${value.is_cut ? ", the first part" : ""}`, value.text];
    case "page": {
      const head = [`status ${value.status}`, ...value.headers.map(([name, text]) => `${name}: ${text}`)].join("\n");
      const title = `Page, ${bytes(value.size)}${value.is_cut ? ", the first part" : ""}`;
      return [title, value.text === null ? head : `${head}\n\n${value.text}`];
    }
    case "bytes":
      return [`Value: ${bytes(value.size)}, not shown`, ""];
    case "absent":
      return [isPage ? "Not shared: each visitor gets a page of their own" : "Value: the upstream does not have it", ""];
    default:
      return ["No value", ""];
  }
}
