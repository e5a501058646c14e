"""The rules of supervision, judged from what the actors of a tree wrote down.

One rule a function; each says in its assertion what is broken. Decided here: what "once", "lost"
and "outlives" mean. Invariant: the rules know nothing of how the product keeps them.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable
from typing import Any

from tests.harness.tree_lives import (
    BESIDE_THE_END,
    Call,
    Evidence,
    Key,
    Lives,
    Note,
    key_of,
    keys_in,
)


def judge(
    notes: list[Note],
    calls: list[Call],
    is_living: Callable[[str], bool],
    evidence: Evidence,
) -> None:
    """Hold all rules against what is known now, when nothing happens any more."""
    lives = Lives(notes, is_living, evidence)
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


def one_at_a_time(lives: Lives) -> None:
    """An owner is asked about one failure at a time."""
    in_hand: dict[str, Key] = {}
    for it in lives.notes:
        if it["what"] == "is told":
            before = in_hand.get(it["actor"])
            assert before is None, f"{lives.name(it['actor'])} is asked while it has {before}"
            in_hand[it["actor"]] = key_of(it["failure"])
        elif it["what"] == "decides":
            in_hand.pop(it["actor"], None)


def told_once(lives: Lives) -> None:
    """Of one life of a rank an owner is told at most once that it ended; undeliverable: once.

    Of stalls each time, since the rank may have come back after the one before.
    """
    counts: Counter[tuple[Any, ...]] = Counter()
    for it in lives.told:
        failure = it["failure"]
        kind = failure["kind"] if failure["kind"] in BESIDE_THE_END else "END"
        if kind == "STALLED":
            kind = failure["id"]
        for rank, life in zip(failure["ranks"], failure["lives"], strict=True):
            counts[it["actor"], failure["mesh"], failure["mesh_id"], rank, life, kind] += 1
    for (actor, mesh, _, rank, life, kind), count in counts.items():
        what = f"{lives.name(actor)} is told {count} times of {mesh}[{rank}].{life}: {kind}"
        assert count == 1, what


def settled_once(lives: Lives) -> None:
    """A failure is handled by one, or at the hook once; by itself or as a cause."""
    counts: Counter[Key] = Counter()
    for failure in lives.finals:
        # An UNDELIVERABLE brings along why, which was told before.
        is_whole = all(it["kind"] != "UNDELIVERABLE" for it in failure["causes"])
        counts.update(keys_in(failure) if is_whole else {key_of(failure)})
    for key, count in counts.items():
        assert count == 1, f"{key} was settled {count} times"


def nothing_lost(lives: Lives) -> None:
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


def every_end_is_told(lives: Lives) -> None:
    """An actor's end is told to its owner, unless somebody asked for it or the owner is gone."""
    told = {
        (it["actor"], it["failure"]["mesh_id"], rank, life)
        for it in lives.told
        for rank, life in zip(it["failure"]["ranks"], it["failure"]["lives"], strict=True)
        if it["failure"]["kind"] not in BESIDE_THE_END
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


def none_outlives_its_owner(lives: Lives) -> None:
    """An actor ends with its owner, and so does a process."""
    for actor in lives.born:
        if not lives.is_alive(actor) or lives.is_touched_by(actor, lives.evidence.frozen):
            continue
        for owner in lives.owners(actor):
            assert lives.is_alive(owner), f"{lives.name(actor)} outlives {lives.name(owner)}"


def stopped_means_ended(lives: Lives) -> None:
    """Of a mesh that was stopped, or of processes that were, nothing lives on."""
    for actor in lives.born:
        if lives.is_asked(actor) and not lives.is_touched_by(actor, lives.evidence.frozen):
            assert not lives.is_alive(actor), f"{lives.name(actor)} was stopped, and lives"


_OF_A_PROCESS = ("EXITED", "SIGNALED", "GONE")


def asked_is_no_failure(lives: Lives) -> None:
    """Of what was asked to end, and was not hurt, nobody is told that it ended."""
    asked: set[str] = set()
    hurt, hurt_itself = set(lives.evidence.hurt), set(lives.evidence.hurt)
    is_over = False
    for it in lives.notes:  # what was killed when it was asked to end already is no failure either
        if it["what"] == "asks":
            asked |= {it["mesh_id"], *it.get("places", ())}
        if it["what"] == "kills" and lives.meshes_in(it["process"]) <= asked:
            hurt.discard(it["process"])
        if it["what"] == "kills" and it["process"] in asked:
            hurt_itself.discard(it["process"])
    asked.clear()
    for it in lives.notes:
        if it["what"] == "asks":
            asked.add(it["mesh_id"])
        is_over = is_over or it["what"] == "ends all"
        if it["what"] not in ("is told", "hook"):
            continue
        for one in (it["failure"], *it["failure"]["causes"]):
            if "by its owner" in one["message"]:
                continue  # it was another owner's, and who is told had not asked for it
            is_actor = one["mesh_id"] in lives.meshes
            was_hurt = lives.is_hurt(one["instance_id"], hurt if is_actor else hurt_itself)
            if one["kind"] in _OF_A_PROCESS and not was_hurt:
                what = f"{one['kind']} of {one['mesh']}{one['ranks']}, which was asked to end"
                assert not (is_over or one["mesh_id"] in asked), f"told: {what}"


def told_by_one_way(lives: Lives) -> None:
    """What `respawn` raised, and what actors in a process were told of, is told to no other."""
    meshes = {birth["mesh_id"] for birth in lives.born.values()}
    for it in lives.told:
        failure = it["failure"]
        if failure["kind"] == "INIT_RAISED" and failure["mesh_id"] in meshes:
            assert (failure["mesh_id"], failure["id"]) not in lives.raised_of, (
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


def ends_once(lives: Lives) -> None:
    """An actor cleans up at most once."""
    for actor, count in Counter(it["actor"] for it in lives.by_what["cleans up"]).items():
        assert count == 1, f"{lives.name(actor)} cleaned up {count} times"


def empty_processes_are_told(lives: Lives) -> None:
    """A process that ends with nobody in it is told of to its owner, or to who was moving in."""
    inhabited = {it for birth in lives.born.values() for it in birth["path"]}
    for it in lives.by_what["kills"]:
        process = it["process"]
        if process in inhabited or process in lives.asked:
            continue
        ids = {key[0] for key in lives.seen} | lives.raised_by_respawns
        assert f"{process}-end-1" in ids, f"nobody was told of the end of {process}"


def calls_end(lives: Lives, calls: list[Call]) -> None:
    """A call ends when its callee has."""
    napping = defaultdict(list)
    for it in lives.by_what["naps"]:
        napping[it["call"]].append(it["actor"])
    latest: dict[str, dict[int, str]] = defaultdict(dict)
    sizes: dict[str, int] = {}
    for actor, birth in lives.born.items():
        latest[birth["mesh_id"]][birth["rank"]] = actor
        sizes[birth["mesh_id"]] = birth["size"]
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
        others = latest[call.mesh_id].values()  # it may wait for these as well
        if any(lives.is_touched_by(it, lives.evidence.frozen) for it in (*actors, *others)):
            continue
        for actor in actors:
            assert lives.is_alive(actor), f"{call} outlives {lives.name(actor)}"
        if any(lives.is_touched_by(actor, lives.hurt) for actor in actors):
            continue  # whose process was frozen may be on its way still
        unborn = set(range(sizes[call.mesh_id])) - set(latest[call.mesh_id])
        if unborn and {(call.mesh_id, rank) for rank in unborn} <= lives.stalled:
            continue  # it waits for one that is to be in a process that is frozen
        assert not call.is_short, f"{call} is not answered by {lives.name(actors[0])}, which lives"


def callers_hear_the_same(lives: Lives, calls: list[Call]) -> None:
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
