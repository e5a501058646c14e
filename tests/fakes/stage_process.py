"""A stage server as a process of its own, to be killed and frozen: `python stage_process.py PORT`.

Prints its port. Endpoints: `pid` answers at once, `sleep` sleeps, `hold` holds the GIL meanwhile.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import sys

from tests.fakes.stage_server import StageServer


async def _main() -> None:
    async def pid():
        return os.getpid()

    async def sleep(seconds):
        await asyncio.sleep(seconds)
        return os.getpid()

    async def hold(seconds):
        ctypes.PyDLL(None).usleep(int(seconds * 1e6))
        return os.getpid()

    port, instance_id = sys.argv[1:3]
    server = StageServer(instance_id, {"pid": pid, "sleep": sleep, "hold": hold})
    await server.start(f"127.0.0.1:{port}")
    print(server.url, flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(_main())
