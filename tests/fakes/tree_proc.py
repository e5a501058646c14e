"""A process of an actor tree that hosts nothing: started by `launch`, told by `extra` what to do.

Appends its pid, and those of all that it starts, one a line, to the file `pids` of its `extra`,
once it is bound to its owner.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
import uuid
from dataclasses import replace
from pathlib import Path

from stagekeeper.host.proc_launch import launch
from stagekeeper.host.proc_line import ProcLaunch
from stagekeeper.host.proc_start import ReportPipe, read_launch

MODULE = "tests.fakes.tree_proc"
OWNER_LET_GO = 7


def note(path: str, *pids: int) -> None:
    with Path(path).open("a") as file:
        file.write("".join(f"{pid}\n" for pid in pids))


def start_grandchildren(path: str) -> None:
    """Start a plain one, one in a session of its own, and one whose parent ends at once."""
    plain = subprocess.Popen(["sleep", "600"])
    apart = subprocess.Popen(["sleep", "600"], start_new_session=True)
    fork = "setsid sleep 600 >/dev/null 2>&1 & echo $!"
    twice = subprocess.run(["sh", "-c", fork], stdout=subprocess.PIPE, check=True)
    note(path, plain.pid, apart.pid, int(twice.stdout))


async def start_below(told: ProcLaunch) -> None:
    """Start a process like this one, which is its own to end, with grandchildren of its own."""
    instance_id = str(uuid.uuid4())
    below = replace(
        told,
        instance_id=instance_id,
        tree_path=f"{told.tree_path}/{instance_id}",
        extra={"pids": told.extra["pids"], "grandchildren": "yes"},
    )
    await launch(
        below, env=os.environ, cwd=Path("/"), log_path=None, start_timeout_s=60, module=MODULE
    )


async def serve(told: ProcLaunch, pipe: ReportPipe) -> None:
    gone = asyncio.Event()
    pipe.on_owner_gone(gone.set)
    if told.extra.get("below"):
        await start_below(told)
    pipe.report(f"{told.listen_host}:{os.getpid()}")
    await gone.wait()
    os._exit(OWNER_LET_GO)


def main() -> None:
    wait_until = os.environ.get("TREE_PROC_WAITS_FOR")
    while wait_until and not Path(wait_until).exists():
        time.sleep(0.01)
    told, pipe = read_launch()
    extra = told.extra
    if "pids" in extra:
        note(extra["pids"], os.getpid())
    if extra.get("grandchildren"):
        start_grandchildren(extra["pids"])
    if extra.get("bare"):
        note(extra["pids"], subprocess.Popen(["sleep", "600"], env={}).pid)
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
            tell(extra["told"])
    asyncio.run(serve(told, pipe))


def tell(path: str) -> None:
    """Write down what this process, and what it starts, has of its owner."""
    command = ["ls", "/proc/self/fd"]
    child = subprocess.run(command, stdout=subprocess.PIPE, check=True, close_fds=False)
    facts = {
        "path": sys.path,
        "stdin": sys.stdin.read(),
        "environment": dict(os.environ),
        "arguments": sys.argv,
        "fds_of_child": child.stdout.decode().split(),
    }
    Path(path).write_text(json.dumps(facts))


if __name__ == "__main__":
    main()
