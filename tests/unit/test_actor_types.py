"""What a type checker knows of meshes: one run of mypy over one program, line by line.

A line of the program says what is expected of it: `# R: type` that `reveal_type` says so (modules
left out), `# E: code` that it is an error with this code. Every other line has to be without.
"""

from __future__ import annotations

import re
from collections import defaultdict
from pathlib import Path

import pytest
from mypy import api

ROOT = Path(__file__).parents[2]
_MODULE = re.compile(r"\b(?:[a-z_][\w]*\.)+(?=\w)")

PROGRAM = '''
from __future__ import annotations

from collections.abc import AsyncIterator, Generator, Iterator
from typing import Any, Generic, TypeVar

from stagekeeper.actor import Actor, MeshFailure, ProcMesh, endpoint
from stagekeeper.stage import Stage

T = TypeVar("T")


class Worker(Actor):
    def __init__(self, scale: float, *, label: str = "") -> None:
        # The names of a mesh are an author's own.
        self.name = label
        self.size = (1, 2)
        self.scale = scale

    @endpoint
    async def step(self, batch: int, *, fast: bool = False) -> str:
        """Do one step."""
        return str(batch)

    @endpoint(idempotent=True)
    def plain(self, x: float) -> list[float]:
        return [x * self.scale]

    @endpoint
    def count(self, to: int) -> Iterator[int]:
        yield from range(to)

    @endpoint
    def generate(self) -> Generator[bytes, None, str]:
        yield b""
        return ""

    @endpoint(idempotent=True)
    async def watch(self) -> AsyncIterator[float]:
        yield self.plain(1.0)[0]

    @endpoint
    def tell(self, text: str) -> None: ...

    @endpoint
    def anything(self, value: Any) -> Any: ...

    @endpoint
    def level(self) -> float:
        return 0.5

    async def __supervise__(self, failure: MeshFailure) -> bool:
        reveal_type(await self.step(3))  # R: str
        return bool(failure.ranks)

    async def __cleanup__(self, exc: BaseException | None) -> None: ...


class Manager(Actor):
    def __init__(self, procs: ProcMesh) -> None:
        self.workers = procs.spawn("workers", Worker, 0.5, label="a")

    @endpoint
    async def run(self) -> dict[int, str]:
        return dict(await self.workers.step.call(3))

    def __supervise__(self, why: MeshFailure) -> bool:
        return why.mesh is self.workers

    def __cleanup__(self, exc: BaseException | None) -> None: ...


# --- calls


async def call(procs: ProcMesh) -> None:
    workers = procs.spawn("workers", Worker, 1.0, label="a")
    reveal_type(workers)  # R: Worker
    reveal_type(await workers.step.call(3))  # R: ValueMesh[str]
    reveal_type((await workers.step.call(3))[0])  # R: str
    reveal_type(await workers.plain.call(3))  # R: ValueMesh[list[float]]
    reveal_type(await workers[0].step.call_one(3, fast=True))  # R: str
    reveal_type(await workers[1:].step.choose(batch=3))  # R: str
    reveal_type(await workers[[0, 2]].tell.call("a"))  # R: ValueMesh[None]
    reveal_type(await workers.anything.call_one(1))  # R: Any
    async for rank, value in workers.count.stream(3):
        reveal_type(rank)  # R: int
        reveal_type(value)  # R: int
    async for item in workers.watch.stream():
        reveal_type(item)  # R: tuple[int, float, fallback=Ranked[float]]
    async for got in workers.generate.stream():
        reveal_type(got.value)  # R: bytes
    async for answer in workers.step.stream(3):
        reveal_type(answer.value)  # R: str
    workers.tell.broadcast("a")
    self_made = Manager(procs)
    reveal_type(await self_made.workers.step.call(3))  # R: ValueMesh[str]


async def call_wrongly(workers: Worker) -> None:
    await workers.step.call("3")  # E: arg-type
    await workers.step.call()  # E: call-arg
    await workers.step.call_one(3, fast="yes")  # E: arg-type
    await workers.step.call_one(3, slow=True)  # E: call-arg
    await workers.step.choose(3, True)  # E: call-arg
    workers.count.stream("3")  # E: arg-type
    workers.tell.broadcast(3)  # E: arg-type
    workers.absent.broadcast(3)  # E: attr-defined
    workers.step.call(3)  # E: unused-coroutine
    number: int = await workers.step.call_one(3)  # E: assignment
    print(workers.tell.broadcast("a"))  # E: func-returns-value
    workers["a"].tell.broadcast("a")  # E: index


def spawn(procs: ProcMesh) -> None:
    procs.spawn("workers", Worker, 1.0)
    procs.spawn("workers", Worker)  # E: call-arg
    procs.spawn("workers", Worker, "1.0")  # E: arg-type
    procs.spawn("workers", Worker, 1.0, label=3)  # E: arg-type
    procs.spawn("workers", Worker, 1.0, lable="a")  # E: call-arg
    procs.spawn(3, Worker, 1.0)  # E: arg-type
    procs.spawn("numbers", int, 3)  # E: type-var


# --- meshes


async def look(procs: ProcMesh, workers: Manager) -> None:
    reveal_type(len(workers))  # R: int
    reveal_type(workers[0])  # R: Manager
    reveal_type(workers.ranks)  # R: tuple[int, ...] | Any
    reveal_type(workers.failures.get(0))  # R: MeshFailure | None | Any
    reveal_type(await workers.stop(3.0))  # R: StopReport | Any
    await workers.stop(budget_s="3")  # E: arg-type
    await workers.ready(timeout_s=3.0)


# --- on an actor itself


async def local() -> None:
    worker = Worker(1.0)
    reveal_type(await worker.step(3))  # R: str
    reveal_type(worker.plain(3.0))  # R: list[float]
    reveal_type(list(worker.count(3)))  # R: list[int]
    reveal_type([value async for value in worker.watch()])  # R: list[float]
    reveal_type(Worker.step.__doc__)  # R: str | None
    reveal_type(Worker.plain(worker, 3.0))  # R: list[float]
    reveal_type(worker.name)  # R: Any
    worker.plain("3.0")  # E: arg-type
    Worker.plain(worker, "3.0")  # E: arg-type
    await worker.step()  # E: call-arg


# --- subclasses


class Same(Worker):
    @endpoint
    async def step(self, batch: int, *, fast: bool = False) -> str:
        return await super().step(batch, fast=fast)

    @endpoint(idempotent=True)
    def plain(self, x: float, more: int = 0) -> list[float]:
        return super().plain(x)

    @endpoint
    def tell(self, text: object) -> None: ...

    @endpoint
    def level(self) -> int:
        return 1


class Other(Worker):
    @endpoint
    async def step(self, batch: str) -> str:  # E: override
        return batch

    @endpoint
    def plain(self, x: float) -> str:  # E: override
        return ""


class Store(Actor, Generic[T]):
    def __init__(self, first: T, name: str = "") -> None: ...

    @endpoint
    def put(self, value: T) -> list[T]:
        return [value]


async def generic(procs: ProcMesh) -> None:
    store = procs.spawn("store", Store[int], 3, name="of its __init__")
    reveal_type(await store.put.call_one(3))  # R: list[int]
    store.put.broadcast("3")  # E: arg-type


class Strange(Actor):
    def __supervise__(self, failure: int) -> bool:  # E: override
        return True

    def __cleanup__(self) -> None: ...  # E: override


class NoAnswer(Actor):
    def __supervise__(self, failure: MeshFailure) -> None: ...  # E: override


# --- stages


class Encoder(Stage):
    def __init__(self, width: int) -> None:
        self.ranks = [width]
        self.failures = 0

    @endpoint(idempotent=True)
    def encode(self, texts: list[str]) -> list[list[float]]:
        return [[0.0] for _ in texts]

    @endpoint
    async def both(self, text: str) -> list[float]:
        return self.encode([text])[0]

    @property
    def name(self) -> str:
        return "encoder"

    @property
    def size(self) -> int:
        return self.shard_count

    def stop(self) -> None: ...

    def ready(self) -> bool:
        return self.context.shard_index == 0


class Narrow(Encoder):
    @endpoint(idempotent=True)
    def encode(self, texts: list[str]) -> list[list[float]]:
        return super().encode(texts)[:1]


async def stages(encoder: Encoder) -> None:
    reveal_type(encoder.encode(["a"]))  # R: list[list[float]]
    reveal_type(await encoder.both("a"))  # R: list[float]
    reveal_type(encoder.size)  # R: int
    encoder.stop()
    encoder.encode("a")  # E: arg-type
'''


@pytest.mark.timeout(400)  # without a cache mypy reads all that is imported, torch included
def test_checker_knows_endpoints_meshes_and_actors():
    said = _said_by_mypy(PROGRAM)
    expected = {
        number: found[1].strip()
        for number, line in enumerate(PROGRAM.splitlines(), 1)
        if (found := re.search(r"# ([RE]: .*)$", line))
    }
    assert said == expected


def _said_by_mypy(program: str) -> dict[int, str]:
    # The project's cache: where `make type` ran before, little is left to do.
    options = {"--config-file": ROOT / "pyproject.toml", "--cache-dir": ROOT / ".mypy_cache"}
    flat = [str(part) for option in options.items() for part in option]
    out, problem, _ = api.run([*flat, "--no-error-summary", "--no-pretty", "-c", program])
    assert not problem, problem
    said: dict[int, list[str]] = defaultdict(list)
    for line in out.splitlines():
        found = re.match(r"<string>:(\d+): (error|note): (.*?)(?:  \[([\w-]+)\])?$", line)
        assert found, line
        number, kind, text, code = found.groups()
        if kind == "error":
            said[int(number)].append(f"E: {code}")
        elif text.startswith("Revealed type is"):
            said[int(number)].append("R: " + _MODULE.sub("", text.split('"')[1]))
    return {number: "; ".join(parts) for number, parts in said.items()}
