// The page's own age, ticking: it knows when it was rendered.

import { stamp } from "./fresh.js";

const page = document.getElementById("prices");
const age = Math.max(0, Date.now() / 1000 - Number(page.dataset.renderedAt));
stamp(page.querySelector("[data-page-badge]"), { age, freshFor: Number(page.dataset.freshFor) });
