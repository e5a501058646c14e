"""What a supervisor's successor will know of its workers."""

from __future__ import annotations

import contextlib
import sqlite3
from pathlib import Path

from stagekeeper.supervisor.store import FILE_NAME
from tests.harness.waiting import wait_for


async def roster_written(state_dir: Path, worker_count: int) -> None:
    """Wait until a successor would know its workers; the list is written now and then."""

    def is_on_disk() -> bool:
        with contextlib.closing(sqlite3.connect(state_dir / FILE_NAME)) as store:
            (count,) = store.execute("SELECT count(*) FROM roster").fetchone()
        return bool(count == worker_count)

    await wait_for(is_on_disk, "the roster is on disk")
