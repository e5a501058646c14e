"""Stages of this host stopped without an agent, and followed until they are gone.

Decided here: which words name them, where a stop is refused, and what is said about what a
supervisor still wants. Not decided here: how they are stopped (`agent.local_stop`).
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stagekeeper.cli.exits import CliError, ExitCode, usage
from stagekeeper.cli.local_listing import workers_of

if TYPE_CHECKING:
    from stagekeeper.agent.local_stages import LocalWorker, StageChoice
    from stagekeeper.agent.local_stop import LocalStopped
    from stagekeeper.core.model import ShardRecord
    from stagekeeper.runtime.launch import Launch


@dataclass(slots=True)
class _Outcome:
    """What came of the stops: worker id → its stages; and why others were refused."""

    stopped: dict[str, list[LocalStopped]] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)


def choices_from(
    names: Sequence[str], *, stop_all: bool, budget_s: float | None
) -> list[StageChoice]:
    """Read what is to be stopped; empty when nothing is.

    Raises:
        CliError: exit code 2: the words cannot be meant.
    """
    from stagekeeper.agent.local_stages import StageChoice

    if stop_all and names:
        raise usage("--stop-all stops everything: leave out --stop, or name what is meant")
    if budget_s is not None:
        if not (names or stop_all):
            raise usage("--stop-budget-s is for a stop: add --stop NAME or --stop-all")
        if not 0 <= budget_s < math.inf:
            raise usage(f"--stop-budget-s {budget_s:g} is no number of seconds from 0 on")
    return [StageChoice()] if stop_all else [_choice(name) for name in names]


def _choice(text: str) -> StageChoice:
    from stagekeeper.agent.local_stages import StageChoice

    deployment, *rest = text.split("/")
    replica, *more = rest or [""]
    stage, *too_much = more or [""]
    has_empty_part = "" in (deployment, *rest)
    if has_empty_part or too_much or (replica and not replica.isdecimal()):
        raise usage(f"--stop {text!r} is not NAME[/REPLICA[/STAGE]], as `hello/0/greeter`")
    return StageChoice(deployment, int(replica) if replica else None, stage or None)


def stop_shown(
    state_dir: Path,
    worker_id: str | None,
    choices: Sequence[StageChoice],
    *,
    budget_s: float | None,
    is_json: bool,
) -> None:
    """Stop what is chosen on every worker without an agent, and print what became of it.

    Raises:
        CliError: exit code 1: nothing is called so, an agent runs, or something is left; 130:
            Ctrl-C; what was asked to end goes on ending.
    """
    workers = workers_of(state_dir, worker_id)
    for choice in choices:
        if choice.deployment is not None and not any(_has(worker, [choice]) for worker in workers):
            raise CliError(
                ExitCode.FAILED,
                f"no stage of {_written(choice)} is on record in {state_dir}: `stagekeeper stages "
                "--local` lists what is",
            )
    outcome = _Outcome()
    try:
        asyncio.run(_stop_each(workers, choices, budget_s, outcome, is_json=is_json))
    except KeyboardInterrupt:
        raise CliError(
            ExitCode.INTERRUPTED,
            "what was asked to end goes on ending, and the same command again, or the next agent, "
            "settles it",
        ) from None
    if is_json:
        print(json.dumps(_document(state_dir, outcome), indent=2, ensure_ascii=False))
    else:
        for line in _lines(workers, outcome):
            print(line)
    _check(outcome)


async def _stop_each(
    workers: Sequence[LocalWorker],
    choices: Sequence[StageChoice],
    budget_s: float | None,
    outcome: _Outcome,
    *,
    is_json: bool,
) -> None:
    from stagekeeper.agent.host_lock import LockHeld
    from stagekeeper.agent.local_stop import stop_stages
    from stagekeeper.cli.text.local_stages import shard_name

    def begin(shard: ShardRecord, had_ended: bool) -> None:
        if not is_json and not had_ended:
            pid = f" (pid {shard.pid})" if shard.pid else ""
            print(f"{shard_name(shard)}: stopping{pid}", flush=True)

    async def stop(worker: LocalWorker) -> None:
        try:
            outcome.stopped[worker.worker_id] = await stop_stages(
                worker.directory, choices, budget_s=budget_s, on_begin=begin
            )
        except LockHeld as held:
            outcome.refused[worker.worker_id] = _refusal(worker.worker_id, held.holder_pid)

    for worker in workers:
        if worker.agent_pid is not None and _has(worker, choices):
            outcome.refused[worker.worker_id] = _refusal(worker.worker_id, worker.agent_pid)
    await asyncio.gather(*(stop(worker) for worker in workers if worker.agent_pid is None))


def _has(worker: LocalWorker, choices: Sequence[StageChoice]) -> bool:
    known: list[ShardRecord | Launch] = [stage.shard for stage in worker.stages]
    known += [it.record.launch for it in worker.damaged if it.record.launch is not None]
    return any(choice.takes(it) for choice in choices for it in known)


def _written(choice: StageChoice) -> str:
    parts = (choice.deployment, choice.replica_index, choice.stage)
    return "/".join(str(part) for part in parts if part is not None)


def _refusal(worker_id: str, holder_pid: int | None) -> str:
    pid = f" (pid {holder_pid})" if holder_pid else ""
    end = f"end it first with `kill {holder_pid}`" if holder_pid else "end it first"
    return (
        f"the agent of worker {worker_id} runs{pid} and owns its stages: `stagekeeper delete NAME` "
        f"stops a deployment, or {end}"
    )


def _lines(workers: Sequence[LocalWorker], outcome: _Outcome) -> Iterator[str]:
    from stagekeeper.cli.text.local_stages import shard_name

    stopped = [it for some in outcome.stopped.values() for it in some]
    for it in stopped:
        yield f"{shard_name(it.shard)}: {_how(it) if it.is_gone else 'not settled; see above'}"
    if not stopped:
        if not outcome.refused:
            yield "nothing is on record that could be stopped"
        return
    gone = {it.shard.instance_id for it in stopped}
    left = {
        stage.shard.replica
        for worker in workers
        for stage in worker.stages
        if stage.shard.instance_id not in gone
    }
    for name in sorted({it.shard.deployment for it in stopped}):
        halves = left & {it.shard.replica for it in stopped if it.shard.deployment == name}
        again = (
            f"`stagekeeper delete {name}` and then `stagekeeper deploy FILE` starts it whole again"
            if halves
            else f"`stagekeeper deploy FILE` starts it again, `stagekeeper delete {name}` takes "
            "that back"
        )
        yield f"note: a supervisor may still want {name}: {again}"


def _how(it: LocalStopped) -> str:
    if it.was_undone:
        return "undone: its start was never committed"
    return "settled: it had ended already" if it.had_ended else "stopped"


def _document(state_dir: Path, outcome: _Outcome) -> dict[str, Any]:
    from stagekeeper.cli.text.local_stages import shard_json

    return {
        "state_dir": str(state_dir),
        "stopped": [
            {
                "worker_id": worker_id,
                **shard_json(it.shard),
                "gone": it.is_gone,
                "undone": it.was_undone,
                "had_ended": it.had_ended,
            }
            for worker_id, some in sorted(outcome.stopped.items())
            for it in some
        ],
        "refused": [
            {"worker_id": worker_id, "reason": reason}
            for worker_id, reason in sorted(outcome.refused.items())
        ],
    }


def _check(outcome: _Outcome) -> None:
    problems = [reason for _, reason in sorted(outcome.refused.items())]
    left = sum(not it.is_gone for some in outcome.stopped.values() for it in some)
    if left:
        problems.append(f"{left} of the stages could not be settled: repeat, or start an agent")
    if len(problems) == 1:
        raise CliError(ExitCode.FAILED, problems[0])
    if problems:
        raise CliError(ExitCode.FAILED, "not everything was stopped:", details=problems)
