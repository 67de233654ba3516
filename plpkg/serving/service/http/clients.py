"""Clients that go before they are answered."""

import asyncio

from starlette.exceptions import HTTPException
from starlette.requests import Request


async def unless_gone(call: Request, work):
    """The result of work, which is cancelled when the client goes."""

    async def gone() -> None:
        while (await call.receive())["type"] != "http.disconnect":
            pass

    tasks = [asyncio.ensure_future(work), asyncio.create_task(gone())]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if not tasks[0].done():
            raise HTTPException(499, "the client has gone")
        return tasks[0].result()
    finally:
        for each in tasks:
            each.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
