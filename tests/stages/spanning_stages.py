"""Stages of several shards: their shards meet while they load, as the ranks of a collective do."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from stagekeeper.actor import endpoint
from stagekeeper.stage import Stage


class Gang(Stage):
    """Loads until all of its shards do, and until it is let on.

    Args:
        folder: where the shards meet: `<deployment>.<stage>.<shard>.here` says that one loads.
        gate: a file; a shard loads until it exists. Empty: there is none.
        gated_shard: which shard the gate holds up; -1 means all.
        fails: the shard that cannot load; -1 means none.
        torn: a file; `fails` counts only while it exists. Empty: it counts always.
        waits: whether a shard waits for the others.
    """

    def __init__(
        self,
        folder: str,
        *,
        gate: str = "",
        gated_shard: int = -1,
        fails: int = -1,
        torn: str = "",
        waits: bool = True,
    ) -> None:
        self.folder = Path(folder)
        self.gate = Path(gate) if gate else None
        self.is_gated = gated_shard in (-1, self.shard_index)
        self.fails = fails == self.shard_index
        self.torn = Path(torn) if torn else self.folder
        self.waits = waits

    def load(self) -> None:
        self._mark(self.shard_index).touch()
        shards = range(self.shard_count) if self.waits else ()
        while not all(self._mark(shard).exists() for shard in shards):
            time.sleep(0.01)
        while self.gate is not None and self.is_gated and not self.gate.exists():
            time.sleep(0.01)
        if self.fails and self.torn.exists():
            raise RuntimeError("weights of this shard are torn")

    @endpoint(idempotent=True)
    async def where(self) -> dict[str, Any]:
        return {
            "pid": os.getpid(),
            "stage": self.context.stage_name,
            "shard": self.shard_index,
        }

    @endpoint(idempotent=True)
    async def ask(self, sibling: str) -> Any:
        """Ask a sibling where it is."""
        return await self.siblings[sibling].where.call_one()

    def _mark(self, shard: int) -> Path:
        return self.folder / f"{self.context.deployment}.{self.context.stage_name}.{shard}.here"
