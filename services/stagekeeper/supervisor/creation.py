"""A creation as its caller sees it: accepted, progress, outcome.

Decided here: how long a caller waits for a supervisor that recovers, and when the stream is over:
when the registry derives that nothing of the deployment is starting any more. The caller only
watches; a stream that ends early, whoever ends it, changes nothing.

Invariant: an outcome that says READY is sent after every list says so.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

from stagekeeper.core.commands import CreationAccepted
from stagekeeper.core.errors import Reason, Refused
from stagekeeper.core.events import DeploymentRequested
from stagekeeper.core.ids import DeploymentName
from stagekeeper.core.model import DeploymentSpec
from stagekeeper.core.operations import CreationView
from stagekeeper.core.states import DeploymentState
from stagekeeper.runtime.clock import Clock
from stagekeeper.runtime.convert import deployment_state_to_proto
from stagekeeper.supervisor.convert import replica_failure_to_proto
from stagekeeper.supervisor.deployment_messages import DeploymentMessages
from stagekeeper.supervisor.engine import Engine
from stagekeeper.supervisor.progress_hub import ProgressHub
from stagekeeper.supervisor.pulse import wait_until_set
from stagekeeper.v1 import deployment_service_pb2 as deployment_pb2

ANSWER_BEFORE_DEADLINE_S = 0.2
"""How long before the caller's deadline a wait is given up, so that the answer still arrives."""


class Creations:
    """Lets callers follow creations.

    Args:
        engine: takes the wish, and says how far it is.
        progress: hears of the starts.
        messages: deployments as messages.
        clock: wall time for display.
        is_durable: whether a wish survives this process.
    """

    def __init__(
        self,
        engine: Engine,
        progress: ProgressHub,
        messages: DeploymentMessages,
        clock: Clock,
        *,
        is_durable: bool,
    ) -> None:
        self._engine = engine
        self._progress = progress
        self._messages = messages
        self._clock = clock
        self._is_durable = is_durable
        self._is_ending = False

    def end(self) -> None:
        """End every stream: the supervisor ends."""
        self._is_ending = True
        self._engine.events.beat()

    async def follow(
        self, spec: DeploymentSpec, plan_id: str, time_remaining: Callable[[], float | None]
    ) -> AsyncIterator[deployment_pb2.CreateDeploymentResponse]:
        """Want `spec`, and yield what happens until nothing of it is starting.

        Args:
            spec: a checked one.
            plan_id: the plan that the caller looked at; empty for none.
            time_remaining: of the caller's patience, in seconds; None is without end.

        Raises:
            Refused: as the registry refuses it; SUPERVISOR_RECOVERING shortly before the deadline;
                DRAINING, when the supervisor ends first.
        """
        registry = self._engine.registry
        with (
            self._engine.events.subscribe() as news,
            self._progress.subscribe(spec.name, news) as progress,
        ):
            accepted = await self._accept(spec, plan_id, time_remaining, news)
            yield deployment_pb2.CreateDeploymentResponse(
                accepted=deployment_pb2.CreationAccepted(
                    deployment=spec.name,
                    durable=self._is_durable,
                    starting_replicas=accepted.starting,
                )
            )
            while True:
                news.clear()
                creation, view = registry.creation_of(spec.name), registry.deployment(spec.name)
                for message in progress.take():
                    yield deployment_pb2.CreateDeploymentResponse(progress=message)
                if view is None or view.state is DeploymentState.DELETING or creation.is_settled:
                    break
                if self._is_ending:
                    raise Refused(
                        Reason.DRAINING,
                        f"the supervisor ends while {spec.name} is starting: repeat to see what "
                        "became of it",
                        retry_after_s=1.0,
                    )
                await news.wait()
            yield self._outcome(spec.name, creation)

    async def _accept(
        self,
        spec: DeploymentSpec,
        plan_id: str,
        time_remaining: Callable[[], float | None],
        news: asyncio.Event,
    ) -> CreationAccepted:
        while True:
            news.clear()
            try:
                wish = DeploymentRequested(spec, self._clock.wall(), plan_id)
                return self._engine.ask(wish, CreationAccepted)
            except Refused as refused:
                if refused.reason is not Reason.SUPERVISOR_RECOVERING or self._is_ending:
                    raise
                while not (self._engine.registry.is_complete or self._is_ending):
                    left_s = time_remaining()
                    wait_s = None if left_s is None else left_s - ANSWER_BEFORE_DEADLINE_S
                    if wait_s is not None and wait_s <= 0:
                        raise
                    await wait_until_set(news, wait_s)
                    news.clear()

    def _outcome(
        self, name: DeploymentName, creation: CreationView
    ) -> deployment_pb2.CreateDeploymentResponse:
        view = self._engine.registry.deployment(name)
        if view is None:
            deployment = deployment_pb2.Deployment(
                name=name,
                state=deployment_state_to_proto(DeploymentState.DELETING),
                reason="it was deleted, and nothing of it is left",
                durable=self._is_durable,
            )
        else:
            deployment = self._messages.of(view)
        return deployment_pb2.CreateDeploymentResponse(
            outcome=deployment_pb2.CreationOutcome(
                deployment=deployment,
                failures=[replica_failure_to_proto(failed) for failed in creation.failures],
            )
        )
