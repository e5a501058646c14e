"""What is wrong in the spec of a command stage: every wrong field at once.

Decided here: what may stand in a command line, which templates mean something for this stage, and
which probes make sense where. Invariant: what passed can be filled in for any place that the stage
may get, and looked at as it says.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from typing import Final

from stagekeeper.core.command_stage import (
    CARD_NAMES,
    GRPC,
    HTTP,
    LOG,
    PLAIN_NAMES,
    PORT_NAMES,
    TCP,
    CommandSpec,
    DrainSpec,
    Probe,
    StagePorts,
    names_in,
    nearly_in,
)
from stagekeeper.core.errors import FieldProblem
from stagekeeper.core.field_check import (
    count_problem,
    length_problem,
    named,
    range_problem,
    seconds_problem,
)
from stagekeeper.core.limits import (
    LARGEST_ARGUMENT_BYTES,
    LARGEST_ENV_BYTES,
    LONGEST_TEXT,
    MOST_ARGUMENTS,
    MOST_PORTS,
    MOST_PROBE_FAILURES,
)
from stagekeeper.core.model import StageSpec
from stagekeeper.core.names import shown, text_problem

_PORT_NAME: Final = re.compile(r"[A-Za-z0-9_-]{1,63}\Z", re.ASCII)
_METRIC: Final = re.compile(r"[A-Za-z_:][A-Za-z0-9_:]*\Z", re.ASCII)
_TEMPLATES: Final = ", ".join(
    sorted([*PLAIN_NAMES, *(f"{name}:NAME" for name in sorted(PORT_NAMES))])
)


def command_problems(path: str, stage: StageSpec) -> Iterator[FieldProblem]:
    """Say what is wrong with a stage's program.

    Args:
        path: of the stage.
        stage: has a command.
    """
    command = stage.command
    assert command is not None
    where = f"{path}.command"
    if stage.entrypoint:
        yield FieldProblem(where, "is a stage's program, and it has an entrypoint: say one of them")
    if stage.memory is not None and stage.memory.reuse_profile:
        yield FieldProblem(
            f"{path}.memory.reuse_profile", "is for a Stage class: a program measures by itself"
        )
    if stage.args_json not in ("", "{}"):
        yield FieldProblem(f"{path}.args_json", "are for a Stage class: a program has its argv")
    if ports_are_wrong := _ports_problem(command):
        yield FieldProblem(f"{where}.ports", ports_are_wrong)
    else:
        yield from _unused_ports(where, stage, command)
    yield from _argv_problems(where, stage, command)
    for name, value in stage.env:
        for problem in _template_problems(value, stage, command):
            yield FieldProblem(f"{path}.env[{name[:LONGEST_TEXT]}]", problem)
    yield from _probes_problems(where, command)
    if command.drain is not None:
        yield from named([*_drain_problems(f"{where}.drain", command.drain, stage, command)])


def _argv_problems(where: str, stage: StageSpec, command: CommandSpec) -> Iterator[FieldProblem]:
    argv = command.argv
    if not argv:
        yield FieldProblem(f"{where}.argv", "is empty: name a program, and its arguments")
        return
    yield from named([(f"{where}.argv", count_problem(len(argv), MOST_ARGUMENTS))])
    size = sum(len(argument.encode("utf-8", "replace")) for argument in argv[:MOST_ARGUMENTS])
    if size > LARGEST_ENV_BYTES:
        yield FieldProblem(
            f"{where}.argv", f"has {size} bytes, at most {LARGEST_ENV_BYTES} are taken"
        )
    yield from named([(f"{where}.argv[0]", _program_problem(command.program))])
    for index, argument in enumerate(argv[:MOST_ARGUMENTS]):
        at = f"{where}.argv[{index}]"
        if "\0" in argument:
            yield FieldProblem(at, "contains a NUL character")
        if len(argument.encode("utf-8", "replace")) > LARGEST_ARGUMENT_BYTES:
            yield FieldProblem(at, f"is longer than {LARGEST_ARGUMENT_BYTES} bytes")
        if index:
            for problem in _template_problems(argument, stage, command):
                yield FieldProblem(at, problem)


def _program_problem(program: str) -> str:
    if not program:
        return "is empty: it is the program"
    if any(names_in(program)):
        return f"{shown(program)} holds a template: which program runs is settled beforehand"
    if "/" in program and not program.startswith("/"):
        return f"{shown(program)} is relative: name an absolute path, or a program of the PATH"
    return text_problem(program)


def _template_problems(text: str, stage: StageSpec, command: CommandSpec) -> Iterator[str]:
    for name in dict.fromkeys(names_in(text)):
        word, colon, port = name.partition(":")
        if word in PORT_NAMES and colon:
            if port not in command.ports:
                yield (
                    f"{{{name}}} names no port of the stage; `ports` has "
                    f"{', '.join(map(shown, command.ports)) or 'none'}"
                )
        elif name not in PLAIN_NAMES:
            yield (
                f"{{{name[:LONGEST_TEXT]}}} is no template (there are: {_TEMPLATES}); "
                f"{{{{{name[:LONGEST_TEXT]}}}}} stands for itself"
            )
        elif name in CARD_NAMES and not stage.devices:
            yield f"{{{name}}} is about cards, and the stage has none: add `devices`"
    yield from _nearly_problems(text, command)


def _nearly_problems(text: str, command: CommandSpec) -> Iterator[str]:
    """Name what was surely meant: a program would get it as it is there."""
    for there, meant in dict(nearly_in(text)).items():
        port = meant[1:-1].partition(":")[2]
        if not port or port in command.ports:
            yield f"{shown(there)} is no template, for its blanks: {meant} is one"


def _ports_problem(command: CommandSpec) -> str:
    if problem := count_problem(len(command.ports), MOST_PORTS):
        return problem
    for name in command.ports:
        if not _PORT_NAME.match(name):
            return f"{shown(name)} is no port's name: 1 to 63 letters, digits, - and _"
        if name == "stage":
            return "'stage' is the name of Stagekeeper's own address: choose another"
        if command.ports.count(name) > 1:
            return f"{shown(name)} is there twice"
    return ""


def _unused_ports(where: str, stage: StageSpec, command: CommandSpec) -> Iterator[FieldProblem]:
    texts = [*command.argv[1:MOST_ARGUMENTS], *(value for _, value in stage.env)]
    said = {name.partition(":")[2] for text in texts for name in names_in(text)}
    for name in command.ports[:MOST_PORTS]:
        if name not in said:
            yield FieldProblem(
                f"{where}.ports",
                f"{shown(name)} is told to nobody: put {{port:{name[:LONGEST_TEXT]}}} into the "
                "command or its env",
            )


def ports_problem(entries: Sequence[StagePorts], most: int) -> str:
    """Say what is wrong with ports that an agent says it has leased; empty when nothing is."""
    if problem := count_problem(len(entries), most):
        return problem
    for entry in entries:
        found = [length_problem(entry.host), count_problem(len(entry.ports), MOST_PORTS)]
        for lease in entry.ports[:MOST_PORTS]:
            found += [length_problem(lease.name), range_problem(lease.port, 1, 65_535)]
        if problem := next(filter(None, found), ""):
            return problem
    return ""


def _probes_problems(where: str, command: CommandSpec) -> Iterator[FieldProblem]:
    if command.ready is None and not command.ports:
        yield FieldProblem(
            f"{where}.ready",
            "is missing: without ports there is nothing to look at; say {log: TEXT}, a text of "
            "the line that it prints when it is ready",
        )
    for name in ("ready", "live", "canary"):
        probe: Probe | None = getattr(command, name)
        if probe is not None:
            yield from named(_probe_problems(f"{where}.{name}", probe, command))
            if probe.look == LOG and name != "ready":
                yield FieldProblem(f"{where}.{name}", "log is for `ready` alone")


def _probe_problems(where: str, probe: Probe, command: CommandSpec) -> list[tuple[str, str]]:
    found = [
        (where, _look_problem(probe)),
        (f"{where}.contains", length_problem(probe.contains, LONGEST_TEXT)),
        (f"{where}.body", _body_problem(probe)),
        (f"{where}.failures", range_problem(probe.failures, 1, MOST_PROBE_FAILURES)),
    ]
    if probe.contains and probe.look != HTTP:
        found.append((f"{where}.contains", "is for http alone"))
    if probe.look == LOG and probe.port:
        found.append((f"{where}.port", "is not for log"))
    elif probe.look != LOG:
        found.append((f"{where}.port", _port_problem(probe.port, command)))
    for limit in ("interval_s", "timeout_s"):
        seconds = getattr(probe, limit)
        if seconds is not None:
            found.append((f"{where}.{limit}", seconds_problem(seconds, may_be_zero=False)))
    return found


def _look_problem(probe: Probe) -> str:
    if probe.look == HTTP:
        return _path_problem(probe.target)
    if probe.look == LOG and not probe.target:
        return "log is empty: say a text of the line that it prints"
    if probe.look in (GRPC, LOG):
        return length_problem(probe.target, LONGEST_TEXT) or text_problem(probe.target)
    return "" if probe.look == TCP else "says not how to look: http, grpc, tcp or log"


def _path_problem(path: str) -> str:
    if not path.startswith("/"):
        return f"{shown(path)} is no path of an HTTP request: it begins with /"
    if any(not ("!" <= character <= "~") for character in path):
        return f"{shown(path)} is no path of an HTTP request: percent-encode what is not ASCII"
    return length_problem(path, LONGEST_TEXT)


def _body_problem(probe: Probe) -> str:
    if not probe.body:
        return ""
    if probe.look != HTTP:
        return "is for http alone"
    if len(probe.body) > LARGEST_ARGUMENT_BYTES:
        return f"has {len(probe.body)} characters, at most {LARGEST_ARGUMENT_BYTES} are taken"
    try:
        json.loads(probe.body)
    except (ValueError, RecursionError) as error:
        return f"is not JSON: {error}"
    return ""


def _port_problem(port: str, command: CommandSpec) -> str:
    if port in command.ports or (not port and command.ports):
        return ""
    listed = ", ".join(map(shown, command.ports)) or "none"
    return f"{shown(port) if port else 'it'} is no port of the stage; `ports` has {listed}"


def _drain_problems(
    where: str, drain: DrainSpec, stage: StageSpec, command: CommandSpec
) -> Iterator[tuple[str, str]]:
    yield f"{where}.settle_s", seconds_problem(drain.settle_s)
    if drain.budget_s is not None:
        yield f"{where}.budget_s", seconds_problem(drain.budget_s)
    waits_s = drain.settle_s + (drain.budget_s or 0.0)
    if stage.stop_budget_s is not None and waits_s >= stage.stop_budget_s:
        yield (
            where,
            f"takes {waits_s:g} s, and nothing is left for its end of the stop_budget_s of "
            f"{stage.stop_budget_s:g} s",
        )
    if not drain.metric:
        for name in ("path", "port"):
            if getattr(drain, name):
                yield f"{where}.{name}", "is where `metric` is read, and there is none"
        return
    if not _METRIC.match(drain.metric) or len(drain.metric) > LONGEST_TEXT:
        yield f"{where}.metric", f"{shown(drain.metric)} is no metric's name"
    yield f"{where}.path", _path_problem(drain.path)
    yield f"{where}.port", _port_problem(drain.port, command)
