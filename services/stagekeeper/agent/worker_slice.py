"""The worker's slice: all that this agent holds, as it is put to a supervisor.

Kept here: its revision, +1 at each change, and the last message built of it; what did not change is
not built again. The digest leaves out what may change without a registration (`figures`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final

from stagekeeper.agent.figures import (
    MemoryFigures,
    are_worth_telling,
    device_without_figures,
    memory_figures,
    shard_without_figures,
)
from stagekeeper.core.model import WorkerReport
from stagekeeper.runtime.convert import report_to_proto
from stagekeeper.v1 import supervisor_service_pb2 as supervisor_pb2

_DIGEST_BYTES: Final = 16


@dataclass(frozen=True, slots=True)
class SliceCopy:
    """The slice at one moment, ready to be sent; heartbeats name its revision and digest."""

    request: supervisor_pb2.RegisterWorkerRequest
    revision: int
    digest: bytes


class WorkerSlice:
    """The slice of one agent.

    Args:
        cluster: named in every message.
        report: makes the report of this moment, with any revision.
    """

    def __init__(self, cluster: str, report: Callable[[], WorkerReport]) -> None:
        self._cluster = cluster
        self._report = report
        self._revision = 1
        self._told: MemoryFigures = {}
        self.on_change: Callable[[], None] = lambda: None

    @property
    def revision(self) -> int:
        return self._revision

    def changed(self) -> None:
        """Note that what is held is another thing now. Many changes in a row make one message."""
        self._revision += 1
        self.on_change()

    def figures_are_read(self) -> None:
        """Have the slice put again if memory is far from what was told of it last."""
        now = memory_figures(self._report())
        if are_worth_telling(self._told, now):
            self._told = now  # once, also where nobody is there to be told
            self.changed()

    def copy(self) -> SliceCopy:
        """Build the message of this moment."""
        report = replace(self._report(), revision=self._revision)
        self._told = memory_figures(report)
        digest = self._digest(report)
        request = report_to_proto(report, cluster=self._cluster, digest=digest)
        return SliceCopy(request, report.revision, digest)

    def _digest(self, report: WorkerReport) -> bytes:
        lasting = replace(
            report,
            revision=0,
            shards=tuple(map(shard_without_figures, report.shards)),
            devices=tuple(map(device_without_figures, report.devices)),
        )
        message = report_to_proto(lasting, cluster=self._cluster, digest=b"")
        data = message.SerializeToString(deterministic=True)
        return hashlib.blake2b(data, digest_size=_DIGEST_BYTES).digest()
