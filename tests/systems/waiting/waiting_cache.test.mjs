// The driver of stillfresh-waiting.js: what it asks and when, how it retries, rests and ends.

import assert from "node:assert/strict";
import test from "node:test";

import { INITIAL, WaitingCache, step } from "../../../src/stillfresh/gateway/static/stillfresh-waiting.js";

console.warn = () => {}; // what a failed refetch says

/** `fetch` waits until the test answers. */
class Backend {
  waiting = [];
  calls = 0;

  fetch = (signal) => {
    this.calls += 1;
    this.signal = signal;
    return new Promise((resolve, reject) => this.waiting.push({ resolve, reject }));
  };

  async answer(...games) {
    await turns();
    this.waiting.shift().resolve(games);
    await turns();
  }

  async fail() {
    await turns();
    this.waiting.shift().reject(new Error("the backend is down"));
    await turns();
  }
}

/** Notes how long, and returns when the test says so. */
class Sleeper {
  slept = [];

  sleep = (milliseconds) => {
    this.slept.push(milliseconds);
    return new Promise((resolve) => (this.wake = resolve));
  };
}

/** Let everything run that is ready. */
async function turns() {
  for (let turn = 0; turn < 20; turn++) await null;
}

test("a hundred turns of one game cost one refetch after the first", async () => {
  let calls = 0;
  const waiting = new WaitingCache(async () => {
    calls += 1;
    return ["chess", "go", "poker"];
  });
  waiting.start();
  await waiting.settled();
  waiting.opened("poker");
  for (let turn = 0; turn < 100; turn++) {
    waiting.moveSent("poker");
    waiting.yourTurn("poker");
    await waiting.settled();
  }
  assert.equal(calls, 2);
  assert.deepEqual(waiting.navigation("poker"), {
    games: ["chess", "go"],
    proof: "snapshot",
    pending: false,
  });
});

test("one refetch runs at a time, and what is asked meanwhile is asked once after it", async () => {
  const backend = new Backend();
  const waiting = new WaitingCache(backend.fetch);
  waiting.start();
  waiting.invalidated();
  waiting.invalidated();
  await backend.answer("a");
  assert.equal(backend.calls, 2);
  await backend.answer("b", "c", "d");
  assert.equal(backend.calls, 2);
  assert.deepEqual(waiting.state.pool, ["b", "c", "d"]);
  assert.equal(waiting.navigation().pending, false);
});

test("a failed refetch is tried again after growing pauses, and success forgets them", async () => {
  const backend = new Backend();
  const sleeper = new Sleeper();
  const waiting = new WaitingCache(backend.fetch, sleeper);
  waiting.start();
  for (let failure = 0; failure < 9; failure++) {
    await backend.fail();
    sleeper.wake();
  }
  assert.deepEqual(sleeper.slept, [500, 1000, 2000, 4000, 8000, 16000, 30000, 30000, 30000]);
  await backend.answer("a");
  waiting.invalidated();
  await backend.fail();
  assert.equal(sleeper.slept.at(-1), 500);
});

test("an event ends the pause and asks at once", async () => {
  const backend = new Backend();
  const sleeper = new Sleeper();
  const waiting = new WaitingCache(backend.fetch, sleeper);
  waiting.start();
  await backend.fail();
  waiting.reconnected();
  await turns();
  assert.equal(backend.calls, 2);
  sleeper.wake();
  await turns();
  assert.equal(backend.calls, 2);
});

test("an answer that is no array of ids is a failure", async () => {
  for (const answer of [undefined, "chess", { 0: "chess" }, [null], [1.5]]) {
    const sleeper = new Sleeper();
    const waiting = new WaitingCache(async () => answer, sleeper);
    waiting.start();
    await turns();
    assert.deepEqual(sleeper.slept, [500], JSON.stringify(answer));
  }
});

test("closing aborts the request, settles everybody and refuses events", async () => {
  const backend = new Backend();
  const waiting = new WaitingCache(backend.fetch);
  waiting.start();
  await turns();
  const settled = waiting.settled();
  waiting.close();
  await settled;
  assert.equal(backend.signal.aborted, true);
  await backend.answer("a");
  assert.deepEqual(waiting.state.pool, []);
  assert.throws(() => waiting.start(), /closed/);
});

test("listeners are told of changes only, and a broken one stops nobody", async () => {
  const errors = [];
  globalThis.reportError = (error) => errors.push(error.message);
  const waiting = new WaitingCache(async () => ["a"]);
  const states = [];
  waiting.subscribe(() => {
    throw new Error("mine");
  });
  const off = waiting.subscribe((cache) => states.push(cache.state));
  waiting.start();
  await waiting.settled();
  assert.equal(states.length, 2);
  assert.equal(states.at(-1), waiting.state);
  waiting.gameState("a", true, 1); // of a game that is not on screen, and confirms nothing
  assert.equal(states.at(-1), waiting.state);
  off();
  waiting.invalidated();
  assert.equal(states.length, 2);
  assert.deepEqual(errors, ["mine", "mine", "mine"]);
});

test("wrong arguments are refused, and change nothing", () => {
  const waiting = new WaitingCache(async () => []);
  assert.throws(() => waiting.opened({}), /gameId/);
  assert.throws(() => waiting.opened("a", 1), /myTurn/);
  assert.throws(() => waiting.yourTurn("a", "2"), /version/);
  assert.throws(() => waiting.yourTurn(undefined), /gameId/);
  assert.throws(() => waiting.hear({ type: "your_turn", game_id: "a" }), /gameId/);
  assert.throws(() => waiting.gameState("a", undefined), /myTurn/);
  assert.throws(() => waiting.hear({ type: "answered" }), /gameIds/);
  assert.throws(() => waiting.hear({ type: "toString" }), /no such event/);
  assert.throws(() => new WaitingCache(), /fetch/);
  assert.equal(waiting.state, INITIAL);
});

test("states are frozen, and go on after a way through JSON", () => {
  const { state } = step(INITIAL, { type: "started" });
  const answered = { type: "answered", gameIds: ["a", "b", "a"] };
  const next = step(JSON.parse(JSON.stringify(state)), answered);
  assert.deepEqual(next, step(state, answered));
  assert.throws(() => next.state.pool.push("c"), TypeError);
});
