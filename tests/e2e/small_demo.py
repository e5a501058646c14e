"""The demo's own course with stages that load nothing: `python -m tests.e2e.small_demo`."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import yaml

from examples.semantic_search.demo.run import run_demo
from examples.semantic_search.demo.scene import Scene
from stagekeeper.client import Client
from tests.e2e.specs import echo
from tests.harness.cluster import STAGES


def write_spec(directory: Path) -> Path:
    path = directory / "spec.yaml"
    path.write_text(yaml.safe_dump(echo(replicas=2)))
    return path


PACE_S: Final = 0.01
"""Before each request: callers of a stage that does nothing would leave no processor to others."""


async def ask(client: Client, question: str, timeout: float, /) -> str:
    await asyncio.sleep(PACE_S)
    return str(await client.call("echo", "echo", question, timeout=timeout))


def tell(answer: str) -> Sequence[str]:
    return [f"it said {answer!r}"]


if __name__ == "__main__":
    sys.exit(
        run_demo(
            Scene(
                write_spec=write_spec,
                pythonpath=STAGES,
                ask=ask,
                tell=tell,
                questions=("ping", "pong"),
                shown=1,
            )
        )
    )
