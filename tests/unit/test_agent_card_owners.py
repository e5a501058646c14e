"""Whose a process on a card is, and what it is called."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

from stagekeeper.agent.cards.card_owners import program_name, seen_on_card
from stagekeeper.agent.cards.devices import CardProcess
from stagekeeper.agent.cards.host_claims import StageClaim
from stagekeeper.host.process import identity_of
from stagekeeper.runtime.launch import INSTANCE_ENV

NOBODYS = 2**22 + 1


def claim(pid: int = 0, instance_id: str = "", *, ticks_later: int = 0) -> StageClaim:
    found = identity_of(pid) if pid else None
    return StageClaim(
        operation_id="op",
        stage_id=0,
        holder="m",
        cards=(),
        instance_id=instance_id,
        pid=pid,
        start_ticks=found.start_ticks + ticks_later if found is not None else 0,
    )


def test_processes_are_told_apart_by_session_and_by_environment():
    command = [sys.executable, "-c", "print('up', flush=True); input()"]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    leader = subprocess.Popen(command, start_new_session=True, **pipes)
    strayed = subprocess.Popen(command, env={**os.environ, INSTANCE_ENV: "i-1"}, **pipes)
    try:
        for it in (leader, strayed):
            assert it.stdout is not None
            it.stdout.readline()
        pids = (os.getpid(), leader.pid, strayed.pid, NOBODYS)
        processes = [CardProcess(pid, 100) for pid in pids]

        seen = seen_on_card(processes, [claim(leader.pid), claim(instance_id="i-1")])
        of_others = seen_on_card(processes, [claim(leader.pid, ticks_later=1), claim()])
    finally:
        for it in (leader, strayed):
            it.kill()
            it.communicate()

    assert [it.claim for it in seen] == [None, 0, 1, None]
    assert [bool(it.name) for it in seen] == [True, True, True, False]
    assert [it.used_bytes for it in seen] == [100] * 4
    # A pid that was given to another process since proves nothing.
    assert [it.claim for it in of_others] == [None] * 4


def test_name_of_a_program_is_fit_to_be_shown():
    name = program_name(os.getpid())

    assert name
    assert name.isprintable()
    assert program_name(NOBODYS) == "?"
