"""Replicas as a pure function of the claims on them: what a replica is, and why.

Decided here: which claims count, the state of a replica, and the sentence that explains it. Not
decided here: the start that stands for a replica (`stage_sets`), what the next action is called
(`next_action`), a deployment's state (`compose`), and what is done about it (`reconcile`).

Invariant: a replica is READY only when one start of it has, for each stage, a complete set without
contradictions whose shards are all READY and committed; nothing else is ever routed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from stagekeeper.core import next_action
from stagekeeper.core.counted import counted
from stagekeeper.core.ids import Generation, ReplicaKey, StageId
from stagekeeper.core.model import DeploymentSpec, Failure, ReplicaView, RoutedShard, ShardRecord
from stagekeeper.core.next_action import NextAction
from stagekeeper.core.operations import FailureNote
from stagekeeper.core.stage_sets import Claim, Shown, StageSet, choose_shown, routed_shards
from stagekeeper.core.states import ReplicaState, ShardState, WorkerState

PROBLEMS_SHOWN = 4
UNREPORTED = "no worker that is registered reports it"


@dataclass(slots=True)
class ReplicaContext:
    """What is known of a replica beside the claims on it.

    Attributes:
        spec: as desired; None when only workers know of the deployment.
        is_wanted: its index is below the replicas wanted.
        is_deleting: its deployment is being deleted.
        starting_on: the workers on which an operation starts it, for people; None when none does.
        waits_for: the replica whose start has to be over before that operation begins; None: none.
        behind: a replica whose start was begun before on a card of both; None: none.
        is_decided: that operation is being committed, whatever comes.
        is_committed: it was committed, and only a worker's report is missing.
        note: why its last start failed in this reign; None when it did not.
        last_failure: of a start since it was last READY, as far as this reign saw it; None: none.
        is_recovering: workers that were there before are still waited for.
        ceiling: generations up to it were deleted under this name; None when none were.
    """

    spec: DeploymentSpec | None = None
    is_wanted: bool = False
    is_deleting: bool = False
    starting_on: str | None = None
    waits_for: ReplicaKey | None = None
    behind: ReplicaKey | None = None
    is_decided: bool = False
    is_committed: bool = False
    note: FailureNote | None = None
    last_failure: Failure | None = None
    is_recovering: bool = False
    ceiling: Generation | None = None

    @property
    def must_be_shown(self) -> bool:
        return self.is_wanted or self.starting_on is not None


def derive_replica(
    key: ReplicaKey, claims: Iterable[Claim], context: ReplicaContext
) -> ReplicaView | None:
    """Derive one replica; None when it is neither claimed, nor wanted, nor starting.

    The answer does not depend on the order of `claims`.
    """
    live, is_leaving = _claims_in_play(claims, context)
    if not live:
        return None if is_leaving or not context.must_be_shown else _unreported(key, context)
    shown = choose_shown(live, context.spec)
    if not is_leaving and shown.start.is_routable:
        shards = routed_shards(shown.start.sets)
        count, (text, timer) = len(shards), next_action.of_silence(shards)
        return ReplicaView(
            key, ReplicaState.READY, count, count, "", text, shards=shards, timer=timer
        )
    findings, shards = _findings(shown, context.spec), routed_shards(shown.sets)
    state, reason, (text, timer) = _verdict(findings, shards, is_leaving, context)
    return ReplicaView(
        key=key,
        state=state,
        ready_shard_count=findings.ready_count,
        shard_count=findings.shard_count,
        reason=reason,
        next_action=text,
        shards=shards,
        timer=timer,
    )


def _claims_in_play(claims: Iterable[Claim], context: ReplicaContext) -> tuple[list[Claim], bool]:
    """Leave out what does not count, and say whether the rest is only being taken away.

    What was deleted does not come back because a late worker still has it. On a LOST worker it is
    not even waited for: the tombstone stops it if that worker ever returns.
    """
    present = [claim for claim in claims if claim.record.state is not ShardState.STOPPED]
    if context.is_deleting:
        return _not_lost(present), True
    ceiling = context.ceiling
    if ceiling is None:
        return present, False
    kept = [claim for claim in present if claim.record.generation > ceiling]
    if kept or context.must_be_shown:
        return kept, False
    return _not_lost(present), True


def _not_lost(claims: Iterable[Claim]) -> list[Claim]:
    return [claim for claim in claims if claim.worker_state is not WorkerState.LOST]


def _unreported(key: ReplicaKey, context: ReplicaContext) -> ReplicaView:
    """Explain a replica that no worker reports."""
    state, (text, timer) = ReplicaState.PENDING, next_action.DEPLOY_AGAIN
    if context.starting_on is not None:
        state = ReplicaState.STARTING
        reason, (text, timer) = _of_start(context)
    elif context.note is not None:
        state, reason = ReplicaState.FAILED, context.note.message
    elif context.is_recovering:
        reason, (text, timer) = "no worker reports it yet; workers are awaited", next_action.WAIT
    elif context.last_failure is not None:
        reason = f"{UNREPORTED}; {_told(context.last_failure)}"
    else:
        reason, (text, timer) = UNREPORTED, next_action.START_ITS_AGENT
    shard_count = context.spec.shard_count if context.spec is not None else 0
    return ReplicaView(key, state, 0, shard_count, reason, text, timer=timer)


def _told(failure: Failure) -> str:
    """Tell a failure of an earlier reign. It is not said that nothing came up after it."""
    return f"its last recorded failure, on worker {failure.origin.worker_id}: {failure.message}"


def _of_start(context: ReplicaContext, *, is_begun: bool = False) -> tuple[str, NextAction]:
    """Explain a start of this reign; `is_begun` when all of its stages are under way."""
    if context.is_committed:
        reason = f"it was committed on {context.starting_on}, whose report is awaited"
        return reason, next_action.REPORT_AWAITED
    if context.is_decided:
        return f"it has started on {context.starting_on}, and is committed", next_action.COMMITS
    reason = f"it starts on {context.starting_on}"
    if context.waits_for is not None:
        reason += f" after {context.waits_for}, which has shards on the same cards"
        return reason, next_action.STARTS_LATER
    if context.behind is not None and not is_begun:
        reason += f" after {context.behind}, which starts on a card of both"
        return reason, next_action.STARTS_LATER
    return reason, next_action.STARTS


@dataclass(slots=True)
class _Findings:
    """What keeps a reported replica from being READY, in words, and how much of it is."""

    ready_count: int = 0
    shard_count: int = 0
    conflicts: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    unready: list[str] = field(default_factory=list)
    unready_states: list[ShardState] = field(default_factory=list)
    is_uncommitted: bool = False
    is_starting: bool = False
    committed: Generation | None = None

    def add_set(self, one: StageSet) -> None:
        self.shard_count += one.shard_count
        if one.is_committed and (self.committed is None or one.generation > self.committed):
            self.committed = one.generation
        if one.conflict:
            self.conflicts.append(f"{one.label} is in CONFLICT: {one.conflict}")
            return
        present = {claim.record.shard_index for claim in one.claims}
        if len(present) < one.shard_count:
            absent = [index for index in range(one.shard_count) if index not in present]
            listed = ", ".join(str(index) for index in absent[:PROBLEMS_SHOWN])
            listed += ", …" if len(absent) > PROBLEMS_SHOWN else ""
            what = "shard" if len(absent) == 1 else f"{len(absent)} shards"
            self.missing.append(f"{what} ({listed}) of {one.label} reported by no worker")
        for claim in one.claims:
            self._add_claim(one.label, claim)

    def add_other(self, one: StageSet) -> None:
        """Add a set of another start: of this one that stage is missing."""
        self.shard_count += one.shard_count
        if one.conflict:
            self.conflicts.append(f"{one.label} is in CONFLICT: {one.conflict}")
            return
        self.missing.append(
            f"{one.label} reported of another start only (operation "
            f"{one.claims[0].record.operation_id}), and two starts are never put together"
        )
        for claim in one.claims:
            if claim.record.state is ShardState.FAILED:
                self._add_claim(one.label, claim)

    def _add_claim(self, label: str, claim: Claim) -> None:
        record = claim.record
        where = f"{label} on worker {claim.worker_id}"
        if record.state is ShardState.READY and record.committed:
            self.ready_count += 1
        elif record.state is ShardState.FAILED:
            phase = f" in {record.phase}" if record.phase is not None else ""
            self.failed.append(f"{where} FAILED{phase}{_because(record)}")
        else:
            phase = f" ({record.phase})" if record.phase is not None else ""
            uncommitted = "" if record.committed else ", not committed"
            self.unready.append(f"{where} is {record.state}{phase}{uncommitted}{_because(record)}")
            self.unready_states.append(record.state)
            self.is_uncommitted = self.is_uncommitted or not record.committed
            if not record.committed and record.state in (ShardState.PENDING, ShardState.STARTING):
                self.is_starting = True

    def sentence(self) -> str:
        problems = [*self.failed, *self.conflicts, *self.missing, *self.unready]
        listed = "; ".join(problems[:PROBLEMS_SHOWN])
        more = len(problems) - PROBLEMS_SHOWN
        listed += f"; and {more} more" if more > 0 else ""
        return f"{self.ready_count} of {counted(self.shard_count, 'shard')} READY: {listed}"


def _because(record: ShardRecord) -> str:
    return f": {record.state_reason}" if record.state_reason else ""


def _findings(shown: Shown, spec: DeploymentSpec | None) -> _Findings:
    findings = _Findings()
    by_stage = {one.stage_id: one for one in shown.sets}
    elsewhere = {one.stage_id for one in shown.others}
    if spec is not None:
        stage_count = len(spec.stages)
    else:
        stage_count = max(one.claims[0].record.stage_count for one in by_stage.values())
    for number in range(max(stage_count, max(by_stage) + 1)):
        one = by_stage.get(StageId(number))
        if one is not None and number in elsewhere:
            findings.add_other(one)
        elif one is not None:
            findings.add_set(one)
        elif number < stage_count:
            known = spec is not None and number < len(spec.stages)
            wanted = spec.stages[number] if known and spec is not None else None
            findings.shard_count += wanted.shard_count if wanted is not None else 1
            label = f"stage {number} ({wanted.name})" if wanted is not None else f"stage {number}"
            findings.missing.append(f"{label} reported by no worker")
    return findings


def _verdict(
    findings: _Findings, shards: Sequence[RoutedShard], is_leaving: bool, context: ReplicaContext
) -> tuple[ReplicaState, str, NextAction]:
    """Return the state of a reported replica that is not READY, its reason, its next action."""
    sentence = findings.sentence()
    if is_leaving:
        action = next_action.of_leaving(shards, is_recovering=context.is_recovering)
        return ReplicaState.DRAINING, "its deployment was deleted", action
    if context.starting_on is not None:
        reason, action = _of_start(context, is_begun=not findings.missing)
        silence = next_action.of_silence(shards)
        action = silence if silence.text else action
        return ReplicaState.STARTING, f"{reason}; {sentence}", action
    note = context.note
    if note is not None and _counts(note, findings.committed):
        reason = f"{note.message} ({sentence})"
        return ReplicaState.FAILED, reason, next_action.DEPLOY_ANEW
    if findings.failed:
        return ReplicaState.FAILED, sentence, next_action.DEPLOY_ANEW
    action = _next_for_partial(findings, shards, context)
    if findings.is_starting and not findings.conflicts:
        return ReplicaState.STARTING, sentence, action
    return ReplicaState.PARTIAL, sentence, action


def _counts(note: FailureNote, committed: Generation | None) -> bool:
    """Whether the story of a failed start is that of what is reported now."""
    if committed is None or note.generation > committed:
        return True
    return note.undoes_commit and note.generation == committed


def _next_for_partial(
    findings: _Findings, shards: Sequence[RoutedShard], context: ReplicaContext
) -> NextAction:
    if findings.conflicts:
        return next_action.DELETE_THEN_DEPLOY
    if findings.is_uncommitted and findings.committed is None:
        return next_action.UNDONE_LATER if context.is_recovering else next_action.UNDONE
    if context.is_recovering:
        return next_action.WAIT
    if findings.missing:
        return next_action.REPORTED_AGAIN
    return next_action.of_unready(findings.unready_states, shards)
