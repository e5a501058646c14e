"""Keep the vectors of a corpus on disk: built once, checked when opened, mapped into memory.

Decided here: what a file must prove before it is believed, who builds when several processes miss
it at once, and what a process that waits for another's build can tell. Not decided here: what the
vectors mean and how they are computed. Invariant: under the final name there is never a file that
is incomplete; whoever is killed at any moment leaves at most a temporary file, which the next
builder overwrites.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

Progress = Callable[[int, int, str], None]
"""`(done, total, note)`: how many rows are finished."""

_TENSOR = "vectors"
_POLL_S = 0.1


@dataclass(frozen=True, slots=True)
class VectorCache:
    """The place of one set of vectors; several processes may hold the same place."""

    directory: Path
    key: str
    """Names all that the vectors depend on: corpus, weights, arithmetic. A file name."""
    rows: int
    columns: int

    @property
    def path(self) -> Path:
        return self.directory / f"{self.key}.safetensors"

    def load(self) -> Tensor | None:
        """Check and map the file: rows × columns, float32; None when absent or damaged.

        The mapping stays good when the file is replaced or removed: it keeps the old one.
        """
        try:
            with safe_open(self.path, framework="pt") as file:
                stamp = (file.metadata() or {}).get("sha256")
                vectors: Tensor = file.get_tensor(_TENSOR)
        except (OSError, SafetensorError):
            return None
        fits = vectors.dtype == torch.float32 and vectors.shape == (self.rows, self.columns)
        return vectors if fits and stamp == _checksum(vectors) else None

    def load_or_build(self, build: Callable[[Progress], Tensor], progress: Progress) -> Tensor:
        """Map the file; where nobody has built it or is building it, build it first.

        `build(progress)` runs at most once at a time for one place on one machine; the others wait
        and pass on the builder's progress as it is made, so they do not hide a builder that hangs.
        When a builder dies or raises, one that waits takes over. A second call only maps.

        Raises:
            OSError: the directory cannot be written; give another one.
            Whatever `build` raises; nothing is left that would be taken for a result.
        """
        vectors = self.load()
        if vectors is not None:
            return vectors
        self.directory.mkdir(parents=True, exist_ok=True)
        with self._turn(progress) as note_progress:
            vectors = self.load()
            if vectors is None:
                self._store(build(note_progress))
                vectors = self.load()
        if vectors is None:
            raise OSError(f"{self.path} was written and does not read back: is the disk sound?")
        return vectors

    @contextmanager
    def _turn(self, progress: Progress) -> Iterator[Progress]:
        """Hold the right to build; yield a `progress` that those who wait can read, too.

        `flock` and not `lockf`: two threads of one process must exclude each other as well, and
        this lock never crosses a fork. The lock file stays: removing it would let two in at once.
        """
        descriptor = os.open(self.directory / f"{self.key}.lock", os.O_RDWR | os.O_CREAT, 0o644)
        try:
            heard = b""
            while not _try_lock(descriptor):
                said = os.pread(descriptor, 100, 0)
                if said != heard:
                    heard = said
                    _pass_on(said, progress)
                time.sleep(_POLL_S)
            os.ftruncate(descriptor, 0)  # what an earlier builder said is not news

            def tell(done: int, total: int, note: str) -> None:
                os.pwrite(descriptor, b"%10d %10d %10d\n" % (os.getpid(), done, total), 0)
                progress(done, total, note)

            yield tell
        finally:
            os.close(descriptor)

    def _store(self, vectors: Tensor) -> None:
        """Write `vectors` so that the final name shows all or nothing, power cuts included."""
        vectors = vectors.contiguous()
        temporary = self.directory / f"{self.key}.building"
        save_file({_TENSOR: vectors}, temporary, metadata={"sha256": _checksum(vectors)})
        _sync(temporary)
        temporary.replace(self.path)
        _sync(self.directory)


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _pass_on(said: bytes, progress: Progress) -> None:
    words = said.split()
    if len(words) == 3 and all(word.isdigit() for word in words):  # else: just made, or cut
        pid, done, total = (int(word) for word in words)
        progress(done, total, f"waiting: process {pid} builds them")


def _checksum(vectors: Tensor) -> str:
    return hashlib.sha256(vectors.numpy().data).hexdigest()


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
