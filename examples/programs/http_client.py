"""A client of somebody else's API that keeps responses as a browser does.

Use it when your program asks an API over HTTP and the API says how long its responses are fresh
(`Cache-Control`, `ETag`). All tasks and processes that ask at once cause one request.
"""

import asyncio

import httpx2

from stillfresh.integrations.httpx import AsyncCacheTransport


async def main(address: str) -> None:
    transport = AsyncCacheTransport("sqlite:///http.db")
    async with httpx2.AsyncClient(transport=transport) as client:
        responses = await asyncio.gather(*(client.get(address) for _ in range(16)))
        print(responses[0].status_code)  # 200
        again = await client.get(address)
        print(again.headers["Cache-Status"])  # stillfresh; hit;…


if __name__ == "__main__":
    asyncio.run(main("https://api.example.com/items"))
