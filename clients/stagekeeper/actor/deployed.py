"""Stages of a deployment, called like actors: one rank per replica that can take calls.

Decided here: that the routes are looked up at every call, so that a stage which came back is
there and one that is gone is not. Not decided here: what is safe to repeat; nothing is repeated
(`Client.call` does that). Invariant: a stage belongs to the cluster, so nothing here can stop it
or owns it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from stagekeeper.actor.calling import EndpointRef, endpoint_of_mesh
from stagekeeper.actor.connection.link import (
    Link,
    PendingCall,
    ReplyFuture,
    ReplyStream,
    fail_call,
)
from stagekeeper.actor.endpoint import Endpoint
from stagekeeper.actor.owning.answer_errors import error_of_answer
from stagekeeper.actor.owning.scope import sender_name
from stagekeeper.actor.place import Place
from stagekeeper.actor.rank_links import RankLink
from stagekeeper.client.client import Client
from stagekeeper.client.errors import CONNECTION_LOST, CallLost, NoReplica, NotFound
from stagekeeper.client.routing import Route
from stagekeeper.v1 import stage_service_pb2 as pb
from stagekeeper.v1.types_pb2 import Payload
from stagekeeper.wire.payload import Tensors

if TYPE_CHECKING:
    from stagekeeper.actor.program import Program

SYNC_LIMIT_S: Final = 10.0


class StageRank:
    """One instance of a stage. For the loop's thread only."""

    is_failed = False  # where it has failed there is no route to it

    def __init__(self, program: Program, route: Route, rank: int, name: str) -> None:
        self.rank = rank
        self.outstanding = 0
        self._program = program
        self._instance_id = route.instance_id
        self._place = Place(route.url, route.instance_id, is_stage=True)
        self._name = name

    def call(self, endpoint: str, payload: Payload) -> asyncio.Future[Payload]:
        self._program.check_thread()
        future = ReplyFuture()
        self._send(future, endpoint, payload)
        return future

    def stream(self, endpoint: str, payload: Payload) -> ReplyStream:
        self._program.check_thread()
        stream = ReplyStream()
        self._send(stream, endpoint, payload)
        return stream

    def cast(self, endpoint: str, payload: Payload) -> None:
        sender = sender_name()
        self._program.on_loop(
            lambda: self._program.links.to(self._place).cast(
                self._instance_id, endpoint, payload, sender
            )
        )

    def _send(self, call: PendingCall, endpoint: str, payload: Payload) -> None:
        link = self._program.links.to(self._place)
        link.call(self, call, self._instance_id, endpoint, payload, sender_name())

    def error_of(self, error: pb.CallError) -> BaseException:
        return error_of_answer(error, self._name, self.rank)

    def link_broke(self, link: Link, calls: list[PendingCall]) -> None:
        for call in calls:
            fail_call(
                call,
                CallLost(
                    f"the connection to {self._name} at {self._place.address} was lost",
                    reason=CONNECTION_LOST,
                ),
            )


class StageMesh:
    """A stage of a deployment. Made by `Root.stage`; its attributes are the stage's endpoints.

    Attributes:
        name: `deployment/stage`.
        size: how many replicas can take calls now.
    """

    def __init__(
        self,
        program: Program,
        client: Client,
        deployment: str,
        stage: str,
        endpoints: Mapping[str, Endpoint] | None,
        tensors: Tensors,
    ) -> None:
        self._program = program
        self._client = client
        self._deployment = deployment
        self._stage = stage
        self._endpoints = endpoints
        self.tensors: Tensors = tensors
        self._ranks: dict[str, StageRank] = {}

    def __getattr__(self, name: str) -> EndpointRef[..., Any, Any]:
        if name.startswith("_"):
            raise AttributeError(name)
        found = endpoint_of_mesh(name, self, self._endpoints, self.name)
        self.__dict__[name] = found
        return found

    @property
    def name(self) -> str:
        return f"{self._deployment}/{self._stage}"

    @property
    def size(self) -> int:
        return len(self._routes())

    @property
    def links(self) -> Sequence[RankLink]:
        """The instances that can take calls now, by replica; see `RankView`.

        Raises:
            NoReplica: there are none.
        """
        routes = self._routes()
        if not routes:
            raise NoReplica(
                f"no replica of {self.name} can take calls now", reason="NO_REPLICA", never_ran=True
            )
        for instance_id in self._ranks.keys() - {route.instance_id for route in routes}:
            del self._ranks[instance_id]
        return [self._rank_of(route) for route in routes]

    def __repr__(self) -> str:
        return f"<stage {self.name}>"

    def _rank_of(self, route: Route) -> StageRank:
        rank = self._ranks.get(route.instance_id)
        if rank is None:
            rank = StageRank(self._program, route, route.replica_index, self.name)
            self._ranks[route.instance_id] = rank
        return rank

    def _routes(self) -> Sequence[Route]:
        view = self._client.routes.view(self._deployment)
        if view is None:
            return ()
        names = [stage.name for stage in view.spec.stages]
        if self._stage not in names:
            return ()
        return self._client.routes.routes(self._deployment, names.index(self._stage))

    async def check(self) -> None:
        """Make sure that there is such a stage.

        Raises:
            NotFound: there is no such deployment, or it has no such stage.
        """
        await self._client.synced(SYNC_LIMIT_S)
        view = self._client.routes.view(self._deployment)
        if view is None:
            view = await self._client.get(self._deployment)
        names = [stage.name for stage in view.spec.stages]
        if self._stage not in names:
            raise NotFound(
                f"{self._deployment} has no stage {self._stage!r}; it has: {', '.join(names)}",
                reason="STAGE_UNKNOWN",
            )
