"""What a demo deploys and asks. Values only; the course is the same for every scene."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from stagekeeper.client import Client


class Ask(Protocol):
    """Puts one question to the deployment and returns the answer."""

    def __call__(self, client: Client, question: str, timeout: float, /) -> Awaitable[Any]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """What is deployed, and what is asked of it.

    Attributes:
        write_spec: writes the spec file into a folder and returns its path.
        pythonpath: where its stages are.
        ask: the same question always gets an equal answer.
        tell: an answer as lines for people.
        questions: all of them are asked by the load.
        shown: how many of them are asked and shown before.
        callers: requests that are under way at any time.
        agents: how many.
        devices: of each agent.
        last_word: said at the end of a demo that went well.
    """

    write_spec: Callable[[Path], Path]
    pythonpath: Path
    ask: Ask
    tell: Callable[[Any], Sequence[str]]
    questions: Sequence[str]
    shown: int = 3
    callers: int = 4
    agents: int = 2
    devices: Sequence[str] = ("cpu:0=1GiB", "cpu:1=1GiB")
    last_word: str = ""
