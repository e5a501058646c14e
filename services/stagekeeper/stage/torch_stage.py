"""`TorchStage`: a stage whose memory is torch's, so that it can be measured.

Decided here: how much of a card such a stage uses, on CUDA and on the CPU, and how many blocks of
a cache fit into what is left. torch is imported when
it is first needed, which is after the process is on record and its control socket answers.
Invariant: importing this module imports no torch.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

from stagekeeper.stage.memory import HostMemoryMeter, MemoryMeter
from stagekeeper.stage.stage import Stage

if TYPE_CHECKING:
    import torch


class TorchStage(Stage):
    """A stage on torch: tensors arrive as torch tensors, and MEASURE is held to the budget.

    On CUDA the peak is what torch allocated at most in `measure`, and what the card lost to others
    meanwhile: workspaces of libraries, buffers of collectives. What was there before (the context)
    and what comes later (graphs) is not in it: leave room for those with `memory.reserve`. On the
    CPU the peak is the growth of this process's resident memory since the stage was made, and at
    least the size of its modules' parameters and buffers.
    """

    tensors: ClassVar[Literal["numpy", "torch"]] = "torch"

    __meter: MemoryMeter | None
    __baseline: HostMemoryMeter

    def __new__(cls, *args: object, **kwargs: object) -> Self:
        self = super().__new__(cls, *args, **kwargs)
        self.__meter = None
        self.__baseline = HostMemoryMeter()  # before __init__, which may load already
        return self

    @property
    def device(self) -> torch.device:
        """The first card of this stage, as torch names it: `cuda:0`, or `cpu` without one."""
        import torch

        return torch.device("cuda:0" if self._is_on_cuda() else "cpu")

    def memory_meter(self) -> MemoryMeter:
        if self.__meter is None:
            self.__meter = (
                _CudaMeter(len(self.context.devices))
                if self._is_on_cuda()
                else _TorchHostMeter(self, self.__baseline)
            )
        return self.__meter

    def kv_blocks(self, budget_bytes: int, block_bytes: int) -> int:
        """Return how many blocks of a cache fit into what `allocate` was given.

        Where torch's process group spans several ranks it is the least of all of them, so that each
        has the same; then every rank has to ask, in the same order.
        """
        blocks = max(0, budget_bytes) // block_bytes
        distributed: Any = sys.modules.get("torch.distributed")
        if distributed is None or not (distributed.is_available() and distributed.is_initialized()):
            return blocks
        import torch

        device = self.device if distributed.get_backend() == "nccl" else torch.device("cpu")
        least: Any = torch.tensor(blocks, dtype=torch.int64, device=device)
        distributed.all_reduce(least, op=distributed.ReduceOp.MIN)
        return int(least.item())

    def _is_on_cuda(self) -> bool:
        return any(device.kind == "cuda" for device in self.context.devices)


class _CudaMeter:
    """What this process has on that of the visible cards where it is most.

    torch knows what it allocated itself. What libraries take beside it (workspaces, buffers of a
    collective) shows only in what the card as a whole lost: from the baseline on, while the phase
    lock keeps others from moving memory. What lay there before, the context among it, does not.
    """

    def __init__(self, device_count: int) -> None:
        import torch

        self._cuda: Any = torch.cuda
        self._cuda.init()  # a stage that has nothing on its card yet is measured too
        self._cards = range(device_count)
        self._outside_bytes = [0] * device_count
        """On each card: what others, and this process outside of torch, had at the baseline."""

    def used_bytes(self) -> int:
        return int(max(self._cuda.memory_allocated(card) for card in self._cards))

    def held_bytes(self) -> int:
        return int(max(self._cuda.memory_reserved(card) for card in self._cards))

    def reset_peak(self) -> None:
        for card in self._cards:
            self._cuda.synchronize(card)
            self._cuda.reset_peak_memory_stats(card)
            self._outside_bytes[card] = self._outside(card)

    def peak_bytes(self) -> int:
        return max(self._peak_of(card) for card in self._cards)

    def _peak_of(self, card: int) -> int:
        self._cuda.synchronize(card)
        # Never below 0: a stranger that gave memory back is nobody's gain here.
        grown_bytes = max(0, self._outside(card) - self._outside_bytes[card])
        return int(self._cuda.max_memory_allocated(card)) + grown_bytes

    def _outside(self, card: int) -> int:
        free_bytes, total_bytes = self._cuda.mem_get_info(card)
        return int(total_bytes - free_bytes - self._cuda.memory_reserved(card))


class _TorchHostMeter:
    """Resident growth, and never less than what the stage's modules hold."""

    def __init__(self, stage: TorchStage, resident: HostMemoryMeter) -> None:
        self._stage = stage
        self._resident = resident

    def used_bytes(self) -> int:
        return max(self._resident.used_bytes(), module_bytes(self._stage))

    def reset_peak(self) -> None:
        self._resident.reset_peak()

    def peak_bytes(self) -> int:
        return max(self._resident.peak_bytes(), module_bytes(self._stage))


def module_bytes(stage: object) -> int:
    """Return the bytes of parameters and buffers in the modules that are attributes of `stage`.

    Storage that several tensors share counts once.
    """
    torch: Any = sys.modules.get("torch")
    if torch is None:
        return 0
    storages: dict[int, int] = {}
    for value in vars(stage).values():
        if isinstance(value, torch.nn.Module):
            for tensor in (*value.parameters(), *value.buffers()):
                storage = tensor.untyped_storage()
                storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())
