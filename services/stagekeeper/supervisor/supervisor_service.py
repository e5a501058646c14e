"""SupervisorService: registrations, heartbeats and failures of workers.

Decided here: that a call is of this cluster. Everything else is converted, handed to the engine and
converted back. Heartbeats are the most frequent call there is: they read five fields, and their
answers are built once for each kind of answer.

Invariant: while the reign lasts a heartbeat is always answered OK, with a verdict.
"""

from __future__ import annotations

from collections.abc import Sequence

import structlog

from stagekeeper.core.commands import (
    FailureAcknowledged,
    HeartbeatAnswered,
    HeartbeatVerdict,
    RegistrationAccepted,
)
from stagekeeper.core.errors import FieldProblem, Reason, Refused, bad_fields
from stagekeeper.core.events import FailureReported, HeartbeatReceived, WorkerRegistered
from stagekeeper.core.failure_check import failure_problems
from stagekeeper.core.field_check import named
from stagekeeper.core.ids import ClusterName, WorkerId
from stagekeeper.core.limits import LARGEST_REPORT_BYTES
from stagekeeper.core.model import Failure, RefusedEntry
from stagekeeper.core.names import name_problem, shown
from stagekeeper.core.report_check import count_problems
from stagekeeper.runtime.convert import (
    epoch_to_proto,
    failure_from_proto,
    report_from_proto_in_turns,
)
from stagekeeper.runtime.errors import (
    Context,
    abort_refused,
    answers_refusals,
    answers_refusals_up_to,
)
from stagekeeper.supervisor.engine import Engine
from stagekeeper.v1 import supervisor_service_pb2 as supervisor_pb2
from stagekeeper.v1 import supervisor_service_pb2_grpc as supervisor_grpc

_log = structlog.get_logger(__name__)

_MOST_LOGGED = 10

_VERDICTS = {
    HeartbeatVerdict.OK: supervisor_pb2.HEARTBEAT_VERDICT_OK,
    HeartbeatVerdict.REGISTER: supervisor_pb2.HEARTBEAT_VERDICT_REGISTER,
    HeartbeatVerdict.SUPERSEDED: supervisor_pb2.HEARTBEAT_VERDICT_SUPERSEDED,
}


class SupervisorServicer(supervisor_grpc.SupervisorServiceServicer):
    """The worker-facing half of the supervisor.

    Args:
        cluster: every message must name it.
        engine: decides.
    """

    def __init__(self, cluster: ClusterName, engine: Engine) -> None:
        self._cluster = cluster
        self._engine = engine
        self._last_answer: HeartbeatAnswered | None = None
        self._last_message = supervisor_pb2.HeartbeatResponse()

    @answers_refusals_up_to(LARGEST_REPORT_BYTES)
    async def RegisterWorker(
        self, request: supervisor_pb2.RegisterWorkerRequest, context: Context
    ) -> supervisor_pb2.RegisterWorkerResponse:
        self._check_cluster(request.cluster)
        if problems := _count_problems(request):
            raise bad_fields(problems, "the registration")
        report, unreadable, places = await report_from_proto_in_turns(request)
        accepted = self._engine.ask(WorkerRegistered(report, request.digest), RegistrationAccepted)
        refused = [*unreadable, *_at_their_places(accepted.refused, places)]
        if refused:
            _log.warning(
                "entries of a registration were refused",
                worker_id=report.worker_id,
                count=len(refused),
                refused=[f"{entry.index}: {entry.message}" for entry in refused[:_MOST_LOGGED]],
            )
        return supervisor_pb2.RegisterWorkerResponse(
            epoch=epoch_to_proto(accepted.epoch),
            next_heartbeat_s=accepted.next_heartbeat_s,
            refused=[
                supervisor_pb2.RefusedEntry(
                    index=entry.index, reason=entry.reason, message=entry.message
                )
                for entry in sorted(refused, key=lambda entry: entry.index)
            ],
            settled_failure_ids=accepted.settled_failures,
            settled_operation_ids=accepted.settled_operations,
        )

    # Not wrapped in `answers_refusals`: each layer costs, and only a failing store refuses here.
    async def Heartbeat(
        self, request: supervisor_pb2.HeartbeatRequest, context: Context
    ) -> supervisor_pb2.HeartbeatResponse:
        if request.cluster != self._cluster:
            return supervisor_pb2.HeartbeatResponse(
                verdict=supervisor_pb2.HEARTBEAT_VERDICT_WRONG_CLUSTER,
                epoch=epoch_to_proto(self._engine.registry.epoch),
            )
        try:
            answer = self._engine.ask(
                HeartbeatReceived(
                    WorkerId(request.worker_id),
                    request.incarnation,
                    request.revision,
                    request.digest,
                ),
                HeartbeatAnswered,
            )
        except Refused as refused:
            await abort_refused(context, refused)
        if answer is not self._last_answer:  # the registry makes an answer once for all workers
            self._last_answer, self._last_message = answer, _answer_message(answer)
        return self._last_message

    @answers_refusals
    async def ReportFailure(
        self, request: supervisor_pb2.ReportFailureRequest, context: Context
    ) -> supervisor_pb2.ReportFailureResponse:
        self._check_cluster(request.cluster)
        failure = failure_from_proto(request.failure)
        if problems := _failure_problems(request, failure):
            raise bad_fields(problems, "the report")
        acknowledged = self._engine.ask(
            FailureReported(WorkerId(request.worker_id), request.incarnation, failure),
            FailureAcknowledged,
        )
        return supervisor_pb2.ReportFailureResponse(
            directive=supervisor_pb2.FAILURE_DIRECTIVE_NONE, settled=acknowledged.is_settled
        )

    def _check_cluster(self, cluster: str) -> None:
        if cluster != self._cluster:
            raise Refused(
                Reason.WRONG_CLUSTER,
                f"this is the supervisor of cluster {self._cluster!r}, not of {cluster!r}: look at "
                "--cluster and --endpoint",
                metadata={"cluster": self._cluster},
            )


def _count_problems(request: supervisor_pb2.RegisterWorkerRequest) -> list[FieldProblem]:
    return count_problems(
        shards=len(request.replica_states),
        operations=len(request.operations),
        failures=len(request.failures),
        devices=len(request.devices),
    )


def _failure_problems(
    request: supervisor_pb2.ReportFailureRequest, failure: Failure
) -> list[FieldProblem]:
    worker_id, origin = request.worker_id, failure.origin.worker_id
    problems = list(named([("worker_id", name_problem(worker_id))]))
    if not request.HasField("failure"):
        return [*problems, FieldProblem("failure", "is missing")]
    if origin not in ("", worker_id):
        problem = f"is {shown(origin)}, and {shown(worker_id)} reports"
        problems.append(FieldProblem("failure.origin.worker_id", problem))
    return problems + failure_problems(failure, "failure")


def _answer_message(answer: HeartbeatAnswered) -> supervisor_pb2.HeartbeatResponse:
    return supervisor_pb2.HeartbeatResponse(
        verdict=_VERDICTS[answer.verdict],
        epoch=epoch_to_proto(answer.epoch),
        next_heartbeat_s=answer.next_heartbeat_s,
    )


def _at_their_places(refused: Sequence[RefusedEntry], places: Sequence[int]) -> list[RefusedEntry]:
    """Name entries by their places in the message; some before them may have been unreadable.

    A late message is answered like the newest, whose entries may be more than its own.
    """
    named = []
    for entry in refused:
        place = places[entry.index] if entry.index < len(places) else entry.index
        if place != entry.index:
            entry = RefusedEntry(place, entry.reason, f"replica_states[{place}]: {entry.message}")
        named.append(entry)
    return named
