"""Ends that nobody asked for: seen, written down, told, cleaned up behind.

Decided here: what kind of failure an end is, and in which order it is dealt with: on the disk
first, then in the shard (and so in the slice), then to whom it concerns, then what is left of the
instance is killed. Not decided here: whether anything starts again.

Invariant: an instance fails at most once, and never when it was asked to end.
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from dataclasses import dataclass

import structlog

from stagekeeper.agent.ending import kill_processes, stream_end
from stagekeeper.agent.failures import FailureSpool, make_failure
from stagekeeper.agent.log_tail import last_lines
from stagekeeper.agent.records import RecordStore
from stagekeeper.agent.stage_process import StageProcess
from stagekeeper.core.ids import WorkerId
from stagekeeper.core.limits import MOST_LOG_LINES
from stagekeeper.core.model import ExitInfo, Failure
from stagekeeper.core.states import ShardState
from stagekeeper.host.oom import OomWitness
from stagekeeper.runtime import crash_points
from stagekeeper.runtime.clock import Clock

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class _Verdict:
    kind: str
    message: str
    exit_info: ExitInfo | None


class Deaths:
    """Deals with the failures of one agent's stages.

    Attributes:
        on_failure: called with each stage that failed, once its failure is on disk.
    """

    def __init__(
        self,
        worker_id: WorkerId,
        spool: FailureSpool,
        records: RecordStore,
        oom: OomWitness,
        clock: Clock,
    ) -> None:
        self._worker_id = worker_id
        self._spool = spool
        self._records = records
        self._oom = oom
        self._clock = clock
        self.on_failure: Callable[[StageProcess, Failure], None] = lambda stage, failure: None

    async def watch(self, stage: StageProcess) -> None:
        """Wait for the end of the main process, and deal with it unless it was asked for.

        Runs as long as the process does. Cancelling it leaves the process alone.
        """
        handle = stage.handle
        assert handle is not None
        await handle.wait()
        if not _is_news(stage):
            return  # whoever asked, or failed it, sees to the rest
        await stream_end(stage)
        if not _is_news(stage):
            return
        status = handle.exit_status()
        out_of_memory = (
            status is not None
            and status.signal == signal.SIGKILL
            and not stage.was_killed
            and self._oom.look()
        )
        exit_info = ExitInfo(
            code=status.code if status else None,
            signal=status.signal if status else None,
            out_of_memory=out_of_memory or bool(stage.raised and stage.raised.out_of_memory),
        )
        self._learn_phase(stage)
        verdict = _verdict_on_end(stage, exit_info)
        self.declare(stage, verdict.kind, verdict.message, exit_info=exit_info, seen_by="pidfd")
        await kill_processes(stage)

    def raised(self, stage: StageProcess) -> Failure:
        """Declare the failure of a stage whose start raised, while its process still lives."""
        assert stage.raised is not None
        verdict = _verdict_on_raise(stage, None)
        return self.declare(stage, verdict.kind, verdict.message, seen_by="control stream")

    def found_gone(self, stage: StageProcess) -> Failure:
        """Declare the failure of a recorded process that an agent found gone when it started."""
        earlier = self._spool.of_instance(stage.instance_id)
        if earlier is not None:
            # The last agent saw it and died before the record said so: it is the same death.
            self._enter(stage, earlier)
            return earlier
        return self.declare(
            stage,
            "GONE",
            f"{_name(stage)} ended while no agent watched it; how it ended is not known",
            exit_info=ExitInfo(),
            seen_by="adoption",
        )

    def known_of(self, stage: StageProcess) -> Failure | None:
        """Return the failure of a stage, also one that an earlier life of the agent wrote down."""
        return stage.failure or self._spool.of_instance(stage.instance_id)

    def declare(
        self,
        stage: StageProcess,
        kind: str,
        message: str,
        *,
        seen_by: str,
        exit_info: ExitInfo | None = None,
    ) -> Failure:
        """Write a failure down and put the stage into FAILED; the first one of a stage counts."""
        if stage.failure is not None:
            return stage.failure
        self._learn_phase(stage)
        failure = make_failure(
            self._worker_id,
            stage.shard,
            kind,
            message,
            detected_by=seen_by,
            detect_time=self._clock.wall(),
            exit_info=exit_info,
            last_log_lines=last_lines(self._records.log_path(stage.instance_id), MOST_LOG_LINES),
            remote_traceback=stage.raised.traceback if stage.raised else "",
        )
        self._spool.add(failure)
        crash_points.reached("failure-spooled")
        self._enter(stage, failure)
        return failure

    def _learn_phase(self, stage: StageProcess) -> None:
        """Ask the word that a process left: it may have ended before its last one was heard."""
        noted = self._records.noted_phase(stage.instance_id)
        if noted is not None and not stage.shard.ready_time:
            stage.update(phase=noted)

    def _enter(self, stage: StageProcess, failure: Failure) -> None:
        stage.fail(failure)
        crash_points.reached("failed-written")
        _log.error(
            "a stage failed",
            stage=str(stage),
            kind=failure.kind,
            failure=failure.failure_id,
            message=failure.message,
        )
        self.on_failure(stage, failure)


def _is_news(stage: StageProcess) -> bool:
    return not stage.is_asked and stage.failure is None


def _verdict_on_end(stage: StageProcess, exit_info: ExitInfo) -> _Verdict:
    if stage.raised is not None:
        return _verdict_on_raise(stage, exit_info)
    if exit_info.out_of_memory:
        return _Verdict(
            "OUT_OF_MEMORY", f"{_name(stage)} was killed by the kernel for memory", exit_info
        )
    if exit_info.signal is not None:
        return _Verdict(
            "SIGNALED", f"{_name(stage)} was ended by {_signal_name(exit_info.signal)}", exit_info
        )
    if exit_info.code is not None:
        return _Verdict(
            "EXITED", f"{_name(stage)} exited with code {exit_info.code}, unasked", exit_info
        )
    return _Verdict(
        "EXITED",
        f"{_name(stage)} ended, unasked; how is not known, since another agent had started it",
        exit_info,
    )


def _verdict_on_raise(stage: StageProcess, exit_info: ExitInfo | None) -> _Verdict:
    raised = stage.raised
    assert raised is not None
    where = f" in {raised.phase}" if raised.phase is not None else ""
    name = stage.name
    if raised.out_of_memory:
        kind, what = "OUT_OF_MEMORY", "ran out of memory"
    else:
        kind, what = "INIT_RAISED", "raised"
    return _Verdict(kind, f"{name} {what}{where}: {raised.error}", exit_info)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal
        return f"signal {number}"


def _name(stage: StageProcess) -> str:
    shard = stage.shard
    phase = f" in {shard.phase}" if shard.phase and shard.state is ShardState.STARTING else ""
    pid = f" (pid {shard.pid})" if shard.pid else ""
    return f"{stage.name}{pid}{phase}"
