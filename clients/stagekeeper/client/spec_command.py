"""A command stage as a spec file writes it: `command`, `ports`, probes and `drain` of a stage.

Decided here: the keys, and how a probe is spelled (`{http: /health}`, `{grpc: NAME}`,
`{tcp: PORT}`, `{log: TEXT}`). What the values mean together is checked by the supervisor, which
names fields as the message has them; so the line of each is noted under that name too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import msgspec

from stagekeeper.client.spec_tree import Mappings, Scalar, Tree, plain
from stagekeeper.client.spec_values import Take, TreeReader
from stagekeeper.v1.types_pb2 import DrainSpec, Probe, StageSpec

COMMAND_KEYS: Final = ("command", "ports", "ready", "live", "canary", "drain")

_LOOKS: Final = ("http", "grpc", "tcp", "log")


def command_takes(reader: TreeReader, stage: StageSpec, path: str) -> dict[str, Take]:
    """Return what takes over the keys of a command stage.

    Args:
        reader: keeps problems and lines.
        stage: is filled.
        path: of the stage.
    """
    command = f"{path}.command"

    def note(name: str, at: str) -> None:
        """Note that a field of the message stands where a key of the file does."""
        for known, line in list(reader.lines.items()):
            if known == at or known.startswith((f"{at}.", f"{at}[")):
                reader.lines[f"{command}.{name}{known[len(at) :]}"] = line

    def argv(value: Tree, at: str) -> None:
        stage.command.argv.extend(reader.texts(value, at))
        note("argv", at)

    def ports(value: Tree, at: str) -> None:
        stage.command.ports.extend(reader.texts(value, at))
        note("ports", at)

    def probe(name: str) -> Take:
        def take(value: Tree, at: str) -> None:
            getattr(stage.command, name).CopyFrom(_probe(reader, value, at))
            note(name, at)

        return take

    def drain(value: Tree, at: str) -> None:
        stage.command.drain.CopyFrom(_drain(reader, value, at))
        note("drain", at)

    return {
        "command": argv,
        "ports": ports,
        "ready": probe("ready"),
        "live": probe("live"),
        "canary": probe("canary"),
        "drain": drain,
    }


def check_command_keys(reader: TreeReader, tree: Tree, path: str, stage: StageSpec) -> None:
    """Refuse keys that only a command stage has, and such as only a Stage class has."""
    if not isinstance(tree, Mappings):
        return
    entries, lines = tree.entries, tree.key_lines
    if "command" not in entries:
        stage.ClearField("command")  # what was read of it says nothing without one
        for key in COMMAND_KEYS[1:]:
            if key in entries:
                reader.problem(
                    f"{path}.{key}", "is for a stage with a `command`", lines.get(key, 0)
                )
        return
    for key, instead in (
        ("entrypoint", "say one of them"),
        ("args", "put arguments into the command"),
        ("max_in_flight", "calls go to the program itself"),
    ):
        if key in entries:
            reader.problem(
                f"{path}.{key}",
                f"is not for a stage with a `command`: {instead}",
                lines.get(key, 0),
            )


def _probe(reader: TreeReader, tree: Tree, path: str) -> Probe:
    probe = Probe()

    def text(name: str) -> Take:
        return lambda value, at: reader.set(probe, name, reader.text(value, at))

    def seconds(name: str) -> Take:
        return lambda value, at: reader.set(probe, name, reader.seconds(value, at))

    def tcp(value: Tree, at: str) -> None:
        port = reader.text(value, at)
        if port is not None:
            probe.tcp, probe.port = True, port

    def body(value: Tree, at: str) -> None:
        is_text = isinstance(value, Scalar) and isinstance(value.value, str)
        probe.body = str(plain(value)) if is_text else msgspec.json.encode(plain(value)).decode()

    takes: dict[str, Callable[[Tree, str], None]] = {
        "http": text("http_path"),
        "grpc": text("grpc_service"),
        "tcp": tcp,
        "log": text("log_text"),
        "port": text("port"),
        "body": body,
        "contains": text("contains"),
        "interval_s": seconds("interval_s"),
        "timeout_s": seconds("timeout_s"),
        "failures": lambda value, at: reader.set(
            probe, "failures", reader.count(value, at, least=1)
        ),
    }
    reader.keys(tree, path, takes)
    if isinstance(tree, Mappings) and len(tree.entries.keys() & set(_LOOKS)) != 1:
        reader.problem(path, f"needs exactly one of {', '.join(_LOOKS)}", tree.line)
    if isinstance(tree, Mappings) and {"tcp", "port"} <= tree.entries.keys():
        reader.problem(f"{path}.port", "is what `tcp` says already", tree.key_lines.get("port", 0))
    return probe


def _drain(reader: TreeReader, tree: Tree, path: str) -> DrainSpec:
    drain = DrainSpec()

    def text(name: str) -> Take:
        return lambda value, at: reader.set(drain, name, reader.text(value, at))

    def in_flight(value: Tree, at: str) -> None:
        reader.keys(
            value,
            at,
            {"metric": text("metric"), "http": text("path"), "port": text("port")},
            required=("metric", "http"),
        )

    def seconds(name: str) -> Take:
        return lambda value, at: reader.set(drain, name, reader.seconds(value, at))

    reader.keys(
        tree,
        path,
        {
            "settle_s": seconds("settle_s"),
            "budget_s": seconds("budget_s"),
            "in_flight": in_flight,
        },
    )
    return drain
