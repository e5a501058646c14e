"""Rounds of nonsense against one rpc, and what has to hold after every single one.

Decided here: that a request that is refused changes nothing that can be looked at, and that one
that is answered is followed by a look at what must never change. Not decided here: what a server's
state is, and what of it must never change (the tests).
"""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import grpc
import pytest
from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.message import Message

from stagekeeper.wire.error_details import released
from tests.harness.nonsense import (
    Nonsense,
    each_field,
    enormous,
    label,
    many_fields,
    undecodable,
    wrong_wires,
)
from tests.harness.verdicts import BUGS, Verdict, judge, send


@dataclass(frozen=True)
class Effort:
    """How much is tried of each rpc, and from which seed on.

    Attributes:
        values: of each field, each with a look at all of the state before and behind it.
        rounds: requests with several wrong fields, looked at likewise.
        quick_values: of each field, in a row; the state is looked at behind all of them.
    """

    values: int = 1
    rounds: int = 8
    quick_values: int = 3
    seed: int = 0


QUICK = Effort()
LONG = Effort(values=4, rounds=300, quick_values=60)


async def _nothing(verdict: Verdict) -> None:
    return None


def _all(request: Nonsense) -> bool:
    return True


@dataclass
class Target:
    """One rpc of a server that runs.

    Attributes:
        sound: makes a request that would be taken, another one each time.
        state: all of the server that a refused request must leave as it is.
        answered: called after each request that was answered: checks, and puts right what it may
            have changed.
        is_undone: what is answered has to be put right at once, or the next one is another case.
        is_sent: whether a request may be sent; False for one that would end what is looked at.
    """

    channel: grpc.aio.Channel
    method: MethodDescriptor
    sound: Callable[[], Message]
    state: Callable[[], Awaitable[dict[str, Any]]]
    answered: Callable[[Verdict], Awaitable[None]] = _nothing
    is_undone: bool = False
    is_sent: Callable[[Nonsense], bool] = _all
    reasons: dict[str, int] = field(default_factory=dict)

    async def endure(self, effort: Effort) -> dict[str, int]:
        """Send everything; return how often each reason was given, "" for an answer."""
        before = await self.state()
        for request in self._requests(effort):
            if not self.is_sent(request):
                continue
            verdict = await judge(self.channel, self.method, request)
            self._count(verdict)
            if not verdict.is_refused:
                await self.answered(verdict)
                before = await self.state()
                continue
            after = await self.state()
            assert after == before, (
                f"{label(self.method)} was refused ({verdict.reason}) and changed "
                f"{[key for key in before if before[key] != after.get(key)]}: {request}"
            )
        await self._survive_what_cannot_be_read(effort)
        assert await self.state() == before
        await self._endure_in_a_row(effort)
        return self.reasons

    async def _endure_in_a_row(self, effort: Effort) -> None:
        """Send many values of each field; what is answered is looked at now and then."""
        chance = random.Random(f"{effort.seed} {label(self.method)} in a row")
        verdict = None
        for request in each_field(self.sound, chance, effort.quick_values, has_worst=True):
            if self.is_sent(request):
                verdict = await judge(self.channel, self.method, request)
                self._count(verdict)
                if self.is_undone and not verdict.is_refused:
                    await self.answered(verdict)
        if verdict is not None and not verdict.is_refused:
            await self.answered(verdict)
        await self.state()

    def _count(self, verdict: Verdict) -> None:
        self.reasons[verdict.reason] = self.reasons.get(verdict.reason, 0) + 1

    def _requests(self, effort: Effort) -> Iterator[Nonsense]:
        chance = random.Random(f"{effort.seed} {label(self.method)}")
        yield Nonsense(self.sound().SerializeToString(), "nothing wrong")
        yield from each_field(self.sound, chance, effort.values)
        yield from many_fields(self.sound, chance, effort.rounds)
        yield from wrong_wires(self.sound, chance)
        yield from enormous(self.sound)

    async def _survive_what_cannot_be_read(self, effort: Effort) -> None:
        """Send frames that gRPC refuses before any code of ours sees them: nothing else happens."""
        if self.method.client_streaming:
            return  # refused before anything of the stream is read
        chance = random.Random(f"{effort.seed} {label(self.method)}")
        for frame in undecodable(self.sound, chance):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await send(self.channel, self.method, frame)
            released(caught.value)
            assert caught.value.code() in BUGS  # gRPC's own words
