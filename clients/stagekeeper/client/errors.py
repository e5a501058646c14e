"""What a client can be told instead of an answer, cut by what its caller should do next.

One tree: catch `StagekeeperError` for everything, a subclass for what you would do about it. Each
carries `reason` (from the protocol's table, or one of the client's own, below), the gRPC `code`,
the facts the other end gave, and `next_move`, a sentence. Not decided here: what is retried.
Invariant: `never_ran` is True only when it is certain that nothing was executed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Final

import grpc

from stagekeeper.wire.error_details import WireError, describe

if TYPE_CHECKING:
    from stagekeeper.v1.deployment_service_pb2 import Deployment, ReplicaFailure

UNREACHABLE: Final = "UNREACHABLE"
"""The client's own reason: no connection to an address could be made, so nothing was sent."""

CONNECTION_LOST: Final = "CONNECTION_LOST"
"""The client's own reason: the connection broke after the request was sent; it may have run."""


class StagekeeperError(Exception):
    """The base of all that the client raises.

    Attributes:
        message: one sentence for a person: what went wrong, and where.
        reason: why, one word of the protocol's table; empty when the other end gave none.
        code: the gRPC status code; None when no call was made.
        metadata: facts a program can act on, text to text.
        next_move: what the caller can do, one sentence.
        never_ran: nothing was executed, for certain; a repeat does no harm.
        retry_after_s: seconds after which a retry makes sense; None says nothing.
    """

    def __init__(
        self,
        message: str,
        *,
        reason: str = "",
        code: grpc.StatusCode | None = None,
        metadata: Mapping[str, str] | None = None,
        next_move: str = "",
        never_ran: bool = False,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.reason = reason
        self.code = code
        self.metadata = dict(metadata or {})
        self.next_move = next_move or _NEXT_MOVES.get(reason, "")
        self.never_ran = never_ran
        self.retry_after_s = retry_after_s


class BadRequest(StagekeeperError):
    """The request is wrong in itself: mend it.

    Attributes:
        violations: (field path, what is wrong with it), every wrong field at once.
    """

    def __init__(
        self,
        message: str,
        *,
        reason: str = "BAD_FIELD",
        code: grpc.StatusCode | None = grpc.StatusCode.INVALID_ARGUMENT,
        metadata: Mapping[str, str] | None = None,
        next_move: str = "",
        violations: Sequence[tuple[str, str]] = (),
    ) -> None:
        super().__init__(
            message,
            reason=reason,
            code=code,
            metadata=metadata,
            next_move=next_move,
            never_ran=True,
        )
        self.violations = tuple(violations)


class BadEndpoint(BadRequest, ValueError):
    """The endpoint that a client was given cannot be dialled: write it as `host:port`."""


class NotFound(StagekeeperError):
    """There is no such deployment, stage, endpoint or worker: look at the message for what is."""


class NameTaken(StagekeeperError):
    """The name belongs to something else: choose another, or delete that first."""


class OutOfDate(StagekeeperError):
    """Meant for something that has since been replaced: take a fresh view and ask anew."""


class WrongState(StagekeeperError):
    """Not in the present state: wait for it to change, then repeat."""


class PlanStale(WrongState):
    """The plan was for another spec, or the cluster has changed since: plan again, and look."""


class NotAllowed(StagekeeperError):
    """Whoever runs the other end does not let this be done: ask them, or do without."""


class NoRoom(StagekeeperError):
    """Too little of something: free some, or come later."""


class Unavailable(StagekeeperError):
    """Nobody can answer now: retry with backoff."""


class SupervisorUnreachable(Unavailable):
    """The endpoint does not answer. Calls go on with the routes that are known.

    A call raises it only when nobody has ever answered its client.
    """


class NoReplica(Unavailable):
    """No replica of the deployment can take the call; the message says why."""


class CallLost(Unavailable):
    """The call was sent and its answer was lost: it may have run, so it was not repeated."""


class EndpointRaised(StagekeeperError):
    """The endpoint ran and raised: look at its code.

    Attributes:
        remote_type: the exception's type, as its module and name.
        remote_traceback: its traceback; a very long one lost its beginning.
        rank: the rank that raised; None for a stage that is not a mesh.
    """

    @property
    def remote_type(self) -> str:
        return self.metadata.get("type", "")

    @property
    def remote_traceback(self) -> str:
        return self.metadata.get("traceback", "")

    @property
    def rank(self) -> int | None:
        rank = self.metadata.get("rank", "")
        return int(rank) if rank.isdigit() else None


class UnreadableAnswer(StagekeeperError):
    """The call ran, and its answer cannot be decoded here; the message says why."""


class DeadlineExceeded(StagekeeperError, TimeoutError):
    """The time given was over. The endpoint was told, and may have run unless `never_ran`."""


class NotYet(StagekeeperError):
    """A later release can do this; the message says what to do instead."""


class Bug(StagekeeperError):
    """Something went wrong that should not be possible: please report it."""


class DeployFailed(StagekeeperError):
    """The creation ended and not every replica came up.

    Attributes:
        deployment: as it is now.
        failures: one per replica that did not come up, with the stage's failure and its rollback.
    """

    def __init__(
        self, message: str, *, deployment: Deployment, failures: Sequence[ReplicaFailure] = ()
    ) -> None:
        super().__init__(
            message,
            reason="DEPLOY_FAILED",
            next_move="read the cause, mend it, and deploy again: replicas that run are left alone",
        )
        self.deployment = deployment
        self.failures = tuple(failures)


_NEXT_MOVES: Final[Mapping[str, str]] = {
    "BAD_FIELD": "mend the fields named and send it again",
    "SHARD_OUT_OF_RANGE": "mend the fields named and send it again",
    "UNKNOWN_DEVICE": "name a device that the worker has",
    "TOO_LARGE": "send it in smaller parts",
    "DEPLOYMENT_UNKNOWN": "list the deployments and check the name",
    "STAGE_UNKNOWN": "name one of the stages that there are",
    "ENDPOINT_UNKNOWN": "name one of the endpoints that the message lists",
    "PROCS_UNKNOWN": "start others: these have ended",
    "SESSION_UNKNOWN": "connect first, then spawn",
    "MESH_UNKNOWN": "ask its owner for another one: it was stopped",
    "ACTOR_UNKNOWN": "ask its owner where it is now",
    "ACTOR_FAILED": "wait until its owner has respawned it, or do without",
    "ACTOR_STOPPED": "spawn a new mesh; a stopped one takes no more messages",
    "BAD_TOKEN": "call it from a process of its own tree",
    "DEPLOYMENT_EXISTS": "delete the deployment, then deploy; or choose another name",
    "STALE_ROUTE": "repeat the call: the route is fetched anew",
    "REPLICA_DRAINING": "wait until it is gone, then repeat",
    "WRONG_CLUSTER": "check which cluster the endpoint belongs to",
    "PLAN_STALE": "plan again, look, and deploy with the new plan's id",
    "ADMISSION_REFUSED": "free memory on a card (delete something), or ask for less",
    "TOO_MANY_CALLS": "send fewer calls at once, or add replicas",
    "SLOW_DOWN": "send less often",
    "REVISION_GONE": "watch again from a snapshot",
    "SUPERVISOR_RECOVERING": "repeat when the workers are back",
    "DRAINING": "repeat: another replica may take it",
    "NO_REPLICA": "look at the deployment's state and reason, then repeat",
    "NOT_ALLOWED": "ask whoever runs it to allow it (--allow), or do without",
    "ENDPOINT_RAISED": "look at the endpoint's code and the remote traceback",
    "NOT_YET": "do what the message says instead",
    "INTERNAL_BUG": "report it, with the server's log",
    UNREACHABLE: "check the address and that somebody serves it",
    CONNECTION_LOST: "repeat it if a second run does no harm; idempotent endpoints are repeated",
}

_BY_CODE: Final[Mapping[grpc.StatusCode, type[StagekeeperError]]] = {
    grpc.StatusCode.NOT_FOUND: NotFound,
    grpc.StatusCode.ALREADY_EXISTS: NameTaken,
    grpc.StatusCode.ABORTED: OutOfDate,
    grpc.StatusCode.OUT_OF_RANGE: OutOfDate,
    grpc.StatusCode.FAILED_PRECONDITION: WrongState,
    grpc.StatusCode.PERMISSION_DENIED: NotAllowed,
    grpc.StatusCode.UNAUTHENTICATED: NotAllowed,
    grpc.StatusCode.RESOURCE_EXHAUSTED: NoRoom,
    grpc.StatusCode.UNAVAILABLE: Unavailable,
    grpc.StatusCode.DEADLINE_EXCEEDED: DeadlineExceeded,
    grpc.StatusCode.UNIMPLEMENTED: NotYet,
}

_BY_REASON: Final[Mapping[str, type[StagekeeperError]]] = {
    "ENDPOINT_RAISED": EndpointRaised,
    "NO_REPLICA": NoReplica,
    "PLAN_STALE": PlanStale,
}

_REFUSED_BEFORE_RUNNING: Final = frozenset(
    ("STALE_ROUTE", "TOO_MANY_CALLS", "DRAINING", "ENDPOINT_UNKNOWN", "BAD_FIELD", "TOO_LARGE")
)

# gRPC fails a call with these words when its balancer has no connection to give it, so that it
# never left this process. A call that left and was cut off says "Stream removed (…)". There is no
# structured way to tell; a test kills servers in both ways and holds the words to it.
_NEVER_SENT: Final = (
    "failed to connect to all addresses",
    "connections to all backends failing",
    "DNS resolution failed",
    "errors resolving",
)


def from_rpc(error: grpc.RpcError, where: str) -> StagekeeperError:
    """Turn a failed call into the error that its caller is given.

    Args:
        error: as gRPC raised it.
        where: whom the call went to, for the message when the other end gave none.
    """
    found = describe(error)
    code = _CODES.get(found.code, grpc.StatusCode.UNKNOWN)
    if not found.reason and code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED):
        return _broken(found, code, where)
    message = found.message or f"{where} answered {code.name} without a message"
    if code is grpc.StatusCode.INVALID_ARGUMENT:
        return BadRequest(
            message,
            reason=found.reason or "BAD_FIELD",
            metadata=found.metadata,
            violations=found.violations,
        )
    return _class_of(found, code)(
        message,
        reason=found.reason,
        code=code,
        metadata=found.metadata,
        never_ran=found.reason in _REFUSED_BEFORE_RUNNING,
        retry_after_s=found.retry_after_s,
    )


def _broken(found: WireError, code: grpc.StatusCode, where: str) -> StagekeeperError:
    if found.message.startswith(_NEVER_SENT):
        return Unavailable(
            f"{where} cannot be reached: {found.message}",
            reason=UNREACHABLE,
            code=code,
            never_ran=True,
        )
    return CallLost(
        f"the connection to {where} was lost: {found.message}", reason=CONNECTION_LOST, code=code
    )


def _class_of(found: WireError, code: grpc.StatusCode) -> type[StagekeeperError]:
    return _BY_REASON.get(found.reason) or _BY_CODE.get(code, Bug)


_CODES: Final = {code.value[0]: code for code in grpc.StatusCode}
