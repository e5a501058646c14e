"""The state of a stage as its agent sees it: state, phase, addresses, and why it failed.

Decided here: nothing but which moves are legal (core.states says). Changed on the event loop alone.
Invariant: each change is announced after it is complete: whoever listens sees a whole state.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from stagekeeper.actor import Endpoint
from stagekeeper.actor.error_text import author_traceback
from stagekeeper.core.model import MemoryProfile
from stagekeeper.core.states import SHARD_MOVES, Phase, ShardState, check_move

_MAX_ERROR_CHARS = 1_000
_MAX_TRACEBACK_CHARS = 32_000


@dataclass(frozen=True, slots=True)
class PhaseFailure:
    """Why a start ended."""

    error: str
    """One line: type and message."""
    traceback: str
    out_of_memory: bool


class Vitals:
    """STARTING at first; `on_change` is called after each change."""

    def __init__(self) -> None:
        self.state = ShardState.STARTING
        self.phase: Phase | None = None
        self.addresses: tuple[tuple[str, str, str], ...] = ()
        """(name, protocol, url) of each address; the protocol is "grpc" or "http"."""
        self.endpoints: tuple[Endpoint, ...] = ()
        self.device_bytes: int | None = None
        self.predicted_memory: MemoryProfile | None = None
        self.measured_memory: MemoryProfile | None = None
        self.failure: PhaseFailure | None = None
        self.stall_reason = ""
        """What does not answer, while the stage is STALLED by its own word."""
        self.on_change: Callable[[], None] = lambda: None

    def enter_phase(self, phase: Phase) -> None:
        self.phase = phase
        self.on_change()

    def has_class(self, endpoints: Iterable[Endpoint]) -> None:
        """Say what the stage can be asked, known as soon as its class is."""
        self.endpoints = tuple(endpoints)
        self.on_change()

    def uses(
        self,
        device_bytes: int | None,
        *,
        predicted: MemoryProfile | None = None,
        measured: MemoryProfile | None = None,
    ) -> None:
        """Say what is in use, what an earlier start measured, and what this one has so far."""
        self.device_bytes = device_bytes
        self.predicted_memory = predicted
        self.measured_memory = measured
        self.on_change()

    def serves(self, addresses: Iterable[tuple[str, str, str]]) -> None:
        self._move(ShardState.READY)
        self.addresses = tuple(addresses)
        self.phase = None
        self.on_change()

    def stalls(self, reason: str) -> None:
        """Say that it does not answer as it should; a repeat tells the newest reason."""
        self._move(ShardState.STALLED)
        self.stall_reason = reason
        self.on_change()

    def answers_again(self) -> None:
        self._move(ShardState.READY)
        self.stall_reason = ""
        self.on_change()

    def drains(self) -> None:
        if self.state is ShardState.STALLED:
            self.answers_again()  # it goes out of service like any other
        self._move(ShardState.DRAINING)
        self.on_change()

    def failed(self, failure: PhaseFailure) -> None:
        """Say that the start ended; `phase` stays the one that it ended in."""
        self._move(ShardState.FAILED)
        self.failure = failure
        self.on_change()

    def _move(self, state: ShardState) -> None:
        self.state = check_move(SHARD_MOVES, self.state, state, "this stage")


def failure_from(error: BaseException) -> PhaseFailure:
    """Describe what a phase raised; the traceback keeps its end when it is long."""
    text = author_traceback(error)
    if len(text) > _MAX_TRACEBACK_CHARS:
        text = "…" + text[-_MAX_TRACEBACK_CHARS:]
    return PhaseFailure(
        error=one_line(error), traceback=text, out_of_memory=is_out_of_memory(error)
    )


def one_line(error: BaseException) -> str:
    """Return `Type: message`, the first line of the message only, cut to a bearable length."""
    lines = text_of(error).strip().splitlines()
    name = type(error).__qualname__
    return (f"{name}: {lines[0]}" if lines else name)[:_MAX_ERROR_CHARS]


def text_of(error: BaseException) -> str:
    """Return the message of an error that is not ours, whose `__str__` may raise as well."""
    try:
        return sendable(str(error))
    except Exception as broken:
        return f"(its message cannot be read: __str__ raised {type(broken).__qualname__})"


def sendable(text: str) -> str:
    """Replace what is no text in any encoding, such as the undecodable bytes of a file's name."""
    return text if text.isascii() else text.encode("utf-8", "replace").decode()


def is_out_of_memory(error: BaseException | None) -> bool:
    """Tell whether memory ran out, here or in what this error was raised from.

    By name, since torch may not be there: `torch.OutOfMemoryError` (also known as
    `torch.cuda.OutOfMemoryError`), and the RuntimeError of torch's CPU allocator.
    """
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        if isinstance(error, MemoryError):
            return True
        if any(
            cls.__name__ == "OutOfMemoryError" and cls.__module__.split(".")[0] == "torch"
            for cls in type(error).__mro__
        ):
            return True
        if isinstance(error, RuntimeError) and "DefaultCPUAllocator: " in text_of(error):
            return True
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return False
