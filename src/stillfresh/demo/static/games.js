// The next-game header and a board: the longest wait first, and never the game on screen.

import { ask, byId, isHeld, isShown, make, send, showPart, stamp, trouble, unknown, write } from "./fresh.js";

const FRESH_FOR = 10;
const SOON = 2; // seconds, until what could not be shown is asked for again
const PROOFS = {
  irrelevant: "Two games or fewer: there is no order to prove.",
  server: "This order is the service’s own answer.",
  snapshot: "The cache could prove this order without asking again.",
};
let state = null;
let asking = null;
let timer = null;
let busy = false;
let missed = false; // something changed while a click was on its way

export function start() {
  byId("board").append(...Array.from({ length: 9 }, (_, cell) => cellButton(cell)));
  byId("board").firstChild.tabIndex = 0;
  byId("board").addEventListener("keydown", move);
  byId("board").addEventListener("focusin", ({ target }) => rove(target));
  byId("queue").addEventListener("pointerleave", showQueue);
  byId("queue").addEventListener("focusout", () => setTimeout(showQueue));
  byId("next").addEventListener("click", next);
  document.addEventListener("keydown", (event) => {
    const isTyping = event.target.matches("input:not([type=radio]), textarea, select");
    if (event.key === "n" && !isTyping && !event.ctrlKey && !event.metaKey && !event.altKey) next();
  });
  renew();
}

/** The upstream was switched, and the service with it. */
export function switched() {
  changed();
}

/** The service told something: read again, once for all that comes together. */
export function changed() {
  clearTimeout(asking);
  asking = setTimeout(renew, 120);
}

async function renew() {
  missed = busy;
  if (busy) return;
  const answer = await ask("/demo/games");
  if (busy) missed = true; // what was clicked meanwhile says more than this
  else show(answer);
}

/** A board on screen is kept fresh: asked for shortly before its time is up, or soon where there is none. */
function keepFresh() {
  clearTimeout(timer);
  const { board, current } = state ?? {};
  if (state?.connected && (!current || board?.result)) return;
  const left = board ? FRESH_FOR * 0.8 - board.age : 0;
  timer = setTimeout(() => (isShown(byId("board")) ? renew() : keepFresh()), Math.max(SOON, left) * 1000);
}

/** Every click is answered: at once by what is being done, then by what became of it. */
async function act(doing, path, body) {
  if (busy) {
    note("One moment: the last click is still being sent.");
    return;
  }
  busy = true;
  note(doing);
  const answer = await send(path, body);
  busy = false;
  note(answer.refused ?? "", "warn");
  show(answer);
  if (missed) changed();
  return answer;
}

function note(text, level = "") {
  byId("games-word").dataset.level = text ? level : "";
  write(byId("games-word"), capital(text));
}

function next() {
  const first = state?.next?.[0];
  if (first) open(first);
  else note(state ? "No other game waits for you now." : "The games are not loaded yet.");
}

/** The board comes on screen, and the keyboard to it. */
async function open(game) {
  showPart("games");
  const answer = await act(`Opening the game with ${game.bot} …`, `/demo/games/${encodeURIComponent(game.id)}/open`);
  if (!answer) return;
  drawQueue();
  const free = byId("board").querySelector('[aria-disabled="false"]');
  (free ?? byId("board").querySelector('[tabindex="0"]')).focus({ preventScroll: true });
}

function play(cell) {
  const board = state?.board;
  if (!board) note("Open a game first.");
  else if (board.result) note("This game is over.");
  else if (board.cells[cell] !== ".") note("This cell is taken.");
  else if (!board.my_turn) note(`It is ${board.bot}’s turn.`);
  if (!board?.my_turn || board.cells[cell] !== "." || board.result) return;
  const cells = board.cells.slice(0, cell) + "x" + board.cells.slice(cell + 1);
  if (!busy) mark({ ...board, cells, my_turn: false });
  act("Sending your move …", "/demo/games/play", { cell });
}

function cellButton(cell) {
  const button = make("button", "", { type: "button", tabindex: "-1", "aria-disabled": "true" });
  button.addEventListener("click", () => play(cell));
  return button;
}

/** One stop for Tab; the arrows go from cell to cell, taken ones too. */
function move(event) {
  const at = [...byId("board").children].indexOf(event.target);
  const [row, column] = [Math.floor(at / 3), at % 3];
  const to = {
    ArrowLeft: column ? at - 1 : at, ArrowRight: column < 2 ? at + 1 : at,
    ArrowUp: row ? at - 3 : at, ArrowDown: row < 2 ? at + 3 : at, Home: 0, End: 8,
  }[event.key];
  if (at < 0 || to === undefined) return;
  event.preventDefault();
  byId("board").children[to].focus();
}

function rove(target) {
  for (const button of byId("board").children) button.tabIndex = button === target ? 0 : -1;
}

function show(answer) {
  if (answer.no_service) {
    // The games are an example program, which only a clone of the repository has.
    write(byId("turn"), answer.no_service);
    write(byId("next-bot"), "none");
    return;
  }
  keepFresh();
  if (!answer.next) {
    note(answer.refused ?? "", "warn");
    return;
  }
  if (state && answer.connected && !state.connected) note("");
  state = answer;
  keepFresh();
  const first = state.next[0];
  byId("next").disabled = !first;
  byId("next").dataset.game = first?.id ?? "";
  write(byId("next-bot"), first?.bot ?? "none waiting");
  showQueue();
  write(byId("proof"), proof());
  if (state.board) paint(state.board);
  else paintNothing();
}

/** What somebody points at stays: the list is drawn when they have left it. */
function showQueue() {
  if (state && !isHeld(byId("queue"))) drawQueue();
}

function drawQueue() {
  const ids = state.next.map(({ id }) => id).join();
  if (byId("queue").dataset.shown === ids) return;
  byId("queue").dataset.shown = ids;
  byId("queue").replaceChildren(...state.next.map(queued));
}

function proof() {
  if (!state.connected) return "The game service does not answer: this is the last order it sent.";
  return (state.pending ? "Asking the service for the order …" : PROOFS[state.proof]) ?? "";
}

function queued(game) {
  const button = make("button", game.bot, { type: "button", "data-game": game.id });
  button.addEventListener("click", () => open(game));
  const item = make("li");
  item.append(button);
  return item;
}

/** No game is open; or one is of which nothing is kept: never another one's board under its name. */
function paintNothing() {
  const { current, current_bot: bot } = state;
  mark({ id: current ?? "", cells: ".........", my_turn: false });
  unknown(byId("board-badge"), current ? "no copy" : "no game open");
  if (current) write(byId("turn"), `The game with ${bot} cannot be shown: there is no copy yet, and the game service ${trouble()}.`);
}

function paint(board) {
  mark(board);
  write(byId("turn"), says(board));
  if (board.result) unknown(byId("board-badge"), "over");
  else stamp(byId("board-badge"), { ...board, freshFor: FRESH_FOR });
}

function mark(board) {
  byId("board").dataset.game = board.id;
  [...byId("board").children].forEach((button, cell) => {
    const mark = board.cells[cell] === "." ? "" : board.cells[cell];
    write(button, mark === "x" ? "✕" : mark === "o" ? "◯" : "");
    button.dataset.mark = mark;
    button.setAttribute("aria-disabled", String(Boolean(mark || !board.my_turn || board.result)));
    button.setAttribute("aria-label", `Cell ${cell + 1}: ${mark || "free"}`);
  });
}

function says(board) {
  if (board.result === "x") return `You have won against ${board.bot}. Another game follows.`;
  if (board.result === "o") return `${board.bot} has won. Another game follows.`;
  if (board.result) return `A draw with ${board.bot}. Another game follows.`;
  if (board.my_turn) return `Your turn against ${board.bot}.`;
  return state.next.length ? `${board.bot} thinks. Another game waits for you.` : `${board.bot} thinks.`;
}

const capital = (text) => (text ? text[0].toUpperCase() + text.slice(1) : "");
