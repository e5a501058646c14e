"""The kinds of cards of one agent, put together, and what their errors lead to.

Decided here: which kinds there are and in which order, and how often a card is asked for errors
between two readings. Not decided here: what an error costs (`card_health`, `card_faults`).
Invariant: a card that is sick is not chosen from the same turn on in which that was heard.
"""

from __future__ import annotations

from typing import Final

from stagekeeper.agent.cards.card_faults import CardFaults
from stagekeeper.agent.cards.device_choice import parse_choice
from stagekeeper.agent.cards.devices import DeviceSource
from stagekeeper.agent.cards.host_memory import HostMemory, parse_devices
from stagekeeper.agent.cards.inventory import Inventory
from stagekeeper.agent.cards.kernel_log import KernelLog
from stagekeeper.agent.cards.nvml import NvmlDevices
from stagekeeper.agent.cards.visible_devices import VisibleDevices
from stagekeeper.agent.deaths import Deaths
from stagekeeper.agent.settings import AgentSettings
from stagekeeper.agent.stages import Stages
from stagekeeper.host.tasks import TaskOwner
from stagekeeper.runtime.clock import Clock

_LISTEN_S: Final = 1.0
"""So late an error is heard at most, while the driver answers; to ask costs one call."""


class CardSources:
    """Where one agent reads its cards: the slices of RAM come first.

    Args:
        host_id: begins the lock domains of cards that all agents of the host see.
    """

    def __init__(self, settings: AgentSettings, host_id: str) -> None:
        choice = parse_choice(settings.devices)
        domain = f"{host_id}/{settings.worker_id}"
        self._look_s = 2 * settings.device_deadline_s
        self._gpus: NvmlDevices | None = None
        self.all: list[DeviceSource] = [HostMemory(parse_devices(choice.slices, domain))]
        if choice.gpus is not None:
            self._gpus = NvmlDevices(
                choice.gpus,
                host_id,
                deadline_s=settings.device_deadline_s,
                interval_s=settings.device_interval_s,
                visible=VisibleDevices.of(),
                kernel_log=KernelLog(),
            )
            self.all.append(self._gpus)

    @property
    def notes(self) -> tuple[str, ...]:
        """What its operator should know of which cards are used."""
        return self._gpus.notes if self._gpus is not None else ()

    def hear(
        self,
        stages: Stages,
        inventory: Inventory,
        deaths: Deaths,
        owner: TaskOwner,
        clock: Clock,
    ) -> None:
        """Have what runs on a card fail with it, in a task of `owner` from now on."""
        if self._gpus is None:
            return
        faults = CardFaults(stages, inventory, deaths, owner, look_s=self._look_s)

        def is_sick() -> None:
            inventory.refresh()
            faults.look()

        self._gpus.on_fault = faults.met
        self._gpus.on_sick = is_sick
        _ = owner.start("errors of cards", _listen(self._gpus, faults, clock))


async def _listen(gpus: NvmlDevices, faults: CardFaults, clock: Clock) -> None:
    while True:
        await clock.sleep(_LISTEN_S)
        await gpus.listen()
        faults.look()  # also at stages that were taken over since
