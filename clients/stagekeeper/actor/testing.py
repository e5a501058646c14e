"""Actor trees in tests: a root that records what nobody handled, and ways to make things fail.

    async with tree() as it:
        workers = this_host().spawn_procs(2).spawn("workers", Worker)
        await it.kill(workers[1])
        failure = await it.failure()
        assert failure.mesh is workers and failure.ranks == (1,)

Decided here: that a failure which a test did not ask for fails the test. Invariant: when the
block is left nothing of the tree is left, and `unhandled_fault_hook` is what it was.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Final

import stagekeeper.actor as public
from stagekeeper.actor.failure import MeshFailure
from stagekeeper.actor.mesh import ActorMesh
from stagekeeper.actor.tree_root import Root, root
from stagekeeper.host.process import host_boot_id, identity_of

__all__ = ["TestTree", "assert_path", "tree"]

WAIT_LIMIT_S: Final = 30.0
"""How long a test waits for what should come soon. A slow machine is no failure."""


class TestTree:
    """A root whose unhandled failures are collected instead of ending the program. See `tree`.

    Attributes:
        failures: what reached the root and was not yet handed out by `failure`, oldest first.
    """

    __test__ = False  # it is no test, whatever pytest makes of the name

    def __init__(self, inner: Root) -> None:
        self.failures: list[MeshFailure] = []
        self._root = inner
        self._arrived = asyncio.Event()
        self._hook_before: Any = None

    async def __aenter__(self) -> TestTree:
        await self._root.__aenter__()
        self._hook_before = public.unhandled_fault_hook
        public.unhandled_fault_hook = self._record
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            await self._root.__aexit__(exc_type, exc, trace)
        finally:
            public.unhandled_fault_hook = self._hook_before
        if self.failures:
            told = "failures that the test did not ask for:\n" + "\n".join(map(str, self.failures))
            if exc is None:
                raise AssertionError(told)
            exc.add_note(told)  # it may well come of them

    # --- what went wrong

    async def failure(self, limit_s: float = WAIT_LIMIT_S) -> MeshFailure:
        """Return the next failure that reached the root unhandled.

        Raises:
            AssertionError: none came within the limit.
        """
        while not self.failures:
            self._arrived.clear()
            try:
                await asyncio.wait_for(self._arrived.wait(), limit_s)
            except TimeoutError:
                raise AssertionError(f"no failure reached the root within {limit_s:g} s") from None
        return self.failures.pop(0)

    def _record(self, failure: MeshFailure) -> None:
        self.failures.append(failure)
        self._arrived.set()

    # --- making it go wrong

    async def kill(self, mesh: Any) -> list[int]:
        """SIGKILL the process of every rank of `mesh` (a slice, mostly); return their pids.

        Raises:
            ValueError: a rank is on another host, or in the test's own process.
        """
        return await self._signal(mesh, signal.SIGKILL)

    async def freeze(self, mesh: Any) -> list[int]:
        """SIGSTOP them: alive, and without a sign of it."""
        return await self._signal(mesh, signal.SIGSTOP)

    async def thaw(self, mesh: Any) -> list[int]:
        """SIGCONT them."""
        return await self._signal(mesh, signal.SIGCONT)

    async def _signal(self, mesh: Any, number: signal.Signals) -> list[int]:
        if not isinstance(mesh, ActorMesh):
            raise TypeError(f"a mesh of actors has ranks to signal, not {mesh!r:.80}")
        places = await mesh.places(WAIT_LIMIT_S)
        for rank, place in places.items():
            if place.boot_id != host_boot_id() or not place.pid or identity_of(place.pid) is None:
                raise ValueError(f"{mesh.name}[{rank}] has no process on this host")
            if place.pid == os.getpid():
                raise ValueError(f"{mesh.name}[{rank}] is in this very process")
        for place in places.values():
            os.kill(place.pid, number)
        return [place.pid for place in places.values()]


def tree(
    endpoint: str | None = None,
    *,
    lease_s: float = 0.5,
    stop_budget_s: float = 5.0,
) -> TestTree:
    """Make a root for a test: `async with tree() as it:`. What it spawns is owned as under `root`.

    Args:
        endpoint: of a supervisor, for a tree on a cluster.
        lease_s: short, so that a hang shows soon.
        stop_budget_s: as for `root`.
    """
    return TestTree(root(endpoint, name="root", lease_s=lease_s, stop_budget_s=stop_budget_s))


def assert_path(failure: MeshFailure, *expected: str | Sequence[str]) -> None:
    """Check which owners a failure passed, innermost first, and what each decided.

    Args:
        expected: `"manager[0]"` for an owner whatever it decided, or `("manager[0]", "refused")`;
            a decision is compared by its beginning.

    Raises:
        AssertionError: the path is another; both are told.
    """
    wanted = [(it, "") if isinstance(it, str) else (it[0], it[1]) for it in expected]
    same = len(wanted) == len(failure.path) and all(
        hop.owner == owner and hop.decision.startswith(decision)
        for hop, (owner, decision) in zip(failure.path, wanted, strict=True)
    )
    if not same:
        told = ", ".join(f"{hop.owner}: {hop.decision}" for hop in failure.path) or "nobody"
        asked = ", ".join(f"{owner}: {decision or '…'}" for owner, decision in wanted) or "nobody"
        raise AssertionError(f"the failure passed {told}; expected {asked}\n{failure}")
