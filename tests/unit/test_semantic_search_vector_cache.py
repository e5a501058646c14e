"""The cache of vectors: one builder at a time, all or nothing on disk, damage found and mended."""

from __future__ import annotations

import fcntl
import multiprocessing
import multiprocessing.connection
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from examples.semantic_search.vector_cache import Progress, VectorCache

ROWS, COLUMNS = 5, 4
WAIT_S = 30


class Builder:
    """A build function that counts its runs and notes the most that ran at once."""

    def __init__(self, vectors: Tensor) -> None:
        self.vectors = vectors
        self.runs = 0
        self.at_once = 0
        self.most_at_once = 0
        self._lock = threading.Lock()

    def __call__(self, progress: Progress) -> Tensor:
        with self._lock:
            self.runs += 1
            self.at_once += 1
            self.most_at_once = max(self.most_at_once, self.at_once)
        progress(ROWS, ROWS, "built")
        with self._lock:
            self.at_once -= 1
        return self.vectors


def quiet(done: int, total: int, note: str) -> None:
    """Report to nobody."""


@pytest.fixture
def cache(tmp_path: Path) -> VectorCache:
    return VectorCache(tmp_path / "not" / "there" / "yet", "key", ROWS, COLUMNS)


@pytest.fixture
def vectors() -> Tensor:
    return torch.arange(ROWS * COLUMNS, dtype=torch.float32).reshape(ROWS, COLUMNS)


def test_absent_file_is_built_and_the_next_call_only_maps(
    cache: VectorCache, vectors: Tensor
) -> None:
    build = Builder(vectors)
    first = cache.load_or_build(build, quiet)
    second = cache.load_or_build(build, quiet)
    assert build.runs == 1
    assert torch.equal(first, vectors)
    assert torch.equal(second, vectors)


def test_progress_of_the_build_is_passed_on(cache: VectorCache, vectors: Tensor) -> None:
    seen: list[tuple[int, int, str]] = []
    cache.load_or_build(Builder(vectors), lambda *step: seen.append(step))
    assert seen == [(ROWS, ROWS, "built")]


def test_nothing_but_the_file_and_its_lock_is_left(cache: VectorCache, vectors: Tensor) -> None:
    cache.load_or_build(Builder(vectors), quiet)
    assert sorted(path.name for path in cache.directory.iterdir()) == [
        "key.lock",
        "key.safetensors",
    ]


def test_build_that_raises_leaves_no_file_and_the_next_one_succeeds(
    cache: VectorCache, vectors: Tensor
) -> None:
    def fail(progress: Progress) -> Tensor:
        raise RuntimeError("out of words")

    with pytest.raises(RuntimeError, match="out of words"):
        cache.load_or_build(fail, quiet)
    assert not cache.path.exists()
    assert torch.equal(cache.load_or_build(Builder(vectors), quiet), vectors)


def _cut_short(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def _empty(path: Path) -> None:
    os.truncate(path, 0)


def _flip_last_byte(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def _other_text(path: Path) -> None:
    path.write_text("not a tensor in sight")


def _other_shape(path: Path) -> None:
    save_file({"vectors": torch.zeros(ROWS + 1, COLUMNS)}, path, metadata={"sha256": "0"})


def _other_tensor(path: Path) -> None:
    save_file({"weights": torch.zeros(ROWS, COLUMNS)}, path)


@pytest.mark.parametrize(
    "damage",
    [_cut_short, _empty, _flip_last_byte, _other_text, _other_shape, _other_tensor],
)
def test_damaged_file_is_not_believed_and_built_again(
    cache: VectorCache, vectors: Tensor, damage: Callable[[Path], None]
) -> None:
    build = Builder(vectors)
    cache.load_or_build(build, quiet)
    damage(cache.path)
    assert cache.load() is None
    assert torch.equal(cache.load_or_build(build, quiet), vectors)
    assert build.runs == 2


def test_mapping_outlives_the_replacement_of_its_file(cache: VectorCache, vectors: Tensor) -> None:
    mapped = cache.load_or_build(Builder(vectors), quiet)
    cache.path.unlink()
    cache.load_or_build(Builder(vectors + 1), quiet)
    assert torch.equal(mapped, vectors)


def test_another_key_is_another_file(cache: VectorCache, vectors: Tensor) -> None:
    other = VectorCache(cache.directory, "other", ROWS, COLUMNS)
    cache.load_or_build(Builder(vectors), quiet)
    assert torch.equal(other.load_or_build(Builder(vectors + 1), quiet), vectors + 1)
    loaded = cache.load()
    assert loaded is not None
    assert torch.equal(loaded, vectors)


def test_eight_that_start_together_build_once(cache: VectorCache, vectors: Tensor) -> None:
    build = Builder(vectors)
    together = threading.Barrier(8)

    def run() -> Tensor:
        together.wait(WAIT_S)
        return cache.load_or_build(build, quiet)

    with ThreadPoolExecutor(8) as pool:
        results = [future.result(WAIT_S) for future in [pool.submit(run) for _ in range(8)]]
    assert (build.runs, build.most_at_once) == (1, 1)
    assert all(torch.equal(result, vectors) for result in results)


def test_one_that_waits_tells_the_builders_progress(cache: VectorCache, vectors: Tensor) -> None:
    heard = threading.Event()
    notes: list[tuple[int, int, str]] = []

    def build(progress: Progress) -> Tensor:
        progress(2, ROWS, "two")
        assert heard.wait(WAIT_S)
        return vectors

    def listen(done: int, total: int, note: str) -> None:
        notes.append((done, total, note))
        heard.set()

    building = threading.Event()

    def first() -> Tensor:
        def tell(done: int, total: int, note: str) -> None:
            building.set()

        return cache.load_or_build(build, tell)

    with ThreadPoolExecutor(2) as pool:
        builder = pool.submit(first)
        assert building.wait(WAIT_S)
        waiter = pool.submit(cache.load_or_build, Builder(vectors), listen)
        assert torch.equal(waiter.result(WAIT_S), builder.result(WAIT_S))
    assert notes == [(2, ROWS, f"waiting: process {os.getpid()} builds them")]


def test_one_that_waits_takes_over_when_the_builder_raises(
    cache: VectorCache, vectors: Tensor
) -> None:
    building, give_up = threading.Event(), threading.Event()

    def fail(progress: Progress) -> Tensor:
        progress(1, ROWS, "started")
        building.set()
        assert give_up.wait(WAIT_S)
        raise RuntimeError("gave up")

    with ThreadPoolExecutor(2) as pool:
        failing = pool.submit(cache.load_or_build, fail, quiet)
        assert building.wait(WAIT_S)
        waiter = pool.submit(cache.load_or_build, Builder(vectors), lambda *step: give_up.set())
        assert torch.equal(waiter.result(WAIT_S), vectors)
        assert isinstance(failing.exception(WAIT_S), RuntimeError)


def test_one_that_waits_takes_over_when_the_builder_is_killed(
    cache: VectorCache, vectors: Tensor
) -> None:
    context = multiprocessing.get_context("spawn")  # a fork would share what torch has started
    mine, theirs = context.Pipe()
    builder = context.Process(target=_build_half_and_hang, args=(cache, theirs), daemon=True)
    builder.start()
    theirs.close()
    try:
        assert mine.poll(WAIT_S)
        assert mine.recv() == "half written"
        build = Builder(vectors)
        with ThreadPoolExecutor(1) as pool:
            waiter = pool.submit(cache.load_or_build, build, lambda *step: builder.kill())
            assert torch.equal(waiter.result(WAIT_S), vectors)
    finally:
        builder.kill()
        builder.join(WAIT_S)
    assert build.runs == 1
    assert sorted(path.suffix for path in cache.directory.iterdir()) == [".lock", ".safetensors"]


def _build_half_and_hang(cache: VectorCache, pipe: multiprocessing.connection.Connection) -> None:
    def build(progress: Progress) -> Tensor:
        (cache.directory / f"{cache.key}.building").write_bytes(b"half of a file")
        progress(1, ROWS, "half")
        pipe.send("half written")
        threading.Event().wait()  # for ever: it is killed here
        raise AssertionError

    cache.load_or_build(build, quiet)


def test_finished_file_is_mapped_while_somebody_holds_the_lock(
    cache: VectorCache, vectors: Tensor
) -> None:
    cache.load_or_build(Builder(vectors), quiet)
    with open(cache.directory / "key.lock") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert torch.equal(cache.load_or_build(Builder(vectors), quiet), vectors)
