"""A process of an actor tree that hosts nothing: started by `launch`, told by `extra` what to do.

It notes its pid and those of all that it starts, one a line, in the file `pids` of its `extra`.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from stagekeeper.host.proc_line import ProcLaunch
from stagekeeper.host.proc_start import ReportPipe, read_launch


def note(path: str, *pids: int) -> None:
    with Path(path).open("a") as file:
        file.write("".join(f"{pid}\n" for pid in pids))


def start_grandchildren(path: str) -> None:
    """Start a plain one, one in a session of its own, and one whose parent ends at once."""
    plain = subprocess.Popen(["sleep", "600"])
    apart = subprocess.Popen(["sleep", "600"], start_new_session=True)
    twice = subprocess.run(
        ["sh", "-c", "setsid sleep 600 >/dev/null 2>&1 & echo $!"],
        stdout=subprocess.PIPE,
        check=True,
    )
    note(path, plain.pid, apart.pid, int(twice.stdout))


async def serve(told: ProcLaunch, pipe: ReportPipe) -> None:
    gone = asyncio.Event()
    pipe.on_owner_gone(gone.set)
    pipe.report(f"{told.listen_host}:{os.getpid()}")
    await gone.wait()
    os._exit(7)


def main() -> None:
    told, pipe = read_launch()
    extra = told.extra
    if "pids" in extra:
        note(extra["pids"], os.getpid())
    if extra.get("grandchildren"):
        start_grandchildren(extra["pids"])
    match extra.get("do"):
        case "exit":
            print("I leave", flush=True)
            sys.exit(3)
        case "hang":
            print("I hang", flush=True)
            time.sleep(600)
        case "refuse":
            pipe.fail("no such class")
            time.sleep(600)
        case "ignore":
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        case "tell":
            path = Path(extra["told"])
            path.write_text(json.dumps([sys.path, sys.stdin.read(), os.environ.copy()]))
    asyncio.run(serve(told, pipe))


if __name__ == "__main__":
    main()
