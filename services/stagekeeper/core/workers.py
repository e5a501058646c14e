"""Workers: what is kept of each, and what its silence means.

Decided here: the state of a worker by how long it was silent. Not decided here: what follows for
its shards (nothing: silence is not death, see `derive`).

Invariant: only `hear` brings a worker back to ALIVE, and only time takes it away from there.
"""

from __future__ import annotations

from dataclasses import dataclass

from stagekeeper.core.commands import AgentTarget
from stagekeeper.core.ids import Epoch, HostId, WorkerId
from stagekeeper.core.limits import MOST_NOTES
from stagekeeper.core.model import Device, ShardRecord, WorkerReport
from stagekeeper.core.names import cut
from stagekeeper.core.report_check import CheckedReport
from stagekeeper.core.settings import MISSED_BEATS_UNTIL_SUSPECT, RegistrySettings
from stagekeeper.core.states import WORKER_MOVES, WorkerState, check_move

MOST_LEFT_OUT_SHOWN = 3
"""Of what an agent says for its operator; more would push the rest out of sight."""


@dataclass(frozen=True, slots=True)
class WorkerView:
    """A worker as it is listed. `is_agent_reachable` is None while nobody has tried.

    A worker of the roster that has not registered in this reign has incarnation 0 and no address.
    `notes` are its agent's words for its operator, cut where they are too long or too many.
    """

    worker_id: WorkerId
    state: WorkerState
    reason: str
    silent_for_s: float
    host_id: HostId = HostId("")
    hostname: str = ""
    incarnation: int = 0
    revision: int = 0
    agent_address: str = ""
    is_agent_reachable: bool | None = None
    stages_outlive_agent: bool = True
    outlive_reason: str = ""
    devices: tuple[Device, ...] = ()
    inventory_unknown: bool = False
    inventory_reason: str = ""
    shard_count: int = 0
    registration_count: int = 0
    notes: tuple[str, ...] = ()


@dataclass(slots=True)
class Worker:
    """What is kept of a registered worker: its last report, its lease, and whether it answers.

    `checked` are the entries of the report that were kept; `epoch` is the reign it registered with;
    `pace_s` the pace it was told; `failed_probe_at` is None unless its agent did not answer.
    """

    report: WorkerReport
    checked: CheckedReport
    digest: bytes
    epoch: Epoch
    heard_at: float
    pace_s: float
    state: WorkerState = WorkerState.ALIVE
    is_reachable: bool | None = None
    unreachable_detail: str = ""
    failed_probe_at: float | None = None
    registration_count: int = 0

    @property
    def worker_id(self) -> WorkerId:
        return self.report.worker_id

    @property
    def shards(self) -> tuple[ShardRecord, ...]:
        return self.checked.shards

    @property
    def incarnation(self) -> int:
        return self.report.incarnation

    @property
    def target(self) -> AgentTarget:
        return AgentTarget(self.worker_id, self.incarnation, self.report.agent_address)

    def move(self, new: WorkerState) -> None:
        """Go to another state, as the table has it."""
        self.state = check_move(WORKER_MOVES, self.state, new, f"worker {self.worker_id}")

    @property
    def takes_commands(self) -> bool:
        """Whether asking its agent for anything makes sense now."""
        return self.state in (WorkerState.ALIVE, WorkerState.SUSPECT)

    def has_lease(self, settings: RegistrySettings, now: float) -> bool:
        """Whether the worker id is taken: judged by the clock, not by the last tick."""
        return self.lease_left_s(settings, now) > 0

    def lease_left_s(self, settings: RegistrySettings, now: float) -> float:
        """Return how much silence is left until the lease ends; 0 or less when it has."""
        return self.heard_at + lease_s(settings, self.pace_s) - now


def lease_s(settings: RegistrySettings, pace_s: float) -> float:
    """Return the silence that ends a lease: stretched when the server itself set a slow pace."""
    return max(settings.lease_s, (MISSED_BEATS_UNTIL_SUSPECT + 1) * pace_s)


def lost_after_s(settings: RegistrySettings, pace_s: float) -> float:
    """Return the silence after which a worker is LOST."""
    return max(settings.lost_s, lease_s(settings, pace_s))


def state_after_silence(
    silent_s: float, *, settings: RegistrySettings, pace_s: float, may_be_lost: bool
) -> WorkerState:
    """Judge a silence. `may_be_lost` is False while the supervisor holds still."""
    if silent_s >= lease_s(settings, pace_s):
        is_lost = may_be_lost and silent_s >= lost_after_s(settings, pace_s)
        return WorkerState.LOST if is_lost else WorkerState.UNREACHABLE
    if silent_s >= MISSED_BEATS_UNTIL_SUSPECT * pace_s:
        return WorkerState.SUSPECT
    return WorkerState.ALIVE


_BY_SILENCE = (
    WorkerState.ALIVE,
    WorkerState.SUSPECT,
    WorkerState.UNREACHABLE,
    WorkerState.LOST,
)


def fall_silent(worker: Worker, new: WorkerState) -> bool:
    """Move `worker` down to `new`, step by step as the table has it; never up.

    Returns:
        Whether anything changed.
    """
    old_rank, new_rank = _BY_SILENCE.index(worker.state), _BY_SILENCE.index(new)
    for state in _BY_SILENCE[old_rank + 1 : new_rank + 1]:
        worker.move(state)
    return new_rank > old_rank


def worker_view(
    worker: Worker, now: float, *, judged_at: float | None, probed_at: float | None
) -> WorkerView:
    """Show a worker.

    Args:
        worker: a registered one.
        now: monotonic seconds.
        judged_at: when its silence counts for more; None when it is heard, or LOST.
        probed_at: when its agent is dialled again; None when that is not wanted.
    """
    report = worker.report
    silent_s = max(0.0, now - worker.heard_at)
    reasons = []
    if worker.state is not WorkerState.ALIVE:
        told = "its heartbeats stopped; its shards stay in routes until clients say no"
        if judged_at is not None:
            worse = "UNREACHABLE" if worker.state is WorkerState.SUSPECT else "LOST"
            told += f"; {worse} in {max(0.0, judged_at - now):.0f} s unless it is heard"
        reasons.append(told)
    if worker.is_reachable is False:
        detail = f" ({worker.unreachable_detail})" if worker.unreachable_detail else ""
        reasons.append(
            f"AGENT_UNREACHABLE: its agent does not answer at {report.agent_address}{detail}; "
            "it gets nothing new: look at --listen and --advertise"
            + (f"; dialled again in {max(0.0, probed_at - now):.0f} s" if probed_at else "")
        )
    refused = len(worker.checked.refused)
    if refused:
        reasons.append(f"{refused} of its shards were refused: {worker.checked.refused[0].message}")
    reasons += worker.checked.left_out[:MOST_LEFT_OUT_SHOWN]
    return WorkerView(
        worker_id=report.worker_id,
        state=worker.state,
        reason="; ".join(reasons),
        silent_for_s=silent_s,
        host_id=report.host_id,
        hostname=report.hostname,
        incarnation=report.incarnation,
        revision=report.revision,
        agent_address=report.agent_address,
        is_agent_reachable=worker.is_reachable,
        stages_outlive_agent=report.stages_outlive_agent,
        outlive_reason=cut(report.outlive_reason),
        devices=worker.checked.devices,
        inventory_unknown=report.inventory_unknown,
        inventory_reason=cut(report.inventory_reason),
        shard_count=len(worker.shards),
        registration_count=worker.registration_count,
        notes=tuple([cut(note) for note in report.notes[:MOST_NOTES]]),
    )


def awaited_view(worker_id: WorkerId, silent_s: float, *, waits_s: float | None) -> WorkerView:
    """Show a worker of the roster that has not come back: known of, never counted as alive.

    `waits_s` is how long it is still waited for; None when it is not.
    """
    waiting = "" if waits_s is None else f"; it is being waited for, {waits_s:.0f} s at most"
    return WorkerView(
        worker_id=worker_id,
        state=WorkerState.UNREACHABLE,
        reason=f"it was there before this supervisor started and has not registered{waiting}",
        silent_for_s=silent_s,
    )
