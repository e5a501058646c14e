"""A creation as it goes: one row for each worker that a stage starts on.

Decided here: what is worth a line of its own, and what a row says. Time is handed in. Not decided
here: how rows are drawn (`progress_view`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from stagekeeper.cli.text import states
from stagekeeper.cli.text.amounts import seconds
from stagekeeper.cli.text.lines import visible
from stagekeeper.v1 import types_pb2 as pb2

QUIET_S: Final = 5.0
"""A stage that only counts on gets a line this often."""


ARRIVED: Final = frozenset({"READY", "FAILED", "STOPPED"})
"""States that a creation leaves a stage in."""


@dataclass(slots=True)
class StageRow:
    """One stage on its way. `since` is when it entered its state and phase."""

    replica_index: int
    stage_id: int
    stage: str
    worker_id: str
    state: str
    since: float
    done: int = 0
    total: int = 0
    note: str = ""
    told: tuple[int, str] = (0, "")
    told_at: float = 0.0


class CreationProgress:
    """The rows of one creation, in the order of replica, stage and worker."""

    def __init__(self, monotonic: Callable[[], float]) -> None:
        self._monotonic = monotonic
        self.began = monotonic()
        self._rows: dict[tuple[int, int, str], StageRow] = {}

    @property
    def rows(self) -> list[StageRow]:
        return [self._rows[key] for key in sorted(self._rows)]

    @property
    def elapsed_s(self) -> float:
        return self._monotonic() - self.began

    def feed(self, progress: pb2.StageProgress) -> str:
        """Take one message; return the line that it is worth, or nothing.

        A new state or phase always is; mere counting is every few seconds.
        """
        now = self._monotonic()
        # A worker holds at most one shard of a stage, so it tells the shards of one apart.
        key = (progress.replica_index, progress.stage_id, progress.worker_id)
        state = _state(progress)
        row = self._rows.get(key)
        is_new = row is None or row.state != state
        if row is None or is_new:
            row = StageRow(
                progress.replica_index,
                progress.stage_id,
                progress.stage_name,
                progress.worker_id,
                state,
                since=now,
            )
            self._rows[key] = row
        row.done, row.total = progress.progress.done, progress.progress.total
        row.note = progress.progress.note
        return self._tell(row) if is_new or self._is_due(row) else ""

    def kept_back(self) -> list[str]:
        """Return the lines of what came too soon after another one, and nothing has come since."""
        return [self._tell(row) for row in self.rows if self._is_due(row)]

    def _is_due(self, row: StageRow) -> bool:
        # Compared with what was told, not with what came last: that may have been kept back.
        has_moved = row.told != (row.done, row.note)
        return has_moved and self._monotonic() - row.told_at >= QUIET_S

    def _tell(self, row: StageRow) -> str:
        row.told, row.told_at = (row.done, row.note), self._monotonic()
        return self.line(row)

    def line(self, row: StageRow) -> str:
        """Write one row as a line: `[3.2 s] 0/encoder on agent-0: STARTING(LOAD) 12/40 reading`."""
        text = f"[{seconds(self.elapsed_s)}] {row.replica_index}/{row.stage}"
        if row.worker_id:
            text += f" on {row.worker_id}"
        return f"{text}: {row.state} {how_far(row)}".rstrip()

    def age_s(self, row: StageRow) -> float:
        """Return how long a row has been in its state, or took to get where it stays."""
        if row.state in ARRIVED:
            return row.since - self.began
        return self._monotonic() - row.since


def how_far(row: StageRow) -> str:
    """Write `12/40 reading words`; what is unknown is left out."""
    if row.total:
        amount = f"{row.done}/{row.total}"
    else:
        amount = str(row.done) if row.done else ""
    return " ".join(part for part in (amount, visible(row.note)) if part)


def _state(progress: pb2.StageProgress) -> str:
    name = states.shard_state(progress.state)
    return f"{name}({states.phase(progress.phase)})" if progress.phase else name
