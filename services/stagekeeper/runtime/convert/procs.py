"""Requests for processes for actors."""

from __future__ import annotations

from stagekeeper.core.ids import InstanceId
from stagekeeper.core.procs import ProcsWanted
from stagekeeper.v1 import agent_service_pb2 as pb2


def procs_wanted_from_proto(message: pb2.SpawnProcsRequest) -> ProcsWanted:
    return ProcsWanted(
        procs_id=message.procs_id,
        token=message.token,
        instance_ids=tuple([InstanceId(it) for it in message.instance_ids]),
        incarnation=message.incarnation,
        lease_s=message.lease_s,
        env=tuple(message.environment.items()),
        name=message.name,
        owner=message.owner,
        ends=message.ends,
        end_budget_s=message.end_budget_s,
    )
