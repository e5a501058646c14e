"""Calls to the ranks of a mesh: `workers.step.call(x)`, and its four sisters.

Decided here: which ranks each way of calling asks, what becomes of several answers and errors, and
that nothing is sent before all of the arguments are encoded. Not decided here: how a rank is
reached and what a dead one answers with (`RankLink`), and in which order values of several come
(`merged_streams`). Invariant: whoever stops waiting stops the calls that were made for them; no
call is left behind.

The way of one rank is the hot path: one future, no task.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator, Collection, Mapping, Sequence
from contextlib import aclosing
from typing import Any, Final, Generic, NamedTuple, NoReturn, ParamSpec, TypeVar

from stagekeeper.actor.endpoint import Endpoint
from stagekeeper.actor.errors import Died, MeshError, NotSendable
from stagekeeper.actor.merged_streams import merged
from stagekeeper.actor.rank_links import RankLink, RankView
from stagekeeper.actor.value_mesh import ValueMesh
from stagekeeper.client.errors import CallLost, UnreadableAnswer
from stagekeeper.v1.types_pb2 import Payload
from stagekeeper.wire.payload import PayloadError, decode, encode_arguments

P = ParamSpec("P")
Result = TypeVar("Result", covariant=True)
Local = TypeVar("Local", covariant=True)

_ENDS: Final = (Died, CallLost)
"""Errors that say that a rank has ended, and not what an endpoint raised."""


class Ranked(NamedTuple, Generic[Result]):
    """A value, and the rank that it came from."""

    rank: int
    value: Result


def endpoint_of_mesh(
    name: str, view: RankView, endpoints: Mapping[str, Endpoint] | None, owner: str
) -> EndpointRef[..., Any, Any]:
    """Return what an attribute of a mesh is.

    Args:
        endpoints: of the class, by name; None where it cannot be had: names go unchecked then.
        owner: what has no such endpoint, for people.

    Raises:
        AttributeError: the name is no endpoint's.
    """
    endpoint = None
    if endpoints is not None:
        endpoint = endpoints.get(name)
        if endpoint is None:
            offered = ", ".join(endpoints) or "none"
            raise AttributeError(f"{owner} has no endpoint {name!r}; it has: {offered}")
    return EndpointRef(name, view, endpoint)


class EndpointRef(Generic[P, Result, Local]):
    """One endpoint of a mesh, ready to be called.

    Errors of the endpoint are those of `stagekeeper.actor.errors`: RemoteError when it raised (the
    actor lives on), Died when the rank has failed, MeshStopped when it was stopped. Cancelling what
    awaits an answer cancels the calls. `asyncio.timeout` sets a limit.

    Args:
        name: the endpoint's.
        view: whom calls go to.
        endpoint: as the class declares it, where that is known: errors then name parameters, and
            mistakes are found before anything is sent.
    """

    __slots__ = ("_endpoint", "_name", "_positional", "_view")

    def __init__(self, name: str, view: RankView, endpoint: Endpoint | None = None) -> None:
        self._name = name
        self._view = view
        self._endpoint = endpoint
        self._positional = () if endpoint is None else endpoint.positional

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> Local:
        """Run the method, on an actor itself. On a mesh: TypeError; say how to call it."""
        raise TypeError(
            f"{self._target} is on other processes: say {self._target}.call_one(…) for one rank, "
            ".call(…) for all, .choose(…) for any one, .stream(…) or .broadcast(…)"
        )

    async def call_one(self, *args: P.args, **kwargs: P.kwargs) -> Result:
        """Call the one rank that there is, and return its answer.

        Raises:
            ValueError: there are several ranks.
            NotSendable: an argument cannot travel; nothing was sent.
        """
        links = self._view.links
        if len(links) != 1:
            self._refuse_call_one(links)
        payload = self._payload_once(args, kwargs)
        answer: Result = self._decoded(await links[0].call(self._name, payload))
        return answer

    async def choose(self, *args: P.args, **kwargs: P.kwargs) -> Result:
        """Call the living rank with the fewest calls of this process under way; ties by chance.

        Raises:
            MeshError: no rank is alive.
            NotSendable: an argument cannot travel; nothing was sent.
        """
        payload = self._payload_once(args, kwargs)
        links = self._view.links
        living = [link for link in links if not link.is_failed]
        if not living:
            # Each of them says what it died of.
            _, failed = await self._gathered(links, payload)
            raise MeshError(f"{self._target}: none of {len(links)} ranks is alive", failed, {})
        fewest = min(link.outstanding for link in living)
        link = random.choice([link for link in living if link.outstanding == fewest])
        answer: Result = self._decoded(await link.call(self._name, payload))
        return answer

    async def call(self, *args: P.args, **kwargs: P.kwargs) -> ValueMesh[Result]:
        """Call every rank, and return their answers by rank.

        Waits for all of them when an endpoint raises, and for none when a rank ends: the others'
        calls are then cancelled. To go on without that rank, call a selection.

        Raises:
            MeshError: of some rank there is no answer: `failed` has those that raised or ended,
                `ok` those that answered, by rank; those that were cancelled are in neither.
            NotSendable: an argument cannot travel; nothing was sent.
        """
        payload = self._payload_once(args, kwargs)
        links = self._view.links
        answers, failed = await self._gathered(links, payload)
        if failed:
            raise MeshError(self._said(failed, len(links)), failed, answers)
        return ValueMesh(answers)

    def stream(self, *args: P.args, **kwargs: P.kwargs) -> AsyncGenerator[Ranked[Result], None]:
        """Call every rank, and yield their values as they come, each with its rank.

        An endpoint that answers once yields once per rank. The calls are sent when the first value
        is asked for. A rank that fails ends alone; the others go on. Leaving the loop early cancels
        what is under way: soon after, or, within `async with contextlib.aclosing(…)`, at once.

        Raises:
            MeshError: at the end, when some rank failed: `failed` by rank; of the other ranks `ok`
                has how many values they yielded.
            NotSendable: an argument cannot travel; at once, and nothing is sent.
        """
        return self._streamed(self._payload(args, kwargs))

    def broadcast(self, *args: P.args, **kwargs: P.kwargs) -> None:
        """Send every rank a message to which nothing is answered, and do not wait.

        What an endpoint raises then is a failure of its actor, told to the mesh's owner.

        Raises:
            TypeError: the arguments do not fit the endpoint.
            NotSendable: an argument cannot travel; nothing was sent.
        """
        if self._endpoint is not None:
            try:
                self._endpoint.signature.bind(*args, **kwargs)
            except TypeError as error:  # over there it would end the actor
                raise TypeError(f"{error}; it is called as {self._endpoint}") from None
        payload = self._payload(args, kwargs)
        for link in self._view.links:
            link.cast(self._name, payload)

    def __repr__(self) -> str:
        return f"<endpoint {self._target}>"

    # --- before anything is sent

    @property
    def _target(self) -> str:
        return f"{self._view.name}.{self._name}"

    def _payload_once(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Payload:
        """Encode the arguments of a call that one value answers."""
        if self._endpoint is not None and self._endpoint.kind.is_streaming:
            raise TypeError(f"{self._target} yields several values: say .stream(…)")
        return self._payload(args, kwargs)

    def _payload(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Payload:
        try:
            return encode_arguments(args, kwargs, names=self._positional)
        except PayloadError as error:
            place = error.place or "what is given"
            raise NotSendable(place, error.problem, target=self._target) from error

    def _refuse_call_one(self, links: Sequence[RankLink]) -> NoReturn:
        raise ValueError(
            f"{self._target}.call_one asks exactly one rank, and here are {len(links)}: say "
            ".call(…) for all of them, .choose(…) for any one, or select one: "
            f"{self._view.name}[0].{self._name}.call_one(…)"
        )

    # --- what comes back

    def _decoded(self, payload: Payload) -> Any:
        try:
            return decode(payload, self._view.tensors)
        except PayloadError as error:
            raise UnreadableAnswer(
                f"what {self._target} answered cannot be decoded: {error}"
            ) from error

    def _said(self, failed: Mapping[int, Exception], size: int) -> str:
        ranks = ", ".join(map(str, failed))
        return f"{self._target}: no answer of {len(failed)} of {size} ranks ({ranks})"

    async def _gathered(
        self, links: Sequence[RankLink], payload: Payload
    ) -> tuple[dict[int, Any], dict[int, Exception]]:
        """Call all of `links`; return the answers and the errors, by rank.

        What an endpoint raises waits for the other ranks. The end of a rank does not: they may be
        waiting for it themselves, in a collective; their calls are cancelled, so that they hear of
        it, and are in neither of the two. Where one is known to have ended, the others are not
        even called.
        """
        futures: dict[int, asyncio.Future[Payload]] = {}
        answers: dict[int, Any] = {}
        failed: dict[int, Exception] = {}
        try:
            has_died = False
            for link in sorted(links, key=lambda it: not it.is_failed):
                if has_died and not link.is_failed:
                    break  # it would be cancelled at once
                future = futures[link.rank] = link.call(self._name, payload)
                has_died = has_died or _has_died(future)
            if not has_died:
                await _all_or_a_death(futures.values())
            for link in links:
                answer = futures.get(link.rank)
                if answer is not None and answer.done():
                    try:
                        answers[link.rank] = self._decoded(answer.result())
                    except Exception as error:
                        failed[link.rank] = error
        finally:
            for future in futures.values():
                future.cancel()
        return answers, failed

    async def _streamed(self, payload: Payload) -> AsyncGenerator[Ranked[Any], None]:
        links = self._view.links
        streams = [(link.rank, link.stream(self._name, payload)) for link in links]
        counts = dict.fromkeys((rank for rank, _ in streams), 0)
        failed: dict[int, Exception] = {}
        async with aclosing(merged(streams, self._decoded, self._target)) as arrivals:
            async for rank, value, error in arrivals:
                if error is not None:
                    failed[rank] = error
                    continue
                counts[rank] += 1
                yield Ranked(rank, value)
        if failed:
            ok = {rank: count for rank, count in counts.items() if rank not in failed}
            raise MeshError(self._said(failed, len(links)), failed, ok)


def _has_died(future: asyncio.Future[Payload]) -> bool:
    return future.done() and not future.cancelled() and isinstance(future.exception(), _ENDS)


async def _all_or_a_death(futures: Collection[asyncio.Future[Payload]]) -> None:
    """Return when all are done, or one because its rank has ended."""
    over = asyncio.get_running_loop().create_future()
    left = len(futures)

    def heard(future: asyncio.Future[Payload]) -> None:
        # Reads the error of each, also when nobody waits any more: asyncio reports the others.
        nonlocal left
        left -= 1
        if (_has_died(future) or left == 0) and not over.done():
            over.set_result(None)

    for future in futures:
        future.add_done_callback(heard)
    await over
