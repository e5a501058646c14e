"""The one writer: takes an event to the registry and carries out what it answers.

Decided here: the order (writes reach the disk before work starts, before watchers hear, before the
caller is answered) and what happens when the disk says no. A supervisor that cannot write what it
promised ends its reign: that touches no model, and the next one starts from what is written. So
does one that gives way to a higher reign; from that moment on it takes in nothing, writes nothing
and starts nothing.

Invariant: `handle` never awaits, so events are taken one after another and no lock is needed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import structlog

from stagekeeper.core.commands import (
    Command,
    HeartbeatAnswered,
    PublishChange,
    Reply,
    SaveDeployment,
    SaveEpoch,
    SaveOperation,
    SaveRoster,
    StartOperation,
    Work,
    Write,
)
from stagekeeper.core.errors import Reason, Refused
from stagekeeper.core.event_log import PublishEvent
from stagekeeper.core.events import Event, HeartbeatReceived, Ticked
from stagekeeper.core.registry import Registry
from stagekeeper.runtime import crash_points
from stagekeeper.runtime.clock import Clock
from stagekeeper.supervisor.pulse import Pulse
from stagekeeper.supervisor.store import EpochLost, Store, StoreFailed

_log = structlog.get_logger(__name__)

R = TypeVar("R", bound=Reply)


class Engine:
    """Owns the registry and the store while a reign lasts.

    Args:
        registry: read freely, from memory; changed through `handle` only.
        store: written by `handle`, in order.
        clock: sampled once an event.
        carry_out: starts a piece of work; returns at once, and its outcome comes back as an event.
        on_failed: called once, when the reign has to end: the store failed, or `step_down`.

    Attributes:
        changes: beats when a deployment's view, or whether the lists are complete, has changed.
        news: beats when the change log has anything new, or as `changes` does.
        events: beats after every event but heartbeats.
    """

    def __init__(
        self,
        registry: Registry,
        store: Store,
        clock: Clock,
        *,
        carry_out: Callable[[Work], None],
        on_failed: Callable[[Exception], None],
    ) -> None:
        self.registry = registry
        self.changes = Pulse()
        self.news = Pulse()
        self.events = Pulse()
        self._store = store
        self._clock = clock
        self._carry_out = carry_out
        self._on_failed = on_failed
        self._stored_epoch = registry.epoch
        self._unwritten_roster: SaveRoster | None = None
        self._was_complete = registry.is_complete
        self._failure: Exception | None = None

    def handle(self, event: Event) -> Reply | None:
        """Take in one event; return the reply to whoever sent it, if there is one.

        Raises:
            Refused: by the registry, which is unchanged then; or DRAINING, when the reign is over.
        """
        if self._failure is not None:
            raise _ending(self._failure)
        commands = self.registry.apply(event, now=self._clock.monotonic())
        if len(commands) == 1 and type(reply := commands[0]) is HeartbeatAnswered:
            return reply
        return self._carry(event, commands)

    def ask(self, event: Event, reply_type: type[R]) -> R:
        """Take in one event that is answered with a `reply_type`."""
        reply = self.handle(event)
        if not isinstance(reply, reply_type):
            raise TypeError(f"{type(event).__name__} was answered with {type(reply).__name__}")
        return reply

    def tell(self, event: Event) -> None:
        """Take in an event that nobody waits for: an outcome of work, or time. Never raises."""
        if self._failure is not None:
            return
        try:
            self.handle(event)
        except Refused as refused:
            _log.warning("an event was refused", event_type=type(event).__name__, why=str(refused))
        except Exception as error:
            _log.error("an event met a bug", event_type=type(event).__name__, exc_info=error)

    def tick(self, stalled_s: float) -> None:
        """Tell the registry that time went by; write the roster if it changed.

        It changes with every worker that comes, proves nothing, and is read once a reign: it waits
        for a tick, unless somebody is given something before.
        """
        self.tell(Ticked(stalled_s))
        self._write_roster()

    def step_down(self, why: Exception) -> None:
        """End the reign before another one; nothing is taken in or written from here on."""
        if self._failure is None:
            _log.warning("this supervisor steps down", why=str(why))
            self._end_by(why)

    def end(self) -> None:
        """Write down what was put off: nothing more will be taken in."""
        self.tell(Ticked())
        self._write_roster()

    def _write_roster(self) -> None:
        roster, self._unwritten_roster = self._unwritten_roster, None
        if roster is None or self._failure is not None:
            return
        try:
            self._store.write_roster(self._stored_epoch, roster.worker_ids)
        except StoreFailed as error:
            self._fail(error)

    def _carry(self, event: Event, commands: list[Command]) -> Reply | None:
        reply: Reply | None = None
        writes: list[Write] = []
        work: list[Work] = []
        has_changes = has_news = False
        for command in commands:
            if isinstance(command, PublishChange):
                has_changes = True
            elif isinstance(command, PublishEvent):
                has_news = True
            elif isinstance(command, Work):
                work.append(command)
            elif isinstance(command, SaveRoster):
                self._unwritten_roster = command
            elif isinstance(command, Write):
                writes.append(command)
            else:
                reply = command
        if self._unwritten_roster and any(isinstance(it, StartOperation) for it in work):
            # The next reign has to wait for whoever may hold something.
            writes.append(self._unwritten_roster)
            self._unwritten_roster = None
        if writes:
            self._write(writes)
        for item in work:
            self._carry_out(item)
        is_complete = self.registry.is_complete
        if has_changes or is_complete != self._was_complete:
            self._was_complete = is_complete
            has_news = True
            self.changes.beat()
        if has_news:
            self.news.beat()
        if not isinstance(event, HeartbeatReceived):
            self.events.beat()
        return reply

    def _write(self, writes: list[Write]) -> None:
        try:
            self._store.write(self._stored_epoch, writes)
        except StoreFailed as error:
            self._fail(error)
            raise _ending(error) from error
        for write in writes:
            if isinstance(write, SaveEpoch):
                self._stored_epoch = write.epoch
            elif isinstance(write, SaveDeployment):
                crash_points.reached("desired-written")
            elif isinstance(write, SaveOperation) and write.saved.is_decided:
                crash_points.reached("commit-decided")

    def _fail(self, error: StoreFailed) -> None:
        if isinstance(error, EpochLost):
            self.step_down(error)
        elif self._failure is None:
            _log.error("the store failed, so this supervisor ends", why=str(error))
            self._end_by(error)

    def _end_by(self, error: Exception) -> None:
        self._failure = error
        self._on_failed(error)


def _ending(error: Exception) -> Refused:
    if isinstance(error, StoreFailed) and not isinstance(error, EpochLost):
        return Refused(
            Reason.DRAINING,
            "this supervisor ends, since what it promises could not be written down "
            f"({error}); models go on serving: repeat when a supervisor is back",
            retry_after_s=1.0,
        )
    return Refused(
        Reason.DRAINING,
        f"this supervisor steps down ({error}); models go on serving: ask the endpoint again",
        retry_after_s=0.1,
    )
