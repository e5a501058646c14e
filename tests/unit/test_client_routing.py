"""The routing table: what each change does to the routes, and which route is picked."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stagekeeper.client.routing import Route, RoutingTable
from stagekeeper.client.view import Missing, NoRoute
from stagekeeper.v1 import deployment_service_pb2 as pb
from stagekeeper.v1 import types_pb2 as types
from tests.fakes.views import deployment, replica, revision, shard

in_its_time = settings(deadline=None)  # a busy machine is no failure

PENDING = types.REPLICA_STATE_PENDING
PARTIAL = types.REPLICA_STATE_PARTIAL
FAILED = types.REPLICA_STATE_FAILED
READY = types.REPLICA_STATE_READY


def _change(kind: Any, view: pb.Deployment | None = None, n: int = 1, epoch: int = 1, **more):
    return pb.WatchDeploymentsResponse(
        kind=kind, deployment=view, revision=revision(n, epoch), **more
    )


def _snapshot(table, *views, n=1, epoch=1, complete=True):
    table.begin()
    for view in views:
        table.apply(_change(pb.CHANGE_KIND_SNAPSHOT, view, n, epoch))
    table.apply(_change(pb.CHANGE_KIND_SYNCED, n=n, epoch=epoch, complete=complete))


def _ready(index, **more):
    return replica(index, shard(f"i{index}", f"host:{index}", worker_id=f"w{index}", **more))


def _instances(table, name="m", stage_id=0):
    return [route.instance_id for route in table.routes(name, stage_id)]


def _pick(table, name="m", stage=None, **more) -> Route:
    found = table.pick(name, stage, **more)
    assert isinstance(found, Route)
    return found


@pytest.fixture
def table():
    table = RoutingTable()
    _snapshot(table, deployment("m", _ready(0), _ready(1), _ready(2)))
    return table


# --- what changes do


def test_only_ready_replicas_are_routed():
    table = RoutingTable()
    states = [state for state in types.ReplicaState.values() if state != READY]
    _snapshot(
        table,
        deployment(
            "m",
            _ready(0),
            *(
                replica(n, shard(f"i{n}", "host:9"), state=state)
                for n, state in enumerate(states, start=1)
            ),
        ),
    )
    assert _instances(table) == ["i0"]


def test_modified_deployment_replaces_its_routes(table):
    view = deployment("m", replica(0, shard("new", "host:7")))
    table.apply(_change(pb.CHANGE_KIND_MODIFIED, view, 2))
    assert _instances(table) == ["new"]
    assert dict(table.addresses) == {"host:7": 1}


def test_older_word_than_what_is_known_changes_nothing(table):
    table.learn(deployment("m", _ready(5)), revision(9), is_complete=True)
    table.apply(_change(pb.CHANGE_KIND_MODIFIED, deployment("m", _ready(4)), 8))
    assert _instances(table) == ["i5"]


def test_read_that_the_watch_is_past_changes_nothing(table):
    table.apply(_change(pb.CHANGE_KIND_REMOVED, pb.Deployment(name="m"), 7))
    table.learn(deployment("m", _ready(0)), revision(6), is_complete=True)
    assert table.view("m") is None


@pytest.mark.parametrize("is_complete", [False, True])
def test_read_from_a_successor_that_waits_for_workers_takes_no_route(table, is_complete):
    """The watch still holds what the dead supervisor said: that nobody was missing."""
    waiting = deployment("m", replica(0, state=PENDING), replica(1, state=PENDING), _ready(2))
    table.learn(waiting, revision(1, epoch=2), is_complete=is_complete)
    assert _instances(table) == ["i0", "i1", "i2"]
    assert not table.is_complete
    _snapshot(table, waiting, epoch=2, complete=False)
    assert _instances(table) == ["i0", "i1", "i2"]
    table.apply(_change(pb.CHANGE_KIND_BOOKMARK, n=2, epoch=2, complete=True))
    assert _instances(table) == ["i2"]


def test_incomplete_read_takes_no_route(table):
    table.learn(deployment("m", replica(0, state=PENDING)), revision(2), is_complete=False)
    assert _instances(table) == ["i0", "i1", "i2"]


def test_read_of_the_watched_reign_is_taken_at_its_word(table):
    table.learn(deployment("m", replica(0, state=PENDING)), revision(2), is_complete=True)
    assert _instances(table) == []


def test_removed_deployment_is_forgotten(table):
    table.apply(_change(pb.CHANGE_KIND_REMOVED, pb.Deployment(name="m"), 2))
    assert list(table.names) == []
    assert dict(table.addresses) == {}


def test_complete_snapshot_replaces_all_that_was_known(table):
    _snapshot(table, deployment("other", _ready(9)), epoch=2)
    assert list(table.names) == ["other"]
    assert dict(table.addresses) == {"host:9": 1}


def test_incomplete_snapshot_removes_neither_deployments_nor_replicas(table):
    _snapshot(
        table,
        deployment("m", replica(0, state=PENDING), _ready(1), replica(2, state=PARTIAL)),
        epoch=2,
        complete=False,
    )
    assert _instances(table) == ["i0", "i1", "i2"]
    _snapshot(table, epoch=3, complete=False)
    assert _instances(table) == ["i0", "i1", "i2"]


def test_incomplete_word_that_knows_better_is_taken(table):
    moved = replica(1, shard("moved", "host:7"))
    _snapshot(
        table,
        deployment("m", replica(0, state=FAILED), moved, replica(2, state=PENDING)),
        epoch=2,
        complete=False,
    )
    assert _instances(table) == ["moved", "i2"]


def test_held_routes_go_when_the_last_worker_is_back(table):
    _snapshot(table, deployment("m", replica(0, state=PENDING), _ready(1)), epoch=2, complete=False)
    assert _instances(table) == ["i0", "i1", "i2"]
    table.apply(_change(pb.CHANGE_KIND_BOOKMARK, n=3, epoch=2, complete=True))
    assert _instances(table) == ["i1"]
    assert dict(table.addresses) == {"host:1": 1}


def test_of_100_replicas_none_is_withdrawn_while_3_have_come_back():  # U35
    table = RoutingTable()
    everything = [_ready(n) for n in range(100)]
    _snapshot(table, deployment("m", *everything))
    back = [
        _ready(n) if n in (3, 50, 99) else replica(n, state=PENDING, reason="waiting")
        for n in range(100)
    ]
    _snapshot(table, deployment("m", *back), epoch=2, complete=False)
    assert len(_instances(table)) == 100
    for n in range(100):
        back[n] = _ready(n)
        table.apply(_change(pb.CHANGE_KIND_MODIFIED, deployment("m", *back), n + 2, epoch=2))
        assert len(_instances(table)) == 100
    table.apply(_change(pb.CHANGE_KIND_BOOKMARK, n=200, epoch=2, complete=True))
    assert len(_instances(table)) == 100


def test_routes_of_one_stage_do_not_mix_with_anothers():
    table = RoutingTable()
    both = replica(0, shard("a", "h:1"), shard("b", "h:2", stage_id=1, stage_name="ranker"))
    _snapshot(table, deployment("m", both, stages=("encoder", "ranker")))
    assert _instances(table, stage_id=0) == ["a"]
    assert _pick(table, "m", "ranker").instance_id == "b"
    assert _pick(table, "m", 1).instance_id == "b"


def test_entry_of_a_deployment_without_a_spec_is_told_by_its_shards():
    table = RoutingTable()
    both = replica(0, shard("a", "h:1"), shard("b", "h:2", stage_id=1, stage_name="ranker"))
    both.shards[1].record.entry = True
    _snapshot(table, deployment("m", both, stages=()))
    assert _pick(table).instance_id == "b"
    assert _pick(table, "m", "encoder").instance_id == "a"


_names = st.sampled_from(["a", "b"])
_replicas = st.dictionaries(
    st.integers(0, 2), st.sampled_from([READY, PENDING, FAILED]), max_size=3
)
_changes = st.lists(st.tuples(_names, _replicas | st.none()), max_size=6)


@in_its_time
@given(_changes, _changes)
def test_complete_watch_ends_with_exactly_what_was_shown_last(first, second):
    """Against a dumb table: a dict, and the READY replicas of what it holds."""
    table = RoutingTable()
    for epoch, changes in ((1, first), (2, second)):
        dumb: dict[str, dict] = {}
        table.begin()
        table.apply(_change(pb.CHANGE_KIND_SYNCED, n=0, epoch=epoch, complete=False))
        for n, (name, replicas) in enumerate(changes, start=1):
            if replicas is None:
                dumb.pop(name, None)
                view, kind = pb.Deployment(name=name), pb.CHANGE_KIND_REMOVED
            else:
                dumb[name] = replicas
                kind = pb.CHANGE_KIND_MODIFIED
                view = deployment(
                    name,
                    *(
                        replica(i, shard(f"{name}{i}", f"{name}:{i}"), state=state)
                        for i, state in replicas.items()
                    ),
                )
            table.apply(_change(kind, view, n, epoch))
        table.apply(_change(pb.CHANGE_KIND_BOOKMARK, n=99, epoch=epoch, complete=True))
        expected = {
            name: sorted(f"{name}{i}" for i, state in replicas.items() if state == READY)
            for name, replicas in dumb.items()
        }
        assert {name: _instances(table, name) for name in table.names} == expected
        addresses = {f"{i[0]}:{i[1]}" for instances in expected.values() for i in instances}
        assert set(table.addresses) == addresses


@in_its_time
@given(_changes)
def test_incomplete_watch_never_loses_a_ready_replica_without_being_told(changes):
    table = RoutingTable()
    _snapshot(table, deployment("a", _ready(0), _ready(1)))
    alive = {0, 1}
    table.begin()
    for n, (_, replicas) in enumerate(changes, start=1):
        if replicas is None:
            continue
        alive -= {i for i, state in replicas.items() if state == FAILED}
        view = deployment("a", *(replica(i, state=s) for i, s in replicas.items() if s != READY))
        table.apply(_change(pb.CHANGE_KIND_MODIFIED, view, n, 2))
        assert set(_instances(table, "a")) == {f"i{i}" for i in alive}


# --- which one is picked


def test_picks_go_round_while_nothing_is_under_way(table):
    picked = [_pick(table).instance_id for _ in range(6)]
    assert picked == ["i0", "i1", "i2", "i0", "i1", "i2"]


def test_pick_takes_the_one_with_the_fewest_calls_under_way(table):
    for _ in range(5):
        route = _pick(table)
        if route.instance_id != "i1":
            table.acquire(route)
    assert _pick(table).instance_id == "i1"


@in_its_time
@given(st.lists(st.booleans(), max_size=60))
def test_calls_under_way_differ_by_at_most_one_while_none_ends_early(steps):
    table = RoutingTable()
    _snapshot(table, deployment("m", *(_ready(n) for n in range(4))))
    under_way: list[Route] = []
    for starts in steps:
        if starts or not under_way:
            route = _pick(table)
            table.acquire(route)
            under_way.append(route)
        else:
            fullest = max(under_way, key=lambda r: table.outstanding(r.instance_id))
            under_way.remove(fullest)
            table.release(fullest)
        counts = Counter(route.instance_id for route in under_way)
        spread = [counts[f"i{n}"] for n in range(4)]
        assert max(spread) - min(spread) <= 1
        assert [table.outstanding(f"i{n}") for n in range(4)] == spread


def test_excluded_instances_are_not_picked(table):
    assert _pick(table, exclude={"i0", "i2"}).instance_id == "i1"
    found = table.pick("m", None, exclude={"i0", "i1", "i2"})
    assert isinstance(found, NoRoute)
    assert found.what is Missing.OTHER_REPLICA


def test_lost_workers_shards_are_the_last_resort():
    table = RoutingTable()
    lost = shard("lost", "h:1", worker_state=types.WORKER_STATE_LOST)
    silent = shard("silent", "h:2", worker_state=types.WORKER_STATE_UNREACHABLE)
    _snapshot(table, deployment("m", replica(0, lost), replica(1, silent)))
    picked = []
    for _ in range(3):
        route = _pick(table)
        table.acquire(route)
        picked.append(route.instance_id)
    assert picked == ["silent"] * 3
    assert _pick(table, exclude={"silent"}).instance_id == "lost"


def test_avoided_instance_is_passed_over_until_its_time_is_up(table):
    table.avoid("i0", until=10.0)
    assert {_pick(table, now=9.999).instance_id for _ in range(6)} == {"i1", "i2"}
    assert _pick(table, now=9.999, exclude={"i1", "i2"}).instance_id == "i0"
    assert {_pick(table, now=10.0).instance_id for _ in range(6)} == {"i0", "i1", "i2"}


def test_new_instance_at_the_address_of_an_avoided_one_starts_clean(table):  # R31
    table.avoid("i0", until=10.0)
    view = deployment("m", replica(0, shard("fresh", "host:0")))
    table.apply(_change(pb.CHANGE_KIND_MODIFIED, view, 2))
    assert _pick(table, now=0.0).instance_id == "fresh"
    assert not table._avoided


@pytest.mark.parametrize(
    ("name", "stage", "what", "words"),
    [
        ("x", None, Missing.DEPLOYMENT, "there are: m"),
        ("m", "x", Missing.STAGE, "there are: encoder"),
        ("m", 7, Missing.STAGE, "there are: encoder"),
        ("m", -1, Missing.STAGE, "there are: encoder"),
    ],
)
def test_what_is_not_there_is_said_with_what_is(table, name, stage, what, words):
    found = table.pick(name, stage)
    assert isinstance(found, NoRoute)
    assert found.what is what
    assert words in found.message
    assert not table.has_route(name, stage)


def test_no_ready_replica_is_said_with_state_reason_and_next_action():
    table = RoutingTable()
    failed = replica(0, state=FAILED, reason="thinker ran out of memory", next_action="deploy it")
    view = deployment("m", failed, state=types.DEPLOYMENT_STATE_FAILED, reason="nothing is left")
    _snapshot(table, view)
    found = table.pick("m", None)
    assert isinstance(found, NoRoute)
    assert found.what is Missing.READY_REPLICA
    for words in ("FAILED", "nothing is left", "thinker ran out of memory", "deploy it"):
        assert words in found.message
