"""Calls to a deployment: a route, an attempt, and another one where that is safe.

Decided here: what is repeated. Safe is what was refused before it ran (STALE_ROUTE, TOO_MANY_CALLS,
DRAINING), what never left this process, and, of endpoints declared idempotent, what was cut off.
Everything ends with the call's deadline. Invariant: a call that may have run is repeated only when
its endpoint is idempotent.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import TypeVar

import grpc

from stagekeeper.client.channels import StageCaller, deadline_over
from stagekeeper.client.errors import (
    UNREACHABLE,
    CallLost,
    NoReplica,
    NotFound,
    StagekeeperError,
)
from stagekeeper.client.retry import on_another_replica
from stagekeeper.client.routing import Route, RoutingTable
from stagekeeper.client.supervisor_link import SupervisorLink
from stagekeeper.client.view import Missing, NoRoute
from stagekeeper.client.watching import RouteWatch
from stagekeeper.v1.deployment_service_pb2 import GetDeploymentRequest, GetDeploymentResponse
from stagekeeper.v1.types_pb2 import Payload

Answer = TypeVar("Answer")

PATIENCE_S = 15.0
"""How long a call looks for a replica that takes it, within its deadline: longer than a supervisor
that has just started waits for its workers (10 s)."""

NOBODY_S = 5.0
"""How long a call waits at an endpoint that refuses and where nobody has ever answered: longer than
a supervisor takes to start, and short for an address that is wrong."""

AVOID_S = 1.0
"""How long an instance that could not be reached is the last to be tried."""

_REFRESH_TIMEOUT_S = 2.0
_REPEATED = frozenset(("STALE_ROUTE", "TOO_MANY_CALLS", "DRAINING", UNREACHABLE))


@dataclass(slots=True)
class _Search:
    """One call's way from replica to replica.

    `stale` instances answer to another id now and are never right again; `tried` ones may be, once
    there is nobody else. A route is in doubt when its instance was gone, not when it was busy: the
    supervisor is asked for the first only.
    """

    deployment: str
    stage: str | int | None
    endpoint: str
    deadline: float
    stale: set[str] = field(default_factory=set)
    tried: set[str] = field(default_factory=set)
    may_repeat: bool = False
    is_route_in_doubt: bool = False
    last_error: StagekeeperError | None = None


class RoutedCaller:
    """Calls deployments by name. The parts belong to the client that made them.

    Args:
        table: the routes.
        watch: keeps them up to date.
        link: asked for one deployment when the routes have nothing left.
        stages: makes the single attempts.
    """

    def __init__(
        self, table: RoutingTable, watch: RouteWatch, link: SupervisorLink, stages: StageCaller
    ) -> None:
        self._table = table
        self._watch = watch
        self._link = link
        self._stages = stages
        self._refreshing: dict[str, asyncio.Task[bool]] = {}

    async def send(
        self,
        deployment: str,
        stage: str | int | None,
        endpoint: str,
        payload: Payload,
        timeout: float | None,
    ) -> Payload:
        """Call once and return the encoded answer.

        Raises:
            NotFound: no such deployment, stage or endpoint.
            NoReplica: none can take it; the message says why.
            CallLost: it may have run and is not idempotent.
            DeadlineExceeded: the time was over.
            StagekeeperError: what the stage said instead of an answer.
        """
        search = self._search(deployment, stage, endpoint, timeout)

        async def attempt() -> Payload:
            route = await self._route(search)
            self._table.acquire(route)
            try:
                return await self._stages.send(
                    route.url, route.instance_id, endpoint, payload, self._left(search)
                )
            except StagekeeperError as error:
                self._judge(search, route, error)
                raise
            finally:
                self._table.release(route)

        try:
            return await attempt()
        except StagekeeperError as error:
            if not search.may_repeat:
                raise
            return await self._again(search, error, attempt)

    async def send_stream(
        self,
        deployment: str,
        stage: str | int | None,
        endpoint: str,
        payload: Payload,
        timeout: float | None,
    ) -> AsyncGenerator[Payload, None]:
        """Call and yield the encoded values. Once the first has come, nothing is repeated."""
        search = self._search(deployment, stage, endpoint, timeout)

        async def attempt() -> tuple[Route, AsyncGenerator[Payload, None], Payload | None]:
            route = await self._route(search)
            self._table.acquire(route)
            values = self._stages.send_stream(
                route.url, route.instance_id, endpoint, payload, self._left(search)
            )
            try:
                return route, values, await anext(values, None)
            except BaseException as error:
                self._table.release(route)
                if isinstance(error, StagekeeperError):
                    self._judge(search, route, error)
                raise

        try:
            route, values, value = await attempt()
        except StagekeeperError as error:
            if not search.may_repeat:
                raise
            route, values, value = await self._again(search, error, attempt)
        try:
            async with contextlib.aclosing(values):
                while value is not None:
                    yield value
                    value = await anext(values, None)
        finally:
            self._table.release(route)

    async def close(self) -> None:
        """End what is being asked on behalf of calls."""
        tasks = list(self._refreshing.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # --- one attempt

    def _search(
        self, deployment: str, stage: str | int | None, endpoint: str, timeout: float | None
    ) -> _Search:
        now = asyncio.get_running_loop().time()
        deadline = math.inf if timeout is None else now + timeout
        return _Search(deployment, stage, endpoint, deadline)

    def _left(self, search: _Search) -> float | None:
        if search.deadline == math.inf:
            return None
        left_s = search.deadline - asyncio.get_running_loop().time()
        if left_s <= 0:
            raise deadline_over(
                f"a replica of {search.deployment!r} took the call", search.last_error
            )
        return left_s

    async def _route(self, search: _Search) -> Route:
        search.may_repeat = False
        is_unknown = False
        if not self._table.is_synced:
            await self._first_routes(search)
        found = self._pick(search, search.stale | search.tried)
        if isinstance(found, NoRoute) and (
            search.is_route_in_doubt or found.what is not Missing.OTHER_REPLICA
        ):
            is_unknown = await self._refresh(search.deployment, self._left(search))
            search.is_route_in_doubt = False
            found = self._pick(search, search.stale | search.tried)
        if isinstance(found, NoRoute) and search.tried:
            search.tried.clear()
            found = self._pick(search, search.stale)
        if isinstance(found, NoRoute):
            if is_unknown:  # the watch has yet to tell that it is gone
                found = NoRoute(
                    Missing.DEPLOYMENT, f"there is no deployment {search.deployment!r} any more"
                )
            raise self._no_route(search, found)
        return found

    async def _first_routes(self, search: _Search) -> None:
        """Wait until the routes are known: to the deadline, unless nobody has ever been there."""
        link, table = self._link, self._table
        patience_s = max(NOBODY_S, link.patience_s)
        left_s = self._left(search)
        if left_s is None or patience_s < left_s:
            if await self._watch.until(lambda: table.is_synced, patience_s):
                return
            left_s = self._left(search)
            is_over = await self._watch.until(
                lambda: table.is_synced or (link.is_refused and not link.has_answered), left_s
            )
            if is_over and not table.is_synced:
                raise link.unanswered()
        else:
            is_over = await self._watch.until(lambda: table.is_synced, left_s)
        if not is_over:
            raise deadline_over(
                f"the supervisor at {link.endpoint} told the routes", link.last_failure
            )

    def _pick(self, search: _Search, exclude: set[str]) -> Route | NoRoute:
        now = asyncio.get_running_loop().time()
        return self._table.pick(search.deployment, search.stage, exclude=exclude, now=now)

    def _no_route(self, search: _Search, found: NoRoute) -> StagekeeperError:
        # While workers are missing, "not there" may only mean "not there yet".
        is_early = not self._table.is_complete
        search.may_repeat = is_early or found.what is Missing.OTHER_REPLICA
        message = found.message
        if is_early:
            message += "; the supervisor is still waiting for workers"
        if found.what in (Missing.DEPLOYMENT, Missing.STAGE):
            is_stage = found.what is Missing.STAGE
            return NotFound(
                message,
                reason="STAGE_UNKNOWN" if is_stage else "DEPLOYMENT_UNKNOWN",
                code=grpc.StatusCode.NOT_FOUND,
                never_ran=True,
            )
        return NoReplica(
            message, reason="NO_REPLICA", code=grpc.StatusCode.UNAVAILABLE, never_ran=True
        )

    def _judge(self, search: _Search, route: Route, error: StagekeeperError) -> None:
        """Note what an attempt's failure says about its instance, and whether to repeat."""
        search.last_error = error
        search.may_repeat = error.reason in _REPEATED or (
            isinstance(error, CallLost)
            and error.code is grpc.StatusCode.UNAVAILABLE
            and search.endpoint in route.idempotent
        )
        if error.reason == "STALE_ROUTE":
            search.stale.add(route.instance_id)
        else:
            search.tried.add(route.instance_id)
        if error.reason in ("STALE_ROUTE", UNREACHABLE) or isinstance(error, CallLost):
            now = asyncio.get_running_loop().time()
            self._table.avoid(route.instance_id, now + AVOID_S)
            search.is_route_in_doubt = True
            _ = self._start_refresh(route.deployment)

    async def _again(
        self, search: _Search, error: StagekeeperError, attempt: Callable[[], Awaitable[Answer]]
    ) -> Answer:
        left_s = search.deadline - asyncio.get_running_loop().time()
        return await on_another_replica(
            attempt,
            error,
            patience_s=min(PATIENCE_S, left_s),
            may_repeat=lambda: search.may_repeat,
            has_another=lambda: self._table.has_route(
                search.deployment, search.stage, exclude=search.stale | search.tried
            ),
        )

    # --- a fresh word on one deployment

    async def _refresh(self, deployment: str, left_s: float | None) -> bool:
        """Ask for one deployment; return whether the supervisor said that there is none."""
        task = self._start_refresh(deployment)
        await asyncio.wait([task], timeout=left_s)
        return task.done() and not task.cancelled() and task.result()

    def _start_refresh(self, deployment: str) -> asyncio.Task[bool]:
        """Ask for one deployment, once however many calls want it."""
        task = self._refreshing.get(deployment)
        if task is None:
            task = asyncio.create_task(self._ask(deployment), name=f"refresh {deployment}")
            self._refreshing[deployment] = task
            task.add_done_callback(lambda _: self._refreshing.pop(deployment, None))
        return task

    async def _ask(self, deployment: str) -> bool:
        try:
            answer: GetDeploymentResponse = await self._link.ask(
                lambda stub: stub.GetDeployment,
                GetDeploymentRequest(name=deployment),
                _REFRESH_TIMEOUT_S,
                patience_s=0,
            )
        except StagekeeperError as error:
            # Otherwise the routes that are known are the best there is.
            return error.reason == "DEPLOYMENT_UNKNOWN"
        self._table.learn(answer.deployment, answer.revision, is_complete=answer.complete)
        self._watch.tell()
        return False
