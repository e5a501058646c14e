"""The notes of a random tree, sorted: who was born, who ended how, who was told of what.

Decided here: when an actor counts as alive, asked to end, failed or hurt. Invariant: only notes and
`Evidence` are looked at, never the product.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

Note = dict[str, Any]
Key = tuple[str, str, tuple[int, ...], tuple[int, ...]]

BESIDE_THE_END = ("UNDELIVERABLE", "CLEANUP_RAISED", "STALLED")
"""Kinds of failure that say of no end; each of them is told once as well."""


@dataclass
class Call:
    """A call that a trial made."""

    mesh_id: str
    task: asyncio.Task[Any]
    number: int
    is_short: bool
    is_stop: bool = False


@dataclass
class Evidence:
    """What is known beside the notes.

    Attributes:
        hurt: processes that were killed or frozen, ever.
        frozen: those that are frozen now.
        alive: actors that live, as of the last look.
        latest: the last actor of each rank.
        is_over: the root has ended.
    """

    hurt: set[str] = field(default_factory=set)
    frozen: set[str] = field(default_factory=set)
    alive: set[str] = field(default_factory=set)
    latest: dict[tuple[str, int], str] = field(default_factory=dict)
    slow: set[str] = field(default_factory=set)
    is_over: bool = False
    lease_s: float = 0.0

    def may_be_slow(self, mesh_id: str) -> bool:
        return mesh_id in self.slow


class Lives:
    """The notes, sorted."""

    def __init__(
        self, notes: list[Note], is_living: Callable[[str], bool], evidence: Evidence
    ) -> None:
        self.notes = notes
        self.evidence = evidence
        self.is_living = is_living
        by_what: dict[str, list[Note]] = defaultdict(list)
        for it in notes:
            by_what[it["what"]].append(it)
        self.by_what = by_what
        self.born = {it["actor"]: it for it in by_what["born"]}
        self.meshes = {it["mesh_id"] for it in by_what["born"]}
        self.last_life = {(it["mesh_id"], it["rank"]): it["life"] for it in by_what["born"]}
        self.ended = {it["actor"] for it in by_what["cleans up"]}
        self.hurt = evidence.hurt | {it["process"] for it in by_what["leaves"]}
        self.paths = {birth["path"][-1]: birth["path"] for birth in self.born.values()}
        self.boomed = {it["actor"] for it in by_what["booms"]}
        asked: set[str] = set()
        for it in by_what["asks"]:
            asked |= {it["mesh_id"], *it.get("places", ())}
        self.asked = asked
        self.told = [it for it in notes if it["what"] in ("is told", "hook")]
        self.decided: dict[tuple[str, Key], str] = {
            (it["actor"], key_of(it["failure"])): it["decision"] for it in by_what["decides"]
        }
        self.finals = [
            it["failure"]
            for it in self.told
            if it["what"] == "hook" or self.decision(it) == "handled"
        ]
        # Whoever joins a stop is given the same report.
        self.finals += {
            key_of(failure): failure for it in by_what["stopped"] for failure in it["cleanup"]
        }.values()
        self.seen = {
            key
            for failure in [*(it["failure"] for it in self.told), *self.finals]
            for key in keys_in(failure)
        }
        self.raised_by_respawns = {
            failure_id for it in by_what["respawn failed"] for failure_id in it["ids"]
        }
        self.stalled = {
            (it["failure"]["mesh_id"], rank)
            for it in self.told
            if it["failure"]["kind"] == "STALLED"
            for rank in it["failure"]["ranks"]
        }
        """Ranks of which somebody was told that they make no progress."""
        self.raised_of = {
            (it["mesh_id"], failure_id)
            for it in by_what["respawn failed"]
            for failure_id in it["ids"]
        }
        """(mesh, failure) that a respawn raised: the end of a process is one of each mesh in it."""
        self.overdue = {one for it in by_what["stopped"] for one in it["overdue"]}
        self.respawns_failed = {
            (it["actor"], it["mesh_id"], rank)
            for it in by_what["respawn failed"]
            for rank in it["ranks"]
        }

        self.failed = {
            (key[1], rank, life)
            for failure in [*(it["failure"] for it in self.told), *self.finals]
            for one in (failure, *failure["causes"])
            if one["kind"] not in BESIDE_THE_END
            for key in (key_of(one),)
            for rank, life in zip(key[2], key[3], strict=True)
        }

    def has_failed(self, actor: str) -> bool:
        """Return whether anybody was told that it failed; it may be ending still."""
        if actor == "root":
            return False
        birth = self.born[actor]
        return (birth["mesh_id"], birth["rank"], birth["life"]) in self.failed

    def decision(self, told: Note) -> str:
        return self.decided.get((told["actor"], key_of(told["failure"])), "none")

    def process(self, actor: str) -> str:
        process: str = self.born[actor]["path"][-1]
        return process

    def is_alive(self, actor: str) -> bool:
        if actor == "root":
            return not self.evidence.is_over
        birth = self.born[actor]
        return (
            self.is_living(self.process(actor)) and actor not in self.ended and not birth["raises"]
        )

    def owners(self, actor: str) -> Iterator[str]:
        """Yield the owner, its owner, and so on up to the root."""
        while actor != "root":
            actor = self.born[actor]["owner"]
            yield actor

    def was_ending(self, actor: str) -> bool:
        """Return whether it may have been on its way out for another reason than its process."""
        return self.is_asked(actor) or actor in self.boomed or self.has_failed(actor)

    def is_hurt(self, process: str, hurt: set[str]) -> bool:
        """Return whether it, or one above it, is one of these, or left; or is unknown."""
        path = self.paths.get(process)
        left = {it["process"] for it in self.by_what["leaves"]}
        return path is None or any(it in hurt | left for it in path)

    def meshes_in(self, process: str) -> set[str]:
        """Return the meshes with an actor in a process or below it."""
        return {birth["mesh_id"] for birth in self.born.values() if process in birth["path"]}

    def line(self, actor: str) -> Iterator[str]:
        """Yield it and its owners, but the root."""
        yield actor
        yield from (owner for owner in self.owners(actor) if owner != "root")

    def is_asked(self, actor: str) -> bool:
        birth = self.born[actor]
        return birth["mesh_id"] in self.asked or any(it in self.asked for it in birth["path"])

    def is_touched_by(self, actor: str, processes: set[str]) -> bool:
        """Return whether it, or an owner of it, is in one of these processes or below one."""
        return any(it in processes for one in self.line(actor) for it in self.born[one]["path"])

    def name(self, actor: str) -> str:
        if actor == "root":
            return "root"
        birth = self.born[actor]
        return f"{birth['mesh']}[{birth['rank']}].{birth['life']}"


def key_of(failure: Note) -> Key:
    """Return what makes two reports reports of one failure."""
    return failure["id"], failure["mesh_id"], tuple(failure["ranks"]), tuple(failure["lives"])


def keys_in(failure: Note) -> set[Key]:
    """Return the failure and what it stands for; an UNDELIVERABLE says only why."""
    if failure["kind"] == "UNDELIVERABLE":
        return {key_of(failure)}
    return {key_of(failure), *map(key_of, failure["causes"])}
