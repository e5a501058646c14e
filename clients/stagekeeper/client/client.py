"""The client: one object for everything that a program asks of Stagekeeper.

It only composes: the way to the supervisor, the watched routes, the channels to stages, and calls
over them. Invariant: nothing here needs the supervisor for a call once the routes are known.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import AsyncGenerator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

from stagekeeper.client import deploying
from stagekeeper.client.calls import RoutedCaller
from stagekeeper.client.channels import StageCaller, decode_answer, encode_call
from stagekeeper.client.deploying import OnProgress
from stagekeeper.client.errors import BadEndpoint
from stagekeeper.client.event_reading import OnGap, read_events
from stagekeeper.client.log_reading import read_stage_log
from stagekeeper.client.pool import ChannelPool
from stagekeeper.client.routing import RoutingTable
from stagekeeper.client.spec_file import LoadedSpec, loaded_spec
from stagekeeper.client.supervisor_link import SupervisorLink
from stagekeeper.client.watching import RouteWatch, deployment_changes
from stagekeeper.v1.agent_service_pb2 import ReadStageLogRequest
from stagekeeper.v1.deployment_service_pb2 import (
    Deployment,
    Event,
    GetDeploymentRequest,
    ListDeploymentsRequest,
    ListDeploymentsResponse,
    ListFailuresRequest,
    ListWorkersRequest,
    ListWorkersResponse,
    PlanDeploymentResponse,
    WatchDeploymentsResponse,
)
from stagekeeper.v1.types_pb2 import DeploymentSpec, Failure
from stagekeeper.wire.payload import MSGPACK, Tensors
from stagekeeper.wire.stable_endpoint import DEFAULT_ENDPOINT, ENDPOINT_ENV, endpoint_problem

CALL_TIMEOUT_S: Final = 60.0
ASK_TIMEOUT_S: Final = 10.0


class Client:
    """A client of one Stagekeeper, used as `async with Client("host:7070") as client:`.

    Entering never waits for the supervisor. Every method may be called by many tasks at once, in
    the event loop that entered; calls to one stage share one connection. All errors that it raises
    are `StagekeeperError`s.

    Args:
        endpoint: the stable endpoint; by default STAGEKEEPER_ENDPOINT, then 127.0.0.1:7070.
        patience_s: how long a question to the supervisor goes on while nobody answers there. Calls
            do not depend on it, unless nobody has ever answered: then they wait so long, and 5 s at
            least.
        watch_at_once: watch the routes from the start; False begins with the first call, for
            programs that only ask.

    Raises:
        BadEndpoint: it is neither `host:port` nor a name with one of gRPC's schemes.
    """

    def __init__(
        self, endpoint: str | None = None, *, patience_s: float = 3.0, watch_at_once: bool = True
    ) -> None:
        self.endpoint = endpoint or os.environ.get(ENDPOINT_ENV) or DEFAULT_ENDPOINT
        if problem := endpoint_problem(self.endpoint):
            raise BadEndpoint(f"endpoint {problem}", violations=[("endpoint", problem)])
        self.routes = RoutingTable()
        self._link = SupervisorLink(self.endpoint, patience_s=patience_s)
        self._stages = StageCaller()
        self._agents = ChannelPool()
        self._watch = RouteWatch(
            self._link, self.routes, lambda: self._stages.keep_only(self.routes.addresses)
        )
        self._caller = RoutedCaller(self.routes, self._watch, self._link, self._stages)
        self._watch_at_once = watch_at_once

    async def __aenter__(self) -> Self:
        if self._watch_at_once:
            self._watch.start()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """End the watch and every call of this client. Deployments go on."""
        await self._watch.stop()
        await self._caller.close()
        await self._stages.close()
        await self._agents.close()
        await self._link.close()

    # --- deployments

    async def deploy(
        self,
        spec: DeploymentSpec | LoadedSpec | Mapping[str, Any] | str | Path,
        *,
        plan_id: str = "",
        on_progress: OnProgress | None = None,
        timeout: float | None = None,
    ) -> Deployment:
        """Deploy, and return the deployment when every replica of it is READY.

        Deploying the same again changes what runs in nothing and starts what does not run. When the
        supervisor dies meanwhile its successor is asked how it ended. Cancelling leaves the
        creation running; `delete` cancels it.

        Args:
            spec: a file's path, a dict with the file's keys, or the message.
            plan_id: of a plan that was looked at (`plan`): start nothing but that. A deployment of
                which nothing has to be started is left alone, whatever the plan was.
            on_progress: told that the creation was accepted, then each stage's progress.
            timeout: seconds; None waits as long as the stages take.

        Raises:
            SpecError: the file or the dict is wrong, every problem with its line.
            BadRequest: the spec is wrong; `violations` has every field.
            NameTaken: the name has another spec: delete, then deploy.
            NoRoom: no worker has the memory; the message holds the sums; nothing was started.
            WrongState: it is being deleted.
            PlanStale: `plan_id` fits no longer; the message says what is different.
            DeployFailed: a replica did not come up; it was rolled back.
            SupervisorUnreachable: nobody answers at the endpoint.
        """
        loaded = loaded_spec(spec)
        return await deploying.create(
            self._link, loaded, plan_id, on_progress or (lambda event: None), timeout
        )

    async def plan(
        self,
        spec: DeploymentSpec | LoadedSpec | Mapping[str, Any] | str | Path,
        *,
        timeout: float = ASK_TIMEOUT_S,
    ) -> PlanDeploymentResponse:
        """Say what `deploy` would do at this moment, and start nothing.

        What it would be refused for is no error here: `refusals` has every reason. `plan_id` is for
        `deploy`, which then starts this or nothing.

        Raises:
            SpecError: the file or the dict is wrong, every problem with its line.
            BadRequest: the spec is wrong; `violations` has every field.
            SupervisorUnreachable: nobody answers at the endpoint.
        """
        return await deploying.plan(self._link, loaded_spec(spec), timeout)

    async def delete(self, name: str, *, wait: bool = True, timeout: float = 60.0) -> bool:
        """Delete a deployment; with `wait`, return when every process of it is gone.

        It goes on by itself once it is written down, whatever happens to this call.

        Returns:
            Whether the wish survives a death of the supervisor.

        Raises:
            NotFound: nothing of that name is wanted or reported.
            DeadlineExceeded: it is not gone yet, and goes on.
            SupervisorUnreachable: nobody answers at the endpoint.
        """
        return await deploying.delete(self._link, name, wait=wait, timeout=timeout)

    async def get(self, name: str, *, timeout: float = ASK_TIMEOUT_S) -> Deployment:
        """Read one deployment.

        Raises:
            NotFound: nothing of that name is wanted or reported.
            SupervisorUnreachable: nobody answers at the endpoint.
        """
        answer = await self._link.ask(
            lambda stub: stub.GetDeployment, GetDeploymentRequest(name=name), timeout
        )
        return answer.deployment

    async def list(self, *, timeout: float = ASK_TIMEOUT_S) -> ListDeploymentsResponse:
        """Read all deployments, in the order of their names.

        With `complete` false, workers are missing after a restart: what is not there may come.

        Raises:
            SupervisorUnreachable: nobody answers at the endpoint.
        """
        return await self._link.ask(
            lambda stub: stub.ListDeployments, ListDeploymentsRequest(), timeout
        )

    async def workers(self, *, timeout: float = ASK_TIMEOUT_S) -> ListWorkersResponse:
        """Read all workers, silent ones included, in the order of their ids.

        Raises:
            SupervisorUnreachable: nobody answers at the endpoint.
        """
        return await self._link.ask(lambda stub: stub.ListWorkers, ListWorkersRequest(), timeout)

    async def failures(
        self, deployment: str = "", *, limit: int = 0, timeout: float = ASK_TIMEOUT_S
    ) -> Sequence[Failure]:
        """Read recorded failures, newest first: of one deployment, or of all; at most `limit`.

        Raises:
            SupervisorUnreachable: nobody answers at the endpoint.
        """
        answer = await self._link.ask(
            lambda stub: stub.ListFailures,
            ListFailuresRequest(deployment=deployment, limit=limit),
            timeout,
        )
        return answer.failures

    async def watch(self) -> AsyncGenerator[WatchDeploymentsResponse, None]:
        """Yield every change, for ever: first a SNAPSHOT of each deployment and a SYNCED.

        When the supervisor is gone it waits, and goes on where it was, or with a new snapshot.
        Close the generator to end it (`contextlib.aclosing`).
        """
        async with contextlib.aclosing(deployment_changes(self._link)) as changes:
            async for message in changes:
                if message is not None:
                    yield message

    async def events(
        self,
        name: str = "",
        *,
        last: int = 100,
        follow: bool = False,
        on_gap: OnGap = lambda gap: None,
    ) -> AsyncGenerator[Event, None]:
        """Yield what happened, oldest first: to one deployment, or at all; each event once.

        A supervisor keeps events in memory: of another reign only its own are there.

        Args:
            name: the deployment; empty means everything, workers and the supervisor included.
            last: how many of the newest to begin with.
            follow: go on with what happens, for ever, over any number of supervisors.
            on_gap: told when the supervisor is away, and what was or may have been missed.

        Raises:
            BadRequest: `name` is no name, or `last` is too many.
            SupervisorUnreachable: nobody answers at the endpoint, before the first answer.
        """
        events = read_events(self._link, name, last=last, follow=follow, on_gap=on_gap)
        async with contextlib.aclosing(events):
            async for event in events:
                yield event

    # --- calls

    async def call(
        self,
        name: str,
        endpoint: str,
        /,
        *args: object,
        stage: str | int | None = None,
        timeout: float | None = CALL_TIMEOUT_S,
        **kwargs: object,
    ) -> Any:
        """Call an endpoint of a deployment and return its answer.

        The replica with the fewest calls under way is taken; another one when that refused before
        it ran, could not be reached, or, for endpoints declared idempotent, was cut off. Cancelling
        cancels the endpoint.

        Args:
            name: the deployment.
            endpoint: the endpoint.
            args: positional arguments; see `stagekeeper.wire.payload` for what can travel.
            stage: its name or id; None means the deployment's entry stage.
            timeout: seconds for all attempts together; None waits for ever.
            kwargs: keyword arguments. For names that `call` takes itself, use `call_with`.

        Raises:
            BadRequest: the arguments cannot travel, or do not fit the endpoint.
            NotFound: there is no such deployment, stage or endpoint.
            NoReplica: no replica can take it; the message says why.
            EndpointRaised: the endpoint ran and raised.
            CallLost: the answer was lost; it may have run.
            NoRoom: every replica has as many calls as it takes.
            SupervisorUnreachable: nobody has ever answered this client at its endpoint.
            DeadlineExceeded: the time was over.
        """
        return await self.call_with(name, endpoint, args, kwargs, stage=stage, timeout=timeout)

    async def call_with(
        self,
        name: str,
        endpoint: str,
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
        *,
        stage: str | int | None = None,
        timeout: float | None = CALL_TIMEOUT_S,
        content_type: str = MSGPACK,
        tensors: Tensors = "numpy",
    ) -> Any:
        """Like `call`, with its arguments as values.

        Args:
            name: the deployment.
            endpoint: the endpoint.
            args: positional arguments.
            kwargs: keyword arguments.
            stage: its name or id; None means the entry stage.
            timeout: seconds for all attempts together; None waits for ever.
            content_type: how arguments and answer travel; JSON turns tensors into lists.
            tensors: what tensors in the answer become: read-only numpy arrays, or torch tensors.
        """
        self._watch.start()
        payload = encode_call(args, kwargs or {}, content_type)
        answer = await self._caller.send(name, stage, endpoint, payload, timeout)
        return decode_answer(answer, tensors, f"endpoint {endpoint!r} of {name!r}")

    async def call_stream(
        self,
        name: str,
        endpoint: str,
        /,
        *args: object,
        stage: str | int | None = None,
        timeout: float | None = CALL_TIMEOUT_S,
        **kwargs: object,
    ) -> AsyncGenerator[Any, None]:
        """Call an endpoint that yields; each value comes as soon as it is there.

        Arguments and errors are those of `call`. Once the first value has come, nothing is
        repeated. Closing the generator cancels the endpoint (`contextlib.aclosing`).
        """
        values = self.call_stream_with(name, endpoint, args, kwargs, stage=stage, timeout=timeout)
        async with contextlib.aclosing(values):
            async for value in values:
                yield value

    async def call_stream_with(
        self,
        name: str,
        endpoint: str,
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
        *,
        stage: str | int | None = None,
        timeout: float | None = CALL_TIMEOUT_S,
        content_type: str = MSGPACK,
        tensors: Tensors = "numpy",
    ) -> AsyncGenerator[Any, None]:
        """Like `call_stream`, with its arguments as values, as in `call_with`."""
        self._watch.start()
        payload = encode_call(args, kwargs or {}, content_type)
        answers = self._caller.send_stream(name, stage, endpoint, payload, timeout)
        async with contextlib.aclosing(answers):
            async for answer in answers:
                yield decode_answer(answer, tensors, f"endpoint {endpoint!r} of {name!r}")

    async def synced(self, timeout: float | None = None) -> bool:
        """Wait until the routes are known; False when they are not after `timeout` seconds."""
        self._watch.start()
        return await self._watch.until(lambda: self.routes.is_synced, timeout)

    # --- logs

    async def stage_log(
        self,
        name: str,
        *,
        stage: str | int | None = None,
        replica: int = 0,
        shard: int = 0,
        previous: bool = False,
        last_lines: int = 100,
        follow: bool = False,
    ) -> AsyncGenerator[str, None]:
        """Yield lines of a stage's log, oldest first, from the agent that holds it.

        Args:
            name: the deployment.
            stage: its name or id; None means the entry stage.
            replica: which copy.
            shard: which part of a stage that has several. Of a replica that is gone, parts are
                counted in the order of the workers that still have a log of the stage.
            previous: the instance before the latest one.
            last_lines: how many to begin with.
            follow: go on with what is written from then on.

        Raises:
            NotFound: no such deployment or stage, or no agent has such a log.
            Unavailable: an agent that has it, or could have it, does not answer.
        """
        request = ReadStageLogRequest(
            deployment=name,
            replica_index=replica,
            previous=previous,
            last_lines=last_lines,
            follow=follow,
        )
        pieces = read_stage_log(self._link, self._agents, request, stage, shard)
        async with contextlib.aclosing(pieces):
            async for piece in pieces:
                for line in piece.lines:
                    yield line
