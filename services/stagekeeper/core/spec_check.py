"""What a deployment's spec may say, checked whole: every wrong field at once.

Decided here: what is wrong in a spec itself, what it asks for that is not built yet, and whether
two specs are the same wish. Not decided here: whether there is room for it (`placement`).

Invariant: a spec that passed can be written down, sent to an agent, and compared with itself.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import NoReturn

from stagekeeper.core.errors import FieldProblem, Reason, Refused, bad_fields
from stagekeeper.core.model import DeploymentSpec, MemoryNeed, ModelInfo, Placement, StageSpec
from stagekeeper.core.names import name_problem, text_problem

MOST_REPLICAS = 1_000
MOST_STAGES = 64
MOST_IN_FLIGHT = 65_536
MOST_DEVICES = 64
LARGEST_DEVICE = 255
LARGEST_BYTES = 2**63 - 1
LONGEST_TEXT = 255
LONGEST_ENTRYPOINT = 1_000
MOST_LIST_ENTRIES = 1_000
LARGEST_SPEC_CHARACTERS = 1_048_576
RESERVED_ENV = "STAGEKEEPER_"

_ENV_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\Z", re.ASCII)


@dataclass(slots=True)
class _Problems:
    """Problems as they are found; `later` are those that a later release will not have."""

    wrong: list[FieldProblem] = field(default_factory=list)
    later: list[FieldProblem] = field(default_factory=list)

    def add(self, path: str, problem: str) -> None:
        if problem:
            self.wrong.append(FieldProblem(path, problem))


def check_spec(spec: DeploymentSpec) -> None:
    """Check a spec.

    Raises:
        Refused: TOO_LARGE, for its size alone. BAD_FIELD, with every wrong field. NOT_YET, when
            nothing is wrong and it asks for what this release lacks.
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
    problems.add("replicas", _range_problem(spec.replicas, 1, MOST_REPLICAS))
    _check_model(spec.model, problems)
    _check_placement(spec.placement, problems)
    problems.add("stages", _count_problem(spec.stages))
    seen: dict[str, int] = {}
    for index, stage in enumerate(spec.stages[:MOST_STAGES]):
        path = f"stages[{index}]"
        _check_stage(path, stage, problems)
        if stage.name in seen:
            problems.add(f"{path}.name", f"{stage.name!r} is the name of stage {seen[stage.name]}")
        seen.setdefault(stage.name, index)
    if spec.entry and spec.entry not in seen:
        problems.add("entry", f"no stage is called {spec.entry!r}; there are {_listed(seen)}")
    if problems.wrong:
        raise bad_fields([*problems.wrong, *problems.later], "the spec")
    if problems.later:
        listed = "; ".join(str(problem) for problem in problems.later)
        raise Refused(
            Reason.NOT_YET,
            f"the spec asks for what is not built yet: {listed}",
            problems=problems.later,
        )


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
    return size + len(spec.name) + len(spec.entry) + len(spec.model.name) + len(spec.model.version)


def _check_model(model: ModelInfo, problems: _Problems) -> None:
    problems.add("model.name", _text_problem(model.name))
    problems.add("model.version", _text_problem(model.version))
    problems.add("model.abilities", _list_problem(model.abilities))
    for index, ability in enumerate(model.abilities[:MOST_LIST_ENTRIES]):
        problems.add(f"model.abilities[{index}]", _text_problem(ability) if ability else "is empty")


def _check_placement(placement: Placement, problems: _Problems) -> None:
    problems.add("placement.workers", _list_problem(placement.workers))
    for index, worker in enumerate(placement.workers[:MOST_LIST_ENTRIES]):
        problems.add(f"placement.workers[{index}]", name_problem(worker))
    problems.add("placement.device_pool", _list_problem(placement.device_pool))
    for index, device in enumerate(placement.device_pool[:MOST_LIST_ENTRIES]):
        problems.add(
            f"placement.device_pool[{index}]", _text_problem(device) if device else "is empty"
        )


def _check_stage(path: str, stage: StageSpec, problems: _Problems) -> None:
    problems.add(f"{path}.name", name_problem(stage.name))
    problems.add(f"{path}.entrypoint", _entrypoint_problem(stage.entrypoint))
    problems.add(f"{path}.args_json", _args_problem(stage.args_json))
    problems.add(f"{path}.devices", _devices_problem(stage.devices))
    _check_memory(path, stage, problems)
    _check_env(path, stage.env, problems)
    for limit in ("start_timeout_s", "stall_timeout_s", "stop_budget_s"):
        seconds = getattr(stage, limit)
        if seconds is not None and not (math.isfinite(seconds) and seconds > 0):
            problems.add(
                f"{path}.{limit}", f"{seconds!r} is not a finite number of seconds above 0"
            )
    problems.add(f"{path}.max_in_flight", _range_problem(stage.max_in_flight, 1, MOST_IN_FLIGHT))
    if stage.shard_count > 1:
        problems.later.append(
            FieldProblem(
                f"{path}.shard_count",
                f"{stage.shard_count} shards are not built yet: leave it at 1, and give the stage "
                "several devices of one worker",
            )
        )
    elif stage.shard_count < 1:
        problems.add(f"{path}.shard_count", f"{stage.shard_count} is below 1")


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


def _check_env(path: str, env: Sequence[tuple[str, str]], problems: _Problems) -> None:
    problems.add(f"{path}.env", _list_problem([name for name, _ in env]))
    for name, value in env[:MOST_LIST_ENTRIES]:
        where = f"{path}.env[{name}]"
        if not _ENV_NAME.match(name):
            problems.add(where, "is no variable's name: letters, digits and _, not a digit first")
        elif name.startswith(RESERVED_ENV):
            problems.add(where, f"names that begin with {RESERVED_ENV} are set by the agent")
        if "\0" in value:
            problems.add(where, "its value contains a NUL character")


def _args_problem(args_json: str) -> str:
    try:
        args = json.loads(args_json, parse_constant=_no_constant, object_pairs_hook=_once)
    except (ValueError, RecursionError) as error:
        return f"is not JSON: {error}"
    return "" if isinstance(args, dict) else "is not a JSON object of keyword arguments"


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number in JSON")


def _once(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the key {twice!r} is there twice")
    return found


def _entrypoint_problem(entrypoint: str) -> str:
    module, _, name = entrypoint.partition(":")
    parts = [*module.split("."), *name.split(".")]
    if len(entrypoint) <= LONGEST_ENTRYPOINT and all(part.isidentifier() for part in parts):
        return ""
    return f"{entrypoint[:LONGEST_TEXT]!r} is not module:Class"


def _devices_problem(devices: Sequence[int]) -> str:
    if len(devices) > MOST_DEVICES:
        return f"has {len(devices)} cards, at most {MOST_DEVICES} are taken"
    wrong = [device for device in devices if not 0 <= device <= LARGEST_DEVICE]
    if wrong:
        return f"{wrong} are not from 0 to {LARGEST_DEVICE}: they number the replica's own cards"
    return _twice_problem(devices)


def _count_problem(stages: Sequence[StageSpec]) -> str:
    if not stages:
        return "is empty: a deployment has at least one stage"
    return _range_problem(len(stages), 1, MOST_STAGES)


def _range_problem(number: int, lowest: int, highest: int) -> str:
    return "" if lowest <= number <= highest else f"{number} is not from {lowest} to {highest}"


def _text_problem(text: str) -> str:
    if len(text) > LONGEST_TEXT:
        return f"has {len(text)} characters, at most {LONGEST_TEXT} are taken"
    return text_problem(text)


def _list_problem(texts: Sequence[str]) -> str:
    if len(texts) > MOST_LIST_ENTRIES:
        return f"has {len(texts)} entries, at most {MOST_LIST_ENTRIES} are taken"
    return _twice_problem(texts)


def _twice_problem(values: Sequence[object]) -> str:
    if len(set(values)) == len(values):
        return ""
    twice = next(value for value in values if values.count(value) > 1)
    return f"{twice!r} is there twice"


def _listed(names: Iterable[str]) -> str:
    return ", ".join(names) or "none"
