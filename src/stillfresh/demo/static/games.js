// The next-game header and a board: the longest wait first, and never the game on screen.

import { ask, byId, isShown, make, send, stamp, unknown, write } from "./fresh.js";

const FRESH_FOR = 10;
const SOON = 2; // seconds, until what could not be shown is asked for again
const PROOFS = {
  irrelevant: "Two games or fewer: no order to prove.",
  server: "This order is the service’s own answer.",
  snapshot: "This order was proved without asking again.",
};
let state = null;
let asking = null;
let timer = null;
let busy = false;
let missed = false; // something changed while a click was on its way

export function start() {
  byId("board").append(...Array.from({ length: 9 }, (_, cell) => cellButton(cell)));
  byId("next").addEventListener("click", next);
  document.addEventListener("keydown", (event) => {
    const isTyping = event.target.matches("input, textarea, select");
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
    note("One moment: the last click is still on its way.");
    return;
  }
  busy = true;
  note(doing);
  const answer = await send(path, body);
  busy = false;
  note(answer.refused ?? "", "warn");
  show(answer);
  if (missed) changed();
}

function note(text, level = "") {
  byId("games-word").dataset.level = text ? level : "";
  write(byId("games-word"), capital(text));
}

function next() {
  const first = state?.next?.[0];
  if (first) open(first);
  else note(state ? "No other game waits for you now." : "The games are not there yet.");
}

function open(game) {
  act(`Opening the game with ${game.bot} …`, `/demo/games/${encodeURIComponent(game.id)}/open`);
}

function play(cell) {
  const board = state?.board;
  if (!board?.my_turn || board.cells[cell] !== "." || board.result) return;
  const cells = board.cells.slice(0, cell) + "x" + board.cells.slice(cell + 1);
  if (!busy) mark({ ...board, cells, my_turn: false });
  act("Sending your move …", "/demo/games/play", { cell });
}

function cellButton(cell) {
  const button = make("button", "", { type: "button" });
  button.addEventListener("click", () => play(cell));
  return button;
}

function show(answer) {
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
  write(byId("next-bot"), first?.bot ?? "none waits");
  byId("queue").replaceChildren(...state.next.map(queued));
  write(byId("proof"), proof());
  if (state.board) paint(state.board);
  else paintNothing();
}

function proof() {
  if (!state.connected) return "The game service is away: the order is the last that it told.";
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
  if (current) write(byId("turn"), `The game with ${bot} cannot be shown: nothing is kept of it yet, and the service is away.`);
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
    button.disabled = Boolean(mark || !board.my_turn || board.result);
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
