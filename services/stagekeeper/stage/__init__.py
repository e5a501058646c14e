"""The stage process: it hosts one shard of a model and serves it on its own address.

`python -m stagekeeper.stage` imports this package before it knows whether it may start at all, so
nothing is imported here until it is asked for.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from stagekeeper.stage.memory import HostMemoryMeter, MemoryMeter
    from stagekeeper.stage.siblings import Siblings, SiblingUnknown
    from stagekeeper.stage.stage import Stage, StageContext, StageDevice
    from stagekeeper.stage.torch_stage import TorchStage

_HOMES = {
    "HostMemoryMeter": "memory",
    "MemoryMeter": "memory",
    "SiblingUnknown": "siblings",
    "Siblings": "siblings",
    "Stage": "stage",
    "StageContext": "stage",
    "StageDevice": "stage",
    "TorchStage": "torch_stage",
}

__all__ = [
    "HostMemoryMeter",
    "MemoryMeter",
    "SiblingUnknown",
    "Siblings",
    "Stage",
    "StageContext",
    "StageDevice",
    "TorchStage",
]


def __getattr__(name: str) -> object:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{home}"), name)
