"""Where a supervisor is when nobody says otherwise: the same for its servers, agents and clients.

Nothing is imported here, since the command line reads it before it knows what it is to do.
"""

from __future__ import annotations

from typing import Final

DEFAULT_ENDPOINT: Final = "127.0.0.1:7070"
ENDPOINT_ENV: Final = "STAGEKEEPER_ENDPOINT"

GRPC_SCHEMES: Final = ("dns:", "ipv4:", "ipv6:", "unix:", "unix-abstract:")
"""Of gRPC's names, https://github.com/grpc/grpc/blob/master/doc/naming.md"""


def endpoint_problem(endpoint: str) -> str:
    """Say why nobody can be dialled at an endpoint, and what to write; empty when it is sound.

    It is `host:port`, or a name that gRPC resolves by its scheme (`dns:…`, `unix:…`).
    """
    if endpoint.startswith(GRPC_SCHEMES):
        return ""
    host, separator, port = endpoint.rpartition(":")
    if not host or not separator or "/" in host:
        return f"{endpoint!r} is not host:port: write it as {DEFAULT_ENDPOINT}"
    if not (port.isascii() and port.isdigit() and len(port) < 6 and 0 < int(port) < 65536):
        return f"{endpoint!r} has no port from 1 to 65535: write it as {DEFAULT_ENDPOINT}"
    if ":" in host and not (host.startswith("[") and host.endswith("]")):
        return f"{endpoint!r}: an IPv6 host stands in brackets, as [::1]:7070"
    return ""
