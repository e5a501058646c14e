"""A process for actors that hosts none: started by an agent, told by STAND_IN what to do."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time

from stagekeeper.host.proc_start import read_launch


def leave(*_: object) -> None:
    print("in order", flush=True)
    os._exit(0)


def main() -> None:
    told, pipe = read_launch()
    signal.signal(signal.SIGTERM, leave)
    what = os.environ.get("STAND_IN", "")
    if "grandchild" in what:
        child = subprocess.Popen(["sleep", "600"], start_new_session=True)
        print(f"grandchild {child.pid}", flush=True)
    if "refuses" in what:
        print("no, never", flush=True)
        pipe.fail("it does not want to")
        sys.exit(1)
    print("allow", told.extra["allow"], flush=True)
    with socket.create_server((told.listen_host, 0)) as listening:
        pipe.report("{}:{}".format(*listening.getsockname()))
        if "exits" in what:
            print("I leave", flush=True)
            sys.exit(3)
        time.sleep(600)


if __name__ == "__main__":
    main()
