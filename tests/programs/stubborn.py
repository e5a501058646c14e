"""An HTTP server that ignores SIGTERM and has grandchildren nobody can find by their looks.

`python stubborn.py HOST PORT`: each grandchild leads a session of its own, was left by its parent,
and has an empty environment. Their pids are printed. GET /metrics, and POST anything, are answered.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

IN_FLIGHT = 2.0


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self._answer(f'# HELP x y\nrunning{{model="a}} b"}} {IN_FLIGHT}\nrunning_total 9\n')

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self._answer('{"text": "Paris"}')

    def _answer(self, text: str) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *args: object) -> None: ...


def leave_behind() -> int:
    """Fork twice, so that the grandchild is an orphan; return its pid."""
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        # Its name is for the test alone, which finds and sweeps it by that.
        name = f"{os.environ['STAGEKEEPER_RUN_DIR']}/orphan"
        sleeper = subprocess.Popen(
            [name, "600"], executable="/bin/sleep", env={}, start_new_session=True
        )
        os.write(write_end, str(sleeper.pid).encode())
        os._exit(0)
    os.waitpid(child, 0)
    return int(os.read(read_end, 32))


def main() -> None:
    host, port = sys.argv[1:]
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    pids = [leave_behind() for _ in range(2)]
    print("grandchildren", *pids, flush=True)
    server = ThreadingHTTPServer((host, int(port)), Handler)
    print("env", os.environ.get("SHARE"), sys.argv, flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main()
