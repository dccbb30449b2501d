// What is wrong with the layout of a page, in sentences; run by test_dashboard_states.py.
() => {
  const wrong = [];
  const [wide, there] = [document.documentElement.scrollWidth, innerWidth];
  if (wide > there) wrong.push(`the page is ${wide} px wide`);
  const texts = [];
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  for (let node = walker.nextNode(); node; node = walker.nextNode()) {
    const parent = node.parentElement;
    if (!node.data.trim() || parent.closest(".visually-hidden, .skip, .scroll, script, noscript")) continue;
    if (!parent.checkVisibility({ visibilityProperty: true, opacityProperty: true })) continue;
    const range = document.createRange();
    const card = parent.closest(".card, .health, .bar")?.getBoundingClientRect();
    for (const { 0: word, index } of node.data.matchAll(/[^\s-]+/g)) {
      range.setStart(node, index);
      range.setEnd(node, index + word.length);
      const boxes = [...range.getClientRects()];
      const lines = new Set(boxes.map((it) => Math.round(it.top)));
      if (lines.size > 1 && word.length <= 20 && !parent.closest(".mono")) wrong.push(`"${word}" is broken into ${lines.size} lines`);
      const clip = parent.closest(".clamp")?.getBoundingClientRect();
      for (const box of boxes) {
        if (parent.closest(".cut") || (clip && box.bottom > clip.bottom + 1)) continue;
        if (card && (box.left < card.left || box.right > card.right + 0.5)) wrong.push(`"${word}" stands out of its card`);
        texts.push([word, node, box]);
      }
    }
  }
  for (const [at, [word, node, box]] of texts.entries()) {
    for (const [other, another, that] of texts.slice(at + 1)) {
      if (node === another) continue;
      const across = Math.min(box.right, that.right) - Math.max(box.left, that.left);
      const down = Math.min(box.bottom, that.bottom) - Math.max(box.top, that.top);
      if (across > 0.5 && down > 3) wrong.push(`"${word}" and "${other}" overlap`);
    }
  }
  const boxes = [...document.querySelectorAll(".bar, .health, .card")].filter((it) => it.checkVisibility());
  for (const [at, one] of boxes.entries()) {
    for (const other of boxes.slice(at + 1)) {
      const [a, b] = [one.getBoundingClientRect(), other.getBoundingClientRect()];
      const across = Math.min(a.right, b.right) - Math.max(a.left, b.left);
      const down = Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top);
      if (across > 0.5 && down > 0.5) wrong.push(`${one.id || one.className} and ${other.id || other.className} overlap`);
    }
  }
  return [...new Set(wrong)];
}
