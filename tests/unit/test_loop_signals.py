"""Signals that a loop listens to, and the children of its process: in a program of its own."""

import subprocess
import sys

PROGRAM = """
import asyncio, multiprocessing, os, pathlib, signal, time
from stagekeeper.host import loop_signals

def nap(to_parent):
    to_parent.send("on its own")
    time.sleep(60)

def has_pending(pid):
    status = pathlib.Path(f"/proc/{pid}/status").read_text()
    return any(int(it.split()[1], 16) for it in status.splitlines() if it[3:].startswith("Pnd:"))

async def main():
    heard = []
    loop = asyncio.get_running_loop()
    loop_signals.listen(loop, signal.SIGTERM, lambda: heard.append(1))
    loop.add_signal_handler(signal.SIGUSR1, lambda: heard.append(2))  # of the program's own
    context = multiprocessing.get_context("fork")
    from_child, to_parent = context.Pipe()
    child = context.Process(target=nap, args=(to_parent,))
    child.start()
    os.kill(child.pid, signal.SIGUSR1)
    from_child.recv()
    os.kill(child.pid, signal.SIGUSR1)
    while has_pending(child.pid):
        time.sleep(0.01)
    child.terminate()
    child.join(10)
    await asyncio.sleep(0)
    print(child.exitcode, heard)
    os.kill(os.getpid(), signal.SIGTERM)
    while not heard:
        await asyncio.sleep(0)
    loop_signals.leave(loop, signal.SIGTERM)
    print(heard, signal.getsignal(signal.SIGTERM) is signal.SIG_DFL)
    child.kill()

asyncio.run(main())
"""


def test_what_is_sent_to_a_forked_child_ends_it_and_is_not_heard_by_the_parent():
    ran = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=30, check=True
    )

    assert ran.stdout.splitlines() == ["-15 []", "[1] True"]
