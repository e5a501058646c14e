"""The warden of an actor tree: outlives the tree's root, and ends all that the root left.

Run as a program of its own, by path and without the site's packages, so that it is small and starts
at once: `python -I -S warden_program.py TREE_PATH ROOT_PID ROOT_TICKS`, its stdin a pipe of the
root. It waits until the root has ended or says so over the pipe, kills everything at and below the
place until nothing is left, and exits. It hears no polite signal: whoever wants it gone ends the
root.

Decided here: when the root counts as gone. The end of its pipe alone would not tell, since a forked
copy of the root holds it open as well. `warden` has the root's side.

Invariant: nothing is imported but what is built in, `tree_sweep`, and what that needs.
"""

from __future__ import annotations

import os
import select
import signal
import sys

SWEEP_LIMIT_S = 60.0
"""How long it kills on; a process that a driver holds in the kernel ends by itself afterwards."""

ALL_GONE = 0
SOME_LEFT = 1

_PIPE = 0


def main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_IGN)
    # Without the site's packages nobody else tells where ours are.
    sys.path.append(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))
    from stagekeeper.host import tree_sweep

    path, root_pid, root_ticks = sys.argv[1:]
    wait_for_end(tree_sweep.open_pidfd(int(root_pid), int(root_ticks)))
    try:
        tree_sweep.sweep(path, deadline_s=SWEEP_LIMIT_S)
    except TimeoutError:
        sys.exit(SOME_LEFT)
    sys.exit(ALL_GONE)


def wait_for_end(root: int | None) -> None:
    """Return when there is anything to read in the pipe, its end included, or the root has ended.

    Args:
        root: the root's pidfd; None when it is gone already.
    """
    if root is None:
        return
    poll = select.poll()
    poll.register(_PIPE, select.POLLIN)
    poll.register(root, select.POLLIN)
    poll.poll()


if __name__ == "__main__":
    main()
