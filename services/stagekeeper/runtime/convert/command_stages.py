"""Programs as stages: their specs, and the ports that their agents lease for them.

Decided here: the defaults of fields that were left out. What a field may hold is the core's to
judge; a probe that says not how to look comes out as one with an empty `look`.
"""

from __future__ import annotations

from stagekeeper.core.command_stage import (
    DEFAULT_FAILURES,
    GRPC,
    HTTP,
    LOG,
    TCP,
    CommandSpec,
    DrainSpec,
    PortLease,
    Probe,
    StagePorts,
)
from stagekeeper.v1 import types_pb2 as pb2

_LOOKS = {"http_path": HTTP, "grpc_service": GRPC, "log_text": LOG}


def command_to_proto(command: CommandSpec) -> pb2.CommandSpec:
    return pb2.CommandSpec(
        argv=command.argv,
        ports=command.ports,
        ready=_probe_to_proto(command.ready),
        live=_probe_to_proto(command.live),
        canary=_probe_to_proto(command.canary),
        drain=None if command.drain is None else _drain_to_proto(command.drain),
    )


def command_from_proto(message: pb2.CommandSpec) -> CommandSpec:
    has = message.HasField
    return CommandSpec(
        argv=tuple(message.argv),
        ports=tuple(message.ports),
        ready=_probe_from_proto(message.ready) if has("ready") else None,
        live=_probe_from_proto(message.live) if has("live") else None,
        canary=_probe_from_proto(message.canary) if has("canary") else None,
        drain=_drain_from_proto(message.drain) if has("drain") else None,
    )


def _probe_to_proto(probe: Probe | None) -> pb2.Probe | None:
    if probe is None:
        return None
    message = pb2.Probe(
        port=probe.port,
        body=probe.body,
        contains=probe.contains,
        interval_s=probe.interval_s,
        timeout_s=probe.timeout_s,
        failures=probe.failures,
    )
    for name, look in _LOOKS.items():
        if probe.look == look:
            setattr(message, name, probe.target)
    if probe.look == TCP:
        message.tcp = True
    return message


def _probe_from_proto(message: pb2.Probe) -> Probe:
    said = message.WhichOneof("look")
    look = _LOOKS.get(said or "", TCP if said == "tcp" and message.tcp else "")
    return Probe(
        look=look,
        target=getattr(message, said) if said in _LOOKS else "",
        port=message.port,
        body=message.body,
        contains=message.contains,
        interval_s=message.interval_s if message.HasField("interval_s") else None,
        timeout_s=message.timeout_s if message.HasField("timeout_s") else None,
        failures=message.failures or DEFAULT_FAILURES,
    )


def _drain_to_proto(drain: DrainSpec) -> pb2.DrainSpec:
    return pb2.DrainSpec(
        settle_s=drain.settle_s,
        budget_s=drain.budget_s,
        metric=drain.metric,
        path=drain.path,
        port=drain.port,
    )


def _drain_from_proto(message: pb2.DrainSpec) -> DrainSpec:
    return DrainSpec(
        settle_s=message.settle_s,
        budget_s=message.budget_s if message.HasField("budget_s") else None,
        metric=message.metric,
        path=message.path,
        port=message.port,
    )


def stage_ports_to_proto(ports: StagePorts) -> pb2.StagePorts:
    return pb2.StagePorts(
        stage_id=ports.stage_id,
        host=ports.host,
        ports=[pb2.NamedPort(name=it.name, port=it.port) for it in ports.ports],
    )


def stage_ports_from_proto(message: pb2.StagePorts) -> StagePorts:
    return StagePorts(
        message.stage_id,
        message.host,
        tuple([PortLease(it.name, it.port) for it in message.ports]),
    )
