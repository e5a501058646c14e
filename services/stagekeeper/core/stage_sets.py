"""Sets of shards: which start stands for a replica, and what contradicts itself.

Decided here: the choice among the starts of one replica, and what a CONFLICT is. Not decided here:
what the chosen one is worth (`derive`).

A start is one operation over all stages: its stages were told of each other's addresses, and were
committed together. Invariant: what can be routed is of one start; shards are never taken from two
generations of a stage; the choice does not depend on the order of the claims.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol, TypeVar

from stagekeeper.core.ids import Generation, StageId, WorkerId
from stagekeeper.core.model import DeploymentSpec, RoutedShard, ShardRecord
from stagekeeper.core.states import ShardState, WorkerState


class Claim(NamedTuple):
    """One shard by the word of one worker."""

    worker_id: WorkerId
    worker_state: WorkerState
    record: ShardRecord


@dataclass(slots=True)
class StageSet:
    """The shards of one stage with one generation. `claims` are in shard order, never empty.

    `conflict` says what contradicts what; empty when nothing does.
    """

    stage_id: StageId
    generation: Generation
    claims: list[Claim]
    conflict: str = ""

    @property
    def shard_count(self) -> int:
        return max(claim.record.shard_count for claim in self.claims)

    @property
    def is_committed(self) -> bool:
        return all(claim.record.committed for claim in self.claims)

    @property
    def has_failed(self) -> bool:
        return any(claim.record.state is ShardState.FAILED for claim in self.claims)

    @property
    def is_routable(self) -> bool:
        """Complete, without contradiction, and every shard READY and committed."""
        if self.conflict or len(self.claims) != self.claims[0].record.shard_count:
            return False
        for claim in self.claims:
            if claim.record.state is not ShardState.READY or not claim.record.committed:
                return False
        return True

    @property
    def label(self) -> str:
        return f"stage {self.stage_id} ({self.claims[0].record.stage_name})"


@dataclass(slots=True)
class Start:
    """What is reported of one start of a replica: sets ascending by stage, never none."""

    sets: list[StageSet]

    @property
    def is_committed(self) -> bool:
        return all(one.is_committed for one in self.sets)

    @property
    def has_failed(self) -> bool:
        return any(one.has_failed for one in self.sets)

    @property
    def is_routable(self) -> bool:
        """Every stage is there and can be routed."""
        stage_count = self.sets[0].claims[0].record.stage_count
        if len(self.sets) != stage_count or self.sets[-1].stage_id != stage_count - 1:
            return False
        return all(one.is_routable for one in self.sets)


@dataclass(slots=True)
class Shown:
    """What stands for a replica.

    Attributes:
        start: the start that was chosen.
        others: sets of stages that nobody reports of that start, ascending: shown, never routed.
    """

    start: Start
    others: list[StageSet]

    @property
    def sets(self) -> list[StageSet]:
        """All that is shown, ascending by stage."""
        return sorted([*self.start.sets, *self.others], key=lambda one: one.stage_id)


class _Candidate(Protocol):
    @property
    def is_routable(self) -> bool: ...

    @property
    def is_committed(self) -> bool: ...

    @property
    def has_failed(self) -> bool: ...


_C = TypeVar("_C", bound=_Candidate)


def choose_shown(claims: Sequence[Claim], spec: DeploymentSpec | None) -> Shown:
    """Choose the start that stands for a replica; of `claims` there is at least one."""
    by_start: dict[Generation, dict[StageId, list[Claim]]] = {}
    for claim in claims:
        stages = by_start.setdefault(claim.record.generation, {})
        stages.setdefault(claim.record.stage_id, []).append(claim)
    starts = [_start(by_start[generation], spec) for generation in sorted(by_start, reverse=True)]
    chosen = _chosen(starts)
    if len(starts) == 1 or chosen.is_routable:
        return Shown(chosen, [])
    elsewhere: dict[StageId, list[StageSet]] = {}
    for start in starts:
        for one in start.sets:
            elsewhere.setdefault(one.stage_id, []).append(one)
    for one in chosen.sets:
        del elsewhere[one.stage_id]
    return Shown(chosen, [_chosen(elsewhere[stage_id]) for stage_id in sorted(elsewhere)])


def routed_shards(shown: Iterable[StageSet]) -> tuple[RoutedShard, ...]:
    """List the shards of these sets in the order of (stage, shard), CONFLICT written in."""
    return tuple(
        RoutedShard(
            replace(claim.record, state=ShardState.CONFLICT) if one.conflict else claim.record,
            claim.worker_id,
            claim.worker_state,
        )
        for one in shown
        for claim in one.claims
    )


def _chosen(candidates: Sequence[_C]) -> _C:
    """Choose among starts, or among the sets of a stage, given newest first.

    The newest that can be routed: a newer one that cannot withdraws nothing. Without any, the
    newest, except that a start which failed does not hide what was committed before it.
    """
    for candidate in candidates:
        if candidate.is_routable:
            return candidate
    for candidate in candidates:
        if candidate.is_committed or not candidate.has_failed:
            return candidate
    return candidates[0]


def _start(stages: dict[StageId, list[Claim]], spec: DeploymentSpec | None) -> Start:
    sets = [_stage_set(stage_id, stages[stage_id], spec) for stage_id in sorted(stages)]
    for one in sets[1:]:
        one.conflict = one.conflict or _disagreement_of_stages(sets[0].claims[0], one.claims[0])
    return Start(sets)


def _stage_set(stage_id: StageId, members: list[Claim], spec: DeploymentSpec | None) -> StageSet:
    conflict = ""
    if len(members) > 1:
        members.sort(key=lambda claim: (claim.record.shard_index, claim.worker_id))
        conflict = _disagreement(members)
    if spec is not None and not conflict:
        conflict = _quarrel_with_spec(stage_id, members[0], spec)
    return StageSet(stage_id, members[0].record.generation, members, conflict)


def _disagreement(members: Sequence[Claim]) -> str:
    """Say what two claims on one set disagree about."""
    for before, claim in itertools.pairwise(members):
        ours, theirs = before.record, claim.record
        who = f"workers {before.worker_id} and {claim.worker_id}"
        if ours.shard_index == theirs.shard_index:
            return f"{who} both claim shard {ours.shard_index}"
        if ours.shard_count != theirs.shard_count:
            return f"{who} say {ours.shard_count} and {theirs.shard_count} shards"
        if problem := _disagreement_of_stages(before, claim):
            return problem
        if ours.stage_name != theirs.stage_name:
            return f"{who} call it {ours.stage_name!r} and {theirs.stage_name!r}"
    return ""


def _disagreement_of_stages(before: Claim, claim: Claim) -> str:
    """Say what two claims on one start disagree about, be they of one stage or of two."""
    ours, theirs = before.record, claim.record
    who = f"workers {before.worker_id} and {claim.worker_id}"
    if ours.stage_count != theirs.stage_count:
        return f"{who} say {ours.stage_count} and {theirs.stage_count} stages"
    if ours.operation_id != theirs.operation_id:
        return f"{who} name the operations {ours.operation_id} and {theirs.operation_id}"
    return ""


def _quarrel_with_spec(stage_id: StageId, claim: Claim, spec: DeploymentSpec) -> str:
    """Say where a set, of which all claims agree, is of another shape than the spec wants it."""
    record, who = claim.record, f"worker {claim.worker_id}"
    if record.stage_count != len(spec.stages) or stage_id >= len(spec.stages):
        return f"{who} says {record.stage_count} stages, the spec {len(spec.stages)}"
    wanted = spec.stages[stage_id]
    if record.stage_name != wanted.name:
        return f"{who} calls it {record.stage_name!r}, the spec {wanted.name!r}"
    if record.shard_count != wanted.shard_count:
        return f"{who} says {record.shard_count} shards, the spec {wanted.shard_count}"
    return ""
