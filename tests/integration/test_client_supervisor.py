"""What the client asks of the supervisor: lists, watches, creations and deletions to their end."""

from __future__ import annotations

import asyncio
import contextlib
import re
import sys

import grpc
import pytest

from stagekeeper import client as sdk
from stagekeeper.cli.exits import CliError, ExitCode
from stagekeeper.cli.log_reading import LogChoice, logs_shown
from stagekeeper.client import Client, parse_spec
from stagekeeper.v1 import agent_service_pb2 as agent_pb
from stagekeeper.v1 import deployment_service_pb2 as pb
from stagekeeper.v1 import types_pb2 as types
from stagekeeper.v1.agent_service_pb2_grpc import (
    AgentServiceServicer,
    add_AgentServiceServicer_to_server,
)
from stagekeeper.wire.error_details import pack
from tests.fakes.supervisor_server import SupervisorServer
from tests.fakes.views import deployment, replica, shard
from tests.harness.waiting import wait_for

SPEC = {"name": "m", "stages": [{"name": "s", "entrypoint": "a:B"}]}
ACCEPTED = pb.CreateDeploymentResponse(
    accepted=pb.CreationAccepted(deployment="m", durable=True, starting_replicas=[0])
)
PROGRESS = pb.CreateDeploymentResponse(
    progress=types.StageProgress(stage_name="s", phase=types.PHASE_LOAD)
)
READY = deployment("m", replica(0))
STARTING = deployment(
    "m",
    replica(0, state=types.REPLICA_STATE_STARTING),
    state=types.DEPLOYMENT_STATE_CREATING,
)
FAILED = deployment(
    "m",
    replica(0, state=types.REPLICA_STATE_FAILED),
    state=types.DEPLOYMENT_STATE_FAILED,
    reason="the start was interrupted and cancelled; deploy again",
)


def _outcome(view, *failures):
    outcome = pb.CreationOutcome(deployment=view, failures=failures)
    return pb.CreateDeploymentResponse(outcome=outcome)


@pytest.fixture
async def supervisor():
    supervisor = await SupervisorServer().start()
    yield supervisor
    await supervisor.stop()


@pytest.fixture
async def client(supervisor):
    async with Client(supervisor.endpoint) as client:
        yield client


# --- questions


async def test_lists_are_answered(supervisor, client):
    supervisor.put(READY)
    supervisor.workers.append(pb.Worker(worker_id="w0"))
    assert (await client.get("m")).name == "m"
    listing = await client.list()
    assert [view.name for view in listing.deployments] == ["m"]
    assert listing.complete
    assert [worker.worker_id for worker in (await client.workers()).workers] == ["w0"]
    assert [failure.failure_id for failure in await client.failures("m", limit=7)] == ["m/7"]
    with pytest.raises(sdk.NotFound) as caught:
        await client.get("n")
    assert caught.value.reason == "DEPLOYMENT_UNKNOWN"
    assert caught.value.next_move


async def test_absent_supervisor_is_said_after_the_patience_with_what_to_do():
    async with Client("127.0.0.1:1", patience_s=0.3) as client:
        started = asyncio.get_running_loop().time()
        with pytest.raises(sdk.SupervisorUnreachable, match=r"127\.0\.0\.1:1") as caught:
            await client.list()
        assert asyncio.get_running_loop().time() - started < 3
        assert "endpoint" in caught.value.next_move
        assert caught.value.reason == "UNREACHABLE"


async def test_who_answers_and_is_no_supervisor_is_said_to_be_none_and_waited_out(supervisor):
    """A proxy may have nothing behind it for a while, and another program the port."""
    stranger = grpc.aio.server()
    port = stranger.add_insecure_port("127.0.0.1:0")
    await stranger.start()
    address = f"127.0.0.1:{port}"
    async with Client(address, patience_s=0.2) as client:
        with pytest.raises(sdk.SupervisorUnreachable, match="is no supervisor") as caught:
            await client.list()
        assert caught.value.never_ran
        assert f"at {address}" in caught.value.message
        assert not await client.synced(timeout=0.1)
        with pytest.raises(sdk.SupervisorUnreachable, match="UNIMPLEMENTED"):
            await asyncio.wait_for(client.call("m", "e", timeout=30), 15)

        await stranger.stop(None)
        successor = await SupervisorServer().start(address)
        try:
            assert await client.synced(timeout=20)
        finally:
            await successor.stop()


async def test_program_without_logging_hears_nothing_of_the_watch():
    program = """
import asyncio
from stagekeeper.client import Client

async def main():
    async with Client("127.0.0.1:1") as client:
        assert not await client.synced(timeout=0.3)

asyncio.run(main())
"""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", program, stderr=asyncio.subprocess.PIPE
    )
    _, stderr = await asyncio.wait_for(process.communicate(), 60)
    assert (process.returncode, stderr.decode()) == (0, "")


async def test_question_outlasts_a_short_absence(supervisor, client):
    supervisor.put(READY)
    address = supervisor.endpoint
    await client.list()
    await supervisor.stop()
    question = asyncio.create_task(client.list())
    await asyncio.sleep(0.3)
    successor = await SupervisorServer(epoch=2).start(address)
    try:
        assert (await asyncio.wait_for(question, 10)).complete
    finally:
        await successor.stop()


async def test_endpoint_comes_from_the_environment(supervisor, monkeypatch):
    monkeypatch.setenv("STAGEKEEPER_ENDPOINT", supervisor.endpoint)
    async with Client(watch_at_once=False) as client:
        assert (await client.list()).complete
    assert supervisor.asked["watch"] == 0


# --- the watch


async def test_watch_goes_on_where_it_was_when_its_stream_breaks(supervisor, client):
    async with contextlib.aclosing(client.watch()) as changes:
        assert (await anext(changes)).kind == pb.CHANGE_KIND_SYNCED
        supervisor.put(READY)
        assert (await anext(changes)).kind == pb.CHANGE_KIND_ADDED
        supervisor.end_streams()
        supervisor.remove("m")
        change = await asyncio.wait_for(anext(changes), 10)
        assert change.kind == pb.CHANGE_KIND_REMOVED
        assert 1 in supervisor.resumed


async def test_watch_starts_anew_with_a_successor(supervisor, client):
    async with contextlib.aclosing(client.watch()) as changes:
        await anext(changes)
        supervisor.put(READY)
        await anext(changes)
        address = supervisor.endpoint
        await supervisor.stop()
        successor = SupervisorServer(epoch=2)
        successor.put(READY)
        await successor.start(address)
        try:
            kinds = [(await asyncio.wait_for(anext(changes), 10)).kind for _ in range(2)]
            assert kinds == [pb.CHANGE_KIND_SNAPSHOT, pb.CHANGE_KIND_SYNCED]
        finally:
            await successor.stop()


# --- creations


async def test_deploy_tells_progress_and_returns_the_deployment(supervisor, client):
    supervisor.creations = [[ACCEPTED, PROGRESS, _outcome(READY)]]
    told: list[object] = []
    view = await client.deploy(SPEC, on_progress=told.append)
    assert view.name == "m"
    assert told == [ACCEPTED.accepted, PROGRESS.progress]


async def test_deploy_takes_a_file(supervisor, client, tmp_path):
    supervisor.creations = [[ACCEPTED, _outcome(READY)]]
    (tmp_path / "m.yaml").write_text("name: m\nstages:\n  - {name: s, entrypoint: 'a:B'}\n")
    assert (await client.deploy(tmp_path / "m.yaml")).name == "m"


async def test_deploy_that_fails_says_what_failed(supervisor, client):
    failure = pb.ReplicaFailure(
        replica_index=0, worker_id="w0", message="s raised in LOAD: no file"
    )
    supervisor.creations = [[ACCEPTED, _outcome(FAILED, failure)]]
    with pytest.raises(sdk.DeployFailed, match="replica 0 on w0: s raised in LOAD") as caught:
        await client.deploy(SPEC)
    assert caught.value.failures[0].worker_id == "w0"
    assert caught.value.deployment.state == types.DEPLOYMENT_STATE_FAILED


@pytest.mark.parametrize(
    ("code", "reason", "expected"),
    [
        (grpc.StatusCode.ALREADY_EXISTS, "DEPLOYMENT_EXISTS", sdk.NameTaken),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, "ADMISSION_REFUSED", sdk.NoRoom),
        (grpc.StatusCode.FAILED_PRECONDITION, "REPLICA_DRAINING", sdk.WrongState),
        (grpc.StatusCode.UNIMPLEMENTED, "NOT_YET", sdk.NotYet),
        (grpc.StatusCode.INTERNAL, "INTERNAL_BUG", sdk.Bug),
    ],
)
async def test_refused_deploy_says_why_and_what_next(supervisor, client, code, reason, expected):
    supervisor.creations = [[(code, reason)]]
    with pytest.raises(expected, match=reason) as caught:
        await client.deploy(SPEC)
    assert (caught.value.reason, caught.value.code) == (reason, code)
    assert caught.value.next_move
    assert supervisor.asked["create"] == 1


async def test_fields_that_the_supervisor_refuses_are_told_with_their_lines(supervisor, client):
    violations = [("stages[0].devices", "needs memory"), ("name", "is too long")]
    supervisor.creations = [[(grpc.StatusCode.INVALID_ARGUMENT, "BAD_FIELD", violations)]] * 2
    text = "name: m\nstages:\n  - name: s\n    entrypoint: a:B\n    devices: [0]\n"
    with pytest.raises(sdk.SpecError, match=r"line 5: stages\[0\]\.devices: needs memory"):
        await client.deploy(parse_spec(text, "m.yaml"))
    with pytest.raises(sdk.BadRequest) as caught:
        await client.deploy(SPEC)
    assert caught.value.violations == tuple(violations)


async def test_deploy_before_the_supervisor_is_there_waits_for_it():
    supervisor = SupervisorServer()
    await supervisor.start()
    address = supervisor.endpoint
    await supervisor.stop()
    async with Client(address, patience_s=10) as client:
        creation = asyncio.create_task(client.deploy(SPEC))
        await asyncio.sleep(0.3)
        supervisor.creations = [[ACCEPTED, _outcome(READY)]]
        await supervisor.start(address)
        assert (await asyncio.wait_for(creation, 20)).name == "m"
    await supervisor.stop()


@pytest.mark.parametrize("ending", [READY, FAILED])
async def test_creation_is_followed_over_the_death_of_its_supervisor(supervisor, client, ending):
    supervisor.creations = [[ACCEPTED, None]]
    accepted = asyncio.Event()
    creation = asyncio.create_task(
        client.deploy(SPEC, on_progress=lambda event: accepted.set(), timeout=30)
    )
    await asyncio.wait_for(accepted.wait(), 10)
    address = supervisor.endpoint
    await supervisor.stop()
    successor = SupervisorServer(epoch=2, complete=False)
    await successor.start(address)
    try:
        await wait_for(lambda: successor.asked["watch"] >= 2, "it is watched again")
        assert not creation.done()
        successor.put(STARTING)
        successor.become_complete()
        successor.put(ending)
        if ending is READY:
            assert (await asyncio.wait_for(creation, 10)).name == "m"
        else:
            with pytest.raises(sdk.DeployFailed, match="interrupted and cancelled"):
                await asyncio.wait_for(creation, 10)
        assert successor.asked["create"] == 0
    finally:
        await successor.stop()


async def test_creation_deleted_by_somebody_else_ends(supervisor, client):
    supervisor.creations = [[ACCEPTED]]  # the stream ends without an outcome
    with pytest.raises(sdk.NotFound, match="'m' was deleted meanwhile"):
        await client.deploy(SPEC, timeout=10)


async def test_deletion_that_cancels_a_creation_is_no_failure_of_its_stages(supervisor, client):
    going = deployment("m", state=types.DEPLOYMENT_STATE_DELETING)
    failure = pb.ReplicaFailure(replica_index=0, worker_id="w0", message="s was cancelled in LOAD")
    supervisor.creations = [[ACCEPTED, _outcome(going, failure)]]
    with pytest.raises(sdk.NotFound, match="'m' was deleted meanwhile") as caught:
        await client.deploy(SPEC)
    assert caught.value.next_move == "deploy it again if it is still wanted"


async def test_deploy_ends_at_its_timeout_and_says_that_it_goes_on(supervisor, client):
    supervisor.put(STARTING)
    supervisor.creations = [[ACCEPTED]]
    with pytest.raises(sdk.DeadlineExceeded, match="goes on"):
        await client.deploy(SPEC, timeout=0.5)
    supervisor.creations = [[ACCEPTED, None]]
    with pytest.raises(sdk.DeadlineExceeded):
        await client.deploy(SPEC, timeout=0.5)


# --- deletions


async def test_delete_returns_when_it_is_gone(supervisor, client):
    supervisor.put(deployment("m", replica(0)))
    deletion = asyncio.create_task(client.delete("m"))
    await wait_for(lambda: supervisor.asked["delete"], "it is asked for")
    await wait_for(lambda: supervisor.asked["watch"] >= 2, "it is watched")
    assert not deletion.done()
    supervisor.remove("m")
    assert await asyncio.wait_for(deletion, 10) is True


async def test_delete_without_waiting_returns_when_it_is_written_down(supervisor, client):
    supervisor.put(deployment("m", replica(0)))
    assert await client.delete("m", wait=False) is True


async def test_delete_is_followed_over_the_death_of_the_supervisor(supervisor, client):
    supervisor.put(deployment("m", replica(0)))
    deletion = asyncio.create_task(client.delete("m"))
    await wait_for(lambda: supervisor.asked["watch"] >= 2, "it is watched")
    address = supervisor.endpoint
    await supervisor.stop()
    successor = await SupervisorServer(epoch=2, complete=False).start(address)
    try:
        # It is not listed, which means nothing while workers are missing.
        await wait_for(lambda: successor.asked["watch"] >= 2, "it is watched again")
        await asyncio.sleep(0.2)
        assert not deletion.done()
        successor.become_complete()
        assert await asyncio.wait_for(deletion, 10) is True
    finally:
        await successor.stop()


async def test_delete_that_takes_too_long_says_that_it_goes_on(supervisor, client):
    supervisor.put(deployment("m", replica(0)))
    with pytest.raises(sdk.DeadlineExceeded, match="goes on"):
        await client.delete("m", timeout=0.4)


async def test_delete_of_what_is_not_there_is_said(client):
    with pytest.raises(sdk.NotFound):
        await client.delete("m")


@pytest.mark.parametrize("wait", [False, True])
async def test_delete_whose_answer_was_lost_has_succeeded_when_nothing_is_left(
    supervisor, client, wait
):
    supervisor.put(deployment("m", replica(0)))
    supervisor.deletion_lost = lambda: supervisor.remove("m")
    assert await client.delete("m", wait=wait) is True
    assert supervisor.asked["delete"] == 2


async def test_delete_that_was_never_sent_says_that_there_is_nothing():
    supervisor = await SupervisorServer().start()
    address = supervisor.endpoint
    await supervisor.stop()
    async with Client(address, patience_s=10) as client:
        deletion = asyncio.create_task(client.delete("m"))
        await asyncio.sleep(0.3)
        await supervisor.start(address)
        try:
            with pytest.raises(sdk.NotFound):
                await asyncio.wait_for(deletion, 20)
        finally:
            await supervisor.stop()


# --- logs


class _Agent(AgentServiceServicer):
    def __init__(self, lines):
        self.lines = lines
        self.requests = []

    async def ReadStageLog(self, request, context):
        self.requests.append(request)
        if self.lines is None:
            message = "no such stage here"
            trailers = pack(grpc.StatusCode.NOT_FOUND, message, "STAGE_UNKNOWN")
            await context.abort(grpc.StatusCode.NOT_FOUND, message, trailing_metadata=trailers)
        for lines in self.lines:
            yield agent_pb.ReadStageLogResponse(lines=lines)


@pytest.fixture
async def agent():
    """Serve agents that end with the test."""
    servers = []

    async def start(lines):
        servicer = _Agent(lines)  # type: ignore[abstract]
        server = grpc.aio.server()
        add_AgentServiceServicer_to_server(servicer, server)
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        servers.append(server)
        return servicer, f"127.0.0.1:{port}"

    yield start
    for server in servers:
        await server.stop(None)


async def test_log_is_read_from_the_agent_that_holds_the_stage(supervisor, client, agent):
    holder, address = await agent([["a", "b"], ["c"]])
    other, other_address = await agent(None)
    supervisor.workers = [
        pb.Worker(worker_id="w0", agent_address=other_address),
        pb.Worker(worker_id="w1", agent_address=address),
    ]
    held = shard("i", "", stage_id=1, stage_name="ranker", worker_id="w1")
    supervisor.put(deployment("m", replica(0, held), stages=("encoder", "ranker")))
    lines = client.stage_log("m", stage="ranker", previous=True, last_lines=7, follow=True)
    assert [line async for line in lines] == ["a", "b", "c"]
    (request,) = holder.requests
    assert (request.deployment, request.stage_id, request.last_lines) == ("m", 1, 7)
    assert request.previous
    assert request.follow
    assert not other.requests


async def test_log_of_a_stage_that_was_rolled_back_is_looked_for_at_every_agent(
    supervisor, client, agent
):
    _, empty = await agent(None)
    _, address = await agent([["why it failed"]])
    supervisor.workers = [
        pb.Worker(worker_id="w0", agent_address="127.0.0.1:1"),
        pb.Worker(worker_id="w1", agent_address=empty),
        pb.Worker(worker_id="w2", agent_address=address),
    ]
    supervisor.put(FAILED)
    assert [line async for line in client.stage_log("m")] == ["why it failed"]


async def test_log_of_each_shard_is_read_where_it_lies(supervisor, client, agent):
    addresses = [(await agent([[f"of shard {n}"]]))[1] for n in (0, 1)]
    supervisor.workers = [
        pb.Worker(worker_id=f"w{n}", agent_address=it) for n, it in enumerate(addresses)
    ]
    supervisor.put(FAILED)
    for n in (0, 1):
        assert [line async for line in client.stage_log("m", shard=n)] == [f"of shard {n}"]
    shards = [shard("i", "", worker_id=f"w{1 - n}") for n in (0, 1)]
    for n, it in enumerate(shards):
        it.record.shard_index, it.record.shard_count = n, 2
    supervisor.put(deployment("m", replica(0, *shards)))
    for n in (0, 1):
        assert [line async for line in client.stage_log("m", shard=n)] == [f"of shard {1 - n}"]


async def test_log_of_an_agent_that_does_not_answer_is_not_said_to_be_missing(
    supervisor, client, agent
):
    _, empty = await agent(None)
    supervisor.workers = [
        pb.Worker(worker_id="w0", agent_address=empty),
        pb.Worker(worker_id="w1", agent_address="127.0.0.1:1"),
    ]
    supervisor.put(deployment("m", replica(0, shard("i", "", worker_id="w1"))))
    with pytest.raises(sdk.Unavailable, match="the agent of worker w1 does not answer"):
        await anext(client.stage_log("m"))
    supervisor.put(FAILED)
    with pytest.raises(sdk.Unavailable, match="the agent of worker w1 does not answer"):
        await anext(client.stage_log("m"))


async def test_logs_verb_names_what_cannot_be_read_and_prints_the_rest(
    supervisor, client, agent, capsys
):
    _, address = await agent([["hello"]])
    supervisor.workers = [
        pb.Worker(worker_id="w0", agent_address=address),
        pb.Worker(worker_id="w1", agent_address="127.0.0.1:1"),
    ]
    replicas = [replica(n, shard("i", "", worker_id=f"w{n}")) for n in (0, 1)]
    supervisor.put(deployment("m", *replicas))
    with pytest.raises(CliError, match="1 of 2 logs not read") as caught:
        await logs_shown(client, LogChoice("m"))
    assert caught.value.code == ExitCode.FAILED
    shown = capsys.readouterr()
    assert re.search(r"^0/\S+ \| hello$", shown.out, re.M)
    assert re.search(r"^1/\S+: the agent of worker w1 does not answer \(", shown.err, re.M)
    with pytest.raises(sdk.Unavailable) as silent:
        await logs_shown(client, LogChoice("m", replica=1))
    assert re.match(r"1/\S+: the agent of worker w1 .*Connection refused\)", silent.value.message)
    with pytest.raises(sdk.NotFound, match=r"m has no replica 5 \(there is: 0, 1\)"):
        await logs_shown(client, LogChoice("m", replica=5))


async def test_log_that_nobody_has_is_said(supervisor, client, agent):
    _, empty = await agent(None)
    supervisor.put(FAILED)
    with pytest.raises(sdk.NotFound):
        await anext(client.stage_log("m"))
    supervisor.workers = [pb.Worker(worker_id="w1", agent_address=empty)]
    with pytest.raises(sdk.NotFound, match="no such stage here"):
        await anext(client.stage_log("m"))
    with pytest.raises(sdk.NotFound, match="no stage 'x'"):
        await anext(client.stage_log("m", stage="x"))
