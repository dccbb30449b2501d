// The next-game header and a board: the longest wait first, and never the game on screen.

import { ask, byId, forget, make, send, stamp, write } from "./fresh.js";

const FRESH_FOR = 10;
const PROOFS = {
  irrelevant: "Two games or fewer: no order to prove.",
  server: "This order is the service’s own answer.",
  snapshot: "This order was proved without asking again.",
};
let state = null;
let asking = null;
let busy = false;

export function start() {
  byId("board").append(...Array.from({ length: 9 }, (_, cell) => cellButton(cell)));
  byId("next").addEventListener("click", next);
  document.addEventListener("keydown", (event) => {
    const isTyping = event.target.matches("input, textarea, select");
    if (event.key === "n" && !isTyping && !event.ctrlKey && !event.metaKey && !event.altKey) next();
  });
  renew();
}

/** The service told something: read again, once for all that comes together. */
export function changed() {
  clearTimeout(asking);
  asking = setTimeout(renew, 120);
}

async function renew() {
  if (!busy) show(await ask("/demo/games"));
}

async function act(path, body) {
  if (busy) return;
  busy = true;
  const answer = await send(path, body);
  busy = false;
  show(answer);
}

function next() {
  if (state?.next?.length) act(`/demo/games/${encodeURIComponent(state.next[0].id)}/open`);
}

function play(cell) {
  const board = state?.board;
  if (!board?.my_turn || board.cells[cell] !== "." || board.result) return;
  const cells = board.cells.slice(0, cell) + "x" + board.cells.slice(cell + 1);
  paint({ ...board, cells, my_turn: false });
  act("/demo/games/play", { cell });
}

function cellButton(cell) {
  const button = make("button", "", { type: "button" });
  button.addEventListener("click", () => play(cell));
  return button;
}

function show(answer) {
  if (!answer.next) {
    write(byId("turn"), capital(answer.refused));
    return;
  }
  state = answer;
  const first = state.next[0];
  byId("next").disabled = !first;
  byId("next").dataset.game = first?.id ?? "";
  write(byId("next-bot"), first?.bot ?? "none waits");
  byId("queue").replaceChildren(...state.next.map(queued));
  const proof = state.pending ? "Asking the service for the order …" : PROOFS[state.proof];
  write(byId("proof"), proof ?? "");
  if (state.board) paint(state.board, state.refused);
  else paintNothing(state.refused);
}

function queued(game) {
  const button = make("button", game.bot, { type: "button", "data-game": game.id });
  button.addEventListener("click", () => act(`/demo/games/${encodeURIComponent(game.id)}/open`));
  const item = make("li");
  item.append(button);
  return item;
}

function paintNothing(refused) {
  forget(byId("board-badge"));
  for (const button of byId("board").children) button.disabled = true;
  if (refused) write(byId("turn"), capital(refused));
}

function paint(board, refused = null) {
  byId("board").dataset.game = board.id;
  [...byId("board").children].forEach((button, cell) => {
    const mark = board.cells[cell] === "." ? "" : board.cells[cell];
    write(button, mark === "x" ? "✕" : mark === "o" ? "◯" : "");
    button.dataset.mark = mark;
    button.disabled = Boolean(mark || !board.my_turn || board.result);
    button.setAttribute("aria-label", `Cell ${cell + 1}: ${mark || "free"}`);
  });
  write(byId("turn"), capital(refused ?? says(board)));
  const badge = byId("board-badge");
  if (board.result) {
    forget(badge);
    badge.dataset.verdict = "gone";
    write(badge, "over");
  } else if (board.age !== undefined) {
    stamp(badge, { ...board, freshFor: FRESH_FOR });
  }
}

function says(board) {
  if (board.result === "x") return `You have won against ${board.bot}. Another game follows.`;
  if (board.result === "o") return `${board.bot} has won. Another game follows.`;
  if (board.result) return `A draw with ${board.bot}. Another game follows.`;
  return board.my_turn ? `Your turn against ${board.bot}.` : `${board.bot} thinks. Another game waits for you.`;
}

const capital = (text) => (text ? text[0].toUpperCase() + text.slice(1) : "");
