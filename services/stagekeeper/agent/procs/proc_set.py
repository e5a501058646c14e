"""One set of processes for actors: who is in it, who holds it, and when it ends.

Decided here: which process is started and which one joined, what a stream of its owner is told, and
how long the set goes on while nobody holds it. Not decided here: what one process does.

Invariant: an instance id is started once, whatever is repeated; when the set `is_over`, nothing of
it runs, and it never runs again.
"""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import structlog

from stagekeeper.agent.procs.held_proc import ForgottenProc, HeldProc, ProcEnd, ProcUp
from stagekeeper.agent.procs.proc_starter import ProcStarter
from stagekeeper.core.ids import InstanceId
from stagekeeper.core.procs import ProcsWanted
from stagekeeper.host.oom import OomWitness
from stagekeeper.host.tasks import TaskOwner
from stagekeeper.runtime.clock import Clock

_log = structlog.get_logger(__name__)

_LEASE_IS_OVER: Final = "nobody held it for its lease: its owner is gone, or was away for too long"

Named = HeldProc | ForgottenProc
News = tuple[InstanceId, ProcUp | ProcEnd]


class ProcSet:
    """One set.

    Args:
        wanted: the request that made it; what it says of the set counts for its whole life.
        owner: of its tasks.
        on_over: called once, when it is over.

    Attributes:
        is_ending: it was told to end; it takes nothing new.
        is_over: nothing of it is left.
    """

    def __init__(
        self,
        wanted: ProcsWanted,
        starter: ProcStarter,
        owner: TaskOwner,
        clock: Clock,
        oom: OomWitness,
        on_over: Callable[[ProcSet], None],
    ) -> None:
        self.is_ending = False
        self.is_over = False
        self._wanted = wanted
        self._starter = starter
        self._owner = owner
        self._clock = clock
        self._oom = oom
        self._on_over = on_over
        self._procs: dict[InstanceId, HeldProc] = {}
        self._forgotten: set[InstanceId] = set()
        self._holder_count = 0
        self._lease: asyncio.Task[Any] | None = None
        self._changed = asyncio.Event()

    def __str__(self) -> str:
        return str(self._wanted)

    @property
    def procs_id(self) -> str:
        return self._wanted.procs_id

    @property
    def live_count(self) -> int:
        """Processes that run, or are on their way."""
        return sum(it.end is None for it in self._procs.values())

    def has(self, instance_id: InstanceId) -> bool:
        """Return whether this id was ever started here."""
        return instance_id in self._procs or instance_id in self._forgotten

    def is_of(self, token: str) -> bool:
        """Return whether this is the secret of the tree that the set belongs to."""
        return hmac.compare_digest(token.encode(), self._wanted.token.encode())

    def join(self, wanted: ProcsWanted) -> list[Named]:
        """Start those of the processes that are new; return all that are named, in their order.

        One that ended and is named no more is forgotten, but for its id.
        """
        named = set(wanted.instance_ids)
        for instance_id in [it for it, proc in self._procs.items() if proc.is_gone]:
            if instance_id not in named:
                del self._procs[instance_id]
                self._forgotten.add(instance_id)
                self._starter.forget(instance_id)
        return [self._named(wanted, it) for it in wanted.instance_ids]

    @contextmanager
    def held(self) -> Iterator[None]:
        """Hold the set; the lease begins when nobody does any more."""
        self._holder_count += 1
        if self._lease is not None:
            self._lease.cancel()
            self._lease = None
        try:
            yield
        finally:
            self._holder_count -= 1
            if not self._holder_count and not self.is_ending and not self._owner.is_stopping:
                self._lease = self._owner.start(f"lease of {self.procs_id}", self._run_out())

    async def news(self, named: Sequence[Named]) -> AsyncIterator[News]:
        """Yield what becomes of these processes, from their beginning, until the set is over."""
        told_up: set[InstanceId] = set()
        told_end: set[InstanceId] = set()
        while True:
            changed = self._changed
            for proc in named:
                if proc.up is not None and proc.instance_id not in told_up:
                    told_up.add(proc.instance_id)
                    yield proc.instance_id, proc.up
                if proc.end is not None and proc.instance_id not in told_end:
                    told_end.add(proc.instance_id)
                    yield proc.instance_id, proc.end
            if changed is self._changed:  # nothing happened while it was told
                if self.is_over:
                    return
                await changed.wait()

    def kill(self, why: str) -> None:
        """End the set at once."""
        self._ends(why)
        for proc in self._procs.values():
            proc.kill(why)
        self._look()

    async def stop(self, why: str, budget_s: float) -> None:
        """End the set, each process within the budget; returns when it is over."""
        self._ends(why)
        await self._stop(self._procs.values(), why, budget_s)
        self._look()

    async def stop_some(
        self, instance_ids: Collection[InstanceId], why: str, budget_s: float
    ) -> None:
        """End some processes, each within the budget; one that never was can never be started."""
        self._forgotten.update(it for it in instance_ids if it not in self._procs)
        await self._stop(
            [self._procs[it] for it in instance_ids if it in self._procs], why, budget_s
        )

    # --- inside

    async def _stop(self, procs: Iterable[HeldProc], why: str, budget_s: float) -> None:
        await asyncio.gather(*[it.stop(why, budget_s) for it in procs if not it.is_gone])

    def _named(self, wanted: ProcsWanted, instance_id: InstanceId) -> Named:
        if instance_id in self._forgotten:
            return ForgottenProc(instance_id)
        proc = self._procs.get(instance_id)
        if proc is None:
            proc = HeldProc(wanted, instance_id, self._starter, self._oom, self._look)
            self._procs[instance_id] = proc
            _ = self._owner.start(f"process {instance_id[:8]}", proc.run())
        return proc

    async def _run_out(self) -> None:
        await self._clock.sleep(self._wanted.lease_s)
        self._lease = None
        self.kill(_LEASE_IS_OVER)

    def _ends(self, why: str) -> None:
        if not self.is_ending:
            self.is_ending = True
            _log.info("processes for actors end", set=str(self), why=why)
        if self._lease is not None:
            self._lease.cancel()
            self._lease = None

    def _look(self) -> None:
        """Wake who listens; note when nothing is left of a set that ends."""
        if self.is_ending and not self.is_over and all(it.is_gone for it in self._procs.values()):
            self.is_over = True
            for instance_id in self._procs:
                self._starter.forget(instance_id)
            self._on_over(self)
        self._changed.set()
        self._changed = asyncio.Event()
