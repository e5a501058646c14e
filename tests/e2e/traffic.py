"""A steady stream of calls beside a test, counted: the judge of "no request fails"."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

from stagekeeper.client import Client
from tests.harness.waiting import wait_for

PACE_S: Final = 0.02
"""Before each call: callers of a stage that does nothing would leave no processor to those that are
killed and started meanwhile."""


class Traffic:
    """Callers that go on until they are stopped.

    Attributes:
        answered: calls that came back right.
        failures: what the others raised, in order.
    """

    def __init__(self) -> None:
        self.answered = 0
        self.failures: list[BaseException] = []

    async def more(self, count: int = 50) -> None:
        """Wait until `count` further calls were answered."""
        goal = self.answered + count
        await wait_for(lambda: self.answered >= goal or self.failures, f"{count} more answers")
        assert not self.failures, self.failures[0]

    async def caller(self, client: Client, name: str, endpoint: str) -> None:
        number = 0
        while True:
            number += 1
            await asyncio.sleep(PACE_S)
            try:
                answer = await client.call(name, endpoint, str(number), timeout=20.0)
                assert answer == str(number), answer
                self.answered += 1
            except asyncio.CancelledError:
                raise
            except Exception as error:
                self.failures.append(error)


@asynccontextmanager
async def traffic(
    client: Client, name: str, endpoint: str = "echo", *, callers: int = 4
) -> AsyncIterator[Traffic]:
    """Call one endpoint, again as soon as it has answered, while the block runs."""
    running = Traffic()
    tasks = [
        asyncio.create_task(running.caller(client, name, endpoint), name=f"caller {index}")
        for index in range(callers)
    ]
    try:
        await running.more(1)
        yield running
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
