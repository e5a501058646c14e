"""Cards: what their workers say of them, and what is held of them.

Bytes; None means unknown, never zero.
"""

from __future__ import annotations

from dataclasses import dataclass

from stagekeeper.core.ids import DeviceId, WorkerId


@dataclass(frozen=True, slots=True)
class ForeignHolder:
    """Who holds memory of a card beside what its agent has reserved.

    `pid` is 0 where it is unknown, or several; `worker_id` is the worker of this cluster whose
    stage it is, empty for strangers.
    """

    pid: int
    name: str
    memory_bytes: int
    worker_id: WorkerId = WorkerId("")

    def __str__(self) -> str:
        return f"pid {self.pid} ({self.name})" if self.pid else self.name


@dataclass(frozen=True, slots=True)
class Device:
    """A card of a worker. (worker id, device id) is its identity in the cluster.

    `sick_reason` says why nothing new goes there, and is empty where it may.
    """

    device_id: DeviceId
    kind: str
    model: str
    index: int
    total_bytes: int
    lock_domain_id: str = ""
    used_bytes: int | None = None
    reserved_bytes: int = 0
    foreign: tuple[ForeignHolder, ...] = ()
    sick_reason: str = ""


@dataclass(frozen=True, slots=True)
class DeviceClaim:
    """What one shard holds of one device: as admission counted it, and as measured."""

    device_id: DeviceId
    reserved_bytes: int
    used_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class MemoryProfile:
    """Memory of a stage on that of its cards where it is most, as its phases measured it.

    `weights_bytes` are in use after LOAD, `peak_bytes` at most in MEASURE, the weights among them;
    `graph_bytes` is what CAPTURE added, None before its end.
    """

    weights_bytes: int
    peak_bytes: int
    graph_bytes: int | None = None
