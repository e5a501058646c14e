"""`Stage`: one step of a model as its author writes it: phases to come up, endpoints to be asked.

Decided here: what an author may override and use. Not decided here: when phases run (phases), how
calls arrive (dispatch). Invariant: a stage can be made and tried without a host, as a plain object;
`context` and `siblings` are then what the test sets.
"""

from __future__ import annotations

from collections.abc import Awaitable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol, Self

from stagekeeper.actor import Actor

if TYPE_CHECKING:
    from stagekeeper.stage.memory import MemoryMeter


@dataclass(frozen=True, slots=True)
class StageDevice:
    """A card of the stage."""

    device_id: str
    kind: str
    """"cuda" or "cpu"."""
    budget_bytes: int
    total_bytes: int


@dataclass(frozen=True, slots=True)
class StageContext:
    """Where a stage stands: which part of which model it is, and what it was given."""

    deployment: str
    replica_index: int
    stage_id: int
    stage_name: str
    shard_index: int
    shard_count: int
    devices: tuple[StageDevice, ...]
    """In the order of the spec. The process sees these cards alone, numbered from 0."""
    budget_bytes: int
    """What the stage may use on each of its cards, the least of them; 0 without cards."""
    cache_dir: Path
    """Kept between starts, shared by the stages of one worker; exists."""
    run_dir: Path
    """Of this instance alone; exists."""


class StageHooks(Protocol):
    """What a host gives to the stage that it makes."""

    @property
    def context(self) -> StageContext: ...

    @property
    def siblings(self) -> Mapping[str, Any]: ...

    def report_progress(self, done: int, total: int, note: str) -> None: ...


_hooks_of_the_next: ContextVar[StageHooks | None] = ContextVar("stagekeeper_hooks", default=None)
"""Set by a host around the construction, so that `__init__` can use what the host gives."""


class Stage(Actor):
    """Base of the stages written in Python.

    The phases run once, in this order, before the first call: each may be a plain method (it runs
    in a worker thread, the same one for all phases) or an `async` one. A phase that raises ends the
    start: the stage is FAILED, with the traceback, and its process ends.
    """

    __reserved_names__: ClassVar[frozenset[str]] = frozenset(
        {"load", "measure", "allocate", "capture", "progress", "context", "siblings"}
        | {"memory_meter", "tensors", "shard_index", "shard_count"}
    )

    tensors: ClassVar[Literal["numpy", "torch"]] = "numpy"
    """What a tensor in a call's arguments becomes."""

    __hooks: StageHooks | None
    __context: StageContext | None
    __siblings: Mapping[str, Any] | None

    def __new__(cls, *args: object, **kwargs: object) -> Self:
        self = super().__new__(cls)
        # Here and not in __init__: authors write an __init__ of their own and need not call ours.
        self.__hooks = _hooks_of_the_next.get()
        if self.__hooks is not None:
            _hooks_of_the_next.set(None)  # a stage made inside of another's __init__ has no host
        self.__context = None
        self.__siblings = None
        return self

    def load(self) -> Awaitable[None] | None:
        """Load the weights."""
        return None

    def measure(self) -> Awaitable[None] | None:
        """Run the largest batch, so that the peak of memory can be read."""
        return None

    def allocate(self, budget_bytes: int) -> Awaitable[None] | None:
        """Allocate what the budget leaves.

        Args:
            budget_bytes: on each card: the stage's budget less what its memory meter read as the
                peak of `measure`; the whole budget where there is no meter. 0 without cards.
        """
        return None

    def capture(self) -> Awaitable[None] | None:
        """Capture CUDA graphs, or do whatever else has to come last."""
        return None

    def memory_meter(self) -> MemoryMeter | None:
        """Return what measures this stage on its cards, the same one each time; None: nothing does.

        With a meter and a budget, a stage that uses more than its budget in `measure` fails.
        """
        return None

    def progress(self, done: int, total: int = 0, note: str = "") -> None:
        """Show a sign of life, and how far a long phase or call is. Cheap; from any thread.

        Args:
            done: units done, as the stage counts them.
            total: units in all; 0 when it cannot say.
            note: what is being done, for people.
        """
        if self.__hooks is not None:
            self.__hooks.report_progress(done, total, note)

    @property
    def context(self) -> StageContext:
        """Where this stage stands. Not to be mixed up with `context()`, which is about one call."""
        if self.__context is not None:
            return self.__context
        if self.__hooks is None:
            raise RuntimeError(
                "this stage has no host; in a test, set `stage.context = StageContext(…)` first"
            )
        return self.__hooks.context

    @context.setter
    def context(self, value: StageContext) -> None:
        self.__context = value

    @property
    def shard_index(self) -> int:
        """Which part of the stage this process is, from 0; 0 where the stage is not split.

        The parts lie on workers of their own, start together and stop together.
        """
        return self.context.shard_index

    @property
    def shard_count(self) -> int:
        """How many parts the stage has, this one among them; 1 where it is not split."""
        return self.context.shard_count

    @property
    def siblings(self) -> Mapping[str, Any]:
        """The other stages of this replica, by name; see `Siblings`. Usable once it is READY."""
        if self.__siblings is not None:
            return self.__siblings
        if self.__hooks is None:
            raise RuntimeError(
                "this stage has no host; in a test, set `stage.siblings = {name: stand-in}` first"
            )
        return self.__hooks.siblings

    @siblings.setter
    def siblings(self, value: Mapping[str, Any]) -> None:
        self.__siblings = value


def make_stage(cls: type[Stage], arguments: Mapping[str, object], hooks: StageHooks) -> Stage:
    """Construct a stage that belongs to a host."""
    token = _hooks_of_the_next.set(hooks)
    try:
        return cls(**arguments)
    finally:
        _hooks_of_the_next.reset(token)
