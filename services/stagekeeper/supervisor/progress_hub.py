"""Progress of starts, from the operations to the calls that wait for a deployment.

Decided here: what a reader that is slower than the news loses: the steps inside one phase, never a
phase. Invariant: a reader holds at most one message per stage, state and phase.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from stagekeeper.core.ids import DeploymentName
from stagekeeper.v1 import types_pb2 as pb2

Key = tuple[int, int, str, int, int]


class ProgressReader:
    """What one call has not sent yet of a deployment's progress; arrivals set `news`."""

    def __init__(self, news: asyncio.Event) -> None:
        self._news = news
        self._waiting: dict[Key, pb2.StageProgress] = {}
        self._told: dict[tuple[int, int, str], pb2.StageProgress] = {}

    def put(self, progress: pb2.StageProgress) -> None:
        key = (
            progress.replica_index,
            progress.stage_id,
            progress.worker_id,
            progress.state,
            progress.phase,
        )
        self._waiting[key] = progress
        self._news.set()

    def take(self) -> list[pb2.StageProgress]:
        """Return what is new since the last time, oldest first; repeats are left out."""
        new = []
        for key, progress in self._waiting.items():
            if self._told.get(key[:3]) != progress:
                self._told[key[:3]] = progress
                new.append(progress)
        self._waiting.clear()
        return new


class ProgressHub:
    """Hands progress to whoever waits for its deployment; nobody waiting is no error."""

    def __init__(self) -> None:
        self._readers: dict[DeploymentName, set[ProgressReader]] = {}

    def publish(self, deployment: DeploymentName, progress: pb2.StageProgress) -> None:
        for reader in self._readers.get(deployment, ()):
            reader.put(progress)

    @contextmanager
    def subscribe(
        self, deployment: DeploymentName, news: asyncio.Event
    ) -> Iterator[ProgressReader]:
        """Lend a reader that hears of `deployment` inside the block and sets `news` then."""
        reader = ProgressReader(news)
        readers = self._readers.setdefault(deployment, set())
        readers.add(reader)
        try:
            yield reader
        finally:
            readers.discard(reader)
            if not readers:
                self._readers.pop(deployment, None)
