"""A gRPC server that is not ours: grpcio's own health service, and nothing else.

`python health.py PORT [FILE]`: while the file exists, it says NOT_SERVING.
"""

from __future__ import annotations

import sys
import time
from concurrent import futures
from pathlib import Path

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc


def main() -> None:
    port, *rest = sys.argv[1:]
    server = grpc.server(futures.ThreadPoolExecutor(4))
    servicer = health.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    server.add_insecure_port(f"127.0.0.1:{port}")
    server.start()
    status = health_pb2.HealthCheckResponse
    print(f"serving at {port}", flush=True)
    while True:
        is_ill = bool(rest) and Path(rest[0]).exists()
        servicer.set("", status.NOT_SERVING if is_ill else status.SERVING)
        time.sleep(0.02)


if __name__ == "__main__":
    main()
