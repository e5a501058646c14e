"""The demo's verdicts: each law has facts that break it, and the sentence says which."""

from __future__ import annotations

import dataclasses
import io
from typing import Any

import pytest
from rich.console import Console

from examples.semantic_search.demo.listing import Listing
from examples.semantic_search.demo.load import Load
from examples.semantic_search.demo.report import Facts, Kill, broken_laws, table
from examples.semantic_search.demo.screen import Screen
from examples.semantic_search.demo.waiting import DemoFailed, Watch

BEFORE = Listing(
    epoch=1,
    is_complete=True,
    incarnations={"agent-0": 1},
    stage_pids={(0, "encoder"): 11, (0, "index"): 12},
    supervisor_address="127.0.0.1:1000",
)
AFTER = dataclasses.replace(BEFORE, epoch=2, supervisor_address="127.0.0.1:2000")
GOOD = Facts(
    before=BEFORE,
    after=AFTER,
    kills=[
        Kill("the supervisor", {"supervisor": 1}, {"supervisor": 3}, 2.5, 100),
        Kill("all agents", {"agent-0": 2}, {"agent-0": 4}, 3.5, 100),
    ],
    sent=500,
    failures=(),
    slowest_s=0.3,
)


def drawn(facts: Facts) -> str:
    console = Console(file=io.StringIO(), width=120)
    console.print(table(facts))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_kept_laws_are_not_complained_about() -> None:
    assert broken_laws(GOOD) == []
    assert "✘" not in drawn(GOOD)
    assert "500 sent" in drawn(GOOD) and "0 failed" in drawn(GOOD)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (
            {"failures": ("'a?': CallLost: gone",)},
            "no request may fail, and 1 of 500 did",
        ),
        (
            {
                "after": dataclasses.replace(
                    AFTER, stage_pids={(0, "encoder"): 11, (0, "index"): 99}
                )
            },
            "stage index of replica 0 was process 12 and is now process 99",
        ),
        (
            {"after": dataclasses.replace(AFTER, stage_pids={(0, "encoder"): 11})},
            "stage index of replica 0 was process 12 and is now nowhere",
        ),
        (
            {"after": dataclasses.replace(AFTER, supervisor_address="127.0.0.1:1000")},
            "nothing was rediscovered",
        ),
        (
            {"kills": [Kill("the supervisor", {"supervisor": 1}, {"supervisor": 1}, 0.1, 0)]},
            "supervisor was killed, and process 1 is still the one that runs",
        ),
    ],
)
def test_broken_law_is_named_and_its_row_marked(change: dict[str, Any], sentence: str) -> None:
    facts = dataclasses.replace(GOOD, **change)

    (broken,) = broken_laws(facts)

    assert sentence in broken
    assert drawn(facts).count("✘") == 1


async def test_load_counts_every_request_as_answered_or_failed() -> None:
    asked = 0

    async def ask(question: str, timeout: float) -> str:
        nonlocal asked
        asked += 1
        if question == "raises":
            raise RuntimeError("out of order")
        return "wrong" if question == "differs" else "right"

    expected = dict.fromkeys(("works", "raises", "differs"), "right")
    watch = Watch(Screen())
    async with Load(ask, expected, callers=2) as load:

        async def has_seen_enough() -> bool | None:
            return len(load.failures) >= 4 or None

        await watch.until("failures of both kinds", has_seen_enough, within_s=30)

    assert load.sent == asked == load.answered + len(load.failures)
    assert any("RuntimeError: out of order" in failure for failure in load.failures)
    assert any("another answer than before: 'wrong'" in failure for failure in load.failures)


async def test_wait_that_is_over_says_what_it_waited_for() -> None:
    async def never() -> None:
        return None

    with pytest.raises(DemoFailed, match=r"not within 0 s: the moon"):
        await Watch(Screen()).until("the moon", never, within_s=0)


async def test_wait_ends_at_once_when_a_guard_raises() -> None:
    watch = Watch(Screen())

    def broken() -> None:
        raise DemoFailed("a law is broken")

    watch.guards.append(broken)

    async def never() -> None:
        return None

    with pytest.raises(DemoFailed, match="a law is broken"):
        await watch.until("the moon", never, within_s=600)
