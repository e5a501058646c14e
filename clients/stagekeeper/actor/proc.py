"""`python -m stagekeeper.actor.proc`: one process of an actor tree, from first to last line.

It ends when its owner asks (SIGTERM, or by letting go of the start pipe), or when all whom it knows
are on other hosts and were away for their lease; and is killed by the kernel when who started it
dies. Exit code 0: it was asked to end and did.
"""

from __future__ import annotations

import asyncio
import atexit
import logging
import os
import signal
import sys

from stagekeeper.host import loop_signals
from stagekeeper.host.proc_start import ReportPipe, read_launch

_STOP_BUDGET_S = 8.0

# A child that is forked here uses no gRPC, which says so at each fork unless it is told.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")


def main() -> int:
    launch, pipe = read_launch()
    from stagekeeper.actor import reference_codec  # noqa: F401  (lets meshes travel)
    from stagekeeper.actor.program import Program, set_current_program

    logging.basicConfig(
        stream=sys.stderr,
        level=logging.WARNING,
        format=f"%(asctime)s %(levelname)s {launch.name}: %(message)s",
    )
    program = Program(
        instance_id=launch.instance_id,
        tree_path=launch.tree_path,
        token=launch.token,
        boot_id=launch.boot_id,
        listen_host=launch.listen_host,
        lease_s=launch.lease_s,
        allow=launch.extra.get("allow", ""),
    )
    set_current_program(program)
    program.house.on_exit = _leave
    try:
        return asyncio.run(_run(program, pipe))
    except (SystemExit, KeyboardInterrupt) as wish:  # of a task that code of an actor had started
        _leave(wish)
        raise


def _leave(error: BaseException) -> None:
    """End as the code of an actor wants it: at once, since nobody asked for it.

    An end in order would tell the other actors here that they were stopped, or lost their owner.
    """
    code = error.code if isinstance(error, SystemExit) else 1
    if code is not None and not isinstance(code, int):
        sys.stderr.write(f"{code}\n")
        code = 1
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code or 0)


async def _run(program: object, pipe: ReportPipe) -> int:
    from stagekeeper.actor.program import Program

    assert isinstance(program, Program)
    loop = asyncio.get_running_loop()
    asked = asyncio.Event()
    pipe.on_owner_gone(asked.set)
    # Its agent may hold a connection for long that leads nowhere any more.
    program.house.on_deserted = asked.set
    loop_signals.listen(loop, signal.SIGTERM, asked.set)
    # A Ctrl-C at the terminal is for the root, which ends the tree in order.
    loop_signals.listen(loop, signal.SIGINT, lambda: None)
    address = await program.start()
    pipe.report(address)
    await asked.wait()
    await program.house.stop_all(_STOP_BUDGET_S)
    await program.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
