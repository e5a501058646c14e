"""A small DeploymentService in this process: shows what a test puts into it, and its change log."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from typing import Any

import grpc

from stagekeeper.v1 import deployment_service_pb2 as pb
from stagekeeper.v1 import types_pb2 as types
from stagekeeper.v1.deployment_service_pb2_grpc import (
    DeploymentServiceServicer,
    add_DeploymentServiceServicer_to_server,
)
from stagekeeper.wire.error_details import pack
from stagekeeper.wire.transport import SERVER_OPTIONS
from tests.fakes.views import revision


class SupervisorServer(DeploymentServiceServicer):
    """Holds `deployments`; `put` and `remove` are changes that watchers see.

    `creations` answers CreateDeployment: messages to send, an exception to abort with
    (code, reason), or None to hang; one entry a call. `deletion_lost` is called by the next
    deletion once it is written down, and the answer to that one is lost.
    """

    def __init__(self, epoch: int = 1, *, complete: bool = True) -> None:
        self.epoch = epoch
        self.complete = complete
        self.deployments: dict[str, pb.Deployment] = {}
        self.workers: list[pb.Worker] = []
        self.creations: list[list[object]] = []
        self.deletion_lost: Callable[[], None] | None = None
        self.asked: Counter[str] = Counter()
        self.resumed: list[int] = []
        self.endpoint = ""
        self._n = 0
        self._log: list[pb.WatchDeploymentsResponse] = []
        self._watchers: set[asyncio.Queue] = set()
        self._server: grpc.aio.Server | None = None

    async def start(self, address: str = "127.0.0.1:0") -> SupervisorServer:
        self._server = grpc.aio.server(options=SERVER_OPTIONS)
        add_DeploymentServiceServicer_to_server(self, self._server)
        port = self._server.add_insecure_port(address)
        await self._server.start()
        self.endpoint = f"127.0.0.1:{port}"
        return self

    async def stop(self) -> None:
        if self._server is not None:
            self.end_streams()
            await self._server.stop(None)
            self._server = None

    def end_streams(self) -> None:
        for queue in self._watchers:
            queue.put_nowait(None)

    def put(self, view: pb.Deployment, *, quietly: bool = False) -> None:
        """Show a deployment; `quietly` tells no watcher."""
        kind = pb.CHANGE_KIND_ADDED
        if view.name in self.deployments:
            kind = pb.CHANGE_KIND_MODIFIED
        self.deployments[view.name] = view
        self._change(kind, view, quietly)

    def remove(self, name: str, *, quietly: bool = False) -> None:
        """End a deployment; `quietly` tells no watcher."""
        del self.deployments[name]
        self._change(pb.CHANGE_KIND_REMOVED, pb.Deployment(name=name), quietly)

    def become_complete(self) -> None:
        self.complete = True
        for queue in self._watchers:
            queue.put_nowait(self._said(pb.CHANGE_KIND_BOOKMARK))

    def _change(self, kind: Any, view: pb.Deployment, quietly: bool = False) -> None:
        self._n += 1
        message = pb.WatchDeploymentsResponse(
            kind=kind, deployment=view, revision=revision(self._n, self.epoch)
        )
        self._log.append(message)
        if not quietly:
            for queue in self._watchers:
                queue.put_nowait(message)

    def _said(self, kind: Any) -> pb.WatchDeploymentsResponse:
        return pb.WatchDeploymentsResponse(
            kind=kind, revision=revision(self._n, self.epoch), complete=self.complete
        )

    async def _refuse(self, context, code: grpc.StatusCode, reason: str, violations=()) -> None:
        message = f"the supervisor says {reason}"
        trailers = pack(code, message, reason, violations=violations)
        await context.abort(code, message, trailing_metadata=trailers)

    async def WatchDeployments(self, request, context):
        self.asked["watch"] += 1
        queue: asyncio.Queue = asyncio.Queue()
        if request.HasField("after"):
            if request.after.epoch.number != self.epoch:
                await self._refuse(context, grpc.StatusCode.OUT_OF_RANGE, "REVISION_GONE")
            self.resumed.append(request.after.n)
            for message in self._log[request.after.n :]:
                queue.put_nowait(message)
        else:
            for view in self.deployments.values():
                queue.put_nowait(
                    pb.WatchDeploymentsResponse(
                        kind=pb.CHANGE_KIND_SNAPSHOT,
                        deployment=view,
                        revision=revision(self._n, self.epoch),
                    )
                )
            queue.put_nowait(self._said(pb.CHANGE_KIND_SYNCED))
        self._watchers.add(queue)
        try:
            while True:
                message = await queue.get()
                if message is None:
                    return
                yield message
        finally:
            self._watchers.discard(queue)

    async def GetDeployment(self, request, context):
        self.asked["get"] += 1
        view = self.deployments.get(request.name)
        if view is None:
            await self._refuse(context, grpc.StatusCode.NOT_FOUND, "DEPLOYMENT_UNKNOWN")
        return pb.GetDeploymentResponse(
            deployment=view, revision=revision(self._n, self.epoch), complete=self.complete
        )

    async def ListDeployments(self, request, context):
        self.asked["list"] += 1
        return pb.ListDeploymentsResponse(
            deployments=self.deployments.values(), complete=self.complete
        )

    async def ListWorkers(self, request, context):
        return pb.ListWorkersResponse(workers=self.workers, complete=self.complete)

    async def ListFailures(self, request, context):
        failure = types.Failure(failure_id=f"{request.deployment}/{request.limit}")
        return pb.ListFailuresResponse(failures=[failure])

    async def CreateDeployment(self, request, context):
        self.asked["create"] += 1
        for step in self.creations.pop(0):
            if isinstance(step, tuple):
                await self._refuse(context, *step)
            elif step is None:
                await asyncio.Event().wait()
            else:
                yield step

    async def DeleteDeployment(self, request, context):
        self.asked["delete"] += 1
        view = self.deployments.get(request.name)
        if view is None:
            await self._refuse(context, grpc.StatusCode.NOT_FOUND, "DEPLOYMENT_UNKNOWN")
            raise AssertionError("abort returned")
        view.state = types.DEPLOYMENT_STATE_DELETING
        self.put(view)
        lost, self.deletion_lost = self.deletion_lost, None
        if lost is not None:
            lost()
            await context.abort(grpc.StatusCode.UNAVAILABLE, "Socket closed")
        return pb.DeleteDeploymentResponse(durable=True)

    async def UpdateDeployment(self, request, context):
        await self._refuse(context, grpc.StatusCode.UNIMPLEMENTED, "NOT_YET")

    async def PlanDeployment(self, request, context):
        await self._refuse(context, grpc.StatusCode.UNIMPLEMENTED, "NOT_YET")
