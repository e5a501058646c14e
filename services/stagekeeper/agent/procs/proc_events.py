"""What the owner of processes for actors is told of them, as messages."""

from __future__ import annotations

from stagekeeper.agent.procs.held_proc import ProcEnd, ProcUp
from stagekeeper.agent.procs.proc_sets import ProcSets
from stagekeeper.core.ids import InstanceId
from stagekeeper.runtime.convert import exit_to_proto
from stagekeeper.v1 import agent_service_pb2 as pb


def proc_event(
    instance_id: InstanceId, news: ProcUp | ProcEnd, of: ProcSets
) -> pb.SpawnProcsResponse:
    """Say that a process is up, or how it ended."""
    if isinstance(news, ProcUp):
        return pb.SpawnProcsResponse(
            started=pb.ProcStarted(
                instance_id=instance_id,
                address=news.address,
                pid=news.pid,
                boot_id=of.boot_id,
                incarnation=of.incarnation,
            )
        )
    return pb.SpawnProcsResponse(
        ended=pb.ProcEnded(
            instance_id=instance_id,
            exit=None if news.exit is None else exit_to_proto(news.exit),
            reason=news.reason,
            last_log_lines=news.last_log_lines,
            pid=news.pid,
            is_late=news.is_late,
        )
    )
