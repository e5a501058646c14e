"""Stages with real allocations for the check of a card; they run on the CPU too."""

from __future__ import annotations

import torch

from stagekeeper.actor import endpoint
from stagekeeper.stage import TorchStage

MIB = 2**20
BLOCK_BYTES = 16 * MIB
WIDTH = 1024


class Holds(TorchStage):
    """Weights of some MiB, a batch of some more, blocks of a cache, and a CUDA graph of a product.

    Args:
        fails: its load raises once the weights are on the card.
    """

    def __init__(self, weights_mib: int = 512, batch_mib: int = 512, fails: bool = False) -> None:
        self._weights_mib = weights_mib
        self._batch_mib = batch_mib
        self._fails = fails
        self._left_bytes = 0
        self._cache: list[torch.Tensor] = []
        self._graph: torch.cuda.CUDAGraph | None = None

    def load(self) -> None:
        rows = self._weights_mib * MIB // 4 // WIDTH
        self.weights = torch.full((rows, WIDTH), 1.0 / WIDTH, device=self.device)
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        if self._fails:
            raise RuntimeError("this stage fails with its weights on the card")

    def measure(self) -> None:
        batch = torch.ones(self._batch_mib * MIB // 4 // WIDTH, WIDTH, device=self.device)
        batch.add_(1.0)

    def allocate(self, budget_bytes: int) -> None:
        self._left_bytes = budget_bytes
        for _ in range(self.kv_blocks(budget_bytes, BLOCK_BYTES)):
            self._cache.append(torch.zeros(BLOCK_BYTES // 4, device=self.device))

    def capture(self) -> None:
        self._given = torch.ones(WIDTH, 1, device=self.device)
        if self.device.type != "cuda":
            return
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):  # a warm-up, as capture wants it
            self.weights[:WIDTH] @ self._given
        torch.cuda.current_stream().wait_stream(side)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self._product = self.weights[:WIDTH] @ self._given

    @endpoint
    def product(self, value: float) -> float:
        """Multiply by weights of 1/WIDTH, through the graph if there is one: it is `value`."""
        self._given.fill_(value)
        if self._graph is None:
            return float((self.weights[:WIDTH] @ self._given).mean())
        self._graph.replay()
        torch.cuda.synchronize()
        return float(self._product.mean())

    @endpoint
    def facts(self) -> dict[str, object]:
        on_cuda = self.device.type == "cuda"
        return {
            "left_bytes": self._left_bytes,
            "blocks": len(self._cache),
            "has_graph": self._graph is not None,
            "card": torch.cuda.get_device_name(0) if on_cuda else "cpu",
            "visible": torch.cuda.device_count() if on_cuda else 0,
        }
