"""Deployments as messages, built again only where they changed.

Building a message costs some fifteen times what parsing it does, and lists and watches ask for the
same ones over and over. Decided here: a message is used again while the view that it was made from
is equal to the one asked for, replica by replica; only how long something still takes is written
anew. Invariant: what is lent is copied by whoever asked, before anybody else asks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from stagekeeper.core.ids import DeploymentName, ReplicaIndex
from stagekeeper.core.model import DeploymentView, ReplicaView
from stagekeeper.core.registry import Registry
from stagekeeper.runtime.clock import Clock
from stagekeeper.supervisor.convert import deployment_to_proto, replica_to_proto
from stagekeeper.supervisor.wall_times import WallTimes
from stagekeeper.v1 import deployment_service_pb2 as deployment_pb2

Replicas = dict[ReplicaIndex, tuple[ReplicaView, deployment_pb2.Replica]]


@dataclass(frozen=True, slots=True)
class _Built:
    """`timed` are the places of the replicas whose next action comes by the clock."""

    view: DeploymentView
    message: deployment_pb2.Deployment
    replicas: Replicas
    timed: tuple[int, ...]


class DeploymentMessages:
    """Remembers one message per deployment.

    Args:
        registry: asked for what the clock brings, and when.
        clock: for how far away that is.
    """

    def __init__(self, registry: Registry, clock: Clock) -> None:
        self._registry = registry
        self._clock = clock
        self._times = WallTimes(clock)
        self._built: dict[DeploymentName, _Built] = {}

    def of(self, view: DeploymentView) -> deployment_pb2.Deployment:
        """Return the message of `view`: to be read, copied or sent at once, never to be changed."""
        built = self._built.get(view.name)
        if built is None or (built.view is not view and built.view != view):
            built = self._built[view.name] = self._build(view, built)
        if built.timed:
            self._stamp(built)
        return built.message

    def of_all(self, views: Sequence[DeploymentView]) -> list[deployment_pb2.Deployment]:
        """Return the messages of all deployments there are, and forget those that are gone."""
        messages = [self.of(view) for view in views]
        if len(self._built) > len(views):
            names = {view.name for view in views}
            for gone in self._built.keys() - names:
                self.forget(gone)
        return messages

    def forget(self, name: DeploymentName) -> None:
        """Drop what is remembered of a deployment that is gone."""
        self._built.pop(name, None)

    def _build(self, view: DeploymentView, before: _Built | None) -> _Built:
        known: Replicas = {} if before is None else before.replicas
        replicas = {it.key.index: self._replica(it, known) for it in view.replicas}
        message = deployment_to_proto(
            view, {index: message for index, (_, message) in replicas.items()}, self._times
        )
        timed = tuple(n for n, it in enumerate(view.replicas) if it.timer is not None)
        return _Built(view, message, replicas, timed)

    def _replica(
        self, view: ReplicaView, known: Replicas
    ) -> tuple[ReplicaView, deployment_pb2.Replica]:
        before = known.get(view.key.index)
        if before is not None and (before[0] is view or before[0] == view):
            return before
        return view, replica_to_proto(view, self._times)

    def _stamp(self, built: _Built) -> None:
        now = self._clock.monotonic()
        for place in built.timed:
            message = built.message.replicas[place]
            left_s = self._registry.next_action_in_s(built.view.replicas[place], now)
            if left_s is None:
                message.ClearField("next_action_in_s")
            else:
                message.next_action_in_s = left_s
