// A plain cached function: what a call returned, how old that is, and how long the call took.

import { announce, ask, byId, send, stamp, unknown, write } from "./fresh.js";

const FRESH_FOR = 10; // seconds, as the function's decorator says

export function start() {
  byId("rate-call").addEventListener("click", call);
  byId("rate-invalidate").addEventListener("click", async () => {
    const answer = await send("/demo/rate/invalidate");
    write(byId("rate-word"), answer.refused ?? "Invalidated: the next call waits for a new value.");
  });
  call();
}

/** The upstream was switched: what a call returns now may differ. */
export function switched() {
  call();
}

async function call() {
  write(byId("rate-word"), "Calling …");
  const answer = await ask("/demo/rate");
  if (answer.refused) {
    unknown(byId("rate-badge"), "no copy");
    write(byId("rate-word"), answer.refused);
    return;
  }
  const { value, took, age, verdict, error } = answer;
  announce(byId("rate"), value.toFixed(4));
  stamp(byId("rate-badge"), { age, freshFor: FRESH_FOR, verdict, error });
  write(byId("rate-word"), `The call took ${taken(took)}. ${meaning(verdict, error)}`);
}

function taken(seconds) {
  return seconds < 1 ? `${(seconds * 1000).toFixed(1)} ms` : `${seconds.toFixed(1)} s`;
}

function meaning(verdict, error) {
  if (verdict === "fresh") return "Until the copy is 10 s old, calls return it and do not run the function.";
  if (error) return "Loading failed: this is the old copy.";
  return "The copy is stale: the function runs in the background. Call again.";
}
