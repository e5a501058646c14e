"""The numbers that the registry decides by, and how they have to nest.

Decided here: defaults (PROTOCOL §4) and their cross-checks. Not decided here: where they come from
(flags and files are the servers' business).

Invariant: settings that exist are consistent; a set that would declare a punctual worker silent is
refused when it is made, not found out at night.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

MISSED_BEATS_UNTIL_SUSPECT = 2


@dataclass(frozen=True, slots=True)
class RegistrySettings:
    """What the registry is tuned by. Times are seconds.

    Attributes:
        heartbeat_s: pace of a worker's heartbeats while there are few workers.
        lease_s: silence after which a worker is UNREACHABLE and its id is free for another host.
        lost_s: silence after which a worker is LOST.
        recovery_window_s: longest HOLD(RECOVERING) after a start; longer where it is not known who
            was there, see `window_s`.
        longest_backoff_s: longest pause of an agent that looks for its supervisor.
        heartbeat_budget_per_s: heartbeats of all workers together; more workers beat more slowly.
        report_wait_s: how long a committed start may take to show up in its worker's report.
        retry_s: pause before a stop or a cancellation that failed is asked for again.
        probe_retry_s: pause before an agent that did not answer is dialled again.
        forget_s: silence after which a worker without shards is dropped from the list.
        change_log_limit: changes that a watcher may be behind before it has to list again.
        event_log_limit: events that are kept; who watches them may be as far behind.
        failure_limit: failures kept for display.
        tombstone_limit: deleted names kept, the newest; a worker that returns with what was deleted
            before them is shown with it, and it can be deleted again.
    """

    heartbeat_s: float = 2.0
    lease_s: float = 10.0
    lost_s: float = 60.0
    recovery_window_s: float = 10.0
    longest_backoff_s: float = 1.0
    heartbeat_budget_per_s: float = 2_000.0
    report_wait_s: float = 10.0
    retry_s: float = 1.0
    probe_retry_s: float = 10.0
    forget_s: float = 3_600.0
    change_log_limit: int = 10_000
    event_log_limit: int = 10_000
    failure_limit: int = 1_000
    tombstone_limit: int = 1_000

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not (math.isfinite(value) and value > 0):
                raise ValueError(f"{field.name} {value!r} is not a finite number above 0")
        suspect_s = MISSED_BEATS_UNTIL_SUSPECT * self.heartbeat_s
        if not suspect_s < self.lease_s < self.lost_s <= self.forget_s:
            raise ValueError(
                f"times must nest: {MISSED_BEATS_UNTIL_SUSPECT} × heartbeat_s ({suspect_s}) < "
                f"lease_s ({self.lease_s}) < lost_s ({self.lost_s}) <= forget_s ({self.forget_s})"
            )

    def window_s(self, *, has_roster: bool) -> float:
        """Return how long a new reign holds still at most.

        With a roster it knows when everybody is back. Without one it knows nothing but the time, so
        every agent gets two of its longest pauses to come.
        """
        return max(self.recovery_window_s, 0.0 if has_roster else 2 * self.longest_backoff_s)

    def pace_s(self, worker_count: int) -> float:
        """Return the time between two heartbeats of one worker: the sum keeps its budget."""
        return max(self.heartbeat_s, worker_count / self.heartbeat_budget_per_s)
