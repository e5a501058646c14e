"""`describe` as its user sees it: four questions, one page.

Decided here: what is asked for. Each answer stands for its own moment, some milliseconds apart.
"""

from __future__ import annotations

import json
import time
from typing import Final

from stagekeeper.cli.text.describe import Answers, describe_blocks
from stagekeeper.cli.text.describe_json import describe_json
from stagekeeper.cli.text.describe_view import write_description
from stagekeeper.client import Client

EVENTS_SHOWN: Final = 10
FAILURES_ASKED: Final = 20


async def description_shown(client: Client, name: str, *, as_json: bool) -> None:
    """Ask for a deployment and all that explains it, and print that.

    Raises:
        NotFound: nothing of that name is wanted or reported.
    """
    deployment = await client.get(name)
    answers = Answers(
        deployment=deployment,
        workers=await client.workers(),
        failures=await client.failures(name, limit=FAILURES_ASKED),
        events=[event async for event in client.events(name, last=EVENTS_SHOWN)],
    )
    if as_json:
        document = describe_json(client.endpoint, answers)
        print(json.dumps(document, indent=2, ensure_ascii=False))
        return
    now = time.time()
    write_description(describe_blocks(answers, now), answers.events, now)
