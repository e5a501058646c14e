"""A stage's memory over its phases: what it was given, what was foreseen, what was measured.

Decided here: whether MEASURE is needed, what `allocate` gets, when a stage has used more than it
was given, and what is kept for the next start. Not decided here: how memory is read (the stage's
meter), and who else may move memory meanwhile (phases).

Invariant: a stage that is over what it was given fails, with both numbers; also what it failed with
is kept, so that the next start knows better.
"""

from __future__ import annotations

import logging
from typing import Final

from stagekeeper.core.model import MemoryProfile
from stagekeeper.runtime.launch import Launch
from stagekeeper.stage.memory import HoldsMemory, MemoryMeter
from stagekeeper.stage.profile import keep_profile, read_profile
from stagekeeper.stage.vitals import Vitals

_log = logging.getLogger(__name__)

_APART_SHARE: Final = 0.1
_APART_BYTES: Final = 32 * 2**20
"""Weights that differ by no more are the same ones, read by a meter of a process's own memory."""


class BudgetExceeded(Exception):
    """The stage used more of a card than its spec asks for."""


class StageMemory:
    """The account of one start. All but `tell` may be called in any thread, one at a time."""

    def __init__(self, launch: Launch, vitals: Vitals) -> None:
        self._launch = launch
        self._vitals = vitals
        self._meter: MemoryMeter | None = None
        self._predicted = read_profile(launch) if launch.devices else None
        self._weights_bytes = 0
        self._is_of_another = False
        self._peak_bytes: int | None = None
        self._graph_bytes: int | None = None
        self._held_before_capture = 0
        self._used_bytes: int | None = None

    @property
    def needs_measure(self) -> bool:
        """Whether MEASURE has to run; what LOAD shows of a remembered profile may decide that."""
        known = self._predicted
        if not self._launch.skips_measure or known is None or self._is_of_another:
            return True
        return self._foreseen_peak_bytes > self._launch.budget_bytes

    @property
    def left_bytes(self) -> int:
        """What may be allocated: the budget, less the peak, less what graphs need of it.

        Graphs are the reserve's; only what an earlier start saw them take beyond it counts here.
        """
        peak_bytes = self._peak_bytes
        if self._predicted is not None and not self.needs_measure:
            peak_bytes = self._foreseen_peak_bytes
        beyond_bytes = self._foreseen_bytes - self._launch.reserve_bytes
        return max(0, self._launch.budget_bytes - (peak_bytes or 0) - beyond_bytes)

    def loaded(self, meter: MemoryMeter | None) -> None:
        self._meter = meter
        if meter is not None:
            self._weights_bytes = self._used_bytes = meter.used_bytes()
            self._compare()

    def _compare(self) -> None:
        """See whether what was loaded is what the remembered profile is of."""
        known = self._predicted
        if known is None or not self._launch.skips_measure:
            return
        self._check("LOAD", self._weights_bytes)
        apart_bytes = abs(self._weights_bytes - known.weights_bytes)
        self._is_of_another = apart_bytes > known.weights_bytes * _APART_SHARE + _APART_BYTES
        if self.needs_measure:
            _log.warning(
                "the remembered profile does not fit this start (weights %s then, %s now; peak %s "
                "then, the budget is %s now): it is measured anew",
                *map(_sized, (known.weights_bytes, self._weights_bytes)),
                *map(_sized, (known.peak_bytes, self._launch.budget_bytes)),
            )

    def measure_begins(self) -> None:
        """Take the baseline."""
        if self._meter is not None:
            self._meter.reset_peak()

    def measured(self) -> None:
        """Read the peak.

        Raises:
            BudgetExceeded: it is over the budget.
        """
        if self._meter is None:
            return
        self._peak_bytes = self._meter.peak_bytes()
        self._used_bytes = self._meter.used_bytes()
        self._keep()
        self._check("MEASURE", self._peak_bytes)

    def capture_begins(self) -> None:
        if self._meter is not None:
            self._used_bytes = self._meter.used_bytes()
            self._held_before_capture = self._held()

    def capture_failed(self) -> str:
        """Keep what graphs had taken by then; return a sentence on it, empty where nobody knows."""
        if self._meter is None:
            return ""
        self._graph_bytes = max(0, self._held() - self._held_before_capture)
        self._keep()
        return (
            f"graphs had taken {_sized(self._graph_bytes)} of a card by then, and "
            f"{_sized(self._foreseen_bytes)} was foreseen for them"
        )

    def captured(self) -> None:
        """Read what graphs took, and what the stage uses now that it is complete.

        Raises:
            BudgetExceeded: with them it has more than its budget and its reserve.
        """
        if self._meter is None:
            return
        need_bytes = (self._used_bytes or 0) + self._batch_bytes
        self._graph_bytes = max(0, self._held() - self._held_before_capture)
        self._used_bytes = self._meter.used_bytes()
        self._keep()
        given_bytes = self._launch.budget_bytes + self._launch.reserve_bytes
        need_bytes += self._graph_bytes
        if self._launch.devices and need_bytes > given_bytes:
            raise BudgetExceeded(
                f"stage {self._launch.stage_name} needs {_sized(need_bytes)} of a card after "
                f"CAPTURE, and its budget and its reserve there are {_sized(given_bytes)}: its "
                f"graphs took {_sized(self._graph_bytes)}, and {_sized(self._foreseen_bytes)} was "
                "foreseen. The next start leaves room for what was measured; or give it a larger "
                "memory.reserve in the spec"
            )

    def tell(self) -> None:
        """Show what is known by now. On the event loop."""
        if self._meter is None:
            return
        measured = None
        if self._peak_bytes is not None:
            measured = MemoryProfile(self._weights_bytes, self._peak_bytes, self._graph_bytes)
        self._vitals.uses(self._used_bytes, predicted=self._predicted, measured=measured)

    @property
    def _foreseen_peak_bytes(self) -> int:
        """The peak by the remembered profile: what a batch took then, on the weights of now."""
        known = self._predicted
        if known is None:
            return 0
        batch_bytes = max(0, known.peak_bytes - known.weights_bytes)
        return max(known.peak_bytes, self._weights_bytes + batch_bytes)

    @property
    def _foreseen_bytes(self) -> int:
        """What graphs may take: the reserve, or what an earlier start saw them take."""
        seen_bytes = 0 if self._predicted is None else self._predicted.graph_bytes or 0
        return max(self._launch.reserve_bytes, seen_bytes)

    @property
    def _batch_bytes(self) -> int:
        """What the largest batch takes beside the weights, and needs again after CAPTURE.

        Where a meter does not tell what is in use from what is kept, that may be in use already.
        """
        peak_bytes = self._peak_bytes
        if peak_bytes is None and self._predicted is not None:
            peak_bytes = self._predicted.peak_bytes
        if peak_bytes is None or not isinstance(self._meter, HoldsMemory):
            return 0
        return max(0, peak_bytes - self._weights_bytes)

    def _held(self) -> int:
        if self._meter is None:
            return 0
        if isinstance(self._meter, HoldsMemory):
            return self._meter.held_bytes()
        return self._meter.used_bytes()

    def _check(self, phase: str, used_bytes: int) -> None:
        budget_bytes = self._launch.budget_bytes
        if self._launch.devices and used_bytes > budget_bytes:
            raise BudgetExceeded(
                f"stage {self._launch.stage_name} used {_sized(used_bytes)} of a card in {phase}, "
                f"and its budget there is {_sized(budget_bytes)}: give it more memory in the spec, "
                "or measure a smaller batch"
            )

    def _keep(self) -> None:
        if not self._launch.devices:
            return
        peak_bytes = self._peak_bytes
        if peak_bytes is None:  # it was not measured this time
            if self._predicted is None:
                return
            peak_bytes = self._predicted.peak_bytes
        graph_bytes = self._graph_bytes
        if graph_bytes is None and self._predicted is not None:
            graph_bytes = self._predicted.graph_bytes
        keep_profile(
            self._launch,
            MemoryProfile(self._weights_bytes, peak_bytes, graph_bytes),
        )


def _sized(size_bytes: int) -> str:
    return f"{size_bytes} bytes ({size_bytes / 2**20:.0f} MiB)"
