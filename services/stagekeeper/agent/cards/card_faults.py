"""What runs on a sick card fails, and so does the program that met an error of its own.

Decided here: whom an error ends. Of a sick card that is each stage that has claimed it, at every
look, so that none is missed. Of an error that only one program met it is the stage whose process
the driver named; where it named nobody, the one stage that has the card, if all the processes on it
are its, by the looks before and after. Not decided here: which cards are sick (`card_health`), what
follows from a failure (`deaths`).

Invariant: a stage is not ended for an error that may be that of another process which a look saw.
"""

from __future__ import annotations

from collections.abc import Iterable

import structlog

from stagekeeper.agent.cards.card_owners import is_of_stage
from stagekeeper.agent.cards.devices import CardFault
from stagekeeper.agent.cards.inventory import Inventory
from stagekeeper.agent.deaths import Deaths
from stagekeeper.agent.ending import kill_processes
from stagekeeper.agent.stage_process import StageProcess
from stagekeeper.host.tasks import TaskOwner

_log = structlog.get_logger(__name__)

KIND = "DEVICE_FAILED"
SEEN_BY = "nvml"


class CardFaults:
    """Fails the stages of one agent for what their cards tell.

    Args:
        look_s: how long a reading of the cards may take.
    """

    def __init__(
        self,
        stages: Iterable[StageProcess],
        inventory: Inventory,
        deaths: Deaths,
        owner: TaskOwner,
        *,
        look_s: float,
    ) -> None:
        self._stages = stages
        self._inventory = inventory
        self._deaths = deaths
        self._owner = owner
        self._look_s = look_s

    def look(self) -> None:
        """Fail each stage that has a sick card. Repeats do nothing."""
        cards = self._inventory.by_id
        sick = {it: card.sick_reason for it, card in cards.items() if card.sick_reason}
        for stage in self._alive() if sick else ():
            for claim in stage.shard.devices:
                if why := sick.get(claim.device_id):
                    self._fail(stage, f"card {claim.device_id} is sick: {why}")
                    break

    def met(self, fault: CardFault) -> None:
        """Fail the stage whose program met an error, if it is known which; soon, or at once."""
        if fault.pid is not None:
            self._settle(fault, frozenset({fault.pid}))
        else:
            before = self._listed(fault)
            _ = self._owner.start("whose error it was", self._settle_after_look(fault, before))

    async def _settle_after_look(self, fault: CardFault, before: frozenset[int]) -> None:
        """Count who came since the last look, and who ended since: it may be their error."""
        await self._inventory.look_again(self._look_s)
        self._settle(fault, before | self._listed(fault))

    def _settle(self, fault: CardFault, pids: frozenset[int]) -> None:
        ids = set(fault.device_ids)
        there = [it for it in self._alive() if ids & {c.device_id for c in it.shard.devices}]
        if fault.pid is None and len(there) > 1:
            there = []
        stage = next((it for it in there if all(is_of_stage(pid, it) for pid in pids)), None)
        if pids and stage is not None:
            self._fail(stage, fault.text)
        else:
            _log.warning("whose error it was is not known; nothing is ended", error=fault.text)

    def _listed(self, fault: CardFault) -> frozenset[int]:
        return frozenset[int]().union(*self._inventory.listed_on(fault.device_ids).values())

    def _alive(self) -> list[StageProcess]:
        return [
            it
            for it in self._stages
            if it.handle is not None and it.holds_processes and not it.is_asked and not it.failure
        ]

    def _fail(self, stage: StageProcess, why: str) -> None:
        pid = f" (pid {stage.shard.pid})" if stage.shard.pid else ""
        self._deaths.declare(stage, KIND, f"{stage.name}{pid} is ended: {why}", seen_by=SEEN_BY)
        _ = self._owner.start(f"kill {stage.instance_id[:8]}", kill_processes(stage))
