"""What a message is answered with when it does not run, or does not fit.

Invariant: each of these says whether something ran, by its reason; callers make errors of them
(`owning.answer_errors` has the other half).
"""

from __future__ import annotations

from stagekeeper.actor.failure import MeshFailure
from stagekeeper.actor.failure_wire import failure_to_proto
from stagekeeper.v1 import stage_service_pb2 as pb

ACTOR_FAILED = "ACTOR_FAILED"
ACTOR_STOPPED = "ACTOR_STOPPED"


class FailureAsError(Exception):
    """What `__cleanup__` is given when not an exception of the actor's own ended it.

    Attributes:
        failure: why it ends.
    """

    def __init__(self, failure: MeshFailure) -> None:
        super().__init__(str(failure))
        self.failure = failure


def died_error(name: str, failure: MeshFailure) -> pb.CallError:
    """Answer that the actor has failed."""
    return pb.CallError(
        reason=ACTOR_FAILED,
        message=f"{name} has failed: {failure.summary}",
        failure=failure_to_proto(failure),
    )


def stopped_error(name: str, endpoint: str, *, had_begun: bool = False) -> pb.CallError:
    """Answer that the actor was stopped, as asked."""
    what = "was given up" if had_begun else "did not run"
    return pb.CallError(
        reason=ACTOR_STOPPED,
        message=f"{name} was stopped: {endpoint} {what}",
        metadata={"had_begun": "true"} if had_begun else {},
    )


def is_misfit(error: BaseException, file: str) -> bool:
    """Return whether a TypeError says that arguments do not fit: no code of the callee ran yet.

    Args:
        file: whose code calls endpoints; the error was raised in it, and no deeper.
    """
    if not isinstance(error, TypeError):
        return False
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return trace is not None and trace.tb_frame.f_code.co_filename == file
