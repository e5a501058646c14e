"""A child of `up`: kept running, given up, stopped, killed. The children are small scripts."""

from __future__ import annotations

import asyncio
import os
import socket
import sys

import pytest

from stagekeeper.agent.host_lock import LockHeld
from stagekeeper.cli.explain import explain
from stagekeeper.cli.up.child import _HELD, Child, ChildEvent, Ended, Ready, StartFailed
from stagekeeper.runtime.clock import SystemClock
from stagekeeper.runtime.retry import Backoff
from stagekeeper.supervisor.predecessor import check_turn
from stagekeeper.supervisor.settings import SupervisorSettings
from stagekeeper.supervisor.state_lock import StateLock
from tests.harness.waiting import wait_for

NO_WAIT = Backoff(initial_s=0.01, factor=1.0, cap_s=0.01)

SERVES = """
import signal, sys, time
print("part ready: address=127.0.0.1:1 state=/a b/c adopted=2", flush=True)
print("something else", file=sys.stderr, flush=True)
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
time.sleep(60)
"""
DEAF = """
import signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("part ready: ", flush=True)
time.sleep(60)
"""
FAILS = """
import sys
print("stagekeeper: cannot listen at 127.0.0.1:1: the port is taken", file=sys.stderr)
sys.exit({code})
"""
REFUSES = """
import sys
print("stagekeeper: others can look into it", file=sys.stderr)
sys.exit(1)
"""


class Watched:
    """A child with its events, run in the background."""

    def __init__(self, tmp_path, script, *, grace_s=5.0):
        self.events: list[ChildEvent] = []
        self.child = Child(
            "part",
            lambda: [sys.executable, "-c", script],
            tmp_path / "part.log",
            SystemClock(),
            self.events.append,
            backoff=NO_WAIT,
            first_start_grace_s=grace_s,
        )

    async def __aenter__(self):
        self.run = asyncio.create_task(self.child.run())
        return self

    async def __aexit__(self, *exc_info):
        self.child.kill()
        self.run.cancel()
        await asyncio.gather(self.run, return_exceptions=True)

    def count(self, kind):
        return sum(isinstance(event, kind) for event in self.events)


async def test_child_that_serves_is_ready_with_its_facts(tmp_path):
    async with Watched(tmp_path, SERVES) as watched:
        await asyncio.wait_for(watched.child.wait_ready(), 20)

        assert watched.child.facts == {
            "address": "127.0.0.1:1",
            "state": "/a b/c",
            "adopted": "2",
        }
        [event] = watched.events
        assert (event.pid, event.is_first) == (watched.child.pid, True)
        await wait_for(lambda: "else" in (tmp_path / "part.log").read_text(), "stderr is logged")


async def test_child_that_is_killed_is_started_again(tmp_path):
    async with Watched(tmp_path, SERVES) as watched:
        await asyncio.wait_for(watched.child.wait_ready(), 20)
        first = watched.child.pid

        os.kill(first, 9)

        await wait_for(lambda: watched.count(Ready) == 2, "it is ready again")
        assert [type(event) for event in watched.events] == [Ready, Ended, Ready]
        assert watched.events[1].how == "killed by SIGKILL"
        assert not watched.events[2].is_first
        assert watched.child.pid != first


async def test_child_that_ends_with_zero_unasked_is_started_again(tmp_path):
    script = "print('part ready: n=1', flush=True)"
    async with Watched(tmp_path, script) as watched:
        await wait_for(lambda: watched.count(Ready) >= 3, "it was started three times")

        ended = [event for event in watched.events if isinstance(event, Ended)]
        assert {event.how for event in ended} == {"exit code 0"}


@pytest.mark.parametrize("code", [2, 70, 78])
async def test_first_start_that_no_retry_mends_is_given_up_at_once(tmp_path, code):
    async with Watched(tmp_path, FAILS.format(code=code), grace_s=60) as watched:
        with pytest.raises(StartFailed, match="the port is taken"):
            await asyncio.wait_for(asyncio.shield(watched.run), 20)

        assert watched.events == []


async def test_first_start_that_is_refused_for_good_is_given_up_at_once(tmp_path):
    async with Watched(tmp_path, REFUSES, grace_s=60) as watched:
        with pytest.raises(StartFailed, match="others can look into it"):
            await asyncio.wait_for(asyncio.shield(watched.run), 20)

        assert watched.events == []


async def test_same_reason_is_told_once(tmp_path):
    async with Watched(tmp_path, FAILS.format(code=1), grace_s=60) as watched:
        await wait_for(lambda: watched.count(Ended) >= 3, "it was tried three times")

        told = [event.how for event in watched.events]
        assert "the port is taken" in told[0]
        assert set(told[1:]) == {"exit code 1"}


async def test_refusals_of_what_somebody_holds_are_known_by_their_words(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as holder:
        endpoint = f"127.0.0.1:{holder.getsockname()[1]}"
        with pytest.raises(OSError) as taken:
            await check_turn(SupervisorSettings(endpoint=endpoint))
    first = StateLock(tmp_path)
    try:
        with pytest.raises(OSError) as in_use:
            StateLock(tmp_path)
    finally:
        first.release()

    held = LockHeld("worker id 'a' is held by process 7 (/x)", 7)
    for error in (taken.value, in_use.value, held):
        assert _HELD.search(explain(error).message), error


async def test_first_start_is_tried_for_a_while_and_then_given_up(tmp_path):
    async with Watched(tmp_path, FAILS.format(code=1), grace_s=0.3) as watched:
        with pytest.raises(StartFailed, match=r"exit code 1.*the port is taken"):
            await asyncio.wait_for(asyncio.shield(watched.run), 20)

        assert watched.count(Ended) >= 1


async def test_start_that_cannot_be_mended_is_tried_on_after_the_child_has_served(tmp_path):
    marker = tmp_path / "was-here"
    script = f"""
import pathlib, sys
marker = pathlib.Path({str(marker)!r})
if marker.exists():
    sys.exit(78)
marker.touch()
print("part ready: ", flush=True)
"""
    async with Watched(tmp_path, script) as watched:
        await wait_for(lambda: watched.count(Ended) >= 4, "it is tried again and again")

        assert not watched.run.done()


async def test_stop_asks_first_and_starts_nothing_anew(tmp_path):
    async with Watched(tmp_path, SERVES) as watched:
        await asyncio.wait_for(watched.child.wait_ready(), 20)

        assert await watched.child.stop(10) is True

        await asyncio.wait_for(watched.run, 5)
        assert watched.child.pid is None
        assert watched.count(Ended) == 0


async def test_stop_kills_when_the_budget_is_over(tmp_path):
    async with Watched(tmp_path, DEAF) as watched:
        await asyncio.wait_for(watched.child.wait_ready(), 20)

        assert await watched.child.stop(0.2) is False
        await asyncio.wait_for(watched.run, 5)


async def test_stop_of_a_child_that_waits_for_its_next_start_ends_the_wait(tmp_path):
    watched = Watched(tmp_path, FAILS.format(code=1), grace_s=1000)
    watched.child.backoff = Backoff(initial_s=1000, cap_s=1000)
    async with watched:
        await wait_for(lambda: watched.count(Ended) == 1, "it failed once")

        assert await watched.child.stop(10) is True
        await asyncio.wait_for(watched.run, 5)


async def test_child_is_no_member_of_our_terminals_group(tmp_path):
    async with Watched(tmp_path, SERVES) as watched:
        await asyncio.wait_for(watched.child.wait_ready(), 20)

        assert os.getpgid(watched.child.pid) != os.getpgid(0)
        assert os.getsid(watched.child.pid) == watched.child.pid


async def test_last_words_of_an_earlier_start_are_not_taken_for_those_of_this_one(tmp_path):
    (tmp_path / "part.log").write_text("stagekeeper: said long ago\n")
    async with Watched(tmp_path, "raise SystemExit(2)") as watched:
        with pytest.raises(StartFailed, match="it said nothing"):
            await asyncio.wait_for(asyncio.shield(watched.run), 20)
