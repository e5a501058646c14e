"""The rules of supervision, judged from what the actors of a tree wrote down.

One rule a function; each says in its assertion what is broken. Decided here: what "once", "lost"
and "outlives" mean. Invariant: the rules know nothing of how the product keeps them.
"""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

Note = dict[str, Any]
Key = tuple[str, str, tuple[int, ...], tuple[int, ...]]

_BESIDE_THE_END = ("UNDELIVERABLE", "CLEANUP_RAISED", "STALLED")
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


def judge(
    notes: list[Note],
    calls: list[Call],
    is_living: Callable[[str], bool],
    evidence: Evidence,
) -> None:
    """Hold all rules against what is known now, when nothing happens any more."""
    lives = _Lives(notes, is_living, evidence)
    evidence.alive = {
        actor for actor in lives.born if lives.is_alive(actor) and not lives.has_failed(actor)
    }
    evidence.latest = {
        (birth["mesh_id"], birth["rank"]): actor for actor, birth in lives.born.items()
    }
    evidence.slow = {
        birth["mesh_id"]
        for actor, birth in lives.born.items()
        if lives.is_touched_by(actor, evidence.frozen)
    }
    one_at_a_time(lives)
    told_once(lives)
    settled_once(lives)
    nothing_lost(lives)
    if not evidence.is_over:  # the end of the tree is the end of all
        every_end_is_told(lives)
    none_outlives_its_owner(lives)
    stopped_means_ended(lives)
    asked_is_no_failure(lives)
    told_by_one_way(lives)
    ends_once(lives)
    empty_processes_are_told(lives)
    calls_end(lives, calls)
    callers_hear_the_same(lives, calls)


class _Lives:
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
            if one["kind"] not in _BESIDE_THE_END
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

    def is_hurt(self, process: str) -> bool:
        """Return whether it, or one above it, was killed, left, was frozen; or is unknown."""
        path = self.paths.get(process)
        return path is None or any(it in self.hurt for it in path)

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


def one_at_a_time(lives: _Lives) -> None:
    """An owner is asked about one failure at a time."""
    in_hand: dict[str, Key] = {}
    for it in lives.notes:
        if it["what"] == "is told":
            before = in_hand.get(it["actor"])
            assert before is None, f"{lives.name(it['actor'])} is asked while it has {before}"
            in_hand[it["actor"]] = key_of(it["failure"])
        elif it["what"] == "decides":
            in_hand.pop(it["actor"], None)


def told_once(lives: _Lives) -> None:
    """Of one life of a rank an owner is told at most once that it ended; undeliverable: once."""
    counts: Counter[tuple[Any, ...]] = Counter()
    for it in lives.told:
        failure = it["failure"]
        kind = failure["kind"] if failure["kind"] in _BESIDE_THE_END else "END"
        for rank, life in zip(failure["ranks"], failure["lives"], strict=True):
            counts[it["actor"], failure["mesh"], failure["mesh_id"], rank, life, kind] += 1
    for (actor, mesh, _, rank, life, kind), count in counts.items():
        what = f"{lives.name(actor)} is told {count} times of {mesh}[{rank}].{life}: {kind}"
        assert count == 1, what


def settled_once(lives: _Lives) -> None:
    """A failure is handled by one, or at the hook once; by itself or as a cause."""
    counts: Counter[Key] = Counter()
    for failure in lives.finals:
        # An UNDELIVERABLE brings along why, which was told before.
        is_whole = all(it["kind"] != "UNDELIVERABLE" for it in failure["causes"])
        counts.update(keys_in(failure) if is_whole else {key_of(failure)})
    for key, count in counts.items():
        assert count == 1, f"{key} was settled {count} times"


def nothing_lost(lives: _Lives) -> None:
    """What an owner was told and did not handle is settled above it, also when it was stopped."""
    settled = {key for failure in lives.finals for key in keys_in(failure)}
    for it in lives.told:
        if it["what"] == "hook" or key_of(it["failure"]) in settled:
            continue
        if any(it["at"] > end["at"] for end in lives.by_what["ends all"]):
            continue  # the root waits for nobody over his budget
        actor = it["actor"]
        if lives.is_touched_by(actor, lives.hurt):
            continue  # it went down with what it knew, and that is told of
        if any(not lives.is_alive(it) and it not in lives.ended for it in lives.line(actor)):
            continue  # so it did when a stop was over its budget
        if any(lives.born[it]["mesh_id"] in lives.overdue for it in lives.line(actor)) or (
            lives.overdue & {it for one in lives.line(actor) for it in lives.born[one]["path"]}
        ):
            continue  # or nobody waited for its word any more
        if any(lives.has_failed(owner) for owner in lives.owners(actor)):
            continue  # it ended because one above it had failed, and that is told of
        told = f"{it['failure']['kind']} of {it['failure']['mesh']}{it['failure']['ranks']}"
        raise AssertionError(
            f"{lives.name(actor)} was told {told}, decided {lives.decision(it)!r}, "
            f"and it was settled nowhere: {key_of(it['failure'])}"
        )


def every_end_is_told(lives: _Lives) -> None:
    """An actor's end is told to its owner, unless somebody asked for it or the owner is gone."""
    told = {
        (it["actor"], it["failure"]["mesh_id"], rank, life)
        for it in lives.told
        for rank, life in zip(it["failure"]["ranks"], it["failure"]["lives"], strict=True)
        if it["failure"]["kind"] not in _BESIDE_THE_END
    }
    for actor, birth in lives.born.items():
        owner = birth["owner"]
        if lives.is_alive(actor) or not lives.is_alive(owner) or lives.has_failed(owner):
            continue
        if lives.is_touched_by(actor, lives.evidence.frozen):
            continue  # it is told when both can say and hear
        if any(map(lives.is_asked, lives.line(actor))):
            continue
        if (owner, birth["mesh_id"], birth["rank"]) in lives.respawns_failed:
            continue
        if birth["life"] < lives.last_life[birth["mesh_id"], birth["rank"]] and any(
            it["failure"]["kind"] == "STALLED" and birth["mesh_id"] == it["failure"]["mesh_id"]
            for it in lives.told
        ):
            continue  # its owner was told that it is stalled, and replaced it
        known = (owner, birth["mesh_id"], birth["rank"], birth["life"]) in told
        assert known, f"{lives.name(actor)} ended, and {lives.name(owner)} was not told"


def none_outlives_its_owner(lives: _Lives) -> None:
    """An actor ends with its owner, and so does a process."""
    for actor in lives.born:
        if not lives.is_alive(actor) or lives.is_touched_by(actor, lives.evidence.frozen):
            continue
        for owner in lives.owners(actor):
            assert lives.is_alive(owner), f"{lives.name(actor)} outlives {lives.name(owner)}"


def stopped_means_ended(lives: _Lives) -> None:
    """Of a mesh that was stopped, or of processes that were, nothing lives on."""
    for actor in lives.born:
        if lives.is_asked(actor) and not lives.is_touched_by(actor, lives.evidence.frozen):
            assert not lives.is_alive(actor), f"{lives.name(actor)} was stopped, and lives"


_OF_A_PROCESS = ("EXITED", "SIGNALED", "GONE")


def asked_is_no_failure(lives: _Lives) -> None:
    """Of what was asked to end, and was not hurt, nobody is told that it ended."""
    asked: set[str] = set()
    is_over = False
    for it in lives.notes:
        if it["what"] == "asks":
            asked.add(it["mesh_id"])
        is_over = is_over or it["what"] == "ends all"
        if it["what"] not in ("is told", "hook"):
            continue
        for one in (it["failure"], *it["failure"]["causes"]):
            if "by its owner" in one["message"]:
                continue  # it was another owner's, and who is told had not asked for it
            if one["kind"] in _OF_A_PROCESS and not lives.is_hurt(one["instance_id"]):
                what = f"{one['kind']} of {one['mesh']}{one['ranks']}, which was asked to end"
                assert not (is_over or one["mesh_id"] in asked), f"told: {what}"


def told_by_one_way(lives: _Lives) -> None:
    """What `respawn` raised, and what actors in a process were told of, is told to no other."""
    meshes = {birth["mesh_id"] for birth in lives.born.values()}
    for it in lives.told:
        failure = it["failure"]
        if failure["kind"] == "INIT_RAISED" and failure["mesh_id"] in meshes:
            assert failure["id"] not in lives.raised_by_respawns, (
                f"told and raised by respawn: {failure}"
            )
        if failure["mesh_id"] in meshes or failure["kind"] not in _OF_A_PROCESS:
            continue
        for actor, birth in lives.born.items():
            if birth["path"][-1] != failure["instance_id"] or birth["raises"]:
                continue
            is_settled = it["at"] - birth["at"] > lives.evidence.lease_s
            is_in_it = actor not in lives.ended and not any(
                map(lives.was_ending, lives.line(actor))
            )
            if is_settled and is_in_it:
                raise AssertionError(f"{failure} is told though {lives.name(actor)} was in it")


def ends_once(lives: _Lives) -> None:
    """An actor cleans up at most once."""
    for actor, count in Counter(it["actor"] for it in lives.by_what["cleans up"]).items():
        assert count == 1, f"{lives.name(actor)} cleaned up {count} times"


def empty_processes_are_told(lives: _Lives) -> None:
    """A process that ends with nobody in it is told of to its owner, or to who was moving in."""
    inhabited = {it for birth in lives.born.values() for it in birth["path"]}
    for it in lives.by_what["kills"]:
        process = it["process"]
        if process in inhabited or process in lives.asked:
            continue
        ids = {key[0] for key in lives.seen} | lives.raised_by_respawns
        assert f"{process}-end-1" in ids, f"nobody was told of the end of {process}"


def calls_end(lives: _Lives, calls: list[Call]) -> None:
    """A call ends when its callee has."""
    napping = defaultdict(list)
    for it in lives.by_what["naps"]:
        napping[it["call"]].append(it["actor"])
    latest: dict[str, dict[int, str]] = defaultdict(dict)
    for actor, birth in lives.born.items():
        latest[birth["mesh_id"]][birth["rank"]] = actor
    for call in calls:
        if call.task.done():
            error = call.task.exception()
            if error is not None:
                raise error
            continue
        assert not lives.evidence.is_over, f"a call of {call} outlives the tree"
        actors = napping.get(call.number) or list(latest[call.mesh_id].values())
        if lives.evidence.frozen and not actors:
            continue  # its process stopped before it was born
        assert actors, f"{call} waits for a mesh of which nothing was born"
        if any(lives.is_touched_by(it, lives.evidence.frozen) for it in actors):
            continue
        for actor in actors:
            assert lives.is_alive(actor), f"{call} outlives {lives.name(actor)}"
        assert not call.is_short, f"{call} is not answered by {lives.name(actors[0])}, which lives"


def callers_hear_the_same(lives: _Lives, calls: list[Call]) -> None:
    """What a caller is told of an end has the id that the owner was told."""
    ids: dict[tuple[Any, ...], set[str]] = defaultdict(set)
    for it in lives.told:
        failure = it["failure"]
        if failure["kind"] not in ("UNDELIVERABLE", "CLEANUP_RAISED"):
            for rank, life in zip(failure["ranks"], failure["lives"], strict=True):
                ids[failure["mesh_id"], rank, life].add(failure["id"])
    owner_of = {birth["mesh_id"]: birth["owner"] for birth in lives.born.values()}
    for call in calls:
        if not call.task.done() or call.task.cancelled():
            continue
        for failure in call.task.result()["died"]:
            owner = owner_of.get(failure["mesh_id"])
            if owner is None or not lives.is_alive(owner):
                continue  # perhaps it could not be asked
            for rank, life in zip(failure["ranks"], failure["lives"], strict=True):
                known = ids[failure["mesh_id"], rank, life]
                what = f"{failure['mesh']}[{rank}].{life}"
                if any("stalled" in it for it in known):
                    continue  # as long as it was, everybody saw something else
                assert not known or failure["id"] in known, f"{what}: {failure}, owner {known}"
