"""Calls through the client, against real gRPC servers in this process: routes, retries, errors."""

from __future__ import annotations

import asyncio
import contextlib

import grpc
import numpy as np
import pytest

from stagekeeper import client as sdk
from stagekeeper.client import Client
from stagekeeper.client import calls as calls_module
from stagekeeper.v1 import types_pb2 as types
from stagekeeper.wire.payload import JSON
from tests.fakes.stage_server import StageServer
from tests.fakes.supervisor_server import SupervisorServer
from tests.fakes.views import deployment, replica, shard
from tests.harness.waiting import wait_for


async def _echo(*args, **kwargs):
    return [list(args), kwargs]


@pytest.fixture
async def servers():
    """Start servers that end with the test."""
    async with contextlib.AsyncExitStack() as stack:

        async def start(server, address="127.0.0.1:0"):
            await server.start(address)
            stack.push_async_callback(server.stop)
            return server

        yield start


@pytest.fixture
async def supervisor(servers):
    return await servers(SupervisorServer())


@pytest.fixture
async def client(supervisor):
    async with Client(supervisor.endpoint) as client:
        yield client


async def _two_replicas(servers, supervisor, endpoints, idempotent=()):
    stages = [await servers(StageServer(f"i{n}", endpoints)) for n in (0, 1)]
    supervisor.put(_view(stages, idempotent))
    return stages


def _view(stages, idempotent=(), name="m"):
    return deployment(
        name,
        *(
            replica(n, shard(s.instance_id, s.url, worker_id=f"w{n}", idempotent=idempotent))
            for n, s in enumerate(stages)
        ),
    )


async def test_call_goes_to_the_entry_stage_with_all_kinds_of_arguments(
    servers, supervisor, client
):
    first, second = await servers(StageServer("i0")), await servers(StageServer("i1"))
    second.endpoints["echo"] = _echo
    supervisor.put(
        deployment(
            "m",
            replica(
                0,
                shard("i0", first.url),
                shard("i1", second.url, stage_id=1, stage_name="ranker"),
            ),
            stages=("encoder", "ranker"),
            entry="ranker",
        )
    )
    assert await client.call("m", "echo", 1, "a", k={"x": [1]}) == [[1, "a"], {"k": {"x": [1]}}]
    assert await client.call_with("m", "echo", (), {"stage": 1}) == [[], {"stage": 1}]
    answer = await client.call("m", "echo", np.eye(2))
    assert answer[0][0].tolist() == [[1, 0], [0, 1]]
    assert await client.call_with("m", "echo", (), {"a": 1}, content_type=JSON) == [[], {"a": 1}]
    with pytest.raises(sdk.NotFound, match="i0 says ENDPOINT_UNKNOWN"):
        await client.call("m", "echo", stage="encoder")
    with pytest.raises(sdk.NotFound, match=r"no stage 'index'.*encoder, ranker"):
        await client.call("m", "echo", stage="index")


async def test_calls_at_once_share_one_connection_a_stage_and_spread_evenly(
    servers, supervisor, client
):
    gate = asyncio.Event()

    async def wait():
        await gate.wait()

    stages = await _two_replicas(servers, supervisor, {"wait": wait})
    calls = [asyncio.create_task(client.call("m", "wait")) for _ in range(64)]
    await wait_for(lambda: sum(stage.ran["wait"] for stage in stages) == 64, "all calls run")
    gate.set()
    await asyncio.gather(*calls)
    assert [stage.ran["wait"] for stage in stages] == [32, 32]
    assert [len(stage.peers) for stage in stages] == [1, 1]


async def test_call_before_the_first_snapshot_waits_for_it(servers):
    stage = await servers(StageServer("i0", {"echo": _echo}))
    supervisor = SupervisorServer()
    supervisor.put(_view([stage]))
    await servers(supervisor)
    address = supervisor.endpoint
    await supervisor.stop()
    async with Client(address) as client:
        call = asyncio.create_task(client.call("m", "echo", 1))
        await asyncio.sleep(0.2)
        assert not call.done()
        await supervisor.start(address)
        assert await asyncio.wait_for(call, 10) == [[1], {}]


async def test_call_without_a_supervisor_ends_at_its_deadline():
    async with Client("127.0.0.1:1") as client:
        with pytest.raises(sdk.DeadlineExceeded, match=r"127\.0\.0\.1:1") as caught:
            await client.call("m", "echo", timeout=0.3)
    assert caught.value.never_ran
    assert "Connection refused" in caught.value.message


async def test_call_where_nobody_ever_answered_says_so_long_before_its_deadline(monkeypatch):
    monkeypatch.setattr(calls_module, "NOBODY_S", 0.3)
    async with Client("127.0.0.1:1", patience_s=0) as client:
        for timeout in (60, None):
            with pytest.raises(sdk.SupervisorUnreachable, match="Connection refused") as caught:
                await asyncio.wait_for(client.call("m", "echo", timeout=timeout), 20)
            assert (caught.value.reason, caught.value.never_ran) == ("UNREACHABLE", True)
            assert "endpoint" in caught.value.next_move


async def test_call_of_a_client_that_was_answered_once_waits_for_the_supervisor(
    servers, monkeypatch
):  # L1
    monkeypatch.setattr(calls_module, "NOBODY_S", 0.1)
    stage = await servers(StageServer("i0", {"echo": _echo}))
    supervisor = SupervisorServer()
    supervisor.put(_view([stage]))
    await servers(supervisor)
    address = supervisor.endpoint
    async with Client(address, patience_s=0, watch_at_once=False) as client:
        await client.list()  # it answers, and tells no routes
        await supervisor.stop()
        call = asyncio.create_task(client.call("m", "echo", 1))
        await wait_for(lambda: client._link.is_refused, "the watch was refused")
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.shield(call), 0.5)
        await supervisor.start(address)
        assert await asyncio.wait_for(call, 10) == [[1], {}]


@pytest.mark.parametrize(
    ("endpoint", "said"),
    [
        ("nonsense", "host:port"),
        ("127.0.0.1", "host:port"),
        (":7070", "host:port"),
        ("box:", "no port"),
        ("box:http", "no port"),
        ("box:0", "no port"),
        ("box:65536", "no port"),
        ("::1:7070", r"\[::1\]:7070"),
    ],
)
def test_endpoint_that_nobody_can_dial_is_refused_at_once(endpoint, said):
    with pytest.raises(sdk.BadEndpoint, match=said) as caught:
        Client(endpoint)
    assert isinstance(caught.value, ValueError)
    assert "7070" in caught.value.message  # what to write
    assert [path for path, _ in caught.value.violations] == ["endpoint"]


@pytest.mark.parametrize(
    "endpoint", ["box:1", "[::1]:7070", "box.example:65535", "dns://10.0.0.2:53/supervisor:7070"]
)
def test_endpoint_that_can_be_dialled_is_taken(endpoint):
    assert Client(endpoint).endpoint == endpoint


async def test_calls_go_on_while_the_supervisor_is_away(servers, supervisor, client):
    await _two_replicas(servers, supervisor, {"echo": _echo})
    await client.call("m", "echo")
    address = supervisor.endpoint
    await supervisor.stop()
    for n in range(20):
        assert await client.call("m", "echo", n) == [[n], {}]
    # The next one knows nothing yet (U35, R10): the routes stay, call by call.
    successor = await servers(SupervisorServer(epoch=2, complete=False), address)
    await wait_for(lambda: successor.asked["watch"], "the client watches the successor")
    for n in range(20):
        assert await client.call("m", "echo", n) == [[n], {}]
    successor.become_complete()
    await wait_for(lambda: "m" not in client.routes.names, "the routes are replaced")
    with pytest.raises(sdk.NotFound):
        await client.call("m", "echo")


async def test_stale_route_is_fetched_anew_and_the_call_succeeds(servers, supervisor, client):
    stage = await servers(StageServer("new", {"echo": _echo}))
    supervisor.put(deployment("m", replica(0, shard("old", stage.url))))
    await client.synced(10)
    supervisor.put(_view([stage]), quietly=True)  # the watch has not told yet
    assert await client.call("m", "echo", 1) == [[1], {}]
    assert supervisor.asked["get"] >= 1
    assert stage.ran["echo"] == 1


async def test_changed_port_is_followed(servers, supervisor, client):  # R23
    old = await servers(StageServer("i0", {"echo": _echo}))
    supervisor.put(_view([old]))
    await client.call("m", "echo")
    new = await servers(StageServer("i1", {"echo": _echo}))
    await old.stop()
    supervisor.put(_view([new]))
    assert await client.call("m", "echo", 2) == [[2], {}]
    assert new.ran["echo"] == 1


@pytest.mark.parametrize(
    "refusal",
    [
        (grpc.StatusCode.RESOURCE_EXHAUSTED, "TOO_MANY_CALLS"),
        (grpc.StatusCode.UNAVAILABLE, "DRAINING"),
    ],
)
async def test_refusal_before_running_is_repeated_on_the_other_replica(
    servers, supervisor, client, refusal
):
    stages = await _two_replicas(servers, supervisor, {"echo": _echo})
    stages[0].refusal = refusal
    for n in range(6):
        assert await client.call("m", "echo", n) == [[n], {}]
    assert stages[1].ran["echo"] == 6


async def test_refusal_by_all_is_repeated_until_one_takes_it(servers, supervisor, client):
    stages = await _two_replicas(servers, supervisor, {"echo": _echo})
    for stage in stages:
        stage.refusal = (grpc.StatusCode.RESOURCE_EXHAUSTED, "TOO_MANY_CALLS")
    call = asyncio.create_task(client.call("m", "echo"))
    await wait_for(lambda: all(stage.asked["echo"] for stage in stages), "both were asked")
    stages[1].refusal = None
    assert await asyncio.wait_for(call, 10) == [[], {}]


async def test_refusal_by_all_ends_with_the_deadline_and_its_reason(servers, supervisor, client):
    stages = await _two_replicas(servers, supervisor, {"echo": _echo})
    for stage in stages:
        stage.refusal = (grpc.StatusCode.RESOURCE_EXHAUSTED, "TOO_MANY_CALLS")
    loop = asyncio.get_running_loop()
    started = loop.time()
    with pytest.raises(sdk.StagekeeperError, match="TOO_MANY_CALLS"):
        await client.call("m", "echo", timeout=0.5)
    assert loop.time() - started < 2
    assert not supervisor.asked["get"]  # who is busy has not moved


async def test_unreachable_replica_is_passed_over_also_for_calls_that_may_not_repeat(
    servers, supervisor, client
):  # U5, after the connection is gone
    stages = await _two_replicas(servers, supervisor, {"echo": _echo})
    await asyncio.gather(*(client.call("m", "echo") for _ in range(4)))
    await stages[0].stop()
    answers = await asyncio.gather(*(client.call("m", "echo", n) for n in range(20)))
    assert [answer[0] for answer in answers] == [[n] for n in range(20)]


async def test_endpoint_that_raised_is_not_repeated(servers, supervisor, client):
    async def divide(a, b):
        return a / b

    stages = await _two_replicas(servers, supervisor, {"divide": divide}, ("divide",))
    with pytest.raises(sdk.EndpointRaised, match="division by zero") as caught:
        await client.call("m", "divide", 1, 0)
    assert caught.value.remote_type == "ZeroDivisionError"
    assert caught.value.remote_traceback.endswith("boom")
    assert caught.value.rank == 0
    assert caught.value.reason == "ENDPOINT_RAISED"
    assert sum(stage.ran["divide"] for stage in stages) == 1


async def test_argument_that_cannot_travel_is_named(servers, supervisor, client):
    await _two_replicas(servers, supervisor, {"echo": _echo})
    with pytest.raises(sdk.BadRequest, match=r"k\[0\]: an object"):
        await client.call("m", "echo", k=[object()])


async def test_deployment_that_failed_says_why(servers, supervisor, client):  # U14
    supervisor.put(
        deployment(
            "m",
            replica(
                0,
                state=types.REPLICA_STATE_FAILED,
                reason="stage thinker was killed for memory",
                next_action="deploy again",
            ),
            state=types.DEPLOYMENT_STATE_FAILED,
        )
    )
    with pytest.raises(sdk.NoReplica, match=r"killed for memory.*deploy again") as caught:
        await client.call("m", "echo")
    assert caught.value.code is grpc.StatusCode.UNAVAILABLE
    assert caught.value.never_ran


async def test_unknown_deployment_is_asked_for_before_it_is_refused(servers, supervisor, client):
    await client.synced(10)
    stage = await servers(StageServer("i0", {"echo": _echo}))
    supervisor.put(_view([stage]), quietly=True)  # U26: another client was told READY
    assert await client.call("m", "echo") == [[], {}]
    with pytest.raises(sdk.NotFound, match="no deployment 'n'") as caught:
        await client.call("n", "echo")
    assert caught.value.reason == "DEPLOYMENT_UNKNOWN"


async def test_deployment_that_is_gone_is_unknown_before_the_watch_tells(supervisor, client):
    draining = replica(0, state=types.REPLICA_STATE_DRAINING)
    supervisor.put(deployment("m", draining, state=types.DEPLOYMENT_STATE_DELETING))
    with pytest.raises(sdk.NoReplica):
        await client.call("m", "echo")
    supervisor.remove("m", quietly=True)
    with pytest.raises(sdk.NotFound, match="no deployment 'm' any more") as caught:
        await client.call("m", "echo")
    assert caught.value.reason == "DEPLOYMENT_UNKNOWN" and caught.value.never_ran


async def test_names_are_compared_exactly(servers, supervisor, client):  # U27
    names = ["llama-2", "a-rep1", "x-rank0", "模型 é"]
    for name in names:
        stage = await servers(StageServer(name, {"echo": _echo}))
        supervisor.put(_view([stage], name=name))
    for name in names:
        assert await client.call(name, "echo", name) == [[name], {}]
    with pytest.raises(sdk.NotFound):
        await client.call("llama", "echo")


async def test_deadline_reaches_the_endpoint_and_the_caller(servers, supervisor, client):
    cancelled = asyncio.Event()

    async def hang():
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    await _two_replicas(servers, supervisor, {"hang": hang}, ("hang",))
    with pytest.raises(sdk.DeadlineExceeded):
        await client.call("m", "hang", timeout=0.3)
    await asyncio.wait_for(cancelled.wait(), 5)


async def test_cancelling_a_call_cancels_the_endpoint(servers, supervisor, client):
    started, cancelled = asyncio.Event(), asyncio.Event()

    async def hang():
        started.set()
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    await _two_replicas(servers, supervisor, {"hang": hang})
    call = asyncio.create_task(client.call("m", "hang"))
    await asyncio.wait_for(started.wait(), 5)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    await asyncio.wait_for(cancelled.wait(), 5)
    assert client.routes.outstanding("i0") == client.routes.outstanding("i1") == 0


async def test_stream_yields_each_value_as_it_comes(servers, supervisor, client):
    gate = asyncio.Event()

    async def count(n):
        for i in range(n):
            yield i
            if i == 0:
                await gate.wait()

    await _two_replicas(servers, supervisor, {"count": count})
    values = client.call_stream("m", "count", 3)
    assert await anext(values) == 0
    gate.set()
    assert [value async for value in values] == [1, 2]


async def test_stream_left_early_cancels_the_endpoint(servers, supervisor, client):
    cancelled = asyncio.Event()

    async def forever():
        try:
            while True:
                yield 1
                await asyncio.sleep(0.01)
        finally:
            cancelled.set()

    await _two_replicas(servers, supervisor, {"forever": forever})
    async with contextlib.aclosing(client.call_stream("m", "forever")) as values:
        assert await anext(values) == 1
    await asyncio.wait_for(cancelled.wait(), 5)
    assert client.routes.outstanding("i0") == client.routes.outstanding("i1") == 0


async def test_stream_refused_before_its_first_value_goes_to_the_other_replica(
    servers, supervisor, client
):
    async def count(n):
        for i in range(n):
            yield i

    stages = await _two_replicas(servers, supervisor, {"count": count})
    stages[0].refusal = (grpc.StatusCode.UNAVAILABLE, "DRAINING")
    for _ in range(4):
        assert [value async for value in client.call_stream("m", "count", 3)] == [0, 1, 2]


async def test_stream_of_nothing_ends(servers, supervisor, client):
    async def nothing():
        return
        yield

    await _two_replicas(servers, supervisor, {"nothing": nothing})
    assert [value async for value in client.call_stream("m", "nothing")] == []


async def test_channels_to_addresses_without_routes_are_closed(servers, supervisor, client):
    stages = await _two_replicas(servers, supervisor, {"echo": _echo})
    await asyncio.gather(*(client.call("m", "echo") for _ in range(4)))
    assert len(client._stages.addresses) == 2
    supervisor.put(_view(stages[:1]))
    await wait_for(lambda: len(client._stages.addresses) == 1, "the other channel is dropped")


async def test_closing_the_client_ends_calls_under_way(servers, supervisor):
    started = asyncio.Event()

    async def hang():
        started.set()
        await asyncio.Event().wait()

    await _two_replicas(servers, supervisor, {"hang": hang})
    client = Client(supervisor.endpoint)
    call = asyncio.create_task(client.call("m", "hang"))
    await asyncio.wait_for(started.wait(), 5)
    await client.close()
    with pytest.raises((sdk.StagekeeperError, asyncio.CancelledError)):
        await asyncio.wait_for(call, 5)
