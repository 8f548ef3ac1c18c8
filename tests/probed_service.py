"""The service's command, with a task that writes down how late its event loop is; tests/attack.py runs it."""

import asyncio
import os
import sys
import time

import uvicorn

from service import command

PAUSE = 0.005  # seconds for which the task sleeps


async def probe(path):
    """Append lines: when it went to sleep, by how much too long it slept, and how long the loop computed meanwhile."""
    with open(path, "a", buffering=1) as log:
        while True:
            wall, cpu = time.monotonic(), time.thread_time()
            await asyncio.sleep(PAUSE)
            log.write(f"{wall} {time.monotonic() - wall - PAUSE} {time.thread_time() - cpu}\n")


def with_probe(main_loop):
    async def run(server):
        task = asyncio.create_task(probe(os.environ["ATTACK_PROBE"]))
        await main_loop(server)
        task.cancel()

    return run


if __name__ == "__main__":
    uvicorn.Server.main_loop = with_probe(uvicorn.Server.main_loop)  # type: ignore[method-assign]
    # Of a checkout before or after it was renamed.
    sys.exit(getattr(command, "serve_command", getattr(command, "main", None))())
