"""What is done to a random tree: kinds of ops, how often each, and plans of what is spawned.

Invariant: an op says all that is drawn of it, so that a list of them is a trial.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Final

from tests.harness.random_trees import Plan

ANSWERS: Final = ("accept", "respawn", "respawn", "refuse", "raise", "sleep", "oversleep")


@dataclass(frozen=True)
class Op:
    """One thing to do: to which branch, how, and how long to wait for what comes of it."""

    kind: str
    pick: int
    arg: int
    pause_s: float
    plan: Plan | None = None

    def __repr__(self) -> str:
        plan = "" if self.plan is None else f", {self.plan}"
        return f"{self.kind}({self.pick}, {self.arg}{plan}) +{self.pause_s}s"


KINDS: Final = {
    "spawn": 6, "call": 3, "nap": 3, "relay": 3, "cast boom": 3, "boom": 1, "cast": 2, "leave": 1,
    "kill": 5, "freeze": 2, "thaw": 2, "stop": 3, "stop procs": 2, "look": 2, "rest": 1,
    "procs": 1, "bad start": 1, "cut": 6, "stall": 1, "kill given": 1,
}  # fmt: skip


def draw_ops(chance: random.Random, most: int, *, depth: int = 2) -> list[Op]:
    """Draw what to do, with meshes that spawn meshes themselves down to `depth`."""
    kinds = [kind for kind, weight in KINDS.items() for _ in range(weight)]
    drawn = [
        "procs",
        "spawn",
        "spawn",
        *(chance.choice(kinds) for _ in range(chance.randrange(1, most))),
    ]
    return [_op(chance, kind, depth) for kind in drawn]


def _op(chance: random.Random, kind: str, depth: int) -> Op:
    plan = _plan(chance, depth) if kind == "spawn" else None
    pause_s = chance.choice((0.0, 0.001, 0.02, 0.3))
    return Op(kind, chance.randrange(1_000), chance.randrange(1_000), pause_s, plan)


def _plan(chance: random.Random, depth: int) -> Plan:
    kinds = ("Node", "Node", "Node", "Plain", "Mute")
    return {
        "kind": chance.choice(kinds),
        "answer": chance.choice(ANSWERS),
        "init": chance.choice(("ok",) * 8 + ("raise", "raise later")),
        "cleanup": chance.choice(("ok",) * 6 + ("raise", "slow")),
        "where": chance.choice(("own", "own", "here", "given")),
        "size": chance.choice((1, 1, 1, 2, 3)),
        "kids": [_plan(chance, depth - 1) for _ in range(chance.choice((0, 0, 0, 1, 1, 2)))]
        if depth
        else [],
    }
