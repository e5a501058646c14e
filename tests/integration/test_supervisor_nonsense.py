"""Whatever is sent, the answer is an answer or a refusal that says why, and never a bug."""

from __future__ import annotations

import random
from typing import Any

import grpc
import pytest
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from stagekeeper.v1 import (
    deployment_service_pb2,
    discovery_service_pb2,
    supervisor_service_pb2,
)
from stagekeeper.wire.error_details import unpack
from tests.fakes.fake_agent import FakeAgent
from tests.fakes.hand_worker import HandWorker, channel_to, shard
from tests.fakes.supervisors import list_deployments, list_workers, reigns, spec

SERVICES = (discovery_service_pb2, deployment_service_pb2, supervisor_service_pb2)
ROUNDS = 40
BUGS = {grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN}
TEXTS = ["", "m", "w1", "default", "a/b", "\n", "x" * 64, "🦙", "127.0.0.1:1", "m:S", "{}", "["]
DOUBLES = [0.0, -1.0, 0.5, 1e300, float("inf"), float("-inf"), float("nan")]


def nonsense(message: Message, chance: random.Random, share: float, depth: int = 0) -> Message:
    """Change a share of a message's fields to values from the edges of what they can hold."""
    for field in message.DESCRIPTOR.fields:
        if (
            field.message_type is not None
            and not field.is_repeated
            and message.HasField(field.name)
        ):
            nonsense(getattr(message, field.name), chance, share, depth + 1)
        if field.message_type is not None and field.is_repeated and len(field.message_type.fields):
            values = getattr(message, field.name)
            for value in values if not field.message_type.GetOptions().map_entry else ():
                nonsense(value, chance, share, depth + 1)
        if chance.random() > share or depth > 4:
            continue
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            getattr(message, field.name)[chance.choice(TEXTS)] = chance.choice(TEXTS)
            continue
        count = chance.randrange(3) if field.is_repeated else 1
        for _ in range(count):
            if field.message_type is not None:
                slot = getattr(message, field.name)
                nonsense(slot.add() if field.is_repeated else slot, chance, 0.75, depth + 1)
                if not field.is_repeated:
                    slot.SetInParent()
            elif field.is_repeated:
                getattr(message, field.name).append(scalar(field, chance))
            else:
                setattr(message, field.name, scalar(field, chance))
    return message


def scalar(field: Any, chance: random.Random) -> Any:
    kind = field.cpp_type
    if kind == FieldDescriptor.CPPTYPE_STRING:
        text = chance.choice(TEXTS)
        return text.encode() if field.type == FieldDescriptor.TYPE_BYTES else text
    if kind == FieldDescriptor.CPPTYPE_BOOL:
        return chance.random() < 0.5
    if kind == FieldDescriptor.CPPTYPE_DOUBLE:
        return chance.choice(DOUBLES)
    highest = {
        FieldDescriptor.CPPTYPE_UINT64: 2**64 - 1,
        FieldDescriptor.CPPTYPE_UINT32: 2**32 - 1,
        FieldDescriptor.CPPTYPE_INT64: 2**63 - 1,
        FieldDescriptor.CPPTYPE_INT32: 2**31 - 1,
        FieldDescriptor.CPPTYPE_ENUM: 99,
    }[kind]
    return chance.choice([0, 1, 1, 2, 3, 7, highest])


def sound(request: Message) -> Message:
    """Make a request that would be taken, so that a small change in it is met where it matters."""
    if isinstance(request, supervisor_service_pb2.RegisterWorkerRequest):
        request.CopyFrom(HandWorker("", "w2").hold(shard(), shard(replica=1, memory_bytes=1)).slice)
        request.devices.add(device_id="cpu:0", kind="cpu", total_bytes=1 << 30)
        request.operations.add(operation_id="op", deployment="m", state=1).generation.n = 1
        request.failures.add(failure_id="f", kind=1).origin.worker_id = "w2"
    elif isinstance(request, supervisor_service_pb2.ReportFailureRequest):
        request.worker_id, request.incarnation = "w1", 1
        request.failure.failure_id = "f"
        request.failure.causes.add(failure_id="g").exit.signal = 9
    elif isinstance(request, deployment_service_pb2.CreateDeploymentRequest):
        request.spec.CopyFrom(spec("n"))
    return request


METHODS = [
    (module.__name__.rsplit(".", 1)[-1], service.name, method)
    for module in SERVICES
    for service in module.DESCRIPTOR.services_by_name.values()
    for method in service.methods
]


@pytest.mark.parametrize("method", METHODS, ids=lambda case: f"{case[1]}.{case[2].name}")
async def test_nonsense_is_answered_or_refused_with_a_reason(tmp_path, method):
    _, service, rpc = method
    chance = random.Random(f"{service}.{rpc.name}")
    request_class = GetMessageClass(rpc.input_type)
    response_class = GetMessageClass(rpc.output_type)
    async with reigns(tmp_path) as them, FakeAgent(them.endpoint, "w1").serving():
        assert them.supervisor is not None
        is_for_workers = service == "SupervisorService"
        address = them.supervisor.worker_address if is_for_workers else them.endpoint
        async with channel_to(address) as channel:
            connect = channel.unary_stream if rpc.server_streaming else channel.unary_unary
            call: Any = connect(
                f"/{rpc.containing_service.full_name}/{rpc.name}",
                request_serializer=request_class.SerializeToString,
                response_deserializer=response_class.FromString,
            )
            for _ in range(ROUNDS):
                share = chance.choice([0.02, 0.05, 0.2, 0.75])
                request = nonsense(sound(request_class()), chance, share)
                if chance.random() < 0.8 and "cluster" in request.DESCRIPTOR.fields_by_name:
                    request.cluster = "default"  # type: ignore[attr-defined]
                try:
                    if rpc.server_streaming:
                        stream = call(request, timeout=10)
                        await stream.read()
                        stream.cancel()
                    else:
                        await call(request, timeout=10)
                except grpc.aio.AioRpcError as error:
                    assert error.code() not in BUGS, f"{error}\n{request}"
                    assert unpack(error) is not None, f"{error}\n{request}"
        assert (await list_workers(them.endpoint)).workers
        await list_deployments(them.endpoint)
        await them.restart()  # and whatever was written can be read again
        await list_deployments(them.endpoint)
