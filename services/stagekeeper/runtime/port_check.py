"""Whether somebody listens at a port: asked when it is leased, and again before it is used.

Invariant: nothing of a port that was asked about stays taken.
"""

from __future__ import annotations

import socket


def is_unbound(host: str, port: int) -> bool:
    """Whether a program could listen there now. One that was just left counts as free."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True
