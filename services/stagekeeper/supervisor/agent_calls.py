"""How a command is said to an agent, and what its failures mean.

Decided here: which failures say nothing about the command (the agent was not reached, or has not
heard of this reign yet) and are worth another try, always with the worker's newest address. Not
decided here: for how long. Invariant: what leaves here is an answer or an `AgentError`.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import grpc

from stagekeeper.core.commands import AgentTarget, CancelOperation, StopSlot
from stagekeeper.core.errors import Reason
from stagekeeper.core.ids import ClusterName, Epoch, WorkerId
from stagekeeper.core.model import OperationRecord
from stagekeeper.runtime.clock import Clock
from stagekeeper.runtime.convert import (
    generation_to_proto,
    header_to_proto,
    operation_from_proto,
)
from stagekeeper.runtime.retry import Backoff
from stagekeeper.supervisor.agent_channels import AgentChannels
from stagekeeper.supervisor.pulse import Pulse
from stagekeeper.v1 import agent_service_pb2 as agent_pb2
from stagekeeper.wire.error_details import describe, is_own_cancellation

T = TypeVar("T")

_BACKOFF = Backoff()


class AgentError(Exception):
    """A command that an agent did not take.

    `reason` names the agent's refusal, or is empty; `may_pass` says that the command itself was not
    judged: the agent was not reached, or has not registered with this reign yet; `is_late` that no
    answer came in time: what was asked may go on, and a repeat joins it.
    """

    def __init__(
        self, message: str, *, reason: str = "", may_pass: bool = False, is_late: bool = False
    ) -> None:
        super().__init__(message)
        self.reason = reason
        self.may_pass = may_pass
        self.is_late = is_late


def agent_error(error: grpc.RpcError, target: AgentTarget) -> AgentError:
    """Say what a failed call to an agent means."""
    found = describe(error)
    who = f"the agent of worker {target.worker_id} at {target.address}"
    if found.reason == Reason.STALE_EPOCH:
        return AgentError(f"{who}: {found.message}", reason=found.reason, may_pass=True)
    if found.code == grpc.StatusCode.UNAVAILABLE.value[0]:
        return AgentError(f"{who} does not answer: {found.message}", may_pass=True)
    if found.code == grpc.StatusCode.DEADLINE_EXCEEDED.value[0]:
        return AgentError(f"{who} did not answer in time", is_late=True)
    return AgentError(f"{who}: {found.message}", reason=found.reason)


def _cancelled_by_agent(target: AgentTarget) -> AgentError:
    return AgentError(
        f"the agent of worker {target.worker_id} at {target.address} ended the call", may_pass=True
    )


class AgentCalls:
    """Says commands to agents in the name of this reign.

    Args:
        cluster: part of every command.
        epoch_of: the reign's epoch now; it may be raised while the supervisor lives.
        target_of: which life of a worker is registered now, and where.
        channels: lends the connections.
        clock: for waits between tries.
    """

    def __init__(
        self,
        cluster: ClusterName,
        *,
        epoch_of: Callable[[], Epoch],
        target_of: Callable[[WorkerId], AgentTarget | None],
        channels: AgentChannels,
        clock: Clock,
    ) -> None:
        self._cluster = cluster
        self._epoch_of = epoch_of
        self._target_of = target_of
        self.channels = channels
        self.clock = clock
        self._lives = Pulse()

    def life_began(self) -> None:
        """Some worker is in another life now: what is being said to its earlier one ends."""
        self._lives.beat()

    def header(self, target: AgentTarget) -> agent_pb2.CommandHeader:
        return header_to_proto(self._cluster, self._epoch_of(), target.incarnation)

    async def probe(self, target: AgentTarget, timeout_s: float) -> str:
        """Dial an agent back; return what was met when it did not answer, else nothing."""
        try:
            async with self.channels.agent(target.address) as agent:
                await agent.GetInventory(agent_pb2.GetInventoryRequest(), timeout=timeout_s)
        except grpc.RpcError as error:
            return str(agent_error(error, target))
        except asyncio.CancelledError:
            if is_own_cancellation():
                raise
            return str(_cancelled_by_agent(target))
        return ""

    async def stop_slot(self, command: StopSlot, timeout_s: float) -> None:
        """Stop a slot and wait until it is gone.

        Raises:
            AgentError: it may still be there.
        """

        async def attempt(target: AgentTarget) -> None:
            request = agent_pb2.StopStageRequest(
                header=self.header(target),
                deployment=command.slot.deployment,
                replica_index=command.slot.index,
                stage_id=command.slot.stage_id,
                up_to_generation=generation_to_proto(command.up_to),
                reason=command.reason,
            )
            async with self.channels.agent(target.address) as agent:
                await agent.StopStage(request, timeout=timeout_s)

        await self.persist(command.target, attempt, limit_s=0.0)

    async def cancel(
        self, command: CancelOperation, timeout_s: float, *, lets_finish: bool = False
    ) -> OperationRecord | None:
        """Cancel an operation; return it as it ended, None when the agent does not know it.

        `lets_finish`: what is in flight there ends by itself first.

        Raises:
            AgentError: something of it may still be there.
        """

        async def attempt(target: AgentTarget) -> agent_pb2.CancelOperationResponse:
            request = agent_pb2.CancelOperationRequest(
                header=self.header(target),
                operation_id=command.operation_id,
                reason=command.reason,
                lets_finish=lets_finish,
            )
            async with self.channels.agent(target.address) as agent:
                return await agent.CancelOperation(request, timeout=timeout_s)

        response = await self.persist(command.target, attempt, limit_s=0.0)
        if not response.HasField("operation"):
            return None
        return operation_from_proto(response.operation)

    async def persist(
        self,
        target: AgentTarget,
        attempt: Callable[[AgentTarget], Coroutine[Any, Any, T]],
        *,
        limit_s: float,
        heard_at: Callable[[], float] = lambda: float("-inf"),
    ) -> T:
        """Try until the agent has judged the command, while its worker is in the same life.

        A registration is answered after the commands that it sets off have left, so an agent may
        be behind by one message: STALE_EPOCH is tried for a few seconds whatever the limit.

        Args:
            target: the life it is meant for; the address is read anew before every try.
            attempt: says the command once; raises `grpc.RpcError` or `AgentError`.
            limit_s: seconds of silence after which an agent that is not reached is given up.
            heard_at: when `attempt` last heard of the agent.

        Raises:
            AgentError: the agent refused, was not reached, or lives another life by now.
        """
        began = self.clock.monotonic()
        failures_in_a_row, last_heard = 0, heard_at()
        while True:
            target = self._same_life(target)
            try:
                return await self._say(attempt, target)
            except grpc.RpcError as rpc_error:
                error = agent_error(rpc_error, target)
            except AgentError as own_error:
                error = own_error
            except asyncio.CancelledError:
                if is_own_cancellation():
                    raise
                error = _cancelled_by_agent(target)
            if heard_at() > last_heard:
                failures_in_a_row, last_heard = 0, heard_at()
            failures_in_a_row += 1
            is_behind = error.reason == Reason.STALE_EPOCH
            silent_s = self.clock.monotonic() - max(began, last_heard)
            if not error.may_pass or silent_s >= (max(limit_s, 3.0) if is_behind else limit_s):
                raise error
            await self.clock.sleep(random.random() * _BACKOFF.ceiling_s(failures_in_a_row))

    async def _say(
        self, attempt: Callable[[AgentTarget], Coroutine[Any, Any, T]], target: AgentTarget
    ) -> T:
        """Say a command once, and no longer than its worker is in that life.

        The agent of an earlier life may live on where nobody looks, and answer late or never.
        """
        saying = asyncio.ensure_future(attempt(target))
        try:
            with self._lives.subscribe() as began:
                while not saying.done():
                    began.clear()
                    self._same_life(target)
                    waking = asyncio.ensure_future(began.wait())
                    try:
                        await asyncio.wait({saying, waking}, return_when=asyncio.FIRST_COMPLETED)
                    finally:
                        waking.cancel()
            return saying.result()
        finally:
            if not saying.done():
                saying.cancel()
                await asyncio.wait({saying})
            if not saying.cancelled():
                saying.exception()  # it was told, or nobody waits for it any more
            del saying  # the error's traceback holds this frame, and this would hold the error

    def _same_life(self, target: AgentTarget) -> AgentTarget:
        now = self._target_of(target.worker_id)
        if now is None or now.incarnation != target.incarnation:
            raise AgentError(
                f"the agent of worker {target.worker_id} is in another life than the one that was "
                f"meant (incarnation {target.incarnation})",
                reason=Reason.STALE_INCARNATION,
            )
        return now
