"""How a failure reads: one line, and the short tree that a person is shown.

The tree goes from who failed last down to where it began, so that the root cause, which is what
the reader needs, stands last and nearest to the prompt. Invariant: whatever a log line or a message
contains, no control character of it reaches a terminal.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from itertools import takewhile
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from stagekeeper.actor.failure import MeshFailure

_MOST_LOG_LINES: Final = 5
_MOST_TRACEBACK_LINES: Final = 8
_LONGEST_LINE: Final = 300
_DEEPER: Final = "   "


def place_name(mesh_name: str, ranks: Sequence[int]) -> str:
    """Name ranks of a mesh: `workers[2]`, `workers[0-3,7]`; without ranks the mesh alone."""
    name = mesh_name or "(unnamed)"
    if not ranks:
        return name
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    return f"{name}[{','.join(str(a) if a == b else f'{a}-{b}' for a, b in runs)}]"


def signal_name(number: int) -> str:
    """`SIGKILL`; of a signal without a name its number."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def end_of(failure: MeshFailure) -> str:
    """Make the sentence of a failure that was given none."""
    end = failure.exit
    code = "an unknown code" if end is None or end.code is None else f"code {end.code}"
    by = "a signal" if end is None or end.signal is None else signal_name(end.signal)
    asked = f"{failure.endpoint or 'a message'}" + (
        f" from {failure.sender}" if failure.sender else ""
    )
    sentences = {
        "EXITED": f"exited with {code}, which nobody had asked for",
        "SIGNALED": f"was ended by {by}",
        "OUT_OF_MEMORY": "was ended by the kernel for memory",
        "INIT_RAISED": "could not be made: its __init__ raised",
        "INIT_TIMEOUT": "did not come up in time",
        "GONE": "is gone, and how it ended is not known",
        "STALLED": "is alive and makes no progress",
        "BROADCAST_RAISED": f"raised in {asked}, for whose answer nobody waited",
        "UNDELIVERABLE": f"was gone when {asked} came",
        "CLEANUP_RAISED": "failed in its __cleanup__",
        "UNHANDLED": "did not handle a failure below it",
        "SUPERVISE_RAISED": "raised in its __supervise__",
        "OWNER_GONE": "lost its owner",
        "DEVICE_FAILED": "was ended, since its card failed",
    }
    return f"{failure.where} {sentences.get(failure.kind, 'failed')}"


def summary_of(failure: MeshFailure) -> str:
    """Say in one line what happened and, where that is something else, where it began."""
    line = _line(failure.message)
    return f"{line}: {_line(failure.root.message)}" if failure.causes else line


def tree_of(failure: MeshFailure) -> str:
    """Show a failure and what caused it, the root cause last."""
    lines: list[str] = []
    above: list[MeshFailure] = []
    shown = (failure, *reversed(failure.causes))
    for position, one in enumerate(shown):
        # Causes are kept flat. A failure has one owner's word more than those that it came of, and
        # several that one owner did not handle have as many words as each other.
        while above and len(above[-1].path) <= len(one.path):
            above.pop()
        arrow = f"{_DEEPER * (len(above) - 1)} └ " if above else ""
        lines.append(f"{arrow}{one.kind}: {_line(one.message)} ({_line(one.id)})")
        lines += [
            f"{_DEEPER * len(above)}   {line}" for line in _details(one, shown[position + 1 :])
        ]
        above.append(one)
    return "\n".join(lines)


def _details(failure: MeshFailure, below: Sequence[MeshFailure]) -> Iterator[str]:
    facts = [f"pid {failure.pid}"] if failure.pid else []
    if any(life > 1 for life in failure.incarnations):
        facts.append(f"incarnation {', '.join(map(str, failure.incarnations))}")
    if failure.exit is not None:
        facts.append(str(failure.exit) + (", asked to end" if failure.exit.asked else ""))
    if failure.detected_by:
        facts.append(f"seen by {failure.detected_by}{_at(failure.detect_time)}")
    if failure.restarts_tried:
        facts.append(f"restarts tried: {failure.restarts_tried}")
    if facts:
        yield _line("; ".join(facts))
    if failure.endpoint:
        yield _line(
            f"in {failure.endpoint}" + (f", sent by {failure.sender}" if failure.sender else "")
        )
    yield from _raised(failure, is_root=not below)
    if failure.last_log_lines:
        yield "the last lines of its log:"
        for line in failure.last_log_lines[-_MOST_LOG_LINES:]:
            yield f"  | {_line(line)}"
    said = 0
    if failure.kind in ("UNHANDLED", "SUPERVISE_RAISED"):
        # What was said of those below, and the word that made this one, which is its message.
        lengths = takewhile(len(failure.path).__gt__, (len(it.path) for it in below))
        said = 1 + max(lengths, default=0)
    for hop in failure.path[said:]:
        yield _line(f"then {hop.owner}: {hop.decision}")


def _raised(failure: MeshFailure, *, is_root: bool) -> Iterator[str]:
    """Tell what was raised and, of the root cause, where: the end of the author's traceback."""
    told = [line for line in failure.remote_traceback.splitlines() if line.strip(" ^~")]
    error = told[-1].strip() if told else ""
    frames = [line for line in told[:-1] if not line.startswith("Traceback (")]
    if is_root and frames:
        yield "raised at:"
        yield from (f"  {_visible(line)}" for line in frames[-_MOST_TRACEBACK_LINES:])
    if error and error not in failure.message:
        yield _line(f"raised {error}")


def _at(seconds: float | None) -> str:
    if seconds is None:
        return ""
    try:
        return f" at {datetime.fromtimestamp(seconds, UTC):%H:%M:%S} UTC"
    except (ValueError, OverflowError, OSError):
        return ""


def _line(text: str) -> str:
    """Return the first line, cut, with whatever a terminal might obey made visible."""
    return _visible(next((line for line in text.splitlines() if line.strip()), "").strip())


def _visible(line: str) -> str:
    if len(line) > _LONGEST_LINE:
        line = line[: _LONGEST_LINE - 1] + "…"
    return "".join(it if it.isprintable() else repr(it)[1:-1] for it in line)
