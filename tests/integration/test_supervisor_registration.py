"""Workers that register by hand, over gRPC, with a real supervisor."""

from __future__ import annotations

import grpc
import pytest

from stagekeeper.core.limits import LONGEST_FAILURE_LINE, LONGEST_TRACEBACK, MOST_LOG_LINES
from stagekeeper.v1 import (
    deployment_service_pb2,
    deployment_service_pb2_grpc,
    supervisor_service_pb2,
    types_pb2,
)
from tests.fakes.hand_worker import EARLIER, HandWorker, channel_to, shard
from tests.fakes.refusals import refused
from tests.fakes.supervisors import get_deployment, list_deployments, list_workers, reigns
from tests.harness.waiting import wait_for

OK = supervisor_service_pb2.HEARTBEAT_VERDICT_OK
REGISTER = supervisor_service_pb2.HEARTBEAT_VERDICT_REGISTER
SUPERSEDED = supervisor_service_pb2.HEARTBEAT_VERDICT_SUPERSEDED
WRONG_CLUSTER = supervisor_service_pb2.HEARTBEAT_VERDICT_WRONG_CLUSTER


async def list_failures(endpoint: str, **fields) -> list[types_pb2.Failure]:
    async with channel_to(endpoint) as channel:
        answer = await deployment_service_pb2_grpc.DeploymentServiceStub(channel).ListFailures(
            deployment_service_pb2.ListFailuresRequest(**fields), timeout=10
        )
    return list(answer.failures)


async def test_two_shards_of_three_are_partial_and_say_so(endpoint):
    first = HandWorker(endpoint, "w1").hold(shard(stage=0, of=3), shard(stage=1, of=3))
    await first.register()
    partial = await get_deployment(endpoint, "m")
    (replica,) = partial.replicas
    assert replica.state == types_pb2.REPLICA_STATE_PARTIAL
    assert (replica.ready_shard_count, replica.shard_count) == (2, 3)
    assert "2 of 3" in replica.reason
    assert replica.next_action
    assert partial.state != types_pb2.DEPLOYMENT_STATE_READY
    await HandWorker(endpoint, "w2").hold(shard(stage=2, of=3)).register()
    (replica,) = (await get_deployment(endpoint, "m")).replicas
    assert replica.state == types_pb2.REPLICA_STATE_READY
    assert [routed.record.stage_id for routed in replica.shards] == [0, 1, 2]
    assert [routed.worker_id for routed in replica.shards] == ["w1", "w1", "w2"]


async def test_uncommitted_replica_is_not_ready(endpoint):
    await HandWorker(endpoint).hold(shard(committed=False)).register()
    (replica,) = (await get_deployment(endpoint, "m")).replicas
    assert replica.state != types_pb2.REPLICA_STATE_READY


async def test_failed_shard_fails_its_replica_with_the_reason(endpoint):
    failed = shard(stage=1, of=2, state=types_pb2.SHARD_STATE_FAILED, state_reason="out of memory")
    await HandWorker(endpoint).hold(shard(stage=0, of=2), failed).register()
    (replica,) = (await get_deployment(endpoint, "m")).replicas
    assert replica.state == types_pb2.REPLICA_STATE_FAILED
    assert "stage-1" in replica.reason
    assert "out of memory" in replica.reason


async def test_what_a_shard_said_is_listed_as_it_said_it(endpoint):
    said = shard(memory_bytes=5, restart_ages_s=[1.5], attempt=2)
    await HandWorker(endpoint).hold(said).register()
    (replica,) = (await get_deployment(endpoint, "m")).replicas
    assert replica.shards[0].record == said


@pytest.mark.parametrize("name", ["llama-2", "a-rep1", "x-rank0", "模型-é-🦙", "a b.c:d#0"])
async def test_names_are_names_and_never_parsed(endpoint, name):
    worker = HandWorker(endpoint, name).hold(shard(name, replica=1), shard(name, replica=12))
    await worker.register()
    listed = await list_deployments(endpoint)
    assert [deployment.name for deployment in listed.deployments] == [name]
    deployment = await get_deployment(endpoint, name)
    assert [replica.replica_index for replica in deployment.replicas] == [1, 12]
    assert deployment.replicas[0].shards[0].worker_id == name


async def test_bad_entries_are_refused_alone_at_their_places(endpoint):
    worker = HandWorker(endpoint).hold(
        shard(state=types_pb2.SHARD_STATE_UNSPECIFIED),
        shard("good"),
        shard("out-of-range", stage=2, of=2),
        shard("generationless"),
        shard("a/b"),
        shard("also-good"),
    )
    worker.slice.replica_states[3].ClearField("generation")
    reply = await worker.register()
    assert [(entry.index, entry.reason) for entry in reply.refused] == [
        (0, "BAD_FIELD"),
        (2, "SHARD_OUT_OF_RANGE"),
        (3, "BAD_FIELD"),
        (4, "BAD_FIELD"),
    ]
    assert all(entry.message for entry in reply.refused)
    listed = await list_deployments(endpoint)
    assert [deployment.name for deployment in listed.deployments] == ["also-good", "good"]


async def test_malformed_slice_is_refused_with_every_wrong_field(endpoint):
    worker = HandWorker(endpoint, "", host_id="", agent_address="nowhere", incarnation=0)
    async with refused(grpc.StatusCode.INVALID_ARGUMENT, "BAD_FIELD") as details:
        await worker.register()
    assert {path for path, _ in details[0].violations} == {
        "worker_id",
        "host_id",
        "agent_address",
        "incarnation",
    }
    assert not (await list_workers(endpoint)).workers


async def test_empty_request_is_refused_and_is_no_bug(endpoint):
    worker = HandWorker(endpoint)
    worker.slice.Clear()
    worker.slice.cluster = "default"
    async with refused(grpc.StatusCode.INVALID_ARGUMENT, "BAD_FIELD"):
        await worker.register()


async def test_heartbeat_verdicts(endpoint):
    worker = HandWorker(endpoint)
    assert (await worker.heartbeat()).verdict == REGISTER
    accepted = await worker.register()
    answer = await worker.heartbeat()
    assert answer.verdict == OK
    assert answer.epoch == accepted.epoch
    assert answer.next_heartbeat_s == pytest.approx(0.5)
    assert (await worker.heartbeat(digest=b"other")).verdict == REGISTER
    assert (await worker.heartbeat(revision=9)).verdict == REGISTER
    assert (await worker.heartbeat(incarnation=2)).verdict == REGISTER
    assert (await worker.heartbeat(cluster="other")).verdict == WRONG_CLUSTER
    worker.slice.incarnation = 2
    await worker.register()
    assert (await worker.heartbeat(incarnation=1)).verdict == SUPERSEDED
    assert (await worker.heartbeat()).verdict == OK


async def test_heartbeat_never_registers(endpoint):
    await HandWorker(endpoint).heartbeat()
    assert not (await list_workers(endpoint)).workers


async def test_other_cluster_is_refused_and_nothing_is_kept(endpoint):
    worker = HandWorker(endpoint, cluster="other").hold(shard())
    async with refused(grpc.StatusCode.FAILED_PRECONDITION, "WRONG_CLUSTER") as details:
        await worker.register()
    assert "'default'" in details[0].message
    assert not (await list_workers(endpoint)).workers
    assert not (await list_deployments(endpoint)).deployments


async def test_stale_incarnation_is_told_the_highest(endpoint):
    await HandWorker(endpoint, incarnation=5).hold(shard()).register()
    async with refused(grpc.StatusCode.ABORTED, "STALE_INCARNATION") as details:
        await HandWorker(endpoint, incarnation=4).register()
    assert details[0].metadata["highest_incarnation"] == "5"
    assert (await get_deployment(endpoint, "m")).replicas[0].shards


async def test_worker_id_of_another_living_host_is_refused(endpoint):
    await HandWorker(endpoint).hold(shard()).register()
    async with refused(grpc.StatusCode.ALREADY_EXISTS, "WORKER_ID_IN_USE"):
        await HandWorker(endpoint, host_id="elsewhere", incarnation=9).register()
    (worker,) = (await list_workers(endpoint)).workers
    assert worker.incarnation == 1


async def test_late_registration_is_answered_and_ignored(endpoint):
    worker = HandWorker(endpoint).hold(shard("new"))
    await worker.register()
    late = HandWorker(endpoint, revision=0).hold(shard("old"))
    reply = await late.register()
    assert reply.epoch.number > 0
    listed = await list_deployments(endpoint)
    assert [deployment.name for deployment in listed.deployments] == ["new"]


async def test_late_registration_with_fewer_entries_is_answered_like_the_newest(endpoint):
    bad = shard("out-of-range", stage=2, of=2)
    worker = HandWorker(endpoint).hold(shard("new"), shard("newer"), bad)
    newest = await worker.register()
    assert [entry.index for entry in newest.refused] == [2]
    late = HandWorker(endpoint, revision=0).hold(shard("old"))
    assert [entry.index for entry in (await late.register()).refused] == [2]


async def test_epoch_rises_above_what_a_worker_shows(endpoint):
    other = HandWorker(endpoint, "other")
    before = (await other.register()).epoch
    seen = types_pb2.Epoch(number=before.number + 40, supervisor_id="z" * 32)
    reply = await HandWorker(endpoint, highest_epoch=seen).register()
    assert reply.epoch.number == seen.number + 1
    assert reply.epoch.supervisor_id == before.supervisor_id
    assert (await other.heartbeat()).verdict == REGISTER
    await other.register()
    assert (await other.heartbeat()).verdict == OK


async def test_raised_epoch_survives_a_restart(tmp_path):
    async with reigns(tmp_path) as them:
        seen = types_pb2.Epoch(number=41, supervisor_id="z")
        raised = (await HandWorker(them.endpoint, highest_epoch=seen).register()).epoch
        await them.restart()
        assert (await list_workers(them.endpoint)).epoch.number == raised.number + 1


async def test_impossible_epoch_is_refused_and_changes_nothing(endpoint):
    worker = HandWorker(endpoint, highest_epoch=types_pb2.Epoch(number=2**64 - 1))
    async with refused(grpc.StatusCode.INVALID_ARGUMENT, "BAD_FIELD"):
        await worker.register()
    assert (await list_workers(endpoint)).epoch.number == 1


async def test_operation_of_an_impossible_reign_is_left_out_and_raises_nothing(endpoint):
    worker = HandWorker(endpoint)
    operation = worker.slice.operations.add(operation_id="op", deployment="m", state=1)
    operation.generation.n = 1
    operation.generation.epoch.number = 2**64 - 1
    assert (await worker.register()).epoch.number == 1


async def test_worker_whose_agent_does_not_answer_is_kept_and_says_so(endpoint):
    await HandWorker(endpoint).hold(shard()).register()

    async def unreachable():
        (worker,) = (await list_workers(endpoint)).workers
        return worker if worker.HasField("agent_reachable") else None

    worker = await wait_for(unreachable, "the agent was dialled back")
    assert not worker.agent_reachable
    assert "AGENT_UNREACHABLE" in worker.reason
    assert worker.agent_address in worker.reason
    assert (await get_deployment(endpoint, "m")).state == types_pb2.DEPLOYMENT_STATE_READY


async def test_failure_is_recorded_once_however_often_it_is_said(endpoint):
    worker = HandWorker(endpoint)
    await worker.register()
    failure = types_pb2.Failure(
        failure_id="f1",
        kind=types_pb2.FAILURE_KIND_SIGNALED,
        origin=types_pb2.FailureOrigin(worker_id="w1", deployment="m", stage_name="thinker"),
        message="killed by SIGKILL",
        exit=types_pb2.ExitInfo(signal=9),
        last_log_lines=["the last words"],
    )
    for _ in range(2):
        reply = await worker.report(failure)
        assert reply.settled
        assert reply.directive == supervisor_service_pb2.FAILURE_DIRECTIVE_NONE
    assert await list_failures(endpoint) == [failure]
    assert await list_failures(endpoint, deployment="m") == [failure]
    assert await list_failures(endpoint, deployment="other") == []


async def test_failure_of_another_worker_is_refused(endpoint):
    worker = HandWorker(endpoint)
    await worker.register()
    origin = types_pb2.FailureOrigin(worker_id="another", deployment="m")
    failure = types_pb2.Failure(failure_id="f1", origin=origin)
    async with refused(grpc.StatusCode.INVALID_ARGUMENT, "BAD_FIELD") as found:
        await worker.report(failure)
    assert [path for path, _ in found[0].violations] == ["failure.origin.worker_id"]
    assert await list_failures(endpoint) == []


async def test_failures_that_do_not_fit_one_message_are_left_out_oldest_first(endpoint):
    worker = HandWorker(endpoint)
    numbers = range(80)
    for half in (numbers[:40], numbers[40:]):
        del worker.slice.failures[:]
        for number in half:
            worker.slice.failures.add(
                failure_id=f"f{number}",
                remote_traceback="🦙" * LONGEST_TRACEBACK,
                last_log_lines=["🦙" * LONGEST_FAILURE_LINE] * MOST_LOG_LINES,
            )
        worker.hold()
        await worker.register()
    listed = [it.failure_id for it in await list_failures(endpoint)]
    assert listed == [f"f{number}" for number in reversed(numbers)][: len(listed)]
    assert 70 < len(listed) < len(numbers)


async def test_failures_in_a_registration_are_settled_and_kept(tmp_path):
    async with reigns(tmp_path) as them:
        worker = HandWorker(them.endpoint)
        worker.slice.failures.add(failure_id="f7", message="it died", kind=1)
        assert list((await worker.register()).settled_failure_ids) == ["f7"]
        await them.restart()
        assert [it.failure_id for it in await list_failures(them.endpoint)] == ["f7"]


async def test_failures_that_make_no_sense_are_refused(endpoint):
    worker = HandWorker(endpoint)
    failure = types_pb2.Failure(failure_id="f")
    async with refused(grpc.StatusCode.NOT_FOUND, "WORKER_UNKNOWN"):
        await worker.report(failure)
    await worker.register()
    async with refused(grpc.StatusCode.INVALID_ARGUMENT, "BAD_FIELD"):
        await worker.report(None)
    async with refused(grpc.StatusCode.INVALID_ARGUMENT, "BAD_FIELD"):
        await worker.report(types_pb2.Failure())
    async with refused(grpc.StatusCode.ABORTED, "STALE_INCARNATION"):
        await worker.report(failure, incarnation=0)
    async with refused(grpc.StatusCode.FAILED_PRECONDITION, "WRONG_CLUSTER"):
        await worker.report(failure, cluster="other")


async def test_silence_is_shown_and_withdraws_nothing(tmp_path):
    numbers = {"heartbeat_s": 0.05, "lease_s": 0.3, "lost_s": 60.0}
    async with reigns(tmp_path, registry=numbers, tick_s=0.02) as them:
        worker = HandWorker(them.endpoint).hold(shard())
        await worker.register()

        async def state():
            (listed,) = (await list_workers(them.endpoint)).workers
            return listed.state

        async def is_unreachable():
            return await state() == types_pb2.WORKER_STATE_UNREACHABLE

        await wait_for(is_unreachable, "the worker is UNREACHABLE")
        (replica,) = (await get_deployment(them.endpoint, "m")).replicas
        assert replica.state == types_pb2.REPLICA_STATE_READY
        assert replica.shards[0].worker_state == types_pb2.WORKER_STATE_UNREACHABLE
        assert (await worker.heartbeat()).verdict == OK
        assert (await list_workers(them.endpoint)).workers[0].silent_for_s < 30


async def test_generation_of_an_earlier_reign_is_kept_as_it_is(endpoint):
    await HandWorker(endpoint).hold(shard(n=17)).register()
    (replica,) = (await get_deployment(endpoint, "m")).replicas
    generation = replica.shards[0].record.generation
    assert (generation.epoch, generation.n) == (EARLIER, 17)
