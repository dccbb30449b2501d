"""I36: `stillfresh serve` and nginx as browsers ask: every browser sends its own head.

Both servers are in front of the same site, one worker each, and are asked in turns. wrk prepares
the requests of a job before it begins, so that its script is no bottleneck.
"""

import shutil
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Final, NamedTuple

from benchmarks import tried
from benchmarks.harness import Progress, Row, Section
from benchmarks.pages import NGINX, SERVE, Taken, asked, medians, nginx, ratio, serve, site

__all__ = ["section"]

ROUNDS: Final = 7
SECONDS: Final = 1
PATHS: Final = 10_000
HEADS: Final = 20_000
SCRIPT: Final = """\
local heads = {}
local n = 0
math.randomseed(36)
local function head(number, path, more)
  return "GET " .. path .. " HTTP/1.1\\r\\nHost: localhost\\r\\nConnection: keep-alive\\r\\n"
    .. "sec-ch-ua: \\"Chromium\\";v=\\"" .. number .. "\\"\\r\\nsec-ch-ua-mobile: ?0\\r\\n"
    .. "sec-ch-ua-platform: \\"Linux\\"\\r\\nUpgrade-Insecure-Requests: 1\\r\\n"
    .. "User-Agent: Mozilla/5.0 (X11; Linux x86_64) Chrome/" .. number .. "\\r\\n"
    .. "Accept: text/html,application/xhtml+xml,*/*;q=0.8\\r\\nSec-Fetch-Mode: navigate\\r\\n"
    .. "Accept-Encoding: gzip, deflate, br\\r\\nAccept-Language: de-DE,de;q=0.9\\r\\n"
    .. "Cookie: _ga=GA1.1." .. number .. "; consent=yes\\r\\n" .. more .. "\\r\\n"
end
local function zipf()
  return math.floor(math.exp(math.random() * math.log({paths})))
end
function init(args)
  for number = 1, {heads} do heads[number] = head(number, {path}, "{more}") end
end
function request()
  n = n % {heads} + 1
  return heads[n]
end
"""


class Job(NamedTuple):
    """What browsers ask for, and how fast it should be."""

    name: str
    path: str
    """Lua; `number` is the request's."""
    more: str
    target: float
    tried: str = ""
    most_p99: float | None = 3.0
    heads: int = HEADS


PAGE: Final = '"/pricing"'
JOBS: Final = (
    Job("different heads", PAGE, "", 0.8, tried.OTHER_HEADS),
    Job(
        "different heads, 304",
        PAGE,
        'If-None-Match: \\"0123456789abcdef0123456789abcdef\\"\\r\\n',
        0.8,
        tried.OTHER_HEADS,
    ),
    Job(f"different heads, {PATHS:,} paths", '"/page/" .. zipf()', "", 0.6, tried.OTHER_PATHS),
    Job("different heads, passed through", '"/private"', "", 0.25, tried.PASSED_ON, None),
    Job("identical heads", PAGE, "", 1.5, tried.SERVE_HIT, heads=1),
)


def script_of(job: Job) -> str:
    text = SCRIPT
    values = {"paths": PATHS, "heads": job.heads, "path": job.path, "more": job.more}
    for name, value in values.items():
        text = text.replace(f"{{{name}}}", str(value))
    return text


def raced(
    progress: Progress, jobs: tuple[Job, ...] = JOBS, rounds: int = ROUNDS
) -> dict[str, Taken]:
    """The rounds of each job."""
    results: dict[str, Taken] = {}
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        folder.chmod(0o755)
        upstream = stack.enter_context(site("expiring"))
        ports = {
            SERVE: stack.enter_context(serve(upstream, "--max-entries", "20000")),
            NGINX: stack.enter_context(nginx(folder, upstream)),
        }
        for job in jobs:
            script = folder / "job.lua"
            script.write_text(script_of(job))
            taken: Taken = {name: [] for name in ports}
            for port in ports.values():
                asked(port, 3, script)
            for turn in range(rounds):
                progress(f"pages: {job.name}, round {turn + 1} of {rounds}")
                for name, port in ports.items():
                    taken[name].append(asked(port, SECONDS, script))
            results[job.name] = taken
    return results


def section(progress: Progress) -> Section:
    title = "Pages as browsers ask: every browser sends its own head (I36)"
    missing = [name for name in ("nginx", "wrk") if shutil.which(name) is None]
    if missing:
        return Section(title, [], missing=f"rates, since {' and '.join(missing)} is not installed")
    rows: list[Row] = []
    figures = {}
    results = raced(progress)
    for job in JOBS:
        taken = results[job.name]
        rate = ratio(taken, SERVE, NGINX)
        what = f"{SERVE}, {job.name}: rate to {NGINX}"
        rows.append(Row("I36", what, rate, job.target, at_least=True, tried=job.tried))
        p99 = ratio(taken, SERVE, NGINX, 1)
        what = f"{SERVE}, {job.name}: 99th percentile to {NGINX}"
        rows.append(Row("I36", what, p99, job.most_p99, tried=job.tried))
        figures[f"requests a second, {job.name}"] = medians(taken, 0)
        figures[f"99th percentile in ms, {job.name}"] = medians(taken, 1)
    notes = (
        f"wrk, one thread, 32 connections, pages of 10 KB, {HEADS:,} prepared heads of twelve "
        f"fields, {ROUNDS} rounds of {SECONDS} s in turns after 3 s of warming up; each ratio is "
        f"the median of its rounds'. The paths are drawn by Zipf's law."
    )
    return Section(title, rows, figures, notes)
