"""A process that puts one key into a store whenever it is told to: `URL NUMBER`.

It says what became of its put: "stored" or "replaced".
"""

import asyncio
import sys
import time
from itertools import count

from stillfresh import Policy
from stillfresh.stores import running
from stillfresh.stores.contract import Copy, Put, PutOutcome
from stillfresh.stores.urls import store_for

KIND = "price"


async def main(url: str, number: str) -> None:
    async with running(store_for(url, time.time)) as store:
        await store.read(KIND, ["a"])
        print("ready", flush=True)
        for turn in count():
            if not sys.stdin.readline():
                return
            value = f"{number} of {turn}".encode()
            put = Put(Copy(store.new_generation(), time.time(), Policy(3_600), value))
            outcome = PutOutcome.AGAIN
            while outcome is PutOutcome.AGAIN:
                outcome = (await store.put(KIND, {"a": put}))["a"].outcome
            print(outcome.value, flush=True)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
