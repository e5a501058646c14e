"""Which cards an agent is to use: what `--devices` says, read as a whole.

Decided here: what can be said, and what does not go together. Not decided here: which cards there
are, and so whether a name fits one (`nvml`): that can change while the agent lives.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from stagekeeper.agent.cards.host_memory import parse_devices

NO_DEVICES: Final = "none"
ALL_GPUS: Final = "cuda"

_FORMS: Final = (
    "cuda (all NVIDIA cards), GPU-… or MIG-… (a UUID of `nvidia-smi -L`, or its beginning), "
    "cpu:0=8GiB, none"
)

_SLICE: Final = re.compile(r"cpu\b.*", re.DOTALL)
_GPU: Final = re.compile(r"(GPU|MIG)-[0-9A-Za-z][0-9A-Za-z/-]*")


@dataclass(frozen=True, slots=True)
class GpuChoice:
    """NVIDIA cards.

    Attributes:
        names: UUIDs, or unique beginnings of some; none chooses all cards.
        is_asked_for: somebody wants cards, so that having none is no answer but a failure.
    """

    names: tuple[str, ...] = ()
    is_asked_for: bool = False


@dataclass(frozen=True, slots=True)
class DeviceChoice:
    """`slices` are specs of slices of RAM; `gpus` is None where NVML is not to be asked at all."""

    slices: tuple[str, ...] = ()
    gpus: GpuChoice | None = None


def parse_choice(specs: Sequence[str]) -> DeviceChoice:
    """Read all values of `--devices`. Without any: the NVIDIA cards, where there are some.

    Raises:
        ValueError: naming every problem.
    """
    specs = [spec.strip() for spec in specs]
    if not specs:
        return DeviceChoice(gpus=GpuChoice())
    slices = tuple(spec for spec in specs if _SLICE.fullmatch(spec))
    names = tuple(spec for spec in specs if _GPU.fullmatch(spec))
    problems = list(_problems(specs, slices, names))
    try:
        parse_devices(slices, "")
    except ValueError as error:
        problems.append(str(error))
    if problems:
        raise ValueError("; ".join(problems))
    gpus = GpuChoice(names, is_asked_for=True) if names or ALL_GPUS in specs else None
    return DeviceChoice(slices, gpus)


def _problems(
    specs: Sequence[str], slices: tuple[str, ...], names: tuple[str, ...]
) -> Iterator[str]:
    known = {*slices, *names, NO_DEVICES, ALL_GPUS}
    for spec in dict.fromkeys(specs):
        if spec not in known:
            yield f"device {spec!r} is none of: {_FORMS}"
        elif spec not in slices and specs.count(spec) > 1:
            yield f"device {spec} is given twice"
    if NO_DEVICES in specs and len(set(specs)) > 1:
        yield f"device {NO_DEVICES} stands alone: it is given with others"
    if ALL_GPUS in specs and names:
        yield f"device {ALL_GPUS} is all NVIDIA cards: it is given with {', '.join(names)}"
