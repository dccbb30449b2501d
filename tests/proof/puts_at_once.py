"""Real processes that write one key at the same moment, in rounds.

    python -m tests.proof.puts_at_once URL

After each round a reader of its own looks: exactly one of the written values must be there (E35).
"""

import argparse
import asyncio
import sys
from contextlib import ExitStack

from stillfresh import Cache, LoadFailed
from tests.kit.processes import Process
from tests.kit.workers.putter import values_in


async def rounds_of_puts(url: str, writers: int, rounds: int) -> list[str]:
    """What went wrong, a line for each round; none is right."""
    wrong: list[str] = []
    with ExitStack() as stack:
        processes = [Process(stack, "putter", url, f"w{number}") for number in range(writers)]
        for turn in range(rounds):
            for process in processes:
                process.go()
            lines = [process.line() for process in processes]
            async with Cache(url) as cache:
                values = values_in(cache)
                try:
                    answer = await values.get("one")
                except LoadFailed as exc:
                    wrong.append(f"round {turn}: all of {lines} were acknowledged: {exc}")
                    await values.put("one", "mended")
                    continue
            if answer.value not in lines:
                wrong.append(f"round {turn}: {answer!r}, of {lines}")
    return wrong


def rounds_of_sessions(url: str, workers: int, rounds: int) -> list[str]:
    """The rounds in which a user who made requests at once was signed out."""
    wrong: list[str] = []
    with ExitStack() as stack:
        first = Process(stack, "django_session", url, "first", "new")
        session_key = first.line()
        others = [
            Process(stack, "django_session", url, f"w{number}", session_key)
            for number in range(workers - 1)
        ]
        for turn in range(rounds):
            for process in (first, *others):
                process.go()
            lines = [process.line() for process in (first, *others)]
            if set(lines) != {"signed in"}:
                wrong.append(f"round {turn}: {lines}")
    return wrong


def counted(url: str, workers: int, times: int) -> int:
    """What a counter shows after each worker has added one so many times, all at once."""
    with ExitStack() as stack:
        processes = [Process(stack, "django_counter", url, times) for _ in range(workers)]
        for process in processes:
            process.go()
        for process in processes:
            said = process.line()
            assert said == "done", said
        processes[0].go()
        return int(processes[0].line())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("url", help="a store's address")
    parser.add_argument("--writers", type=int, default=8, help="processes (default: 8)")
    parser.add_argument("--rounds", type=int, default=200, help="rounds (default: 200)")
    parser.add_argument("--sessions", action="store_true", help="Django sessions instead of puts")
    parser.add_argument("--counter", action="store_true", help="Django's incr instead of puts")
    given = parser.parse_args()
    if given.counter:
        total = counted(given.url, given.writers, given.rounds)
        print(f"{given.url.partition('?')[0]}: {total} of {given.writers * given.rounds} counted")
        return 0 if total == given.writers * given.rounds else 1
    if given.sessions:
        wrong = rounds_of_sessions(given.url, given.writers, given.rounds)
    else:
        wrong = asyncio.run(rounds_of_puts(given.url, given.writers, given.rounds))
    for line in wrong[:20]:
        print(line)
    print(f"{given.url.partition('?')[0]}: {given.rounds} rounds, {len(wrong)} wrong")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
