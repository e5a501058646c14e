"""What happened, as a table, and which of the promises it breaks.

Pure: facts in, sentences and rows out. Invariant: a verdict in the table is green exactly when no
sentence of `broken_laws` speaks of that row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rich import box
from rich.table import Table

from .listing import Listing


@dataclass(frozen=True, slots=True)
class Kill:
    """One `kill -9`, of one process or of several at once.

    Attributes:
        who: the victims, for people.
        pids_before: the victims' pids, by name.
        pids_after: their successors'.
        listed_again_s: from the kill until every replica was listed READY by a supervisor, and
            every agent registered, that had not been killed.
        answered_meanwhile: requests that were answered in this time.
    """

    who: str
    pids_before: Mapping[str, int]
    pids_after: Mapping[str, int]
    listed_again_s: float
    answered_meanwhile: int


@dataclass(frozen=True, slots=True)
class Facts:
    """What the demo saw: two listings, before the first kill and after the last, and the load."""

    before: Listing
    after: Listing
    kills: Sequence[Kill]
    sent: int
    failures: Sequence[str]
    slowest_s: float


def broken_laws(facts: Facts) -> list[str]:
    """Return a sentence for each promise that was broken; empty when all were kept."""
    broken = broken_by_load(facts.sent, facts.failures)
    for (replica_index, stage), before in facts.before.stage_pids.items():
        after = facts.after.stage_pids.get((replica_index, stage))
        if after != before:
            now = f"process {after}" if after else "nowhere"
            broken.append(
                "no stage may be touched by the death of a supervisor or an agent, and stage "
                f"{stage} of replica {replica_index} was process {before} and is now {now}"
            )
    if facts.after.supervisor_address == facts.before.supervisor_address:
        broken.append(
            "a new supervisor is found at a new address, and this one serves its agents at "
            f"{facts.after.supervisor_address}, where the old one did: nothing was rediscovered"
        )
    for kill in facts.kills:
        for name, pid in kill.pids_before.items():
            if kill.pids_after.get(name) in (None, pid):
                broken.append(f"{name} was killed, and process {pid} is still the one that runs")
    return broken


def broken_by_load(sent: int, failures: Sequence[str]) -> list[str]:
    """Return the sentence on failed requests; none when none failed."""
    if not failures:
        return []
    return [f"no request may fail, and {len(failures):,} of {sent:,} did; the first: {failures[0]}"]


def table(facts: Facts) -> Table:
    """Lay out what happened."""
    shown = Table(box=box.SIMPLE_HEAD, title="What happened", title_justify="left")
    shown.title_style = "bold"
    for heading in ("", "before", "after", ""):
        shown.add_column(heading, overflow="fold")
    _add_requests(shown, facts)
    for kill in facts.kills:
        shown.add_row(
            f"kill -9 of {kill.who}",
            "",
            f"{kill.listed_again_s:.1f} s",
            f"until all was listed again; {kill.answered_meanwhile:,} answers",
        )
    shown.add_section()
    for kill in facts.kills:
        for name, before in kill.pids_before.items():
            after = kill.pids_after.get(name)
            is_new = after not in (None, before)
            shown.add_row(
                name, f"pid {before}", f"pid {after or '–'}", _verdict(is_new, "another process")
            )
    shown.add_row(
        "address for agents",
        facts.before.supervisor_address,
        facts.after.supervisor_address,
        _verdict(facts.before.supervisor_address != facts.after.supervisor_address, "changed"),
    )
    shown.add_section()
    for (replica_index, stage), before in facts.before.stage_pids.items():
        after = facts.after.stage_pids.get((replica_index, stage))
        shown.add_row(
            f"replica {replica_index}, stage {stage}",
            f"pid {before}",
            f"pid {after or '–'}",
            _verdict(after == before, "the same process"),
        )
    return shown


def _add_requests(shown: Table, facts: Facts) -> None:
    shown.add_row(
        "requests",
        f"{facts.sent:,} sent",
        f"{len(facts.failures):,} failed",
        _verdict(not facts.failures, f"all answered, the slowest in {facts.slowest_s:.1f} s"),
    )


def _verdict(is_kept: bool, when_kept: str) -> str:
    return f"[green]✔ {when_kept}[/]" if is_kept else f"[bold red]✘ not: {when_kept}[/]"
