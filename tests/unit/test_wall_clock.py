"""recovery-R45: who reads the wall clock, and for what. Nothing that decides is among them."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
WALL_CLOCKS = {"time", "wall", "time_ns", "now", "utcnow", "today", "localtime", "gmtime", "ctime"}
OWNERS = {"time", "datetime", "date", "clock", "_clock"}

FOR_DISPLAY = {
    "services/stagekeeper/runtime/clock.py": "the clock itself",
    "services/stagekeeper/supervisor/wall_times.py": "when something happened",
    "services/stagekeeper/cli/describing.py": "how long ago something happened",
    "services/stagekeeper/cli/event_showing.py": "whether an event is of today",
    "services/stagekeeper/supervisor/creation.py": "when a deployment was wanted",
    "services/stagekeeper/agent/deaths.py": "when a failure was seen",
    "services/stagekeeper/agent/stage_process.py": "since when a stage is READY",
    "services/stagekeeper/agent/spawning.py": "when a stage was started",
    "services/stagekeeper/runtime/phase_lock.py": "since when a holder has the cards",
    "clients/stagekeeper/actor/failing.py": "when a failure of an actor was seen",
}
"""By file: what is noted down for people. Whoever adds one says what it shows, and decides nothing
by it: a clock that jumps must change no state."""


def readings(path: Path) -> Iterator[str]:
    """Yield each call in a file that reads a time of day."""
    for node in ast.walk(ast.parse(path.read_text())):
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
            continue
        name, of = node.func.attr, node.func.value
        owner = (
            of.attr if isinstance(of, ast.Attribute) else of.id if isinstance(of, ast.Name) else ""
        )
        if name in WALL_CLOCKS and owner in OWNERS and not (name == "time" and owner != "time"):
            yield f"{path.relative_to(ROOT)}:{node.lineno}"


def test_recovery_R45_wall_clock_is_read_for_display_alone() -> None:
    found = [
        reading
        for root in ("services/stagekeeper", "clients/stagekeeper")
        for path in sorted((ROOT / root).rglob("*.py"))
        for reading in readings(path)
    ]

    assert {reading.rpartition(":")[0] for reading in found} <= FOR_DISPLAY.keys(), found
    assert "services/stagekeeper/runtime/clock.py" in {it.rpartition(":")[0] for it in found}
