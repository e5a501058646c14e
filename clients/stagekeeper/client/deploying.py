"""Creating and deleting deployments, followed to their end even when the supervisor dies meanwhile.

Decided here: when a creation or a deletion counts as ended for the one who asked. Both go on by
themselves; here they are only watched. Invariant: a creation that was accepted is never asked for
again, since asking again would start what has just failed.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence

import grpc

from stagekeeper.client.channels import deadline_over
from stagekeeper.client.errors import (
    CONNECTION_LOST,
    BadRequest,
    DeadlineExceeded,
    DeployFailed,
    NotFound,
    SupervisorUnreachable,
)
from stagekeeper.client.spec_file import LoadedSpec
from stagekeeper.client.supervisor_link import SupervisorLink
from stagekeeper.client.watching import deployment_changes
from stagekeeper.v1 import types_pb2 as types
from stagekeeper.v1.deployment_service_pb2 import (
    CHANGE_KIND_BOOKMARK,
    CHANGE_KIND_REMOVED,
    CHANGE_KIND_SYNCED,
    CreateDeploymentRequest,
    CreationAccepted,
    CreationOutcome,
    DeleteDeploymentRequest,
    DeleteDeploymentResponse,
    Deployment,
    PlanDeploymentRequest,
    PlanDeploymentResponse,
    ReplicaFailure,
)
from stagekeeper.v1.types_pb2 import StageProgress

OnProgress = Callable[[CreationAccepted | StageProgress], None]
"""Told what happens to a creation: first that it was accepted, then each stage's progress."""


class _Creation:
    """One creation, from the question to its outcome."""

    def __init__(
        self, link: SupervisorLink, loaded: LoadedSpec, plan_id: str, on_progress: OnProgress
    ) -> None:
        self._link = link
        self._request = CreateDeploymentRequest(spec=loaded.spec, plan_id=plan_id)
        self._on_progress = on_progress
        self.accepted: CreationAccepted | None = None

    async def attempt(self, left_s: float | None) -> CreationOutcome | None:
        """Ask for it and follow the stream; None when that broke after the acceptance."""
        events = self._link.stream(lambda stub: stub.CreateDeployment, self._request, left_s)
        try:
            async with contextlib.aclosing(events):
                async for event in events:
                    if event.HasField("outcome"):
                        return event.outcome
                    if event.HasField("accepted"):
                        self.accepted = event.accepted
                        self._on_progress(event.accepted)
                    elif event.HasField("progress"):
                        self._on_progress(event.progress)
        except SupervisorUnreachable:
            if self.accepted is None:
                raise
            return None
        if self.accepted is None:
            raise SupervisorUnreachable(
                f"the supervisor at {self._link.endpoint} ended the call without an answer",
                reason=CONNECTION_LOST,
                code=grpc.StatusCode.UNAVAILABLE,
            )
        return None


async def plan(link: SupervisorLink, loaded: LoadedSpec, timeout: float) -> PlanDeploymentResponse:
    """Ask what a creation would do; `Client.plan` says the rest."""
    request = PlanDeploymentRequest(spec=loaded.spec)
    with _problems_found_in(loaded):
        return await link.ask(lambda stub: stub.PlanDeployment, request, timeout)


@contextlib.contextmanager
def _problems_found_in(loaded: LoadedSpec) -> Iterator[None]:
    """Say what is wrong with a spec where its file says it, if it came from one."""
    try:
        yield
    except BadRequest as error:
        if error.violations and loaded.source:
            raise loaded.error(error.violations) from error
        raise


async def create(
    link: SupervisorLink,
    loaded: LoadedSpec,
    plan_id: str,
    on_progress: OnProgress,
    timeout: float | None,
) -> Deployment:
    """Create a deployment and return it when it is READY; `Client.deploy` says the rest."""
    clock = asyncio.get_running_loop().time
    deadline = math.inf if timeout is None else clock() + timeout
    creation = _Creation(link, loaded, plan_id, on_progress)

    async def attempt() -> CreationOutcome | None:
        left_s = None if deadline == math.inf else max(0.0, deadline - clock())
        return await creation.attempt(left_s)

    with _problems_found_in(loaded):
        outcome = await link.while_unreachable(attempt)
    name = loaded.spec.name
    if outcome is None:
        starting = set(creation.accepted.starting_replicas) if creation.accepted else set()
        try:
            async with asyncio.timeout(None if deadline == math.inf else deadline - clock()):
                outcome = await _until_settled(link, name, starting)
        except TimeoutError as error:
            raise deadline_over(f"{name!r} was READY; its creation goes on by itself") from error
    if outcome.deployment.state == types.DEPLOYMENT_STATE_DELETING:
        raise _deleted_meanwhile(name)  # its failures are those of starts that were cut off
    if outcome.failures or outcome.deployment.state != types.DEPLOYMENT_STATE_READY:
        raise DeployFailed(
            _what_failed(name, outcome.deployment, outcome.failures),
            deployment=outcome.deployment,
            failures=outcome.failures,
        )
    return outcome.deployment


async def _until_settled(link: SupervisorLink, name: str, starting: set[int]) -> CreationOutcome:
    """Watch until nothing of the creation is under way any more, whoever reigns by then."""
    async with contextlib.aclosing(_seen(link, name)) as seen:
        async for view, is_complete in seen:
            if view is None and is_complete:
                raise _deleted_meanwhile(name)
            if view is not None and view.state == types.DEPLOYMENT_STATE_DELETING:
                raise _deleted_meanwhile(name)
            if view is not None and is_complete and _is_settled(view, starting):
                return CreationOutcome(deployment=view)
    raise AssertionError("the watch ended")


def _deleted_meanwhile(name: str) -> NotFound:
    return NotFound(
        f"{name!r} was deleted meanwhile, which cancelled its creation",
        reason="DEPLOYMENT_UNKNOWN",
        next_move="deploy it again if it is still wanted",
    )


async def _seen(
    link: SupervisorLink, name: str
) -> AsyncGenerator[tuple[Deployment | None, bool], None]:
    """Yield, at each change, what is seen of one deployment, and whether no worker is missing."""
    view: Deployment | None = None
    is_synced = is_complete = False
    async with contextlib.aclosing(deployment_changes(link)) as changes:
        async for message in changes:
            if message is None:
                view, is_synced, is_complete = None, False, False
                continue
            if message.kind in (CHANGE_KIND_SYNCED, CHANGE_KIND_BOOKMARK):
                is_synced = is_synced or message.kind == CHANGE_KIND_SYNCED
                is_complete = message.complete
            elif message.deployment.name != name:
                continue
            elif message.kind == CHANGE_KIND_REMOVED:
                view = None
            else:
                view = message.deployment
            if is_synced:
                yield view, is_complete


def _is_settled(view: Deployment, starting: set[int]) -> bool:
    if view.state in (types.DEPLOYMENT_STATE_READY, types.DEPLOYMENT_STATE_FAILED):
        return True
    under_way = (types.REPLICA_STATE_STARTING, types.REPLICA_STATE_PENDING)
    return view.state == types.DEPLOYMENT_STATE_DEGRADED and not any(
        replica.state in under_way for replica in view.replicas if replica.replica_index in starting
    )


async def delete(link: SupervisorLink, name: str, *, wait: bool, timeout: float) -> bool:
    """Delete a deployment, and return when it is gone; `Client.delete` says the rest."""
    may_have_been_taken = False

    async def attempt() -> DeleteDeploymentResponse:
        nonlocal may_have_been_taken
        try:
            return await link.ask(
                lambda stub: stub.DeleteDeployment,
                DeleteDeploymentRequest(name=name),
                timeout,
                patience_s=0,
            )
        except SupervisorUnreachable as error:
            may_have_been_taken = may_have_been_taken or not error.never_ran
            raise
        except NotFound:
            if not may_have_been_taken:
                raise
            # An earlier try was written down, its answer was lost, and it has been carried out.
            return DeleteDeploymentResponse(durable=True)

    try:
        async with asyncio.timeout(timeout):
            answer = await link.while_unreachable(attempt)
            if wait:
                await _until_gone(link, name)
    except TimeoutError as error:
        if isinstance(error, DeadlineExceeded):
            raise
        raise deadline_over(f"{name!r} was gone; its deletion goes on by itself") from error
    return answer.durable


async def _until_gone(link: SupervisorLink, name: str) -> None:
    # Begun after the deletion was written down: a snapshot without it means that it is gone.
    async with contextlib.aclosing(_seen(link, name)) as seen:
        async for view, is_complete in seen:
            if view is None and is_complete:
                return


def _what_failed(name: str, view: Deployment, failures: Sequence[ReplicaFailure]) -> str:
    if failures:
        told = "; ".join(
            f"replica {failure.replica_index}"
            + (f" on {failure.worker_id}" if failure.worker_id else "")
            + f": {failure.message}"
            for failure in failures
        )
        return f"deployment {name!r} did not come up: {told}"
    state = types.DeploymentState.Name(view.state).removeprefix("DEPLOYMENT_STATE_")
    reason = f": {view.reason}" if view.reason else ""
    return f"deployment {name!r} did not come up: it is {state}{reason}"
