"""The leases of ports: one holder each, new ones every time, a range of one's own."""

from __future__ import annotations

import multiprocessing
import socket
from pathlib import Path

import pytest

from stagekeeper.agent.cards.ledger import Booking
from stagekeeper.agent.host_lock import make_lock_dir
from stagekeeper.agent.ports import PortRange, Ports
from stagekeeper.core.command_stage import CommandSpec
from stagekeeper.core.errors import Refused
from stagekeeper.core.ids import (
    DeploymentName,
    Epoch,
    Generation,
    OperationId,
    ReplicaIndex,
    StageId,
    WorkerId,
)
from stagekeeper.core.model import OperationPlan, StageSpec, StageStart
from tests.harness.ports import HOST, ports_in_a_row


def free_range(count: int) -> PortRange:
    ports = ports_in_a_row(count)
    return PortRange(ports[0], ports[-1])


def plan(number: int, *names: str) -> OperationPlan:
    spec = StageSpec("s", command=CommandSpec(("a",), names))
    return OperationPlan(
        operation_id=OperationId(f"op-{number}"),
        deployment=DeploymentName("m"),
        replica_index=ReplicaIndex(0),
        generation=Generation(Epoch(1, "s"), number),
        worker_id=WorkerId("w"),
        stages=(StageStart(StageId(0), spec),),
        stage_count=1,
        entry_stage_id=StageId(0),
        spec_revision=1,
    )


def leased(ports: Ports, number: int, *names: str) -> list[int]:
    return [it.port for stage in ports.lease(plan(number, *names)) for it in stage.ports]


def booking(number: int) -> Booking:
    return Booking(OperationId(f"op-{number}"), StageId(0))


@pytest.fixture
def lock_dir(tmp_path: Path) -> Path:
    make_lock_dir(tmp_path / "l")
    return tmp_path / "l"


def test_ports_go_round_and_none_is_leased_twice(lock_dir: Path) -> None:
    owned = free_range(5)
    ports = Ports(HOST, lock_dir, owned)
    first = leased(ports, 1, "http", "rdv")
    assert first == [owned.first, owned.first + 1]
    ports.free(booking(1))
    second = leased(ports, 2, "http", "rdv")
    assert not {*first} & {*second}  # the next generation has other ones
    third = leased(ports, 3, "http", "rdv")
    assert not {*second} & {*third}

    with pytest.raises(Refused, match=r"no port is free for 'b' of stage s.*--ports"):
        leased(ports, 4, "a", "b")
    assert ports.of(booking(4)) is None  # all or nothing
    ports.close()


def test_a_bound_port_and_one_of_an_earlier_life_are_not_leased(lock_dir: Path) -> None:
    owned = free_range(3)
    ports = Ports(HOST, lock_dir, owned)
    with socket.socket() as stranger:
        stranger.bind((HOST, owned.first))
        stranger.listen()
        earlier = Ports(HOST, lock_dir, owned)
        (held,) = earlier.lease(plan(1, "http"))
        earlier.close()
        ports.hold(booking(1), held)
        assert leased(ports, 2, "http") == [owned.last]
    ports.close()


def test_two_agents_of_a_host_have_ranges_of_their_own(lock_dir: Path) -> None:
    mine = Ports(HOST, lock_dir)
    with multiprocessing.get_context("spawn").Pool(1) as other:
        theirs = other.apply(_lease_elsewhere, (str(lock_dir),))
        assert leased(mine, 1, "http")[0] // 200 != theirs // 200
    mine.close()


_held: list[Ports] = []


def _lease_elsewhere(lock_dir: str) -> int:
    ports = Ports(HOST, Path(lock_dir))
    _held.append(ports)  # as long as the process lives
    return leased(ports, 2, "http")[0]


@pytest.mark.parametrize("text", ["", "20000", "a-b", "3-2", "0-5", "1-70000"])
def test_what_is_no_range_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="range of ports"):
        PortRange.parse(text)
