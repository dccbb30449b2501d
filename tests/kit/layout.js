// What is wrong with the look of a page so wide, in sentences; run by the browser tests of dashboard and demo.
async (width) => {
  while (innerWidth !== width) await new Promise(requestAnimationFrame);
  await Promise.allSettled(document.getAnimations().map((it) => it.finished));
  const wrong = new Set();
  const isSeen = (element) => element.checkVisibility({ visibilityProperty: true, opacityProperty: true });
  const nameOf = (element) => element.id || element.className || element.tagName;
  if (document.documentElement.scrollWidth > innerWidth) wrong.add(`the page is ${document.documentElement.scrollWidth} px wide`);

  const overlaps = (boxes, most, say) => {
    boxes.sort((one, other) => one.box.top - other.box.top);
    for (const [at, one] of boxes.entries()) {
      for (let next = at + 1; next < boxes.length && boxes[next].box.top < one.box.bottom - most; next += 1) {
        const [a, b] = [one.box, boxes[next].box];
        const across = Math.min(a.right, b.right) - Math.max(a.left, b.left);
        const down = Math.min(a.bottom, b.bottom) - b.top;
        if (across > 0.5 && down > most && one.of !== boxes[next].of && one.layer === boxes[next].layer) wrong.add(say(one, boxes[next]));
      }
    }
  };

  // Colours: each text against what is painted behind it.
  const paper = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  const known = new Map();
  const rgba = (colour) => {
    if (!known.has(colour)) {
      paper.clearRect(0, 0, 1, 1);
      paper.fillStyle = colour;
      paper.fillRect(0, 0, 1, 1);
      known.set(colour, [...paper.getImageData(0, 0, 1, 1).data]);
    }
    return known.get(colour);
  };
  const over = ([r, g, b, a], ground) => [r, g, b].map((it, at) => (it * a + ground[at] * (255 - a)) / 255);
  const grounds = new Map();
  const ground = (element) => {
    if (!element) return over(rgba("Canvas"), [255, 255, 255]);
    if (!grounds.has(element)) grounds.set(element, over(rgba(getComputedStyle(element).backgroundColor), ground(element.parentElement)));
    return grounds.get(element);
  };
  const light = (colour) => {
    const [r, g, b] = colour.map((it) => (it / 255 <= 0.04045 ? it / 255 / 12.92 : ((it / 255 + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const contrast = (element) => {
    const [ink, behind] = [over(rgba(getComputedStyle(element).color), ground(element)), ground(element)].map(light);
    return (Math.max(ink, behind) + 0.05) / (Math.min(ink, behind) + 0.05);
  };

  // Texts: whole words, inside their cards, each apart from the others, easy to read.
  const texts = [];
  const parents = new Set();
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  for (let node = walker.nextNode(); node; node = walker.nextNode()) {
    const parent = node.parentElement;
    if (!node.data.trim() || parent.closest(".visually-hidden, .skip, script, noscript, option") || !isSeen(parent)) continue;
    if (getComputedStyle(parent).clipPath !== "none") continue; // for screen readers
    if (!parents.has(parent)) {
      parents.add(parent);
      const found = parent.closest(":disabled") ? 99 : contrast(parent);
      if (found < 4.5) wrong.add(`"${node.data.trim().slice(0, 30)}" has a contrast of ${found.toFixed(1)}`);
    }
    if (parent.closest(".scroll")) continue; // it may be wider than the page, and moves under its first column
    const card = parent.closest(".card, .health, .bar")?.getBoundingClientRect();
    const cut = parent.closest(".cut, .id > span, .topics, .talk, .side, .sides");
    const clip = parent.closest(".clamp")?.getBoundingClientRect();
    const layer = parent.closest(".tabs, .top"); // the page moves below these
    const range = document.createRange();
    for (const { 0: word, index } of node.data.matchAll(/[^\s-]+/g)) {
      range.setStart(node, index);
      range.setEnd(node, index + word.length);
      const boxes = [...range.getClientRects()];
      const lines = new Set(boxes.map((it) => Math.round(it.top)));
      if (lines.size > 1 && word.length <= 20 && !parent.closest(".mono")) wrong.add(`"${word}" is broken into ${lines.size} lines`);
      for (const box of boxes) {
        if (cut || (clip && box.bottom > clip.bottom + 1)) continue;
        if (card && (box.left < card.left || box.right > card.right + 0.5)) wrong.add(`"${word}" stands out of its card`);
        texts.push({ word, of: node, box, layer });
      }
    }
  }
  overlaps(texts, 3, (one, other) => `"${one.word}" and "${other.word}" overlap`);

  // What is cut off says so, and can be read whole.
  const around = new Set();
  for (const parent of parents) for (let it = parent; it !== document.body && !around.has(it); it = it.parentElement) around.add(it);
  for (const it of around) {
    if (it.scrollWidth <= it.clientWidth + 1 || !it.clientWidth) continue;
    const { overflowX, textOverflow } = getComputedStyle(it);
    if (!/hidden|clip/.test(overflowX)) continue;
    if (textOverflow !== "ellipsis") wrong.add(`"${it.textContent.trim().slice(0, 30)}" is cut off`);
    else if (!it.closest("[title]:not([title=''])")) wrong.add(`"${it.textContent.trim().slice(0, 30)}" is cut, and stands nowhere whole`);
  }

  // No chart is empty without a word.
  for (const chart of document.querySelectorAll(".histogram, .spark, .card > .shares")) {
    if (!isSeen(chart) || chart.closest(".scroll")) continue;
    const isDrawn = [...chart.querySelectorAll(".pillar > span, path.line, :scope > span")].some((it) => {
      const { width, height } = it.getBoundingClientRect();
      return width > 0.5 || height > 0.5;
    });
    if (!isDrawn && !chart.closest(".card").textContent.includes("0 %")) wrong.add(`the chart ${chart.dataset.spark ?? chart.dataset.shares ?? nameOf(chart)} is empty, without a word`);
  }

  const boxes = [...document.querySelectorAll(".bar, .health, .card")].filter((it) => isSeen(it) && !it.closest(".top"));
  overlaps(boxes.map((of) => ({ of, box: of.getBoundingClientRect() })), 0.5, (one, other) => `${nameOf(one.of)} and ${nameOf(other.of)} overlap`);
  return [...wrong];
}
