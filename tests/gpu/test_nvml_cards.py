"""The real driver's cards, and a process on one of them."""

from __future__ import annotations

import os

import pytest

from stagekeeper.agent.cards.device_choice import GpuChoice
from stagekeeper.agent.cards.nvml import NvmlDevices

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("torch")]


def source(*names: str) -> NvmlDevices:
    choice = GpuChoice(names, is_asked_for=True)
    return NvmlDevices(choice, "host", deadline_s=10.0, interval_s=5.0)


async def test_cards_are_those_of_torch_and_what_is_used_is_seen(torch):
    held = torch.zeros(2**28, dtype=torch.uint8, device="cuda:0")
    everything = source()

    await everything.look()
    reading = everything.reading(())

    assert reading.unknown_reason == ""
    assert len(reading.cards) >= torch.cuda.device_count()
    for card in reading.cards:
        print(card)
        assert card.device.device_id.startswith(("GPU-", "MIG-"))
        assert (card.device.kind, bool(card.device.model), card.problem) == ("cuda", True, "")
        assert card.device.total_bytes > 2**30
    most_used = max(card.device.used_bytes or 0 for card in reading.cards)
    assert most_used >= held.nbytes

    first = reading.cards[0].device
    one = source(first.device_id[:-4])
    await one.look()
    assert [it.device.device_id for it in one.reading(()).cards] == [first.device_id]

    processes = [it for card in reading.cards for it in card.processes or ()]
    print(f"this process is {os.getpid()}; on the cards are {processes}")
