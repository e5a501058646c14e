"""The demo's course: bring up, ask, kill under load, compare.

Decided here: the order of things and every deadline. Not decided here: what is deployed and asked
(a `Scene`), what must hold at the end (`report`), and how everything ends (`run`). Invariant:
the load is steady before the first kill, and goes on until after the last listing.
"""

from __future__ import annotations

import contextlib
import shlex
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final

import psutil

from stagekeeper.client import Client

from .listing import Listing, look, supervisor_address
from .load import Load
from .report import Facts, Kill, broken_by_load, broken_laws, table
from .scene import Scene
from .screen import Screen
from .up import Up
from .waiting import DemoFailed, Watch

START_S: Final = 300.0
"""Until everything is READY. Two cores need half a minute to build the vectors, other machines
longer."""

ANSWER_S: Final = 30.0
LISTED_AGAIN_S: Final = 60.0
LOAD_S: Final = 60.0
STEADY_ANSWERS: Final = 100
"""The load is steady when so many requests were answered, before the first kill and after each."""


class Course:
    """One run. What breaks a promise is added to `broken`; what ends the run is raised."""

    def __init__(
        self, scene: Scene, deployment: str, up: Up, screen: Screen, broken: list[str]
    ) -> None:
        self._scene = scene
        self._deployment = deployment
        self._up = up
        self._screen = screen
        self._broken = broken
        self._watch = Watch(screen)

    async def run(self) -> None:
        await self._bring_up()
        # The load's client is an ordinary one; the other asks once and is told how things stand.
        async with (
            Client(self._up.endpoint) as caller,
            Client(self._up.endpoint, patience_s=0, watch_at_once=False) as observer,
        ):
            expected = await self._ask_questions(caller)
            facts = await self._kill_under_load(caller, observer, expected)
        self._screen.say()
        self._screen.draw(table(facts))
        self._broken += broken_laws(facts)

    async def _bring_up(self) -> None:
        self._screen.say(f"$ stagekeeper up {shlex.join(self._up.words)}", "bold")
        await self._up.start()
        self._watch.guards.append(self._up.check_running)

        async def serving() -> str | None:
            return self._up.endpoint or None

        # `up` draws its own progress; only the deadline is ours.
        await self._watch.until(
            f"{self._deployment} is up", serving, within_s=START_S, is_shown=False
        )

    async def _ask_questions(self, client: Client) -> dict[str, Any]:
        """Put every question once; show some; return the answers."""
        expected = {}
        for number, question in enumerate(self._scene.questions):
            answer = await self._scene.ask(client, question, ANSWER_S)
            expected[question] = answer
            if number < self._scene.shown:
                self._screen.heading(f"? {question}")
                for line in self._scene.tell(answer):
                    self._screen.paragraph(line)
        return expected

    async def _kill_under_load(
        self, caller: Client, observer: Client, expected: dict[str, Any]
    ) -> Facts:
        before = await self._look(observer)
        self._guard_stages(before)

        async def ask(question: str, timeout: float) -> Any:
            return await self._scene.ask(caller, question, timeout)

        kills = []
        load = Load(ask, expected, callers=self._scene.callers)
        self._watch.footnote = lambda: str(load)
        try:
            async with load:
                self._screen.heading(f"{load.callers} callers ask without a pause")
                await self._steady(load)
                for who, victims in (
                    ("the supervisor", ["supervisor"]),
                    ("all agents", sorted(before.incarnations)),
                ):
                    kills.append(await self._kill(who, victims, load, observer))
                    await self._steady(load)
                after = await self._look(observer)
        except DemoFailed:
            self._broken += broken_by_load(load.sent, load.failures)
            raise
        return Facts(before, after, kills, load.sent, load.failures, load.slowest_s)

    async def _look(self, observer: Client) -> Listing:
        async def listing() -> Listing:
            address = await supervisor_address(self._up.endpoint)
            return replace(await look(observer, self._deployment), supervisor_address=address)

        return await self._watch.until("a listing", listing, within_s=ANSWER_S)

    def _guard_stages(self, before: Listing) -> None:
        """Let the end of any stage process end the demo, from now on."""
        processes: dict[int, psutil.Process] = {}

        def check() -> None:
            for (replica_index, stage), pid in before.stage_pids.items():
                if not _runs(processes, pid):
                    raise DemoFailed(
                        f"only the supervisor and the agents may be killed, and stage {stage} of "
                        f"replica {replica_index} (process {pid}) has ended"
                    )

        self._watch.guards.append(check)

    async def _steady(self, load: Load) -> None:
        goal = load.answered + STEADY_ANSWERS

        async def reached() -> bool | None:
            return load.answered >= goal or None

        await self._watch.until(f"{STEADY_ANSWERS} more answers", reached, within_s=LOAD_S)

    async def _kill(self, who: str, victims: list[str], load: Load, observer: Client) -> Kill:
        """Kill, and wait until successors serve and everything is listed again."""
        before = await self._look(observer)
        answered = load.answered
        began = time.monotonic()
        pids = self._up.kill_children(victims)
        self._screen.heading(f"kill -9 of {who}: {', '.join(map(str, pids.values()))}")

        async def listed_again() -> Listing | None:
            now = await look(observer, self._deployment)
            return now if _is_back(before, now, victims) else None

        await self._watch.until("everything is listed again", listed_again, within_s=LISTED_AGAIN_S)
        listed_again_s = time.monotonic() - began
        answered = load.answered - answered
        self._screen.say(f"  listed again after {listed_again_s:.1f} s; {load}")

        async def announced() -> dict[str, int] | None:
            now = {name: self._up.children.get(name, 0) for name in victims}
            return now if all(now[name] != pids[name] for name in victims) else None

        successors = await self._watch.until(
            f"`up` tells the new pids of {', '.join(victims)}", announced, within_s=LISTED_AGAIN_S
        )
        return Kill(who, pids, successors, listed_again_s, answered)


def _is_back(before: Listing, now: Listing, killed: Sequence[str]) -> bool:
    """Whether a listing is one of successors, and whole.

    A supervisor that lives goes on listing what dead agents held, so that alone proves nothing: the
    killed agents have to have registered in a higher incarnation, and a killed supervisor's
    successor reigns in a higher epoch.
    """
    return (
        now.is_complete
        and now.epoch >= before.epoch + ("supervisor" in killed)
        and all(
            now.incarnations.get(name, 0) >= incarnation + (name in killed)
            for name, incarnation in before.incarnations.items()
        )
        and now.stage_pids.keys() == before.stage_pids.keys()
    )


def _runs(known: dict[int, psutil.Process], pid: int) -> bool:
    """Whether the process that had this pid at the first look is still there."""
    with contextlib.suppress(psutil.NoSuchProcess):
        process = known.setdefault(pid, psutil.Process(pid))
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False
