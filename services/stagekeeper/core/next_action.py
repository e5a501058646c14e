"""What happens next to a replica: by itself, by the clock, or by its user's hand; and when.

Decided here: the sentence for each state and each cause, and which timer is behind it. Not decided
here: the state itself (`derive`), and when the clock gets there: that is looked up when somebody
asks, since a heartbeat moves it and must touch no view.

Invariant: every replica that is not READY has a next action, and so has a READY one of which a
worker is not heard.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, NamedTuple

from stagekeeper.core.model import RoutedShard
from stagekeeper.core.states import ShardState, Timer, WorkerState


class NextAction(NamedTuple):
    """A sentence, and what brings it about where the clock does."""

    text: str = ""
    timer: Timer | None = None


NOTHING: Final = NextAction()
WAITING: Final = "waiting for workers to come back after the supervisor's restart"
WAIT: Final = NextAction(f"{WAITING}; then it is judged without them", Timer.RECOVERY)
START_ITS_AGENT: Final = NextAction(
    "if a worker that is not registered holds it, start its agent; or deploy again to start it anew"
)
DEPLOY_AGAIN: Final = NextAction("deploy again to start it")
DEPLOY_ANEW: Final = NextAction("deploy again: what is left of it is stopped, then it starts anew")
DELETE_THEN_DEPLOY: Final = NextAction(
    "nothing is repaired by guessing: delete the deployment, then deploy it"
)
STARTS: Final = NextAction(
    "it is READY when all of its stages are; the first failure undoes the start"
)
STARTS_LATER: Final = NextAction("its start begins when the one before it is up, or has failed")
COMMITS: Final = NextAction(
    "it is READY when each of its workers has committed its part; a silent one is waited for: to "
    "start it elsewhere, delete the deployment, then deploy it"
)
REPORT_AWAITED: Final = NextAction("it counts as failed unless its worker reports it", Timer.REPORT)
UNDONE: Final = NextAction(
    "nobody runs this start any more: its agent undoes it; then deploy again"
)
UNDONE_LATER: Final = NextAction(
    "the supervisor that started it is gone: the start is undone once the workers are back",
    Timer.RECOVERY,
)
STOPS: Final = NextAction("its shards are stopped, then it is gone", Timer.RETRY)
STOPS_LATER: Final = NextAction("its shards are stopped once the workers are back", Timer.RECOVERY)
REPORTED_AGAIN: Final = NextAction(
    "it is routed again when workers report what is missing; to start it anew, delete the "
    "deployment, then deploy it"
)

_OF_UNREADY: Final = {
    ShardState.ADOPTING: "its agent is taking it over: it is routed again when its process answers",
    ShardState.STALLED: "it is routed again when its stage goes on; to start it anew, delete the "
    "deployment, then deploy it",
    ShardState.DRAINING: "its stage ends, as its agent was asked to; then deploy again",
    ShardState.STOPPING: "its stage ends, as its agent was asked to; then deploy again",
}
_ALL_READY: Final = "it is routed again as soon as all of its shards are READY and committed"

_SILENT: Final = (WorkerState.SUSPECT, WorkerState.UNREACHABLE, WorkerState.LOST)


def silent_shard(shards: Iterable[RoutedShard]) -> RoutedShard | None:
    """Return the shard whose worker's silence is judged next; None when all are heard."""
    silent = [shard for shard in shards if shard.worker_state in _SILENT]
    return min(silent, key=lambda it: (_SILENT.index(it.worker_state), it.worker_id), default=None)


def of_silence(shards: Iterable[RoutedShard]) -> NextAction:
    """Say what becomes of a replica of which a worker is not heard; NOTHING when all are."""
    shard = silent_shard(shards)
    if shard is None:
        return NOTHING
    who = f"worker {shard.worker_id}"
    if shard.worker_state is WorkerState.SUSPECT:
        return NextAction(f"{who} is late: it is UNREACHABLE unless it is heard", Timer.SILENCE)
    if shard.worker_state is WorkerState.UNREACHABLE:
        return NextAction(
            f"{who} is silent, and its shards stay in routes: it is given up on (LOST) unless it "
            "is heard",
            Timer.SILENCE,
        )
    return NextAction(
        f"{who} was given up on, and clients try its shards last: start its agent again, or delete "
        "the deployment and deploy it elsewhere"
    )


def of_leaving(shards: Iterable[RoutedShard], *, is_recovering: bool) -> NextAction:
    """Say how a replica goes that was deleted."""
    if is_recovering:
        return STOPS_LATER
    shard = silent_shard(shards)
    if shard is None or shard.worker_state is WorkerState.SUSPECT:
        return STOPS
    return NextAction(
        f"worker {shard.worker_id} is silent: its shards are stopped when it is heard, and waited "
        "for no longer once it is given up on (LOST)",
        Timer.SILENCE,
    )


def of_unready(unready: Iterable[ShardState], shards: Iterable[RoutedShard]) -> NextAction:
    """Say what becomes of a replica all of which is reported, and not all is READY."""
    silence = of_silence(shards)
    if silence.text:
        return silence
    for state in unready:
        if state in _OF_UNREADY:
            return NextAction(_OF_UNREADY[state])
    return NextAction(_ALL_READY)
