// The dashboard: hears the numbers (live, or by polling), remembers five minutes, and draws.

import {
  VERDICTS, bound, byId, bytes, columns, count, duration, element, figure, histogram, percent, plural, put, quantile,
  rate, shares, spark, visible,
} from "./dashboard-draw.js";
import { Entries } from "./dashboard-entries.js";
import { meaningOf, needingAttention, ranked, wordsOf } from "./dashboard-reasons.js";

const KEPT = 300; // seconds of history
const RECENT = 10; // seconds over which a rate is taken
const POLL = 2_000;
const LONGEST_PAUSE = 30_000;
const SILENCE = 5_000; // the socket tells every second; after so long it is not relied upon
const MOST_KINDS = 5; // in a card
const MOST_STORIES = 10; // of wrong reads
const MOST_REASONS = 3; // in the line at the top
const MOST_DETAIL = 300; // characters of what upstream said
const TOKEN = "stillfresh-token";
const COUNTERS = [
  "hits", "loads", "loaded", "failed", "absent", "coalesced", "superseded", "leases_won", "leases_denied", "store_errors",
  "objective_met", "objective_missed",
];
const GAUGES = ["entries", "loading", "queued", "watched", "failing"];

/* ---- asking the gateway ---- */

class Refused extends Error {}

const token = () => sessionStorage.getItem(TOKEN);

async function ask(path, options = {}) {
  const headers = { "X-Stillfresh": "dashboard" };
  if (token()) headers.Authorization = `Bearer ${token()}`;
  const answer = await fetch(path, { ...options, headers, cache: "no-store", credentials: "omit" });
  if (answer.status === 401) {
    signIn(token() ? "The token is no longer accepted." : "");
    throw new Refused("Enter the token to see the numbers.");
  }
  const told = await answer.json();
  if (!answer.ok) throw new Refused(told.detail ?? told.title ?? `status ${answer.status}`);
  return told;
}

function signIn(said = "") {
  put(byId("sign-in-said"), said);
  if (!byId("sign-in").open) byId("sign-in").showModal();
}

async function access() {
  const told = await ask("api/access");
  byId("sign-out").hidden = !(told.needs_token && told.is_operator);
  return told;
}

/* ---- what was heard, and what follows from two moments ---- */

const history = [];

function totals(rows) {
  const sum = { reads: {}, ages: [], load_times: [], largest_batch: 0, room: 0, retry_at: null, error: null };
  for (const name of [...COUNTERS, ...GAUGES]) sum[name] = 0;
  for (const verdict of VERDICTS) sum.reads[verdict] = 0;
  for (const row of rows) {
    for (const name of [...COUNTERS, ...GAUGES]) sum[name] += row[name];
    for (const verdict of VERDICTS) sum.reads[verdict] += row.reads[verdict];
    row.ages.forEach((number, at) => { sum.ages[at] = (sum.ages[at] ?? 0) + number; });
    row.load_seconds.counts.forEach((number, at) => { sum.load_times[at] = (sum.load_times[at] ?? 0) + number; });
    sum.largest_batch = Math.max(sum.largest_batch, row.largest_batch);
    sum.room += row.loads * row.max_batch;
    if (row.retry_at !== null) sum.retry_at = Math.min(sum.retry_at ?? Infinity, row.retry_at);
    sum.error ??= row.error;
  }
  sum.all_reads = VERDICTS.reduce((all, verdict) => all + sum.reads[verdict], 0);
  return sum;
}

function remember(told) {
  const kinds = new Map(told.resources.map((row) => [`${row.cache} ${row.kind}`, totals([row])]));
  const { at, started_at, bypassed } = told;
  const moment = { at, started_at, told, kinds, bypassed, sum: totals(told.resources) };
  const last = history.at(-1);
  if (last && (last.started_at !== told.started_at || last.at > told.at || last.sum.all_reads > moment.sum.all_reads)) {
    history.length = 0; // another process, or a clock that was set
  }
  if (last && last.at === told.at) history.pop();
  history.push(moment);
  while (history[0].at < told.at - KEPT) history.shift();
  return moment;
}

/** What the gateway noted before this page was opened. */
function recall(notes, started_at) {
  for (const note of notes) {
    const row = { ...note, largest_batch: 0, max_batch: 0, retry_at: null, error: null };
    for (const name of [...COUNTERS, ...GAUGES]) row[name] ??= 0;
    const kinds = new Map(Object.entries(note.kinds).map(([kind, it]) => [kind, { ...it, all_reads: it.reads }]));
    history.push({ at: note.at, started_at, told: null, kinds, bypassed: note.bypassed, sum: totals([row]) });
  }
}

/** The moment so many seconds ago, or the first there was. */
function before(seconds) {
  const wanted = history.at(-1).at - seconds;
  return history.findLast((moment) => moment.at <= wanted) ?? history[0];
}

/** How fast `pick(sum)` grew: of all kinds, or of one, of which the notes from before know reads and loads. */
function speed(pick, kind = null) {
  const now = history.at(-1);
  const of = (moment) => (kind === null ? moment.sum : moment.kinds.get(kind));
  const begin = before(RECENT);
  const old = kind === null ? begin : history.find((moment) => moment.at >= begin.at && moment.kinds.has(kind));
  const seconds = now.at - (old?.at ?? now.at);
  return seconds > 0 ? Math.max(0, pick(of(now)) - pick(of(old))) / seconds : 0;
}

function since(old, now, name = "ages") {
  return now[name].map((number, at) => number - (old?.[name][at] ?? 0));
}

/** Requests of the last minute that passed through uncached: reason -> number. */
function passedOfLate() {
  const [old, now] = [before(60).bypassed, history.at(-1).bypassed];
  return Object.fromEntries(Object.entries(now).map(([reason, number]) => [reason, number - (old[reason] ?? 0)]));
}

/** [seconds ago, a second] for a sparkline, in steps of about two seconds. */
function course(pick) {
  const now = history.at(-1).at;
  const points = [];
  let old = history[0];
  for (const moment of history) {
    const seconds = moment.at - old.at;
    if (seconds < 2) continue;
    points.push([now - moment.at, Math.max(0, pick(moment.sum) - pick(old.sum)) / seconds]);
    old = moment;
  }
  return points;
}

/* ---- one line that says how things are ---- */

function health({ told, kinds, sum }) {
  const away = Object.entries(told.stores).filter(([, store]) => store.error);
  const failing = told.resources.filter((row) => row.failing > 0).map((row) => row.kind);
  const old = before(60).sum;
  const recent = Object.fromEntries(VERDICTS.map((it) => [it, sum.reads[it] - old.reads[it]]));
  const reads = sum.all_reads - old.all_reads;
  const missed = wrongText(told) + missedText(told, kinds);
  const well = missed ? "warn" : "ok";
  if (away.length) {
    const names = Object.keys(told.stores).length > 1 ? ` for ${away.map(([name]) => name).join(" and ")}` : "";
    return ["bad", `The store${names} does not answer. Reads are answered from memory or by the upstream.`, away[0][1].error];
  }
  if (failing.length) {
    const names = failing.slice(0, 3).join(", ") + (failing.length > 3 ? ", …" : "");
    const lost = recent.gone ? `; ${plural(recent.gone, "read")} went unanswered in the last minute` : "; stored copies are served";
    const detail = told.resources.filter((row) => row.error).slice(0, 2).map((row) => `${row.kind}: ${firstLine(row.error)}`).join("; ");
    return [recent.gone ? "bad" : "warn", `The upstream fails for ${plural(failing.length, "kind")} (${names})${lost}.`, detail];
  }
  if (!kinds.size) return ["none", "Nothing is cached: no kind and no page is set up."];
  const watched = sum.watched ? ` Kept fresh for viewers: ${plural(sum.watched, "key")}.` : "";
  const passed = ranked(passedOfLate());
  const uncached = passed.length ? ` ${passedText(passed)}` : "";
  const attention = needingAttention(passed);
  if (!reads && uncached) return [missed || attention ? "warn" : "none", `${missed}Nothing was read from the cache in the last minute.${uncached}${watched}`];
  if (!reads) return [well, `${missed}Quiet: no reads in the last minute.${watched}`];
  if (recent.gone) return ["warn", `${missed}${plural(recent.gone, "read")} went unanswered in the last minute: there was no copy to serve.${uncached}`];
  if (recent.fresh === reads && !uncached) return [well, `${missed}Every read in the last minute got a fresh copy.${watched}`];
  const parts = [
    [recent.fresh, "fresh"], [recent.stale, "stale and refreshed in the background"], [recent.expired, "expired"],
  ].filter(([number]) => number).map(([number, text]) => `${count(number)} ${text}`).join(", ");
  if (!uncached) return [well, `${missed ? `${missed}E` : "All is well: e"}very read in the last minute was answered: ${parts}.${watched}`];
  const level = missed || attention > reads ? "warn" : "ok";
  return [level, `${missed}Every read in the last minute was answered: ${parts}.${uncached}${watched}`];
}

/** "Reads were wrong: user (3 of 456 checked). ", if some were of late, and more than the objective allows. */
function wrongText(told) {
  const names = told.resources.filter(({ truth }) => truth && truth.wrong_reads.some((story) => told.at - story.judged_at < KEPT))
    .filter(({ truth }) => !(wrongBurn(truth) <= 1))
    .map(({ kind, truth }) => `${kind} (${count(truth.wrong)} of ${count(checkedOf(truth))} checked)`);
  return names.length ? `Reads were wrong: ${names.slice(0, 3).join(", ")}${names.length > 3 ? ", …" : ""}. ` : "";
}

/** "Copies are too old: user misses its objective, with 5× the misses that it allows. " */
function missedText(told, kinds) {
  const burning = told.resources.flatMap(({ cache, kind, objective }) => {
    const name = `${cache} ${kind}`;
    const { burn } = judged(objective, kinds.get(name), before(KEPT).kinds.get(name));
    return burn > 1 ? [[kind, burn]] : [];
  }).sort(([, a], [, b]) => b - a);
  if (!burning.length) return "";
  const names = burning.slice(0, 3).map(([kind, burn]) => `${kind} (${+burn.toFixed(1)}× the allowed misses)`);
  return `Copies are older than the objective allows: ${names.join(", ")}${burning.length > 3 ? ", …" : ""}. `;
}

/** Of an error of several lines, the first says what happened. */
function firstLine(text) {
  return text.split(/\r?\n/, 1)[0];
}

/** "62 requests passed through uncached: 40 no freshness stated, 22 set a cookie." One reason has no number. */
function passedText(passed) {
  const sum = (some) => some.reduce((all, [, number]) => all + number, 0);
  if (passed.length === 1) return `${plural(sum(passed), "request")} passed through uncached: ${wordsOf(passed[0][0])}.`;
  const named = passed.slice(0, MOST_REASONS).map(([reason, number]) => `${count(number)} ${wordsOf(reason)}`);
  const others = sum(passed.slice(MOST_REASONS));
  if (others) named.push(`${count(others)} for other reasons`);
  return `${plural(sum(passed), "request")} passed through uncached: ${named.join(", ")}.`;
}

/* ---- drawing ---- */


const slot = (name) => document.querySelector(`[data-slot="${name}"]`);
const say = (name, text) => put(slot(name), text);
let spanOf = "recent";

function draw(moment) {
  const { told, sum } = moment;
  tellHealth(...health(moment));
  const { alive, all } = told.workers ?? {};
  put(byId("workers"), !told.workers ? "" : alive < all ? `${alive} of ${all} workers` : plural(all, "worker"));
  byId("workers").classList.toggle("bad", alive < all);
  put(byId("uptime"), `up ${duration(Math.max(0, told.at - told.started_at))}`);
  byId("site").hidden = !told.has_site;
  drawSpan(told, sum);
  drawReads(sum);
  drawUpstream(sum);
  drawRest(told, sum);
  drawBypassed(told);
  drawSiteConnections(told.site_connections);
  drawKinds(moment);
  drawTruth(told);
}

/** Read out only when it means something else than before: not with every number in it. */
function tellHealth(level, text, detail = "") {
  const meaning = text.replace(/[\d.,<>%]+/g, "");
  if (byId("news").dataset.meaning !== meaning) {
    byId("news").dataset.meaning = meaning;
    put(byId("news"), text);
  }
  byId("health").dataset.level = level;
  put(byId("health-text"), text);
  const shown = visible(detail);
  put(byId("health-detail"), shown.length > MOST_DETAIL ? `${shown.slice(0, MOST_DETAIL)}…` : shown);
}

/** The three questions, and the histogram: of the last five minutes, or since the start. */
function drawSpan(told, sum) {
  const old = spanOf === "recent" && history.length > 1 ? before(KEPT).sum : null;
  drawAge(told, sum, old);
  drawSaved(sum, old);
  const times = since(old, sum, "load_times");
  say("load.p50", bound(quantile(times, told.time_buckets, 0.5), told.time_buckets));
  say("load.p99", bound(quantile(times, told.time_buckets, 0.99), told.time_buckets));
}

/** How many reads needed no load, and how many requests that saved. */
function drawSaved(sum, old) {
  const grown = (pick) => pick(sum) - (old ? pick(old) : 0);
  const reads = grown((it) => it.all_reads);
  say("saved.ratio", reads ? percent(grown((it) => it.hits) / reads) : "–");
  const answered = reads - grown((it) => it.reads.gone);
  const requests = Math.max(0, answered - grown((it) => it.loads));
  say("saved.requests", sum.watched > 0 && requests === 0 ? "–" : count(requests));
}

function drawAge(told, sum, old) {
  const ages = since(old, sum);
  const bounds = told.age_buckets;
  const [half, most] = [quantile(ages, bounds, 0.5), quantile(ages, bounds, 0.99)];
  say("age.p50", bound(half, bounds));
  say("age.p99", bound(most, bounds));
  const terms = told.resources.flatMap(({ fresh_for }) => fresh_for ?? []);
  histogram(byId("histogram"), columns(ages.length ? ages : [...bounds.map(() => 0), 0], bounds, terms));
  byId("histogram").hidden = half === null;
  byId("histogram-empty").hidden = half !== null;
  put(byId("histogram-empty"), sum.all_reads ? "No read got a copy in this time." : "No reads yet. The chart appears with the first one.");
  byId("histogram").setAttribute("aria-label", `Reads by age: half ${bound(half, bounds)}, 99 of 100 ${bound(most, bounds)}`);
}

function drawReads(sum) {
  say("reads.total", count(sum.all_reads));
  figure(slot("reads.rate"), rate(speed((it) => it.all_reads)), " /s");
  spark(document.querySelector('[data-course="reads"]'), course((it) => it.all_reads), "Reads");
  shares(document.querySelector('[data-shares="reads"]'), VERDICTS.map((it) => [it, sum.reads[it]]), sum.all_reads);
  for (const verdict of VERDICTS) {
    const row = document.querySelector(`.verdicts [data-row="${verdict}"]`);
    put(row.children[1], `${rate(speed((it) => it.reads[verdict]))} /s`);
    put(row.children[2], count(sum.reads[verdict]));
  }
}

const saved = (sum) => Math.max(0, sum.all_reads - sum.reads.gone - sum.loads);
/** Every request was made to keep watched items fresh: no read was saved one. */
const isForViewers = (sum) => sum.watched > 0 && saved(sum) === 0;

function drawUpstream(sum) {
  say("upstream.made", count(sum.loads));
  figure(slot("upstream.rate"), rate(speed((it) => it.loads)), " /s");
  spark(document.querySelector('[data-course="loads"]'), course((it) => it.loads), "Upstream requests");
  shares(document.querySelector('[data-shares="saved"]'), [["fresh", saved(sum)]], isForViewers(sum) ? 0 : saved(sum) + sum.loads);
  say("upstream.saved", isForViewers(sum) ? "–" : count(saved(sum)));
  say("upstream.share", !isForViewers(sum) && savedShare(sum) ? `(${savedShare(sum)})` : "");
  say("upstream.note", isForViewers(sum)
    ? "Watched items are refreshed without being read. So far there were no more answered reads than requests."
    : "Failed requests count too. Saved: answered reads minus requests. Without a cache, each read would be a request.");
  say("upstream.keys", count(sum.loaded));
  say("upstream.coalesced", count(sum.coalesced));
}

function savedShare(sum) {
  return sum.all_reads ? percent(saved(sum) / (saved(sum) + sum.loads)) : "";
}

function drawRest(told, sum) {
  const mean = sum.loads ? +(sum.loaded / sum.loads).toFixed(1) : null;
  figure(slot("batch.mean"), mean === null ? "–" : `${mean}`, mean === 1 ? " key each" : " keys each");
  shares(document.querySelector('[data-shares="batch"]'), [[null, sum.loaded]], sum.room);
  say("batch.full", sum.room ? `${percent(sum.loaded / sum.room)}` : "–");
  say("batch.largest", sum.loads ? plural(sum.largest_batch, "key") : "–");

  const viewers = told.live ?? {};
  figure(slot("live.connections"), count(viewers.connections ?? 0), " connected");
  const kinds = Object.entries(viewers.subscriptions ?? {}).filter(([, number]) => number).sort(([, a], [, b]) => b - a);
  const more = kinds.slice(MOST_KINDS).reduce((all, [, number]) => all + number, 0);
  const rows = kinds.slice(0, MOST_KINDS).map(([kind, number]) => [kind, count(number)]);
  drawFacts(byId("subscriptions"), more ? [...rows, ["other kinds", count(more)]] : rows, "nothing subscribed");

  figure(slot("queue.loading"), count(sum.loading), " now");
  say("queue.queued", count(sum.queued));
  say("queue.failing", count(sum.failing));
  slot("queue.failing").classList.toggle("bad", sum.failing > 0);
  slot("queue.failing").title = sum.error ?? "";
  say("queue.retry", sum.retry_at === null ? "–" : `in ${duration(Math.max(0, sum.retry_at - told.at))}`);

  const stores = Object.values(told.stores).filter((store) => !store.is_repeated);
  const known = stores.filter((store) => !store.error);
  const all = (name) => known.reduce((total, store) => total + store[name], 0);
  figure(slot("leases.held"), known.length === stores.length ? count(all("leases")) : "–", " held now");
  say("leases.won", count(sum.leases_won));
  say("leases.denied", count(sum.leases_denied));
  say("leases.lost", count(sum.superseded));

  const errors = (it) => it.failed + it.store_errors;
  figure(slot("errors.rate"), rate(speed(errors)), " /s");
  spark(document.querySelector('[data-course="failed"]'), course(errors), "Errors");
  say("errors.failed", count(sum.failed));
  say("errors.store", count(sum.store_errors));
  say("errors.absent", count(sum.absent));

  const isWhole = known.length === stores.length;
  const away = stores.length > 1 ? [`${stores.length - known.length} of ${stores.length}`, " down"] : ["down", ""];
  figure(slot("store.copies"), ...(isWhole ? [count(all("copies")), all("copies") === 1 ? " copy" : " copies"] : away));
  say("store.bytes", isWhole ? bytes(all("bytes")) : "–");
  say("store.memory", count(sum.entries));
}

function drawSiteConnections(connections) {
  const uses = Object.entries(connections);
  const list = byId("site-connections");
  list.hidden = !uses.length;
  if (list.childElementCount !== 2 * uses.length) {
    list.replaceChildren(...uses.flatMap(([use]) => [element("dt", { textContent: `site, ${use}` }), element("dd", { className: "number" })]));
  }
  uses.forEach(([, { in_use, most }], at) => put(list.children[2 * at + 1], `${count(in_use)} of ${count(most)}`));
}

function drawBypassed(told) {
  const reasons = ranked(told.bypassed);
  byId("bypassed").hidden = !reasons.length;
  put(byId("bypassed-note"), `${plural(reasons.reduce((all, [, number]) => all + number, 0), "request")} since the start`);
  const late = passedOfLate();
  const body = byId("reasons");
  const rows = new Map([...body.children].map((row) => [row.dataset.reason, row]));
  const wanted = reasons.map(([reason, number]) => {
    const row = rows.get(reason) ?? reasonRow(reason);
    put(row.children[1], count(number));
    put(row.children[2], count(late[reason]));
    return row;
  });
  if (wanted.some((row, at) => body.children[at] !== row) || wanted.length !== body.childElementCount) body.replaceChildren(...wanted);
}

function reasonRow(reason) {
  const row = element("tr", { title: meaningOf(reason) },
    element("th", { scope: "row", textContent: wordsOf(reason) }),
    element("td", { className: "number" }),
    element("td", { className: "number" }),
    element("td", { className: "wide muted", textContent: meaningOf(reason) }));
  row.dataset.reason = reason;
  return row;
}

function drawFacts(target, facts, nothing) {
  const known = JSON.stringify(facts);
  if (target.dataset.known === known) return;
  target.dataset.known = known;
  if (!facts.length) target.replaceChildren(element("dt", { className: "alone", textContent: nothing }));
  else target.replaceChildren(...facts.flatMap(([name, value]) => [
    element("dt", { className: "cut", textContent: name, title: name }),
    element("dd", { className: "number", textContent: value }),
  ]));
}

function drawKinds({ told, kinds, sum }) {
  const body = byId("kinds");
  byId("kinds-empty").hidden = kinds.size > 0;
  document.querySelector(".kinds").hidden = !kinds.size;
  const rows = new Map([...body.children].map((row) => [row.dataset.kind, row]));
  for (const { cache, kind, objective } of told.resources) {
    const name = `${cache} ${kind}`;
    const row = rows.get(name) ?? body.appendChild(kindRow(name, kind));
    rows.delete(name);
    drawKind(row, kinds.get(name), name, told.age_buckets);
    drawObjective(row, objective, kinds.get(name), before(KEPT).kinds.get(name));
  }
  for (const row of rows.values()) row.remove();
  const foot = byId("kinds-total");
  if (!foot.firstChild) foot.append(kindRow("", "all"));
  drawKind(foot.firstChild, sum, null, told.age_buckets);
  const hasNone = told.resources.every(({ objective }) => !objective);
  for (const cell of document.querySelectorAll(".kinds .objective")) cell.hidden = hasNone;
}

/** The share of reads since `old` that met the objective, and its burn rate; nothing without such reads. */
function judged(objective, now, old) {
  const [met, missed] = ["objective_met", "objective_missed"].map((name) => now[name] - (old?.[name] ?? 0));
  return objective && met + missed ? { met: met / (met + missed), burn: missed / (met + missed) / (1 - objective.share) } : {};
}

/** The objective, and how the last five minutes (or all reads, if there were none then) met it. */
function drawObjective(row, objective, now, old) {
  const [wanted, share, rateOf] = row.querySelectorAll(".objective");
  put(wanted, objective ? `${+(100 * objective.share).toFixed(6)} % < ${duration(objective.age)}` : "–");
  const { met, burn } = { ...judged(objective, now), ...judged(objective, now, old) };
  put(share, met === undefined ? "–" : percent(met));
  put(rateOf, burn === undefined ? "–" : `${+burn.toFixed(1)}×`);
  rateOf.classList.toggle("bad", burn > 1);
}

/** How the checked reads of each kind were judged, and the stories of those that were wrong. */
function drawTruth(told) {
  const checked = told.resources.filter(({ truth }) => truth);
  byId("truth").hidden = !checked.length;
  const known = JSON.stringify(checked.map(({ cache, kind, truth }) => [cache, kind, truth]));
  if (byId("truth").dataset.known === known) return;
  byId("truth").dataset.known = known;
  byId("truth-kinds").replaceChildren(...checked.map(truthRow));
  const stories = checked.flatMap(({ kind, truth }) => truth.wrong_reads.map((story) => ({ kind, ...story })));
  stories.sort((one, other) => other.judged_at - one.judged_at);
  byId("wrong-reads").hidden = !stories.length;
  byId("wrong-reads").replaceChildren(...stories.slice(0, MOST_STORIES).map(storyItem));
}

function checkedOf(truth) {
  return truth.true + truth.late + truth.wrong;
}

/** How often reads are wrong, as a multiple of what the objective allows; NaN without one. */
function wrongBurn(truth) {
  const checked = checkedOf(truth);
  return truth.objective && checked ? truth.wrong / checked / (1 - truth.objective.share) : NaN;
}

function truthRow({ kind, truth }) {
  const { nines, objective } = truth;
  const cells = [
    count(checkedOf(truth)), count(truth.late), count(truth.wrong), count(truth.failed + truth.skipped),
    nines === null ? "–" : nines.toFixed(1), duration(truth.true_within),
    objective ? `${+(100 * objective.share).toFixed(6)} %` : "–",
  ].map((text) => element("td", { className: "number", textContent: text }));
  cells[2].classList.toggle("bad", truth.wrong > 0);
  cells[6].classList.toggle("bad", wrongBurn(truth) > 1);
  return element("tr", {}, element("th", { scope: "row", className: "cut", textContent: kind, title: kind }), ...cells);
}

/** "price 'a': served fresh from memory, 10 s old (fresh for 1 h); invalidated 12 s before." */
function storyItem(story) {
  const before = story.served_at - story.changed_at;
  const change = story.change ? `${story.change} ${duration(Math.abs(before))} ${before < 0 ? "after" : "before"}` : "no known change";
  const lease = story.lease_until === null ? "" : "; there was a lease on it";
  const text = `${story.kind} ${visible(story.key)}: served ${story.verdict.toLowerCase()} from ${story.origin}, `
    + `${duration(story.age)} old (fresh for ${duration(story.fresh_for)}); ${change}${lease}.`;
  return element("li", { textContent: text, title: `generation ${story.generation ?? "unknown"}` });
}

function kindRow(name, kind) {
  const row = element("tr", {}, element("th", { scope: "row", className: "cut", textContent: kind, title: kind }));
  row.dataset.kind = name;
  for (let at = 0; at < 12; at += 1) row.append(element("td", { className: at === 1 ? "" : "number" }));
  row.children[2].append(element("div", { className: "shares" }));
  for (let at = 0; at < 3; at += 1) row.append(element("td", { className: "number objective", hidden: true }));
  return row;
}

function drawKind(row, sum, name, bounds) {
  const ages = since(name === null ? before(KEPT).sum : before(KEPT).kinds.get(name), sum);
  const seen = ages.some((number) => number > 0) ? ages : sum.ages;
  const cells = row.children;
  put(cells[1], rate(speed((it) => it.all_reads, name)));
  shares(cells[2].firstChild, VERDICTS.map((it) => [it, sum.reads[it]]), sum.all_reads);
  cells[2].title = VERDICTS.map((it) => `${it} ${count(sum.reads[it])}`).join(", ");
  put(cells[3], bound(quantile(seen, bounds, 0.5), bounds));
  put(cells[4], bound(quantile(seen, bounds, 0.99), bounds));
  put(cells[5], rate(speed((it) => it.loads, name)));
  put(cells[6], (!isForViewers(sum) && savedShare(sum)) || "–");
  put(cells[7], sum.loads ? `${+(sum.loaded / sum.loads).toFixed(1)} of ${+(sum.room / sum.loads).toFixed(1)}` : "–");
  put(cells[8], count(sum.watched));
  put(cells[9], sum.queued ? `${count(sum.loading)} (${count(sum.queued)} queued)` : count(sum.loading));
  put(cells[10], count(sum.failing));
  cells[10].classList.toggle("bad", sum.failing > 0);
  cells[10].title = sum.error ?? "";
  put(cells[11], count(sum.superseded));
  put(cells[12], count(sum.failed + sum.store_errors));
}

for (const [id, which] of [["span-recent", "recent"], ["span-all", "all"]]) {
  byId(id).addEventListener("click", () => {
    spanOf = which;
    byId("span-recent").setAttribute("aria-pressed", String(which === "recent"));
    byId("span-all").setAttribute("aria-pressed", String(which === "all"));
    if (history.length) drawSpan(history.at(-1).told, history.at(-1).sum);
  });
}

/* ---- hearing the numbers: a WebSocket, and polling while there is none ---- */

let polling = null;
let socket = null;
let pause = 1_000;
let heardAt = 0;

function linked(state, text) {
  byId("link").dataset.state = state;
  put(byId("link"), text);
}

function heard(told) {
  draw(remember(told));
  entries.told(told);
}

function listen() {
  const url = new URL("../v1/live", location.href);
  url.protocol = url.protocol === "https:" ? "wss:" : "ws:";
  socket = new WebSocket(url);
  socket.addEventListener("open", () => socket.send(JSON.stringify(token() ? { type: "stats", token: token() } : { type: "stats" })));
  socket.addEventListener("message", ({ data }) => {
    const message = JSON.parse(data);
    if (message.type === "ping") socket.send(JSON.stringify({ type: "pong" }));
    if (message.type !== "stats") return;
    pause = 1_000;
    heardAt = performance.now();
    stopPolling();
    linked("live", "live");
    heard(message);
  });
  socket.addEventListener("close", () => {
    socket = null;
    startPolling();
    setTimeout(listen, pause);
    pause = Math.min(LONGEST_PAUSE, pause * 2);
  });
}

function watchSocket() {
  if (performance.now() - heardAt > SILENCE) startPolling();
}

function startPolling() {
  if (polling === null) polling = setTimeout(poll, 0);
}

function stopPolling() {
  clearTimeout(polling);
  polling = null;
}

async function poll() {
  try {
    const told = await ask("api/stats");
    if (polling === null) return;
    linked("polling", "polling");
    heard(told);
  } catch (error) {
    if (polling === null) return;
    linked("away", error instanceof Refused ? "refused" : "no connection");
    tellHealth("bad", error instanceof Refused ? error.message : "The server does not answer. These are the last numbers it sent.");
  }
  polling = setTimeout(poll, POLL);
}

/* ---- beginning ---- */

const entries = new Entries(ask);

async function begin() {
  try {
    const { needs_token, is_operator } = await access();
    if (needs_token && !is_operator) {
      linked("away", "token needed");
      put(byId("health-text"), "Enter the token to see the numbers.");
      signIn(token() ? "This token is wrong." : "");
      return;
    }
    const [told, notes] = await Promise.all([ask("api/stats"), ask("api/history")]);
    recall(notes.filter((note) => note.at < told.at), told.started_at);
    heard(told);
  } catch (error) {
    const said = error instanceof Refused ? error.message : "The server does not answer.";
    linked("away", error instanceof Refused ? "refused" : "no connection");
    put(byId("health-text"), said);
    if (byId("sign-in").open) put(byId("sign-in-said"), said);
    else setTimeout(begin, 3_000);
    return;
  }
  if (byId("sign-in").open) byId("sign-in").close();
  heardAt = performance.now();
  if (history.at(-1).told.has_live) listen();
  else startPolling();
  setInterval(watchSocket, 1_000);
  entries.load();
}

byId("sign-in").addEventListener("cancel", (event) => event.preventDefault());
byId("sign-in-form").addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem(TOKEN, byId("token").value.trim());
  byId("token").value = "";
  if (socket || polling !== null) location.reload();
  else begin();
});
byId("sign-out").addEventListener("click", () => {
  sessionStorage.removeItem(TOKEN);
  location.reload();
});

begin();
