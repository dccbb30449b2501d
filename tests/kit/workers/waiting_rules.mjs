// The waiting rules in JavaScript, for a test in Python: each line on the input is a state and
// events, each line on the output the steps that the events lead to.

import { createInterface } from "node:readline";
import { pathToFileURL } from "node:url";

const { INITIAL, step } = await import(pathToFileURL(process.argv[2]));

for await (const line of createInterface({ input: process.stdin })) {
  const { state: changes, events } = JSON.parse(line);
  let state = { ...INITIAL, ...changes };
  const steps = [];
  for (const event of events) {
    const next = step(state, event);
    steps.push(next);
    state = next.state;
  }
  console.log(JSON.stringify(steps));
}
