"""Shards that meet at the leader's port, and then serve HTTP: as a model over several hosts does.

`python rendezvous.py INDEX COUNT HOST PORT HTTP_PORT`.
"""

from __future__ import annotations

import socket
import sys
import time
from http.server import BaseHTTPRequestHandler, HTTPServer


def meet(index: int, count: int, address: tuple[str, int]) -> int:
    """Wait until all are there; return how many came to this one."""
    if index == 0:
        with socket.create_server(address) as server:
            for _ in range(count - 1):
                server.accept()[0].close()
        return count - 1
    while True:
        try:
            socket.create_connection(address, timeout=20).close()
        except OSError:
            time.sleep(0.02)
        else:
            return 0


def main() -> None:
    index, count, host, port, http_port = sys.argv[1:]
    met = meet(int(index), int(count), (host, int(port)))

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            text = f"{met} of {count} met".encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

    HTTPServer((host, int(http_port)), Handler).serve_forever()


if __name__ == "__main__":
    main()
