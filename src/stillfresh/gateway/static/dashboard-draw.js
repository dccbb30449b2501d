// Numbers as people read them, and the small charts: everything here takes values and draws.

export const VERDICTS = ["fresh", "stale", "expired", "gone"];

const MOST_LABELS = 10; // columns of the histogram; of more, every second one is labelled
const FEWEST_POINTS = 4; // of a curve: fewer are a scratch
const SVG = "http://www.w3.org/2000/svg";
const WHOLE = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
// What an id could hide behind: control characters, and those that turn the direction of a text.
const HIDDEN = /[\u0000-\u001f\u007f-\u009f\u00ad\u061c\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff]/g;

export const byId = (id) => document.getElementById(id);

export function element(tag, properties = {}, ...children) {
  const made = Object.assign(document.createElement(tag), properties);
  made.append(...children);
  return made;
}

export function put(target, text) {
  if (target.textContent !== text) target.textContent = text;
}

export function count(number) {
  if (number < 10_000) return WHOLE.format(number);
  const [unit, by] = [["k", 1e3], ["M", 1e6], ["G", 1e9], ["T", 1e12]].findLast(([, it]) => number >= it);
  const scaled = number / by;
  return `${scaled < 100 ? scaled.toFixed(1) : WHOLE.format(scaled)} ${unit}`;
}

export function rate(number) {
  if (number <= 0) return "0";
  if (number < 0.1) return "< 0.1";
  return number < 10 ? number.toFixed(1) : count(Math.round(number));
}

export function percent(share) {
  const number = share * 100;
  if (number > 99.9 && number < 100) return "> 99.9 %";
  if (number > 0 && number < 0.1) return "< 0.1 %";
  return `${number >= 10 && number < 99 ? Math.round(number) : +number.toFixed(1)} %`;
}

export function duration(seconds) {
  const size = Math.abs(seconds);
  if (size < 10) return `${+seconds.toFixed(1)} s`;
  if (size < 100) return `${Math.round(seconds)} s`;
  if (size < 5400) return `${Math.round(seconds / 60)} min`;
  if (size < 129_600) return `${Math.round(seconds / 3600)} h`;
  return `${Math.round(seconds / 86_400)} d`;
}

/** What is counted up by the second keeps its places. */
export function age(seconds) {
  return Math.abs(seconds) < 9.95 ? `${Math.max(0, seconds).toFixed(1)} s` : duration(seconds);
}

export function bytes(size) {
  if (size < 1000) return `${size} B`;
  const [unit, by] = [["kB", 1e3], ["MB", 1e6], ["GB", 1e9], ["TB", 1e12]].findLast(([, it]) => size >= it);
  const scaled = size / by;
  return `${scaled < 100 ? scaled.toFixed(1) : WHOLE.format(scaled)} ${unit}`;
}

export function plural(number, one, many = `${one}s`) {
  return `${count(number)} ${number === 1 ? one : many}`;
}

/** An id with nothing in it unseen. */
export function visible(text) {
  return text.replace(HIDDEN, (it) => (it === "\n" ? "↵" : `\\u${it.charCodeAt(0).toString(16).padStart(4, "0")}`));
}

/** A number with its unit, the unit smaller. */
export function figure(target, number, unit = "") {
  const [value, small] = target.childNodes.length === 2 ? target.childNodes : [];
  if (value) {
    if (value.nodeValue !== number) value.nodeValue = number;
    put(small, unit);
  } else {
    target.replaceChildren(document.createTextNode(number), element("span", { className: "unit", textContent: unit }));
  }
}

/** The age that this share of the reads was no older than: a bucket's upper bound. */
export function quantile(ages, bounds, share) {
  const total = ages.reduce((sum, it) => sum + it, 0);
  if (!total) return null;
  let seen = 0;
  const bucket = ages.findIndex((it) => (seen += it) >= share * total);
  return { bucket, bound: bounds[bucket] ?? Infinity };
}

export function bound(found, bounds) {
  if (found === null) return "–";
  return found.bound === Infinity ? `> ${brief(bounds.at(-1))}` : `≤ ${brief(found.bound)}`;
}

/** The time of a load, which may be short. */
function brief(seconds) {
  return seconds < 1 ? `${+(seconds * 1000).toFixed(1)} ms` : duration(seconds);
}

/** The buckets worth a column, as [bound, reads]: around the terms in use, and wherever reads are.
    What is younger than the first bound is in the first column; the last one has no bound. */
export function columns(ages, bounds, terms) {
  const used = ages.flatMap((number, at) => (number ? [at] : []));
  const shortest = terms.length ? Math.min(...terms) : bounds[Math.max(0, used[0] ?? 0)];
  const longest = terms.length ? Math.max(...terms) : 0;
  const first = Math.max(0, bounds.findLastIndex((it) => it <= shortest / 20));
  const past = bounds.findIndex((it) => it >= 2 * longest);
  const last = Math.min(bounds.length, 1 + Math.max(past < 0 ? bounds.length : past, used.at(-1) ?? 0, first + 6));
  const sum = (some) => some.reduce((all, it) => all + it, 0);
  return [
    [bounds[first], sum(ages.slice(0, first + 1))],
    ...bounds.slice(first + 1, last).map((bound, at) => [bound, ages[first + 1 + at]]),
    [Infinity, sum(ages.slice(last))],
  ];
}

export function histogram(target, found) {
  const most = Math.max(...found.map(([, number]) => number), 1);
  const total = found.reduce((sum, [, number]) => sum + number, 0);
  if (target.childElementCount !== found.length) {
    target.replaceChildren(...found.map(() => element("div", { className: "bucket" },
      element("span", { className: "many" }),
      element("div", { className: "pillar" }, element("span")),
      element("span", { className: "bound" }))));
  }
  target.toggleAttribute("data-dense", found.length > MOST_LABELS);
  found.forEach(([bound, number], at) => {
    const column = target.children[at];
    const isLast = bound === Infinity;
    const label = isLast ? "older" : duration(bound);
    put(column.children[0], number ? percentShort(number / total) : "");
    column.children[1].firstChild.style.height = number ? `max(2px, ${(100 * number) / most}%)` : "0";
    put(column.children[2], label.replace(" s", "s").replace(" min", "m").replace(" h", "h").replace(" d", "d"));
    column.title = `${isLast ? "more than" : "up to"} ${duration(isLast ? found[at - 1][0] : bound)}: ${plural(number, "read")}`;
    column.toggleAttribute("data-small", number < 0.05 * total);
  });
}

function percentShort(share) {
  const number = share * 100;
  return number < 1 ? "<1%" : `${Math.round(number)}%`;
}

/** A curve; or, of too few points or of nothing, words in its place.
    Points are [seconds ago, value], the oldest first; at least a minute wide.
    Below it: since when, and its highest value; while a pointer is over it, the value there. */
export function spark(place, points, label) {
  const [target, words] = place.children;
  const axis = place.children[2] ?? withAxis(place);
  const width = Math.max(60, points[0]?.[0] ?? 0);
  const most = Math.max(...points.map(([, value]) => value), 0);
  const x = (ago) => (300 * (1 - ago / width)).toFixed(1);
  const y = (value) => (30 - (most ? (28 * value) / most : 0)).toFixed(1);
  if (!target.firstChild) {
    target.setAttribute("viewBox", "0 0 300 32");
    target.setAttribute("preserveAspectRatio", "none");
    for (const name of ["area", "line"]) {
      const path = document.createElementNS(SVG, "path");
      path.setAttribute("class", name);
      target.append(path);
    }
  }
  const line = points.map(([ago, value]) => `${x(ago)} ${y(value)}`).join(" L");
  const [area, stroke] = target.children;
  curves.set(place, { points, width });
  put(axis.children[0], `${duration(width)} ago`);
  put(axis.children[1], `max ${rate(most)}`);
  const isDrawn = most > 0 && points.length >= FEWEST_POINTS;
  target.toggleAttribute("hidden", !isDrawn);
  axis.hidden = !isDrawn;
  put(words, isDrawn ? "" : points.length < FEWEST_POINTS ? "curve follows" : "none lately");
  stroke.setAttribute("d", isDrawn ? `M${line}` : "");
  area.setAttribute("d", isDrawn ? `M${line} L${x(points.at(-1)[0])} 31 L${x(points[0][0])} 31 Z` : "");
  target.setAttribute("aria-label", `${label} over the last five minutes, at most ${rate(most)} a second`);
}

const curves = new WeakMap(); // by place: what is drawn there

/** The axis of a curve, and what a pointer reads there. */
function withAxis(place) {
  const parts = ["from", "most", "now", "read"].map((className) => element("span", { className }));
  const axis = element("div", { className: "axis", hidden: true }, ...parts);
  const [, , now, read] = parts;
  now.textContent = "now";
  place.append(axis);
  place.addEventListener("pointermove", ({ clientX }) => {
    const { left, width } = place.getBoundingClientRect();
    const curve = curves.get(place);
    const ago = curve.width * (1 - (clientX - left) / width);
    const near = curve.points.reduce((best, it) => (Math.abs(it[0] - ago) < Math.abs(best[0] - ago) ? it : best), [Infinity, 0]);
    read.textContent = near[0] === Infinity ? "" : `${rate(near[1])} /s, ${duration(near[0])} ago`;
    axis.toggleAttribute("data-read", near[0] !== Infinity);
  });
  place.addEventListener("pointerleave", () => axis.removeAttribute("data-read"));
  return axis;
}

/** A bar of parts: [verdict or null, amount]. */
export function shares(target, parts, total) {
  if (target.childElementCount !== parts.length) {
    target.replaceChildren(...parts.map(([verdict]) => {
      const made = element("span");
      if (verdict) made.dataset.verdict = verdict;
      return made;
    }));
  }
  target.style.visibility = total ? "" : "hidden"; // nothing to divide
  parts.forEach(([, amount], at) => {
    target.children[at].style.flex = `0 0 ${total ? (100 * amount) / total : 0}%`;
    target.children[at].hidden = !amount;
  });
}
