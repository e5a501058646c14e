"""Deployments as messages, built again only where they changed.

Building a message costs some fifteen times what parsing it does, and lists and watches ask for the
same ones over and over. Decided here: a message is used again while the view that it was made from
is equal to the one asked for, replica by replica. Invariant: what is lent is never changed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from stagekeeper.core.ids import DeploymentName, ReplicaIndex
from stagekeeper.core.model import DeploymentView, ReplicaView
from stagekeeper.supervisor.convert import deployment_to_proto, replica_to_proto
from stagekeeper.v1 import deployment_service_pb2 as deployment_pb2

Replicas = dict[ReplicaIndex, tuple[ReplicaView, deployment_pb2.Replica]]


@dataclass(frozen=True, slots=True)
class _Built:
    view: DeploymentView
    message: deployment_pb2.Deployment
    replicas: Replicas


class DeploymentMessages:
    """Remembers one message per deployment."""

    def __init__(self) -> None:
        self._built: dict[DeploymentName, _Built] = {}

    def of(self, view: DeploymentView) -> deployment_pb2.Deployment:
        """Return the message of `view`: to be read, copied or sent, never to be changed."""
        built = self._built.get(view.name)
        if built is not None and (built.view is view or built.view == view):
            return built.message
        known: Replicas = {} if built is None else built.replicas
        replicas = {replica.key.index: _replica(replica, known) for replica in view.replicas}
        message = deployment_to_proto(
            view, {index: message for index, (_, message) in replicas.items()}
        )
        self._built[view.name] = _Built(view, message, replicas)
        return message

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


def _replica(view: ReplicaView, known: Replicas) -> tuple[ReplicaView, deployment_pb2.Replica]:
    before = known.get(view.key.index)
    if before is not None and (before[0] is view or before[0] == view):
        return before
    return view, replica_to_proto(view)
