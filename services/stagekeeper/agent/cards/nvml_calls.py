"""What NVML is asked, and how its answers are read; runs on the thread for calls that may hang.

NVML is loaded at the first call, and only where its library is: an agent without NVIDIA cards never
pays for it. After any failure it is shut down and begun anew, since a driver that was loaded again
answers nobody who knew the one before. Decided here: which failures are those of one card. What
memory is used and by whom may be unknown; who the cards are may not.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Final, Protocol

from stagekeeper.agent.cards.devices import CardProcess
from stagekeeper.agent.cards.nvml_events import NvmlEvents

_LIBRARY: Final = "libnvidia-ml.so.1"


class NvmlFailed(Exception):
    """NVML did not answer; the text says which call, and how."""


class NvmlAbsent(NvmlFailed):
    """NVML is not installed, or its driver is not loaded."""


class _Call(Protocol):
    """Makes one call under its deadline; the name is for people."""

    def __call__(self, name: str, function: Callable[..., Any], *args: Any) -> Any: ...


@dataclass(frozen=True, slots=True)
class NvmlCard:
    """One card, or one MIG instance of one.

    Attributes:
        gpu_uuid: of the card; another than `uuid` for an instance.
        place: of the card among all, as NVML counts them: by PCI address.
        gpu_instance, compute_instance: the numbers of an instance; None where it is none, or where
            they could not be read.
        total_bytes: 0 where the memory could not be read, and `problem` then says why.
        used_bytes: by anybody, the driver included; None where unknown.
        processes: None where NVML does not tell.
    """

    uuid: str
    gpu_uuid: str
    model: str
    total_bytes: int
    used_bytes: int | None
    processes: tuple[CardProcess, ...] | None
    problem: str = ""
    place: int = 0
    gpu_instance: int | None = None
    compute_instance: int | None = None

    @property
    def old_mig_id(self) -> str:
        """The id that drivers before R470 gave an instance; empty where it has none."""
        if self.gpu_instance is None or self.compute_instance is None:
            return ""
        return f"MIG-{self.gpu_uuid}/{self.gpu_instance}/{self.compute_instance}"

    def answers_to(self, name: str) -> bool:
        """Whether a UUID, or the beginning of one, means this card, or the card it is a part of."""
        is_old_id = bool(self.old_mig_id) and self.old_mig_id == name
        return is_old_id or self.uuid.startswith(name) or self.gpu_uuid.startswith(name)


@dataclass(frozen=True, slots=True)
class Listing:
    """All cards in PCI order; `problems` has a line for each that cannot even be identified."""

    cards: tuple[NvmlCard, ...]
    problems: tuple[str, ...] = ()


class NvmlCalls:
    """NVML through nvidia-ml-py. Used by one thread.

    Args:
        call: makes every call.

    Attributes:
        events: what the cards told of errors; fetched by whoever had them listed.
    """

    def __init__(self, call: _Call) -> None:
        self._call = call
        self.events = NvmlEvents(self._ask)
        self._nvml: Any = None
        self._is_up = False

    def list(self) -> Listing:
        """Read all cards of this host.

        Raises:
            NvmlAbsent, NvmlFailed: NVML as a whole does not answer.
        """
        if self._nvml is None:
            self._nvml = self._load()
        nvml = self._nvml
        try:
            if not self._is_up:
                self._ask("nvmlInit")
                self._is_up = True
            self.events.take(nvml)
            return self._read()
        except nvml.NVMLError as error:
            self._begin_anew()
            absent = (nvml.NVML_ERROR_LIBRARY_NOT_FOUND, nvml.NVML_ERROR_DRIVER_NOT_LOADED)
            kind = NvmlAbsent if error.value in absent else NvmlFailed
            raise kind(_text(error)) from None

    def take_events(self) -> None:
        """Take what the cards told since, without reading them; a failure shows with the next list.

        Raises:
            NvmlFailed: as for `list`.
        """
        if not self._is_up:
            return
        try:
            self.events.take(self._nvml)
        except self._nvml.NVMLError as error:
            self._begin_anew()
            raise NvmlFailed(_text(error)) from None

    def _load(self) -> Any:
        """Import nvidia-ml-py if the library is there: it is large, and says "not found" to all.

        Raises:
            NvmlAbsent: there is no library.
            NvmlFailed: there is one, and it cannot be loaded.
        """
        try:
            self._call(f"loading {_LIBRARY}", ctypes.CDLL, _LIBRARY)
        except OSError as error:
            text = str(error)
            is_absent = _LIBRARY in text and text.endswith("No such file or directory")
            kind = NvmlAbsent if is_absent else NvmlFailed
            raise kind(text if _LIBRARY in text else f"{_LIBRARY}: {text}") from None
        import pynvml

        return pynvml

    def _read(self) -> Listing:
        cards: list[NvmlCard] = []
        problems: list[str] = []
        for index in range(self._ask("nvmlDeviceGetCount")):
            try:
                handle = self._ask("nvmlDeviceGetHandleByIndex", index)
                uuid = self._ask("nvmlDeviceGetUUID", handle)
                found = list(self._card_or_instances(handle, uuid))
                cards += [replace(card, place=index) for card in found]
                self.events.register(self._nvml, handle, uuid)
            except self._nvml.NVMLError as error:
                problems.append(f"card {index}: {_text(error)}")
        if problems or any(card.problem for card in cards):
            self._begin_anew()
        return Listing(tuple(cards), tuple(problems))

    def _card_or_instances(self, handle: Any, uuid: str) -> Iterator[NvmlCard]:
        """Yield a card, or the MIG instances that can be used in its place."""
        if not self._is_in_mig_mode(handle):
            yield self._card(handle, uuid, uuid)
            return
        for place in range(self._ask("nvmlDeviceGetMaxMigDeviceCount", handle)):
            try:
                instance = self._ask("nvmlDeviceGetMigDeviceHandleByIndex", handle, place)
            except self._nvml.NVMLError_NotFound:
                continue  # places may be empty, those after them need not be
            card = self._card(instance, self._ask("nvmlDeviceGetUUID", instance), uuid)
            yield replace(
                card,
                gpu_instance=self._instance_number("Gpu", instance),
                compute_instance=self._instance_number("Compute", instance),
            )

    def _instance_number(self, kind: str, instance: Any) -> int | None:
        try:
            return int(self._ask(f"nvmlDeviceGet{kind}InstanceId", instance))
        except self._nvml.NVMLError:
            return None

    def _is_in_mig_mode(self, handle: Any) -> bool:
        try:
            current, _ = self._ask("nvmlDeviceGetMigMode", handle)
        except (self._nvml.NVMLError_NotSupported, self._nvml.NVMLError_FunctionNotFound):
            return False
        return bool(current == self._nvml.NVML_DEVICE_MIG_ENABLE)

    def _card(self, handle: Any, uuid: str, gpu_uuid: str) -> NvmlCard:
        total_bytes, used_bytes, problem = 0, None, ""
        try:
            memory = self._ask("nvmlDeviceGetMemoryInfo", handle)
            total_bytes, used_bytes = int(memory.total), int(memory.used)
        except self._nvml.NVMLError as error:
            problem = _text(error)
        try:
            model = self._ask("nvmlDeviceGetName", handle)
        except self._nvml.NVMLError:
            model = ""
        processes = self._processes(handle)
        return NvmlCard(uuid, gpu_uuid, model, total_bytes, used_bytes, processes, problem)

    def _processes(self, handle: Any) -> tuple[CardProcess, ...] | None:
        """Read who is on a card. Who computes and draws is in both lists, with one sum.

        Pid 0 is several: a driver gives it to all that another pid namespace has.
        """
        found: dict[int, int | None] = {}
        try:
            for kind in ("Compute", "Graphics"):
                listed: dict[int, int | None] = {}
                for process in self._ask(f"nvmlDeviceGet{kind}RunningProcesses", handle):
                    known = (process.usedGpuMemory, listed.get(process.pid))
                    listed[process.pid] = _sum_of_known(known)
                for pid, used in listed.items():
                    known = (used, found.get(pid))
                    found[pid] = max((it for it in known if it is not None), default=None)
        except self._nvml.NVMLError:
            return None  # not every platform and every driver tells
        return tuple(CardProcess(pid, found[pid]) for pid in sorted(found))

    def _begin_anew(self) -> None:
        if self._is_up:
            self._is_up = False
            self.events.end(self._nvml)
            try:
                self._ask("nvmlShutdown")
            except self._nvml.NVMLError:
                pass

    def _ask(self, name: str, *args: Any) -> Any:
        try:
            return self._call(name, getattr(self._nvml, name), *args)
        except self._nvml.NVMLError as error:
            error.call = name
            raise


def _sum_of_known(figures: tuple[int | None, ...]) -> int | None:
    known = [it for it in figures if it is not None]
    return sum(known) if known else None


def _text(error: Any) -> str:
    """Write `nvmlInit: Driver Not Loaded`: these texts of NVML are short, and have no period."""
    return f"{error.call}: {str(error).rstrip('.')}"
