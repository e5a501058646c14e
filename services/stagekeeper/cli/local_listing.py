"""The stages of this host as `stagekeeper stages --local` lists them.

Decided here: where it looks, and what is said when there is nothing.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from stagekeeper.cli.exits import CliError, ExitCode

if TYPE_CHECKING:
    from stagekeeper.agent.local_stages import LocalWorker


def workers_of(state_dir: Path, worker_id: str | None) -> list[LocalWorker]:
    """Read what the workers of a state directory have on record, or one of them.

    Raises:
        CliError: that one has nothing there.
    """
    from stagekeeper.agent.local_stages import read_workers
    from stagekeeper.core.ids import WorkerId

    if worker_id is None:
        return read_workers(state_dir)
    found = read_workers(state_dir, WorkerId(worker_id))
    if not found:
        raise CliError(
            ExitCode.FAILED,
            f"no agent of worker {worker_id!r} has kept anything in {state_dir}: "
            "`stagekeeper stages --local` lists all workers, and --state-dir names another place",
        )
    return found


def list_shown(state_dir: Path, worker_id: str | None, *, is_json: bool) -> None:
    """Print what is there; nothing at all is an answer too."""
    from stagekeeper.cli.text.local_stages import local_json, local_text
    from stagekeeper.cli.text.tables import write_page

    workers = workers_of(state_dir, worker_id)
    if is_json:
        print(json.dumps(local_json(state_dir, workers), indent=2, ensure_ascii=False))
        return
    text = local_text(state_dir, workers)
    write_page(text.headlines, text.tables, text.notes)
