"""The ledger that the agents of a host share: whose claims count, and who has the turn."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from stagekeeper.agent.cards import host_claims
from stagekeeper.agent.cards.host_claims import (
    ClaimedCard,
    ClaimsFile,
    StageClaim,
    claims_path,
    pid_namespace,
    write_claims,
)
from stagekeeper.agent.cards.host_ledger import HostLedger, LedgerBusy, until_turn
from stagekeeper.agent.cards.ledger import Booking, Ledger
from stagekeeper.agent.host_lock import take_worker_lock
from stagekeeper.core.errors import Reason, Refused
from stagekeeper.core.ids import (
    ClusterName,
    DeviceId,
    InstanceId,
    OperationId,
    StageId,
    WorkerId,
)
from stagekeeper.core.model import Device, MemoryNeed, StageSpec, StageStart
from stagekeeper.host.process import ProcessIdentity, boot_id, find_members, identity_of
from stagekeeper.runtime.launch import INSTANCE_ENV

CARD = DeviceId("GPU-a")
DOMAIN = "host/GPU-a"
CLUSTER = ClusterName("default")
NOBODY = ProcessIdentity(2**22 + 1, 1)
"""No process: Linux gives no such number."""


class Sleeper:
    """A process that does nothing, as a stage would be started: in a session of its own."""

    def __init__(self, instance_id: str = "", child: bool = False) -> None:
        code = "import subprocess, sys; subprocess.Popen([sys.executable, '-c', 'input()']); "
        code = f"{code if child else ''}print('up', flush=True); input()"
        self._process = subprocess.Popen(
            [sys.executable, "-c", code],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, INSTANCE_ENV: instance_id},
            start_new_session=True,
        )
        assert self._process.stdout is not None
        self._process.stdout.readline()
        found = identity_of(self._process.pid)
        assert found is not None
        self.identity = found

    def end(self) -> None:
        """End this process alone; a child of it goes on until `end_all`."""
        self._process.kill()
        self._process.wait()

    def end_all(self) -> None:
        try:
            os.killpg(self._process.pid, 9)
        except ProcessLookupError:
            pass
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()


@pytest.fixture
def sleeper() -> Iterator[Sleeper]:
    it = Sleeper("i-1")
    yield it
    it.end_all()


def claim(reserved_bytes: int, process: ProcessIdentity | None = None, **changes) -> StageClaim:
    facts = {
        "operation_id": "op-1",
        "stage_id": 0,
        "holder": "other replica 0 stage a",
        "cards": (ClaimedCard(DOMAIN, reserved_bytes),),
        "instance_id": "i-1" if process else "",
        "pid": process.pid if process else 0,
        "start_ticks": process.start_ticks if process else 0,
    }
    return StageClaim(**{**facts, **changes})


def other_file(*claims: StageClaim, agent: ProcessIdentity = NOBODY, **changes) -> ClaimsFile:
    facts = {
        "cluster": "default",
        "worker_id": "w2",
        "boot_id": boot_id(),
        "pid_namespace": pid_namespace(),
        "agent_pid": agent.pid,
        "agent_start_ticks": agent.start_ticks,
        "claims": claims,
    }
    return ClaimsFile(**{**facts, **changes})


def put(lock_dir: Path, file: ClaimsFile) -> Path:
    path = claims_path(lock_dir, WorkerId(file.worker_id))
    write_claims(path, file)
    return path


def host(lock_dir: Path, worker_id: str = "w1", cluster: str = "default") -> HostLedger:
    return HostLedger(lock_dir, ClusterName(cluster), WorkerId(worker_id))


def cards() -> tuple[Device, ...]:
    return (Device(CARD, "cuda", "a card", 0, 100, DOMAIN),)


def ledger(lock_dir: Path, worker_id: str = "w1") -> Ledger:
    found = Ledger(cards(), host(lock_dir, worker_id))
    found.open()
    return found


def start(memory_bytes: int) -> StageStart:
    spec = StageSpec("s", "a:B", devices=(0,), memory=MemoryNeed(bytes=memory_bytes))
    return StageStart(StageId(0), spec, (CARD,))


BOOKING = Booking(OperationId("op"), StageId(0))


def reserve(found: Ledger, memory_bytes: int, booking: Booking = BOOKING) -> Booking:
    stage = start(memory_bytes)
    with found.turn():
        found.admit([stage])
        found.book(booking, "m replica 0 stage s", found.claims_of(stage))
    return booking


def refusal(found: Ledger, memory_bytes: int) -> str:
    with pytest.raises(Refused) as refused:
        found.admit([start(memory_bytes)])
    assert refused.value.reason is Reason.ADMISSION_REFUSED
    return refused.value.message


# --- whose claims count


def test_what_one_agent_reserved_counts_for_the_other_until_it_is_free(tmp_path):
    first, second = ledger(tmp_path, "w1"), ledger(tmp_path, "w2")

    booking = reserve(first, 60)
    message = refusal(second, 41)
    second.admit([start(40)])
    first.free(booking)
    second.admit([start(100)])

    assert "device GPU-a: 101 bytes needed, 100 there" in message
    assert "m replica 0 stage s (worker w1): 60" in message
    assert second.reserved_bytes(CARD) == 0


def test_claim_of_a_dead_agent_counts_as_long_as_a_process_of_its_stage_lives(tmp_path, sleeper):
    put(tmp_path, other_file(claim(60, sleeper.identity)))
    found = ledger(tmp_path)

    assert "other replica 0 stage a (worker w2): 60" in refusal(found, 41)
    sleeper.end()

    found.admit([start(100)])


def test_claim_counts_for_a_process_that_outlives_the_stages_main_one(tmp_path):
    """A server's workers hold the memory."""
    parent = Sleeper("i-1", child=True)
    put(tmp_path, other_file(claim(60, parent.identity)))
    found = ledger(tmp_path)
    try:
        parent.end()
        assert refusal(found, 41)
    finally:
        parent.end_all()
    deadline = time.monotonic() + 10
    while find_members(INSTANCE_ENV, "i-1"):
        assert time.monotonic() < deadline

    found.admit([start(100)])


def test_claim_of_a_dead_agent_that_started_nothing_is_over(tmp_path):
    put(tmp_path, other_file(claim(60)))

    ledger(tmp_path).admit([start(100)])


def test_claim_that_started_nothing_counts_while_its_agent_lives(tmp_path, sleeper):
    put(tmp_path, other_file(claim(60), agent=sleeper.identity))

    assert refusal(ledger(tmp_path), 41)


@pytest.mark.parametrize(
    "process",
    [
        NOBODY,
        ProcessIdentity(os.getpid(), 1),
    ],
)
def test_claim_by_a_pid_that_is_nobodys_or_another_processs_is_over(tmp_path, process):
    put(tmp_path, other_file(claim(60, process, instance_id="i-gone")))

    ledger(tmp_path).admit([start(100)])


def test_process_that_exists_and_is_hidden_from_this_user_counts(tmp_path, monkeypatch):
    """Mounted with `hidepid`, `/proc` does not show it: only its number is known to be taken."""
    put(tmp_path, other_file(claim(60), agent=NOBODY))

    def kill(pid: int, signal: int) -> None:
        assert (pid, signal) == (NOBODY.pid, 0)
        raise PermissionError

    monkeypatch.setattr(os, "kill", kill)

    assert refusal(ledger(tmp_path), 41)


def test_claims_of_an_earlier_boot_are_over(tmp_path, sleeper):
    put(tmp_path, other_file(claim(60, sleeper.identity), boot_id="another"))

    ledger(tmp_path).admit([start(100)])


def test_claims_on_another_card_do_not_count(tmp_path, sleeper):
    """Slices of RAM are named after their worker: those of two agents are never one card."""
    elsewhere = claim(60, sleeper.identity, cards=(ClaimedCard("host/w2/cpu:0", 60),))
    put(tmp_path, other_file(elsewhere))

    ledger(tmp_path).admit([start(100)])


def test_agent_of_another_cluster_counts_and_is_said_to_be_one(tmp_path, sleeper):
    put(tmp_path, other_file(claim(60, sleeper.identity), cluster="blue"))
    found = ledger(tmp_path)

    assert "(worker w2 of another cluster): 60" in refusal(found, 41)
    assert [(it.worker_id, it.memory_bytes) for it in found.foreign()[CARD]] == [("", 60)]


def test_claims_of_another_pid_namespace_count_while_their_agent_holds_its_lock(tmp_path):
    """startup-6: its pids mean nothing here, and its lock does."""
    file = other_file(claim(60, NOBODY), pid_namespace="pid:[1]")
    put(tmp_path, file)
    found = ledger(tmp_path)
    found.admit([start(100)])

    held = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import sys; from pathlib import Path; "
            "from stagekeeper.agent.host_lock import take_worker_lock; "
            "lock = take_worker_lock(Path(sys.argv[1]), 'w2'); print('held', flush=True); input()",
            str(tmp_path),
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    try:
        assert held.stdout is not None
        held.stdout.readline()
        assert refusal(found, 41)
    finally:
        held.communicate(b"\n")


def test_file_that_names_this_worker_costs_it_no_lock(tmp_path):
    """To look whether a lock of one's own is held would drop it."""
    lock = take_worker_lock(tmp_path, WorkerId("w1"))
    put(tmp_path, other_file(claim(60, NOBODY), pid_namespace="pid:[1]", worker_id="w1")).rename(
        tmp_path / f"claims-{os.getuid()}-liar.json"
    )

    ledger(tmp_path, "w1").admit([start(100)])

    code = (
        "import sys; from pathlib import Path; "
        "from stagekeeper.agent.host_lock import take_worker_lock; "
        "take_worker_lock(Path(sys.argv[1]), 'w1')"
    )
    second = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True)
    assert b"LockHeld" in second.stderr
    lock.release()


# --- what others put into the folder


def test_file_of_one_user_under_the_name_of_another_is_left_out_and_told(tmp_path, sleeper):
    path = put(tmp_path, other_file(claim(60, sleeper.identity)))
    path.rename(tmp_path / "claims-4242-w2.json")
    found = ledger(tmp_path)

    found.admit([start(100)])

    (note,) = found.notes
    assert f"belongs to user {os.getuid()}" in note


def test_user_speaks_for_no_process_of_another(tmp_path, sleeper, monkeypatch):
    """What it holds still counts: the driver lists it."""
    put(tmp_path, other_file(claim(60, sleeper.identity)))
    path = claims_path(tmp_path, WorkerId("w2"))
    monkeypatch.setattr(host_claims, "real_user", lambda pid: 4242)
    if os.getuid() == 0:  # root speaks for all
        renamed = tmp_path / "claims-4243-w2.json"
        path.rename(renamed)
        os.chown(renamed, 4243, 4243)

    ledger(tmp_path).admit([start(100)])


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"{", "damaged"),
        (b"", "damaged"),
        (b"\xff\xfe", "damaged"),
        (b"[" * 100_000, "damaged"),
        (b'{"worker_id": 3}', "damaged"),
        (b" " * (5 * 2**20), "more than"),
    ],
)
def test_damaged_file_frees_nothing_stops_nobody_and_is_told(tmp_path, sleeper, content, why):
    put(tmp_path, other_file(claim(60, sleeper.identity), worker_id="w3"))
    claims_path(tmp_path, WorkerId("w2")).write_bytes(content)
    found = ledger(tmp_path)

    assert refusal(found, 41)
    found.admit([start(40)])
    (note,) = found.notes
    assert why in note
    assert "left out of the ledger" in note


def test_sizes_that_no_card_has_are_damage(tmp_path, sleeper):
    path = put(tmp_path, other_file(claim(60, sleeper.identity)))
    path.write_text(path.read_text().replace(":60", ":-60"))
    found = ledger(tmp_path)

    found.admit([start(100)])
    assert found.notes


def test_links_pipes_and_folders_are_not_opened(tmp_path, sleeper):
    secret = tmp_path / "secret"
    secret.write_text("{}")
    claims_path(tmp_path, WorkerId("link")).symlink_to(secret)
    os.mkfifo(claims_path(tmp_path, WorkerId("pipe")))
    claims_path(tmp_path, WorkerId("folder")).mkdir()
    put(tmp_path, other_file(claim(60, sleeper.identity)))
    found = ledger(tmp_path)

    assert refusal(found, 41)
    assert len(found.notes) == 3


def test_many_files_of_one_user_hide_none_of_another(tmp_path, sleeper, monkeypatch):
    monkeypatch.setattr(host_claims, "_MOST_FILES_OF_USER", 5)
    for n in range(20):
        (tmp_path / f"claims-{os.getuid()}-{n:04}.json").write_text("{")
        (tmp_path / f"claims-4242-{n:04}.json").write_text("{")
    path = put(tmp_path, other_file(claim(60, sleeper.identity)))
    mine = tmp_path / f"claims-{os.getuid()}-0000.json"
    path.rename(mine)

    assert refusal(ledger(tmp_path), 41)


def test_text_that_cannot_be_shown_is_left_out(tmp_path, sleeper):
    put(tmp_path, other_file(claim(60, sleeper.identity, holder="a\x1b[2Jb")))
    found = ledger(tmp_path)

    found.admit([start(100)])
    assert "cannot be shown" in found.notes[0]


def test_longest_worker_id_has_a_file(tmp_path):
    first, second = ledger(tmp_path, "é" * 63), ledger(tmp_path, "w2")
    reserve(first, 60)

    assert refusal(second, 41)


# --- turns


def hold_the_turn(lock_dir: Path) -> subprocess.Popen[bytes]:
    """Another agent, which is stopped in the middle of its turn."""
    holder = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import sys; from pathlib import Path; "
            "from stagekeeper.agent.cards.host_ledger import HostLedger; "
            "host = HostLedger(Path(sys.argv[1]), 'default', 'w9')\n"
            "with host.turn(): print('has it', flush=True); input()",
            str(lock_dir),
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert holder.stdout is not None
    assert holder.stdout.readline()
    return holder


async def test_turn_that_cannot_be_had_reserves_nothing_and_names_the_holder(tmp_path):
    found = ledger(tmp_path)
    holder = hold_the_turn(tmp_path)
    try:
        began = time.monotonic()
        with pytest.raises(LedgerBusy) as busy:
            await until_turn(lambda: reserve(found, 60), within_s=0.1)
        assert time.monotonic() - began < 5
        assert f"by process {holder.pid}" in busy.value.message
        assert busy.value.reason is Reason.ADMISSION_REFUSED
        assert found.reserved_bytes(CARD) == 0

        waiting = asyncio.create_task(until_turn(lambda: reserve(found, 60), within_s=30))
        await asyncio.sleep(0)
        assert not waiting.done()
    finally:
        holder.communicate(b"\n")
    await waiting

    assert found.reserved_bytes(CARD) == 60


async def test_refusal_for_another_reason_is_not_repeated(tmp_path):
    found = ledger(tmp_path)
    tries = 0

    def act() -> None:
        nonlocal tries
        tries += 1
        reserve(found, 101)

    with pytest.raises(Refused, match="1 too many"):
        await until_turn(act, within_s=30)
    assert tries == 1


def test_lock_file_that_was_removed_is_not_the_lock_any_more(tmp_path):
    first, second = ledger(tmp_path, "w1"), ledger(tmp_path, "w2")
    (tmp_path / "ledger.lock").unlink()
    holder = hold_the_turn(tmp_path)  # it makes a new file
    try:
        for it in (first, second):
            with pytest.raises(LedgerBusy), it.turn():
                pass
    finally:
        holder.communicate(b"\n")


def test_what_cannot_be_told_to_others_is_not_booked(tmp_path):
    found = ledger(tmp_path)
    own = claims_path(tmp_path, WorkerId("w1"))
    own.unlink()
    own.mkdir()

    with pytest.raises(LedgerBusy, match="cannot be written"):
        reserve(found, 60)

    assert found.reserved_bytes(CARD) == 0
    assert "do not see what is free here" in found.notes[0]
    own.rmdir()
    reserve(found, 60)
    assert not found.notes


def test_what_fails_in_a_turn_is_booked_nowhere(tmp_path):
    first, second = ledger(tmp_path, "w1"), ledger(tmp_path, "w2")

    with pytest.raises(RuntimeError), first.turn():
        first.book(BOOKING, "s", first.claims_of(start(60)))
        raise RuntimeError

    assert first.reserved_bytes(CARD) == 0
    second.admit([start(100)])


def test_folder_that_cannot_be_read_admits_nothing(tmp_path):
    found = ledger(tmp_path)
    for path in tmp_path.iterdir():
        path.unlink()
    tmp_path.rmdir()

    with pytest.raises(LedgerBusy):
        found.admit([start(1)])
    tmp_path.mkdir()


RACER = """
import sys
from pathlib import Path
from tests.unit.test_agent_host_ledger import Booking, OperationId, StageId, ledger, reserve
from stagekeeper.agent.cards.host_ledger import LedgerBusy
from stagekeeper.core.errors import Refused

def repeated(act):
    while True:
        try:
            return act()
        except LedgerBusy:
            pass

found = repeated(lambda: ledger(Path(sys.argv[1]), sys.argv[2]))
print("up", flush=True)
for line in sys.stdin:
    booking = Booking(OperationId(line), StageId(0))
    try:
        repeated(lambda: reserve(found, 60, booking))
        won = True
    except Refused:
        won = False
    print("won" if won else "lost", flush=True)
    if sys.stdin.readline().strip() == "free" and won:
        found.free(booking)
    print("ready", flush=True)
"""


def test_two_agents_at_once_never_both_take_the_last_bytes(tmp_path):
    racers = [
        subprocess.Popen(
            [sys.executable, "-c", RACER, str(tmp_path), f"w{n}"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).parents[2],
        )
        for n in range(3)
    ]

    def say(line: str) -> list[str]:
        for it in racers:
            assert it.stdin is not None
            it.stdin.write(f"{line}\n")
            it.stdin.flush()
        return [it.stdout.readline().strip() for it in racers if it.stdout is not None]

    try:
        assert [it.stdout.readline().strip() for it in racers if it.stdout] == ["up"] * 3
        for n in range(200):
            assert sorted(say(f"op-{n}")) == ["lost", "lost", "won"]
            assert say("free") == ["ready"] * 3
    finally:
        for it in racers:
            it.kill()
            it.communicate()


# --- the next life


def test_next_life_takes_over_what_was_told_and_frees_what_nobody_has_taken(tmp_path, sleeper):
    """Of what the dead agent reserved and never started nothing counted until its next life."""
    running = claim(30, sleeper.identity, operation_id="runs")
    put(tmp_path, other_file(running, claim(20, operation_id="reserved"), worker_id="w1"))
    other = ledger(tmp_path, "w2")
    other.admit([start(70)])

    again = Ledger(cards(), host(tmp_path, "w1"))
    again.open()
    assert "101 bytes needed" in refusal(other, 51)

    again.book(Booking(OperationId("runs"), StageId(0)), "m", again.claims_of(start(30)))
    again.forget_inherited()

    other.admit([start(70)])
    assert refusal(other, 71)


def test_what_no_record_tells_of_counts_as_long_as_it_runs(tmp_path, sleeper):
    put(tmp_path, other_file(claim(30, sleeper.identity), worker_id="w1"))
    again, other = ledger(tmp_path, "w1"), ledger(tmp_path, "w2")

    again.forget_inherited()
    assert refusal(again, 71)
    assert refusal(other, 71)
    sleeper.end()
    again.cards_are(cards())  # the next look

    again.admit([start(100)])
    other.admit([start(100)])


def test_start_is_refused_whose_bytes_were_taken_while_its_agent_was_away(tmp_path):
    """What an agent resumes it had reserved; while it was dead that counted for nobody."""
    put(tmp_path, other_file(claim(60, operation_id="op"), worker_id="w1"))
    other = ledger(tmp_path, "w2")
    reserve(other, 60, Booking(OperationId("other"), StageId(0)))

    again = ledger(tmp_path, "w1")
    again.book(BOOKING, "m replica 0 stage s", again.claims_of(start(60)))

    with pytest.raises(Refused, match="given to others while this agent was away"):
        again.check_still_there(start(60))
    other.free(Booking(OperationId("other"), StageId(0)))
    again.check_still_there(start(60))


def test_nothing_starts_before_the_next_life_has_had_its_turn(tmp_path):
    again = Ledger(cards(), host(tmp_path, "w1"))
    again.book(BOOKING, "m", again.claims_of(start(60)))

    with pytest.raises(LedgerBusy, match="has not had its turn"):
        again.check_still_there(start(60))


def test_what_is_taken_over_before_the_cards_are_read_is_told_by_their_names(tmp_path, sleeper):
    first, other = ledger(tmp_path, "w1"), ledger(tmp_path, "w2")
    reserve(first, 60)
    first.runs(BOOKING, InstanceId("i-1"), sleeper.identity)

    again = Ledger(host=host(tmp_path, "w1"))
    again.open()
    again.book(BOOKING, "m replica 0 stage s", first.claims_of(start(60)))
    again.runs(BOOKING, InstanceId("i-1"), sleeper.identity)
    again.forget_inherited()

    assert refusal(other, 41)
    claims_path(tmp_path, WorkerId("w1")).unlink()
    again.cards_are([replace(cards()[0], lock_domain_id="other-host/GPU-a")])
    other.admit([start(100)])


def test_damaged_file_of_its_own_is_replaced(tmp_path):
    claims_path(tmp_path, WorkerId("w1")).write_text("{")
    found = ledger(tmp_path, "w1")
    reserve(found, 60)

    assert refusal(ledger(tmp_path, "w2"), 41)


def test_running_stage_is_told_with_its_process(tmp_path, sleeper):
    """So that it counts should its agent die."""
    first = ledger(tmp_path, "w1")
    reserve(first, 60)

    first.runs(BOOKING, InstanceId("i-1"), sleeper.identity)

    (told,) = host(tmp_path, "w2").others()
    assert [it.process for it in told.claims] == [sleeper.identity]
    assert told.file.agent.pid == os.getpid()
