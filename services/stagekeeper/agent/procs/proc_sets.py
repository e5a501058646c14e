"""The processes for actors of one agent: which sets there are, and who may ask for what.

Decided here: whether a request is for a set of this life, of its own owner, and within what one
agent runs. Not decided here: what happens in a set (`proc_set`). They are no stages: no reign
commands them, no report has them, no memory is reserved for them, and they end with their agent.

Invariant: a request that is refused has changed nothing; a set that has ended is never made again.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Iterator
from typing import Final

import structlog

from stagekeeper.agent.procs.proc_set import Named, ProcSet
from stagekeeper.agent.procs.proc_starter import ProcStarter
from stagekeeper.core.errors import FieldProblem, Reason, Refused, bad_fields
from stagekeeper.core.limits import MOST_AGENT_PROCS
from stagekeeper.core.procs import ProcsWanted
from stagekeeper.host.oom import OomWitness
from stagekeeper.host.tasks import TaskOwner
from stagekeeper.runtime.clock import Clock

_log = structlog.get_logger(__name__)

_ENDED_BY_OWNER: Final = "its owner ended it"
_ENDED_WITH_AGENT: Final = "its agent was asked to end"

_MOST_REMEMBERED: Final = 10_000
"""Sets that have ended. One that is forgotten could be made again by a first request that comes
late; a request that has heard of a process of it is refused however long ago that was."""

_GOODBYE_S: Final = 2.0
"""What is left to the kernel, beyond the budget."""


class ProcSets:
    """All sets of one agent.

    Args:
        allow: patterns of the classes that may be actors; without any there are none.
        incarnation: this life of the agent.
    """

    def __init__(
        self,
        allow: tuple[str, ...],
        incarnation: int,
        starter: ProcStarter,
        owner: TaskOwner,
        clock: Clock,
        oom: OomWitness,
    ) -> None:
        self.incarnation = incarnation
        self.boot_id = starter.boot_id
        self._allow = allow
        self._starter = starter
        self._owner = owner
        self._clock = clock
        self._oom = oom
        self._sets: dict[str, ProcSet] = {}
        self._ended: OrderedDict[str, None] = OrderedDict()

    @property
    def live_count(self) -> int:
        """Processes that run, or are on their way."""
        return sum(it.live_count for it in self._sets.values())

    def join(self, wanted: ProcsWanted) -> tuple[ProcSet, list[Named]]:
        """Start and join what a checked request names; the caller holds the set from here on.

        Raises:
            Refused: NOT_ALLOWED, STALE_INCARNATION, PROCS_UNKNOWN, ADMISSION_REFUSED or BAD_FIELD.
        """
        if not self._allow:
            raise Refused(
                Reason.NOT_ALLOWED, "this agent starts no actors: its --allow names no class"
            )
        found = self._of_owner(wanted)
        if wanted.incarnation not in (0, self.incarnation):
            raise Refused(
                Reason.STALE_INCARNATION,
                f"the agent that started them is gone, and they are with it: this is its life "
                f"{self.incarnation}, and the set is of {wanted.incarnation}",
                metadata={"incarnation": str(self.incarnation)},
            )
        if found is None and not wanted.incarnation and wanted.procs_id not in self._ended:
            found = ProcSet(
                wanted, self._starter, self._owner, self._clock, self._oom, self._is_over
            )
        elif found is None or found.is_ending:
            raise Refused(
                Reason.PROCS_UNKNOWN,
                f"the set {wanted.procs_id} has ended: its owner ended it, or was away for longer "
                "than its lease",
            )
        self._check_new(found, wanted)
        if wanted.procs_id not in self._sets:
            self._sets[wanted.procs_id] = found
            _log.info("processes for actors", set=str(found), owner=wanted.owner)
        return found, found.join(wanted)

    async def end(self, wanted: ProcsWanted) -> None:
        """End the processes named, or the whole set; returns when they are gone.

        What has ended, or never was, can never be started after that. Cancelled, it goes on.

        Raises:
            Refused: NOT_ALLOWED: it is somebody else's.
        """
        found, budget_s = self._of_owner(wanted), wanted.end_budget_s
        if found is None:
            if not wanted.instance_ids:
                self._remember(wanted.procs_id)
            return
        if wanted.instance_ids:
            work = found.stop_some(wanted.instance_ids, _ENDED_BY_OWNER, budget_s)
        else:
            work = found.stop(_ENDED_BY_OWNER, budget_s)
        await asyncio.wait({self._owner.start(f"end of {wanted.procs_id}", work)})

    async def stop(self, budget_s: float) -> None:
        """End all sets in order, since the agent ends; returns within a bounded time."""
        if not self._sets:
            return
        _log.info("actors end with their agent", processes=self.live_count)
        stops = [it.stop(_ENDED_WITH_AGENT, budget_s) for it in self._sets.values()]
        ending = asyncio.gather(*stops)
        try:
            await asyncio.wait_for(ending, budget_s + _GOODBYE_S)
        except TimeoutError:
            _log.error("processes for actors are not gone", count=self.live_count)

    # --- inside

    def _of_owner(self, wanted: ProcsWanted) -> ProcSet | None:
        found = self._sets.get(wanted.procs_id)
        if found is not None and not found.is_of(wanted.token):
            raise Refused(
                Reason.NOT_ALLOWED,
                f"the set {wanted.procs_id} is of another tree: its token differs",
            )
        return found

    def _check_new(self, found: ProcSet, wanted: ProcsWanted) -> None:
        if problems := list(self._taken(found, wanted)):
            raise bad_fields(problems, "the request for processes")
        new_count = sum(not found.has(it) for it in wanted.instance_ids)
        if new_count and self.live_count + new_count > MOST_AGENT_PROCS:
            raise Refused(
                Reason.ADMISSION_REFUSED,
                f"this agent runs {self.live_count} processes for actors, and {new_count} more "
                f"would be above {MOST_AGENT_PROCS}",
            )

    def _taken(self, found: ProcSet, wanted: ProcsWanted) -> Iterator[FieldProblem]:
        others = [it for it in self._sets.values() if it is not found]
        for index, instance_id in enumerate(wanted.instance_ids):
            if any(it.has(instance_id) for it in others):
                yield FieldProblem(f"instance_ids[{index}]", "is a process of another set")

    def _is_over(self, ended: ProcSet) -> None:
        del self._sets[ended.procs_id]
        self._remember(ended.procs_id)
        _log.info("processes for actors are gone", set=str(ended), processes_left=self.live_count)

    def _remember(self, procs_id: str) -> None:
        self._ended[procs_id] = None
        if len(self._ended) > _MOST_REMEMBERED:
            self._ended.popitem(last=False)
