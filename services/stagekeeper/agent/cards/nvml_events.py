"""XID events of NVIDIA cards, taken from NVML on the thread for calls that may hang.

Cards are registered once an event set is there, and what has come is taken without waiting with
each look. Decided here: which failures mean that a card tells nothing, which is said and is no
failure of the card. Not decided here: what an event means (`xid_table`, `card_health`).

Invariant: an event that was taken is kept until somebody fetches it, whatever fails after it. What
comes between the end of an event set and the next one (after a failed call) is not heard.
"""

from __future__ import annotations

import ctypes
import queue
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

_AT_ONCE_MS: Final = 0
_MOST_AT_ONCE: Final = 1_000
"""A card that tells without end must not hold the thread."""
_NO_INSTANCE: Final = 0xFFFFFFFF


@dataclass(frozen=True, slots=True)
class XidEvent:
    """One error, as the driver tells it.

    Attributes:
        gpu_uuid: of the card, also where an instance of it is meant.
        gpu_instance: the number of the MIG instance; None where the card is none, or it is all.
        pci_bus_id: of the card, as the kernel's log names it too; empty where unknown.
    """

    gpu_uuid: str
    xid: int
    gpu_instance: int | None = None
    pci_bus_id: str = ""


class NvmlEvents:
    """The event set of one NVML that is up. Used by the thread of the calls, but for `fetch`.

    Args:
        ask: makes one call of NVML by its name.
    """

    def __init__(self, ask: Callable[..., Any]) -> None:
        self._ask = ask
        self._set: Any = None
        self._registered: dict[str, bool] = {}
        self._by_handle: dict[int, tuple[str, str]] = {}
        self._found: queue.SimpleQueue[XidEvent] = queue.SimpleQueue()

    def register(self, nvml: Any, handle: Any, uuid: str) -> None:
        """Have a card tell its errors from now on; a repeat does nothing."""
        if uuid in self._registered:
            return
        try:
            if self._set is None:
                self._set = self._ask("nvmlEventSetCreate")
            kinds = self._ask("nvmlDeviceGetSupportedEventTypes", handle)
            tells = bool(kinds & nvml.nvmlEventTypeXidCriticalError)
            if tells:
                self._ask(
                    "nvmlDeviceRegisterEvents",
                    handle,
                    nvml.nvmlEventTypeXidCriticalError,
                    self._set,
                )
        except nvml.NVMLError:  # old drivers, virtual cards
            tells = False
        self._registered[uuid] = tells
        if tells:
            self._by_handle[_number(handle)] = (uuid, self._bus_id(nvml, handle))

    def take(self, nvml: Any) -> None:
        """Take what has come.

        Raises:
            NVMLError: nothing can be heard any more until the set is made anew.
        """
        if not self._by_handle:
            return
        for _ in range(_MOST_AT_ONCE):
            try:
                data = self._ask("nvmlEventSetWait", self._set, _AT_ONCE_MS)
            except nvml.NVMLError_Timeout:
                return
            if data.eventType != nvml.nvmlEventTypeXidCriticalError:
                continue
            uuid, bus_id = self._by_handle.get(_number(data.device), ("", ""))
            if uuid:
                instance = int(data.gpuInstanceId)
                self._found.put(
                    XidEvent(
                        uuid,
                        int(data.eventData),
                        None if instance == _NO_INSTANCE else instance,
                        bus_id,
                    )
                )

    def end(self, nvml: Any) -> None:
        """Let go of the set, before NVML is shut down."""
        ended, self._set = self._set, None
        self._registered.clear()
        self._by_handle.clear()
        if ended is not None:
            try:
                self._ask("nvmlEventSetFree", ended)
            except nvml.NVMLError:
                pass

    def deaf(self) -> list[str]:
        """Return the cards of which no errors are told."""
        return [uuid for uuid, tells in list(self._registered.items()) if not tells]

    def fetch(self) -> list[XidEvent]:
        """Return what was taken since the last time, the oldest first. For any thread."""
        found: list[XidEvent] = []
        while not self._found.empty():
            found.append(self._found.get_nowait())
        return found

    def _bus_id(self, nvml: Any, handle: Any) -> str:
        try:
            bus_id = self._ask("nvmlDeviceGetPciInfo", handle).busId
        except nvml.NVMLError:
            return ""
        return bus_id.decode(errors="replace") if isinstance(bus_id, bytes) else str(bus_id)


def _number(handle: Any) -> int:
    """Return a card's handle as a number: two objects of ctypes are never equal."""
    return ctypes.cast(handle, ctypes.c_void_p).value or 0
