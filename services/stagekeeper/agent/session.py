"""The agent's session with its supervisor. Normal registration is the recovery; there is no other.

A connection is a channel, the stubs made from it and the registration, with a generation number.
They live and are dropped together, at the first call that fails; the error goes on to the retry,
which waits and begins at the stable endpoint again. Whoever fails late, on a connection that was
dropped already, drops nothing.

Decided here: when to connect, register, beat, and what each answer means. Not decided here: what is
held (`worker_slice`) and what a command does. Time, chance and network are arguments.

Invariant: one connection at a time, made by one task.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

import structlog

from stagekeeper.agent.authority import Authority
from stagekeeper.agent.connection import (
    AuthorityEnded,
    Connection,
    SessionLost,
    Settlements,
    SupervisorNotFound,
)
from stagekeeper.agent.identity import AgentIdentity
from stagekeeper.agent.settings import AgentSettings
from stagekeeper.agent.transport import CallFailed, Transport
from stagekeeper.agent.worker_slice import WorkerSlice
from stagekeeper.core.errors import Reason
from stagekeeper.core.ids import FailureId, OperationId
from stagekeeper.core.model import Failure
from stagekeeper.host.tasks import TaskOwner
from stagekeeper.runtime.clock import Clock, sleep_until_set
from stagekeeper.runtime.convert import epoch_from_proto, failure_to_proto
from stagekeeper.runtime.retry import FailedAttempt, GaveUp, Retry
from stagekeeper.v1 import supervisor_service_pb2 as supervisor_pb2

_log = structlog.get_logger(__name__)

_OPERATORS_ERROR_S: Final = 5.0
"""How long to wait where only a person can help: another cluster, a worker id in use."""

_BEATS_PER_LOOK: Final = 5
"""About so many heartbeats, jittered, pass between two looks at the stable endpoint."""

_SHORTEST_TIMEOUT_S: Final = 0.25

_REFUSED_FOR_GOOD: Final = frozenset({Reason.BAD_FIELD, Reason.TOO_LARGE})
"""Said of what is sent, not of the moment."""

_SLOWEST_LINK_BYTES_PER_S: Final = 64 * 1024
"""A registration is given the time that its bytes need on such a link, beside its time-out: else a
large slice on a slow link would be cut off and sent again for ever."""


class Session:
    """Finds a supervisor, registers, beats, for ever.

    Args:
        on_registered: called after the first registration of each connection.
        on_broken: called with (task name, exception) when a task beside the session ends with an
            error that no new connection would mend; by default it is logged.
    """

    def __init__(
        self,
        settings: AgentSettings,
        identity: AgentIdentity,
        authority: Authority,
        worker_slice: WorkerSlice,
        settlements: Settlements,
        *,
        transport: Transport,
        clock: Clock,
        random: Callable[[], float],
        on_registered: Callable[[], None] = lambda: None,
        on_broken: Callable[[str, BaseException], None] | None = None,
    ) -> None:
        self._settings = settings
        self._identity = identity
        self._authority = authority
        self._slice = worker_slice
        self._settlements = settlements
        self._transport = transport
        self._clock = clock
        self._random = random
        self._on_registered = on_registered
        self._connection: Connection | None = None
        self._generations = 0
        self._wake = asyncio.Event()
        self._reports = TaskOwner("reports", on_broken)
        worker_slice.on_change = self._wake.set
        self._retry = Retry(
            settings.reconnect,
            sleep=clock.sleep,
            random=random,
            monotonic=clock.monotonic,
            on_failure=self._tell,
            is_retried=lambda error: isinstance(error, CallFailed | SessionLost),
            at_least_s=lambda error: getattr(error, "retry_after_s", 0.0),
        )

    @property
    def connection(self) -> Connection | None:
        """The connection that is used now; None between two."""
        return self._connection

    async def run(self) -> None:
        """Keep the worker registered until cancelled; leaves no connection behind.

        Raises:
            SupervisorNotFound: none was found within `max_wait_s`.
            AuthorityEnded: another incarnation took over; this agent obeys nobody any more.
        """
        try:
            await self._retry.run(self._live, give_up_after_s=self._settings.max_wait_s)
        except GaveUp as gave_up:
            raise SupervisorNotFound(
                f"no supervisor was found at {self._settings.endpoint} within "
                f"{self._settings.max_wait_s:g} s ({gave_up.failures_in_a_row} attempts): "
                f"{gave_up.last}"
            ) from gave_up.last
        finally:
            await self._drop_now()

    async def flush(self, timeout_s: float) -> None:
        """Wait until the slice as it is now was put, or the time is over."""
        wanted = self._slice.revision
        deadline = self._clock.monotonic() + timeout_s
        while self._clock.monotonic() < deadline:
            connection = self._connection
            if connection is not None and connection.registered_revision >= wanted:
                return
            await self._clock.sleep(0.02)

    # --- one connection, from finding the supervisor to its loss

    async def _live(self) -> None:
        connection = await self._connect()
        try:
            await self._register(connection)
            await self._beat_for_ever(connection)
        except (CallFailed, SessionLost) as error:
            self._lose(connection, str(error))
            raise
        finally:
            await connection.link.close()

    async def _connect(self) -> Connection:
        found = await self._transport.find_supervisor(self._settings.discovery_timeout_s)
        if found.cluster != self._settings.cluster:
            raise self._wrong_cluster(found.cluster)
        if not found.worker_address:
            raise SessionLost(f"{self._settings.endpoint} names no address for workers")
        self._generations += 1
        connection = Connection(
            self._generations, found.worker_address, self._transport.connect(found.worker_address)
        )
        self._connection = connection
        return connection

    async def _register(self, connection: Connection) -> None:
        copy = self._slice.copy()
        try:
            response = await connection.link.register(
                copy.request, self._register_timeout_s(copy.request)
            )
        except CallFailed as error:
            raise self._refused(error) from error
        epoch = epoch_from_proto(response.epoch)
        if epoch < self._identity.highest_epoch:
            raise SessionLost(
                f"reign {epoch} at {connection.address} is older than "
                f"{self._identity.highest_epoch}, which this agent has obeyed",
                _OPERATORS_ERROR_S,
            )
        is_first = not connection.is_registered
        self._authority.obey(epoch)
        connection.epoch = epoch
        connection.registered_revision = copy.revision
        connection.digest = copy.digest
        connection.next_heartbeat_s = response.next_heartbeat_s
        self._retry.succeeded()
        for entry in response.refused:
            _log.error(
                "the supervisor refused an entry",
                entry=entry.index,
                reason=entry.reason,
                message=entry.message,
            )
        if is_first:
            connection.beats_until_look = self._beats_until_look()
            _log.info(
                "registered",
                supervisor=connection.address,
                epoch=str(epoch),
                incarnation=self._identity.incarnation,
                connection=connection.generation,
                shards=len(copy.request.replica_states),
            )
            self._on_registered()
        self._settlements.settle(
            [FailureId(it) for it in response.settled_failure_ids],
            [OperationId(it) for it in response.settled_operation_ids],
        )

    async def _beat_for_ever(self, connection: Connection) -> None:
        due = self._clock.monotonic() + connection.next_heartbeat_s
        while True:
            self._wake.clear()
            if connection.lost:
                raise SessionLost(connection.lost)
            self._report_failures(connection)
            now = self._clock.monotonic()
            if self._slice.revision != connection.registered_revision:
                await self._register(connection)
            elif now >= due:
                await self._beat(connection)
            else:
                await self._sleep_until_woken(due - now)
                continue
            due = self._clock.monotonic() + connection.next_heartbeat_s

    async def _beat(self, connection: Connection) -> None:
        request = supervisor_pb2.HeartbeatRequest(
            cluster=self._settings.cluster,
            worker_id=self._identity.worker_id,
            incarnation=self._identity.incarnation,
            revision=connection.registered_revision,
            digest=connection.digest,
        )
        response = await connection.link.heartbeat(request, self._heartbeat_timeout_s(connection))
        connection.next_heartbeat_s = response.next_heartbeat_s
        if response.verdict == supervisor_pb2.HEARTBEAT_VERDICT_SUPERSEDED:
            why = "another incarnation of this worker took over"
            self._authority.end(why)
            raise AuthorityEnded(why)
        if response.verdict == supervisor_pb2.HEARTBEAT_VERDICT_WRONG_CLUSTER:
            raise self._wrong_cluster("another one")
        if response.verdict != supervisor_pb2.HEARTBEAT_VERDICT_OK:
            raise SessionLost("the supervisor asks for a registration")
        if epoch_from_proto(response.epoch) != connection.epoch:
            raise SessionLost("the supervisor began another reign")
        await self._look_at_endpoint(connection)

    async def _look_at_endpoint(self, connection: Connection) -> None:
        """Every few beats, see whether a higher reign lives at the stable endpoint."""
        connection.beats_until_look -= 1
        if connection.beats_until_look > 0:
            return
        connection.beats_until_look = self._beats_until_look()
        try:
            found = await self._transport.find_supervisor(self._settings.discovery_timeout_s)
        except CallFailed:
            return  # who answers heartbeats is good enough
        epoch = epoch_from_proto(found.epoch)
        if found.cluster == self._settings.cluster and epoch > connection.epoch:
            raise SessionLost(f"the endpoint names a higher reign, {epoch}")

    # --- failures, reported beside the heartbeats

    def _report_failures(self, connection: Connection) -> None:
        for failure in self._settlements.unsettled_failures():
            if failure.failure_id in connection.reported:
                continue
            connection.reported.add(failure.failure_id)
            _ = self._reports.start(failure.failure_id, self._report(connection, failure))

    async def _report(self, connection: Connection, failure: Failure) -> None:
        request = supervisor_pb2.ReportFailureRequest(
            cluster=self._settings.cluster,
            worker_id=self._identity.worker_id,
            incarnation=self._identity.incarnation,
            failure=failure_to_proto(failure),
        )
        try:
            response = await connection.link.report_failure(
                request, self._settings.heartbeat_timeout_s
            )
        except CallFailed as error:
            if error.reason in _REFUSED_FOR_GOOD:
                # Such as one that an earlier release spooled: no connection is lost for it, since
                # it would be refused on the next one too.
                _log.error(
                    "a failure was refused and is dropped",
                    failure=failure.failure_id,
                    error=str(error),
                )
                self._settlements.settle([failure.failure_id], [])
                return
            self._lose(connection, str(error))
            await connection.link.close()  # a registration under way on it need not wait it out
            return
        if response.settled:
            self._settlements.settle([failure.failure_id], [])

    # --- losing a connection

    def _lose(self, connection: Connection, why: str) -> None:
        """Drop a connection with all that hangs on it, unless it was dropped already."""
        if self._connection is not connection:
            _log.debug(
                "a call of a dropped connection failed late",
                connection=connection.generation,
                error=why,
            )
            return
        self._connection = None
        connection.registered_revision = 0
        connection.lost = why or "lost"
        self._wake.set()

    async def _drop_now(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.registered_revision = 0
            await connection.link.close()
        await self._reports.stop()

    def _refused(self, error: CallFailed) -> Exception:
        """Say what a refused registration means for the next attempt."""
        if error.reason == Reason.STALE_INCARNATION and error.retry_after_s > 0:
            # The other one lives: with locks in another folder it does not know of this one.
            self._identity.note_refusal()
            return SessionLost(str(error), error.retry_after_s)
        if error.reason == Reason.STALE_INCARNATION:
            highest = error.metadata.get("highest_incarnation", "")
            # This agent holds its host's lock, and the other one's lease is over.
            self._identity.rise_above(int(highest) if highest.isdigit() else 0)
            self._slice.changed()
            return SessionLost(f"{error}; taking incarnation {self._identity.incarnation}")
        if error.reason in (Reason.WORKER_ID_IN_USE, Reason.WRONG_CLUSTER):
            return SessionLost(str(error), max(_OPERATORS_ERROR_S, error.retry_after_s))
        return error

    def _wrong_cluster(self, other: str) -> SessionLost:
        return SessionLost(
            f"the supervisor at {self._settings.endpoint} serves cluster {other!r}, and this agent "
            f"belongs to {self._settings.cluster!r}: look at --cluster and --endpoint",
            _OPERATORS_ERROR_S,
        )

    def _tell(self, attempt: FailedAttempt) -> None:
        _log.warning(
            "no session with a supervisor",
            endpoint=self._settings.endpoint,
            attempt=attempt.failures_in_a_row,
            error=str(attempt.error),
            next_in_s=round(attempt.wait_s, 3),
        )

    # --- time

    def _heartbeat_timeout_s(self, connection: Connection) -> float:
        """A beat that is not answered before the next is due has failed."""
        pace_s = max(connection.next_heartbeat_s, _SHORTEST_TIMEOUT_S)
        return min(self._settings.heartbeat_timeout_s, pace_s)

    def _register_timeout_s(self, request: supervisor_pb2.RegisterWorkerRequest) -> float:
        travel_s = request.ByteSize() / _SLOWEST_LINK_BYTES_PER_S
        return self._settings.register_timeout_s + travel_s

    def _beats_until_look(self) -> int:
        return 1 + round(_BEATS_PER_LOOK * (0.5 + self._random()))

    async def _sleep_until_woken(self, delay_s: float) -> None:
        await sleep_until_set(self._clock, delay_s, self._wake)
