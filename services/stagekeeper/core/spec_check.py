"""What a deployment's spec may say, checked whole: every wrong field at once.

Decided here: what is wrong in a spec itself, and whether two specs are the same wish. Not decided
here: whether there is room for it (`placement`).

Invariant: a spec that passed can be written down, sent to an agent, and compared with itself.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import NoReturn

from stagekeeper.core.command_stage_check import command_problems
from stagekeeper.core.counted import counted
from stagekeeper.core.env_check import env_problems
from stagekeeper.core.errors import FieldProblem, Reason, Refused, bad_fields
from stagekeeper.core.field_check import (
    count_problem,
    id_problem,
    length_problem,
    range_problem,
    seconds_problem,
    twice_problem,
)
from stagekeeper.core.limits import (
    DEEPEST_ARGS,
    LARGEST_BYTES,
    LARGEST_DEVICE,
    LARGEST_SPEC_CHARACTERS,
    LONGEST_ENTRYPOINT,
    LONGEST_TEXT,
    MOST_ABILITIES,
    MOST_DEVICES,
    MOST_IN_FLIGHT,
    MOST_LIST_ENTRIES,
    MOST_REPLICA_WORKERS,
    MOST_REPLICAS,
    MOST_STAGES,
)
from stagekeeper.core.model import DeploymentSpec, MemoryNeed, ModelInfo, Placement, StageSpec
from stagekeeper.core.names import name_problem, shown, text_problem

_CARDS_ENV = dict.fromkeys(
    ("CUDA_DEVICE_ORDER", "CUDA_VISIBLE_DEVICES"),
    "is set by the agent, from the stage's devices: leave it out",
)
"""Which cards a stage sees is settled by placement and admission, which know only `devices`."""

_TOO_DEEP = f"is nested deeper than {DEEPEST_ARGS} containers"


@dataclass(slots=True)
class _Problems:
    """Problems as they are found."""

    wrong: list[FieldProblem] = field(default_factory=list)

    def add(self, path: str, problem: str) -> None:
        if problem:
            self.wrong.append(FieldProblem(path, problem))


def check_spec(spec: DeploymentSpec) -> None:
    """Check a spec.

    Raises:
        Refused: TOO_LARGE, for its size alone. BAD_FIELD, with every wrong field.
    """
    size = _size(spec)
    if size > LARGEST_SPEC_CHARACTERS:
        raise Refused(
            Reason.TOO_LARGE,
            f"the spec has {size} characters, at most {LARGEST_SPEC_CHARACTERS} are taken: let "
            "the stages read large arguments from a file",
        )
    problems = _Problems()
    problems.add("name", name_problem(spec.name))
    problems.add("replicas", range_problem(spec.replicas, 1, MOST_REPLICAS))
    _check_model("model", spec.model, problems)
    _check_placement(spec.placement, problems)
    problems.add("stages", _count_problem(spec.stages))
    seen: dict[str, int] = {}
    for index, stage in enumerate(spec.stages[:MOST_STAGES]):
        path = f"stages[{index}]"
        _check_stage(path, stage, problems)
        if stage.name in seen:
            problems.add(
                f"{path}.name", f"{shown(stage.name)} is the name of stage {seen[stage.name]}"
            )
        seen.setdefault(stage.name, index)
    if spec.entry and spec.entry not in seen:
        sound = [name for name in seen if not name_problem(name)]
        problems.add("entry", f"no stage is called {shown(spec.entry)}; there are {_listed(sound)}")
    problems.add("placement.workers", _too_few_workers(spec))
    if problems.wrong:
        raise bad_fields(problems.wrong, "the spec")


def stage_problems(path: str, stage: StageSpec) -> list[FieldProblem]:
    """Say what is wrong with one stage, for whoever starts it."""
    problems = _Problems()
    _check_stage(path, stage, problems)
    return problems.wrong


def model_problems(path: str, model: ModelInfo) -> list[FieldProblem]:
    """Say what is wrong with the description of a model."""
    problems = _Problems()
    _check_model(path, model, problems)
    return problems.wrong


def is_same_wish(one: DeploymentSpec, other: DeploymentSpec) -> bool:
    """Say whether two checked specs want the same, however they were written.

    The order of environment variables, the spelling of the arguments' JSON and naming the first
    stage as the entry make no difference.
    """
    return one == other or canonical(one) == canonical(other)


def canonical(spec: DeploymentSpec) -> DeploymentSpec:
    """Write a checked spec in the one way that all specs of the same wish are written."""
    return replace(
        spec,
        entry=spec.stages[spec.entry_stage_id].name,
        stages=tuple(
            replace(
                stage,
                env=tuple(sorted(stage.env)),
                args_json=json.dumps(json.loads(stage.args_json), sort_keys=True),
            )
            for stage in spec.stages
        ),
    )


def _size(spec: DeploymentSpec) -> int:
    """Count the characters of everything that a user may make long."""
    lists = (spec.model.abilities, spec.placement.workers, spec.placement.device_pool)
    size = sum(len(text) for texts in lists for text in texts)
    for stage in spec.stages:
        size += len(stage.name) + len(stage.entrypoint) + len(stage.args_json)
        size += sum(len(name) + len(value) for name, value in stage.env)
        if stage.command is not None:
            size += sum(map(len, (*stage.command.argv, *stage.command.ports)))
            probes = (stage.command.ready, stage.command.live, stage.command.canary)
            size += sum(len(it.target) + len(it.body) + len(it.contains) for it in probes if it)
    return size + len(spec.name) + len(spec.entry) + len(spec.model.name) + len(spec.model.version)


def _check_model(path: str, model: ModelInfo, problems: _Problems) -> None:
    problems.add(f"{path}.name", _text_problem(model.name))
    problems.add(f"{path}.version", _text_problem(model.version))
    problems.add(f"{path}.abilities", _list_problem(model.abilities, MOST_ABILITIES))
    for index, ability in enumerate(model.abilities[:MOST_ABILITIES]):
        problems.add(f"{path}.abilities[{index}]", id_problem(ability))


def _check_placement(placement: Placement, problems: _Problems) -> None:
    problems.add("placement.workers", _list_problem(placement.workers))
    for index, worker in enumerate(placement.workers[:MOST_LIST_ENTRIES]):
        problems.add(f"placement.workers[{index}]", name_problem(worker))
    problems.add("placement.device_pool", _list_problem(placement.device_pool))
    for index, device in enumerate(placement.device_pool[:MOST_LIST_ENTRIES]):
        problems.add(f"placement.device_pool[{index}]", id_problem(device))


def _too_few_workers(spec: DeploymentSpec) -> str:
    """Say when the workers that a deployment may use are too few for its shards."""
    workers = spec.placement.workers
    if not workers or not spec.stages or len(workers) >= spec.worker_count:
        return ""
    most = max(spec.stages, key=lambda stage: stage.shard_count)
    return (
        f"names {counted(len(workers), 'worker')}, and stage {shown(most.name)} has "
        f"{most.shard_count} shards, each on a worker of its own: name more, or none"
    )


def _check_stage(path: str, stage: StageSpec, problems: _Problems) -> None:
    problems.add(f"{path}.name", name_problem(stage.name))
    if stage.command is not None:
        problems.wrong += command_problems(path, stage)
    else:
        problems.add(f"{path}.entrypoint", _entrypoint_problem(stage.entrypoint))
        problems.add(f"{path}.args_json", _args_problem(stage.args_json))
    problems.add(f"{path}.devices", _devices_problem(stage.devices))
    _check_memory(path, stage, problems)
    problems.wrong += env_problems(f"{path}.env", stage.env, taken=_CARDS_ENV)
    for limit in ("start_timeout_s", "stall_timeout_s", "stop_budget_s"):
        seconds = getattr(stage, limit)
        if seconds is not None:
            problems.add(f"{path}.{limit}", seconds_problem(seconds, may_be_zero=False))
    problems.add(f"{path}.max_in_flight", range_problem(stage.max_in_flight, 1, MOST_IN_FLIGHT))
    problems.add(f"{path}.shard_count", range_problem(stage.shard_count, 1, MOST_REPLICA_WORKERS))


def _check_memory(path: str, stage: StageSpec, problems: _Problems) -> None:
    need = stage.memory
    if need is None:
        if stage.devices:
            problems.add(
                f"{path}.memory",
                "is missing: a stage with devices says how much it needs of each, as "
                "{utilization: 0.5} or {bytes: 4GiB}",
            )
        return
    problems.add(f"{path}.memory", _amount_problem(need))
    if not 0 <= need.reserve_bytes <= LARGEST_BYTES:
        problems.add(f"{path}.memory.reserve_bytes", f"{need.reserve_bytes} is out of range")


def _amount_problem(need: MemoryNeed) -> str:
    if (need.utilization is None) == (need.bytes is None):
        return "is either a utilization or bytes"
    if need.bytes is not None and not 1 <= need.bytes <= LARGEST_BYTES:
        return f"{need.bytes} bytes are not from 1 to {LARGEST_BYTES}"
    # nan compares false with everything, and so it is refused here.
    if need.utilization is not None and not 0 < need.utilization <= 1:
        return f"utilization {need.utilization!r} is not in (0, 1]; 0.9 is 90 %"
    return ""


def _args_problem(args_json: str) -> str:
    try:
        args = json.loads(args_json, parse_constant=_no_constant, object_pairs_hook=_once)
    except ValueError as error:
        return f"is not JSON: {error}"
    except RecursionError:
        return _TOO_DEEP
    if not isinstance(args, dict):
        return "is not a JSON object of keyword arguments"
    return "" if _is_shallow(args) else _TOO_DEEP


def _is_shallow(args: object) -> bool:
    """Say whether others can read it: each reader's recursion ends somewhere else."""
    level = [args]
    for _ in range(DEEPEST_ARGS):
        children: list[object] = []
        for value in level:
            if isinstance(value, dict):
                children += value.values()
            elif isinstance(value, list):
                children += value
        level = [child for child in children if isinstance(child, dict | list)]
        if not level:
            return True
    return False


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number in JSON")


def _once(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found: dict[str, object] = {}
    for name, value in pairs:
        if name in found:
            raise ValueError(f"the key {shown(name)} is there twice")
        found[name] = value
    return found


def _entrypoint_problem(entrypoint: str) -> str:
    module, _, name = entrypoint.partition(":")
    parts = [*module.split("."), *name.split(".")]
    if len(entrypoint) <= LONGEST_ENTRYPOINT and all(part.isidentifier() for part in parts):
        return ""
    return f"{shown(entrypoint)} is not module:Class"


def _devices_problem(devices: Sequence[int]) -> str:
    if len(devices) > MOST_DEVICES:
        return f"has {len(devices)} cards, at most {MOST_DEVICES} are taken"
    wrong = [device for device in devices if not 0 <= device <= LARGEST_DEVICE]
    if wrong:
        return f"{wrong} are not from 0 to {LARGEST_DEVICE}: they number the replica's own cards"
    return twice_problem(devices)


def _count_problem(stages: Sequence[StageSpec]) -> str:
    if not stages:
        return "is empty: a deployment has at least one stage"
    return range_problem(len(stages), 1, MOST_STAGES)


def _text_problem(text: str) -> str:
    return length_problem(text, LONGEST_TEXT) or text_problem(text)


def _list_problem(texts: Sequence[str], most: int = MOST_LIST_ENTRIES) -> str:
    return count_problem(len(texts), most) or twice_problem(texts)


def _listed(names: Iterable[str]) -> str:
    return ", ".join(map(shown, names)) or "none"
