"""C6: TanStack Query polling the same ids as `coordinator.py`, in Node, from the same server.

Its package comes from npm into a folder that is gone afterwards. Where that cannot be done, the
rows are left out and the notes say why.
"""

import json
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from benchmarks.pages_next import PATIENCE, Missing, run

__all__ = ["Missing", "Polled", "installed", "polled"]

PACKAGE = "@tanstack/query-core"
PROGRAM = """\
import http from "node:http";
import net from "node:net";
import { monitorEventLoopDelay } from "node:perf_hooks";
import { QueryClient, QueryObserver, environmentManager } from "@tanstack/query-core";

const { port, ids, step, freshFor, connections, bare, looks } = JSON.parse(process.argv[2]);
environmentManager.setIsServer(() => false);
let requests = 0, began, end;
const done = new Promise((resolve) => { end = resolve; });

function answered() {
  requests += 1;
  if (requests === 2 * ids) end(process.cpuUsage(began));
}

const agent = new http.Agent({ keepAlive: true, maxSockets: connections });

function byHttp(id) {
  const body = JSON.stringify({ ids: [id] });
  return new Promise((resolve, reject) => {
    const headers = { "content-length": Buffer.byteLength(body) };
    const about = { port, host: "127.0.0.1", method: "POST", agent, headers };
    const asked = http.request(about, (it) => {
      let text = "";
      it.setEncoding("utf8");
      it.on("data", (part) => { text += part; });
      it.on("end", () => {
        answered();
        resolve(JSON.parse(text)[id]);
      });
    });
    asked.on("error", reject);
    asked.end(body);
  });
}

const idle = [], waiting = [];

function send(socket, { id, resolve }) {
  const body = JSON.stringify({ ids: [id] });
  socket.got = "";
  socket.ended = (text) => {
    const next = waiting.shift();
    if (next) send(socket, next); else idle.push(socket);
    answered();
    resolve(JSON.parse(text)[id]);
  };
  socket.write(`POST / HTTP/1.1\\r\\ncontent-length: ${body.length}\\r\\n\\r\\n${body}`);
}

function received(socket, part) {
  socket.got += part;
  const head = socket.got.indexOf("\\r\\n\\r\\n");
  if (head < 0) return;
  const length = parseInt(socket.got.slice(socket.got.lastIndexOf(": ", head) + 2, head));
  if (socket.got.length >= head + 4 + length) socket.ended(socket.got.slice(head + 4));
}

function byHand(id) {
  return new Promise((resolve) => {
    const job = { id, resolve }, socket = idle.pop();
    if (socket) send(socket, job); else waiting.push(job);
  });
}

for (let number = 0; bare && number < connections; number += 1) {
  const socket = net.connect({ port, host: "127.0.0.1", noDelay: true });
  socket.setEncoding("latin1");
  socket.on("data", (part) => received(socket, part));
  await new Promise((resolve) => { socket.once("connect", resolve); });
  idle.push(socket);
}

function fetchOne(id) {
  began ??= process.cpuUsage();
  return bare ? byHand(id) : byHttp(id);
}

const delay = monitorEventLoopDelay({ resolution: 1 });
if (looks) delay.enable();
const client = new QueryClient();
for (let number = 0; number < ids; number += 1) {
  const id = `sku-${number}`;
  const queryFn = () => fetchOne(id);
  const options = { queryKey: ["price", id], queryFn, refetchInterval: freshFor };
  new QueryObserver(client, options).subscribe(() => {});
  if (number % step === step - 1) await new Promise(setImmediate);
}
const used = await done;
console.log(JSON.stringify({
  requests, cpu: (used.user + used.system) / 1e6, stall: looks ? delay.max / 1e6 : 0,
}));
process.exit(0);
"""


@dataclass(frozen=True, slots=True)
class Polled:
    """What keeping the ids fresh took, from the first load until each was refreshed once."""

    requests: int
    cpu: float
    stall: float
    """The longest turn of the loop, in ms; 0 if nobody looked."""


def installed(folder: Path) -> str:
    """What is in the folder now."""
    if shutil.which("npm") is None or shutil.which("node") is None:
        raise Missing("node and npm are not installed")
    (folder / "package.json").write_text('{"private": true, "type": "module"}')
    run(folder, "npm", "install", "--no-audit", "--no-fund", "--ignore-scripts", PACKAGE)
    (folder / "poll.js").write_text(PROGRAM)
    about = json.loads((folder / "node_modules" / PACKAGE / "package.json").read_text())
    return f"TanStack Query {about['version']}"


def polled(folder: Path, **about: float) -> Polled:
    """A query for each id, refetched as often as `freshFor` ms say.

    `bare`: HTTP by hand on sockets, as `coordinator.Upstream` does it; else by `node:http`.
    `looks`: also measure the longest turn, which costs some CPU.
    """
    command = ["node", "poll.js", json.dumps(about)]
    try:
        done = subprocess.run(
            command, cwd=folder, check=True, capture_output=True, text=True, timeout=PATIENCE
        )
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as exc:
        raise Missing(f"node did not come to its end: {exc}") from exc
    return Polled(**json.loads(done.stdout))
