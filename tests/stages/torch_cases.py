"""Stages on torch, for tests of memory and tensors."""

from __future__ import annotations

import torch

from stagekeeper.actor import endpoint
from stagekeeper.stage import TorchStage

MIB = 2**20


class Weighs(TorchStage):
    """Holds some MiB of weights, and needs some more for its largest batch."""

    def __init__(self, weights_mib: int = 16, batch_mib: int = 16) -> None:
        self.weights_mib = weights_mib
        self.batch_mib = batch_mib
        self.allocated_bytes = -1

    def load(self) -> None:
        self.model = torch.nn.Linear(1024, self.weights_mib * 256, bias=False, device=self.device)

    def measure(self) -> None:
        batch = torch.ones(self.batch_mib * MIB // 4, device=self.device)
        batch.add_(1.0)

    def allocate(self, budget_bytes: int) -> None:
        self.allocated_bytes = budget_bytes

    @endpoint
    def left(self) -> int:
        return self.allocated_bytes

    @endpoint
    def double(self, tensor: torch.Tensor) -> torch.Tensor:
        assert isinstance(tensor, torch.Tensor), type(tensor)
        return tensor.to(self.device) * 2

    @endpoint
    def parameters(self) -> int:
        return sum(each.numel() for each in self.model.parameters())


class RunsOut(TorchStage):
    """Asks torch for more than there is."""

    def load(self) -> None:
        self.weights = torch.empty(2**60, dtype=torch.uint8)


class Ranked(TorchStage):
    """Two ranks that have to agree on how many blocks of a cache each of them takes."""

    def __init__(self, rank: int, meeting_point: str) -> None:
        self.rank = rank
        self.meeting_point = meeting_point
        self.blocks = -1

    def load(self) -> None:
        torch.distributed.init_process_group(
            "gloo", init_method=f"file://{self.meeting_point}", rank=self.rank, world_size=2
        )

    def allocate(self, budget_bytes: int) -> None:
        self.blocks = self.kv_blocks((self.rank + 1) * 100 * MIB, MIB)

    @endpoint
    def block_count(self) -> int:
        return self.blocks
