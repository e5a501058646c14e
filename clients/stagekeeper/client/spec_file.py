"""The spec file: YAML, or the same as a dict, to a `DeploymentSpec`; all problems at once.

Decided here: which keys there are, what type each has, and what is said about keys of later
releases. What the values mean together (names, sums of memory, device numbers) is checked by the
supervisor, so that gRPC users get the same checks; `LoadedSpec.locate` finds the line that such a
refusal speaks of. Invariant: a key is read, or refused with what to do instead; never ignored.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import msgspec

from stagekeeper.client.errors import BadRequest
from stagekeeper.client.spec_command import check_command_keys, command_takes
from stagekeeper.client.spec_tree import (
    Items,
    Mappings,
    SpecProblem,
    Tree,
    key_path,
    plain,
    tree_of_value,
    tree_of_yaml,
)
from stagekeeper.client.spec_values import Take, TreeReader
from stagekeeper.v1.types_pb2 import DeploymentSpec, MemoryNeed, ModelInfo, Placement, StageSpec

__all__ = ["LoadedSpec", "SpecError", "SpecProblem", "load_spec", "parse_spec", "spec_from_dict"]

MOST_REPLICAS: Final = 1_000
"""As many as a supervisor takes; said here too, where the line is known."""

_LATER_KEYS: Final = {
    "restart": "a stage that fails stays FAILED: deploy the same file again to start it",
}
_LATER_STAGE_KEYS: Final = {
    "restart": _LATER_KEYS["restart"],
}


class SpecError(BadRequest):
    """The spec is wrong.

    Attributes:
        problems: all of them, in the order of their lines.
        source: the file that was read; empty for a dict.
        as_read: what could be read of it all the same, for whoever looks for further problems;
            None when nothing could.
    """

    def __init__(
        self,
        problems: Sequence[SpecProblem],
        source: str = "",
        as_read: LoadedSpec | None = None,
    ) -> None:
        self.problems = tuple(sorted(problems, key=lambda problem: problem.line))
        self.source = source
        self.as_read = as_read
        listed = "\n".join(f"  {problem}" for problem in self.problems)
        count = len(self.problems)
        what = f"{count} problem{'s' if count > 1 else ''} in {source or 'the spec'}"
        super().__init__(
            f"{what}:\n{listed}",
            code=None,
            violations=[(problem.path, problem.problem) for problem in self.problems],
        )


@dataclass(frozen=True, slots=True)
class LoadedSpec:
    """A spec, and where each of its fields stands.

    `lines` maps field paths (`stages[1].memory`) to lines from 1; empty for a dict.
    """

    spec: DeploymentSpec
    lines: Mapping[str, int] = field(default_factory=dict)
    source: str = ""

    def locate(self, path: str) -> int:
        """Return the line of a field, or of the nearest thing around it; 0 when there is none."""
        while path:
            if path in self.lines:
                return self.lines[path]
            path = path[: max(path.rfind("."), path.rfind("["), 0)]
        return 0

    def error(self, violations: Sequence[tuple[str, str]]) -> SpecError:
        """Build the error for what the supervisor found wrong with the spec."""
        problems = [SpecProblem(path, text, self.locate(path)) for path, text in violations]
        return SpecError(problems, self.source)


def load_spec(path: str | Path) -> LoadedSpec:
    """Read a spec file.

    Raises:
        SpecError: it cannot be read, or is wrong; every problem with its line.
    """
    try:
        content = Path(path).read_bytes()
    except OSError as error:
        problem = SpecProblem("", f"cannot be read: {error.strerror}")
        raise SpecError([problem], str(path)) from error
    try:
        text = content.decode()
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        what = f"the byte 0x{content[error.start]:02x} is no UTF-8: save the file as UTF-8 text"
        raise SpecError([SpecProblem("", what, line)], str(path)) from error
    return parse_spec(text, str(path))


def parse_spec(text: str, source: str = "") -> LoadedSpec:
    """Read a spec from YAML text; `source` names it in errors.

    Raises:
        SpecError: it is wrong; every problem with its line.
    """
    tree, problems = tree_of_yaml(text)
    return _load(tree, problems, source)


def spec_from_dict(value: Mapping[str, Any]) -> LoadedSpec:
    """Read a spec from a dict with the keys of the file.

    Raises:
        SpecError: it is wrong; every problem with its path.
    """
    tree, problems = tree_of_value(value)
    return _load(tree, problems, "")


def _load(tree: Tree | None, problems: list[SpecProblem], source: str) -> LoadedSpec:
    if tree is None:
        raise SpecError(problems, source)
    reader = _SpecReader(problems)
    loaded = LoadedSpec(reader.deployment(tree), reader.lines, source)
    if problems:
        raise SpecError(problems, source, as_read=loaded)
    return loaded


class _SpecReader(TreeReader):
    """Reads the tree of a spec; what is wrong is noted, and reading goes on."""

    def deployment(self, tree: Tree) -> DeploymentSpec:
        spec = DeploymentSpec()
        if not isinstance(tree, Mappings):
            self.problem("", "a spec is a mapping that starts with `name:`", tree.line)
            return spec

        def stages(value: Tree, path: str) -> None:
            for index, item in enumerate(self.items(value, path)):
                spec.stages.append(self._stage(item, f"{path}[{index}]"))
            if isinstance(value, Items) and not value.items:
                self.problem(path, "needs at least one stage", value.line)

        def placement(value: Tree, path: str) -> None:
            spec.placement.CopyFrom(self._placement(value, path))

        def model(value: Tree, path: str) -> None:
            spec.model.CopyFrom(self._model(value, path))

        self.keys(
            tree,
            "",
            {
                "name": lambda value, path: self.set(spec, "name", self.text(value, path)),
                "model": model,
                "replicas": lambda value, path: self.set(
                    spec, "replicas", self.count(value, path, least=1, most=MOST_REPLICAS)
                ),
                "entry": lambda value, path: self.set(spec, "entry", self.text(value, path)),
                "stages": stages,
                "placement": placement,
                "overlap_loads": lambda value, path: self.set(
                    spec, "overlap_loads", self.flag(value, path)
                ),
            },
            required=("name", "stages"),
            later=_LATER_KEYS,
        )
        return spec

    def _model(self, tree: Tree, path: str) -> ModelInfo:
        model = ModelInfo()
        self.keys(
            tree,
            path,
            {
                "name": lambda value, at: self.set(model, "name", self.text(value, at)),
                "version": lambda value, at: self.set(model, "version", self.text(value, at)),
                "abilities": lambda value, at: model.abilities.extend(self.texts(value, at)),
            },
        )
        return model

    def _placement(self, tree: Tree, path: str) -> Placement:
        placement = Placement()
        self.keys(
            tree,
            path,
            {
                "workers": lambda value, at: placement.workers.extend(self.texts(value, at)),
                "device_pool": lambda value, at: placement.device_pool.extend(
                    self.texts(value, at)
                ),
            },
        )
        return placement

    def _stage(self, tree: Tree, path: str) -> StageSpec:
        stage = StageSpec()
        is_command = isinstance(tree, Mappings) and "command" in tree.entries

        def seconds(name: str) -> Take:
            return lambda value, at: self.set(stage, name, self.seconds(value, at))

        def devices(value: Tree, at: str) -> None:
            for index, item in enumerate(self.items(value, at)):
                number = self.count(item, f"{at}[{index}]", least=0)
                if number is not None:
                    stage.devices.append(number)

        self.keys(
            tree,
            path,
            {
                "name": lambda value, at: self.set(stage, "name", self.text(value, at)),
                "entrypoint": lambda value, at: self.set(stage, "entrypoint", self.text(value, at)),
                "args": lambda value, at: self.set(stage, "args_json", self._args(value, at)),
                "devices": devices,
                "memory": lambda value, at: stage.memory.CopyFrom(self._memory(value, at)),
                "shard_count": lambda value, at: self.set(
                    stage, "shard_count", self.count(value, at, least=1)
                ),
                "env": lambda value, at: stage.env.update(self._env(value, at)),
                "start_timeout_s": seconds("start_timeout_s"),
                "stall_timeout_s": seconds("stall_timeout_s"),
                "stop_budget_s": seconds("stop_budget_s"),
                "max_in_flight": lambda value, at: self.set(
                    stage, "max_in_flight", self.count(value, at, least=1)
                ),
                **command_takes(self, stage, path),
            },
            required=("name",) if is_command else ("name", "entrypoint"),
            later=_LATER_STAGE_KEYS,
        )
        check_command_keys(self, tree, path, stage)
        self._no_memory_without_devices(tree, path)
        return stage

    def _no_memory_without_devices(self, tree: Tree, path: str) -> None:
        """Memory is that of cards: without one nothing would be reserved, and nobody told."""
        if not isinstance(tree, Mappings) or "memory" not in tree.entries:
            return
        devices = tree.entries.get("devices")
        if devices is None or (isinstance(devices, Items) and not devices.items):
            self.problem(
                key_path(path, "memory"),
                "is reserved on cards, and the stage has none: add `devices: [0]`, or leave it out",
                tree.key_lines.get("memory", 0),
            )

    def _memory(self, tree: Tree, path: str) -> MemoryNeed:
        need = MemoryNeed()
        self.keys(
            tree,
            path,
            {
                "utilization": lambda value, at: self.set(
                    need, "utilization", self.number(value, at)
                ),
                "bytes": lambda value, at: self.set(need, "bytes", self.size(value, at)),
                "reserve": lambda value, at: self.set(need, "reserve_bytes", self.size(value, at)),
                "reuse_profile": lambda value, at: self.set(
                    need, "reuse_profile", self.flag(value, at)
                ),
            },
        )
        if isinstance(tree, Mappings):
            said = {"utilization", "bytes"} & tree.entries.keys()
            if len(said) != 1:
                self.problem(path, "needs exactly one of utilization and bytes", tree.line)
        return need

    def _env(self, tree: Tree, path: str) -> dict[str, str]:
        if not isinstance(tree, Mappings):
            self.problem(path, "needs names and texts", tree.line)
            return {}
        found = {}
        for name, value in tree.entries.items():
            self.lines[key_path(path, name)] = tree.key_lines.get(name, 0)
            text = self.text(value, key_path(path, name))
            if text is not None:
                found[name] = text
        return found

    def _args(self, tree: Tree, path: str) -> str | None:
        if not isinstance(tree, Mappings):
            self.problem(path, "needs the names and values of keyword arguments", tree.line)
            return None
        return msgspec.json.encode(plain(tree)).decode()


def loaded_spec(
    spec: DeploymentSpec | LoadedSpec | Mapping[str, Any] | str | Path,
) -> LoadedSpec:
    """Read a spec in whatever form a program has it: the message, a file's path, or its keys.

    Raises:
        SpecError: it is wrong, every problem with its line.
    """
    if isinstance(spec, LoadedSpec):
        return spec
    if isinstance(spec, DeploymentSpec):
        return LoadedSpec(spec)
    if isinstance(spec, Mapping):
        return spec_from_dict(spec)
    return load_spec(spec)
