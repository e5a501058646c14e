"""What `--devices` says, and which cards are meant by it."""

from __future__ import annotations

import pytest

from stagekeeper.agent.cards.device_choice import GpuChoice, parse_choice
from stagekeeper.agent.settings import AgentSettings, SettingsError


@pytest.mark.parametrize(
    ("specs", "slices", "gpus"),
    [
        ((), (), GpuChoice()),
        (("none",), (), None),
        (("cuda",), (), GpuChoice(is_asked_for=True)),
        (("cpu:0=8GiB", "cpu:1=1GiB"), ("cpu:0=8GiB", "cpu:1=1GiB"), None),
        (("GPU-1a", "MIG-2b"), (), GpuChoice(("GPU-1a", "MIG-2b"), is_asked_for=True)),
        ((" cuda ", "cpu:0=1GiB"), ("cpu:0=1GiB",), GpuChoice(is_asked_for=True)),
        (("MIG-GPU-1a/2/0",), (), GpuChoice(("MIG-GPU-1a/2/0",), is_asked_for=True)),
    ],
)
def test_choices_are_read(specs, slices, gpus):
    choice = parse_choice(specs)

    assert (choice.slices, choice.gpus) == (slices, gpus)


@pytest.mark.parametrize("spec", ["", "cuda:0", "0", "gpu-1a", "GPU-", "NONE", "GPU-1 2", "cpu0"])
def test_what_is_no_device_is_told_with_what_can_be_said(spec):
    with pytest.raises(ValueError, match=r"is none of: cuda .*GPU-….*cpu:0=8GiB, none") as raised:
        parse_choice([spec])

    assert repr(spec) in str(raised.value)


def test_every_problem_is_told_at_once():
    with pytest.raises(ValueError, match="device") as raised:
        parse_choice(["none", "cuda", "cuda", "GPU-1", "GPU-1", "cpu:0=much", "cpu:1=1", "x"])

    for problem in (
        "device 'x' is none of",
        "device cuda is given twice",
        "device GPU-1 is given twice",
        "device none stands alone",
        "device cuda is all NVIDIA cards: it is given with GPU-1",
        "device 'cpu:0=much'",
    ):
        assert problem in str(raised.value)


def test_settings_refuse_devices_and_times_that_cannot_be(short_folder):
    settings = AgentSettings(
        state_dir=short_folder, devices=("cuda:0",), device_deadline_s=0.0, device_interval_s=-1.0
    )

    with pytest.raises(SettingsError) as raised:
        settings.check()

    assert [it.split(" ")[0] for it in raised.value.problems] == [
        "device",
        "device_deadline_s",
        "device_interval_s",
    ]
