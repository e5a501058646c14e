"""What an error of the NVIDIA driver (an XID) costs, as a table with a source for each line.

The source is NVIDIA's *XID Errors* documentation, chapter *Analyzing Xid Errors with the Xid
Catalog*, table 1 (*Xids*): `says` has what stands there, mostly the resolution bucket of the
immediate action. Where a line reads otherwise than its bucket, it is by that table's *trigger
conditions*, and `says` has those. Decided here: how far an error reaches. Not decided here: what
follows from it (`card_health`, `card_faults`), and which process it was (`kernel_log`).

Invariant: what is not in the table ends nothing and takes no card; it is told.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Final


class Reach(StrEnum):
    """Whom an error takes with it."""

    IGNORE = "ignore"
    """Nobody: it was mended, or another error says what it cost."""
    STAGE = "stage"
    """The program that met it; the card is well, and so is who else is on it."""
    DEVICE = "device"
    """The card, until it was reset, and all that runs on it."""
    HOST = "host"
    """All cards of the machine, until it was started again."""


@dataclass(frozen=True, slots=True)
class XidKind:
    """One line of the table; `what` is for people, `says` is what the source has."""

    xid: int
    reach: Reach
    what: str
    says: str


_APP: Final = "RESTART_APP"
_RESET: Final = "RESET_GPU"
_IGNORE: Final = "IGNORE"


def _lines() -> Iterator[XidKind]:
    for reach, says, kinds in (
        (Reach.IGNORE, _IGNORE, _IGNORED),
        (Reach.STAGE, _APP, _OF_A_PROGRAM),
        (Reach.DEVICE, _RESET, _OF_A_CARD),
    ):
        for xids, what in kinds:
            for xid in xids:
                yield XidKind(xid, reach, what, says)
    yield from _OTHERWISE


_IGNORED: Final = (
    ((14,), "an injected error"),
    ((37, 38), "an error of the driver's firmware"),
    ((44,), "a fault during a context switch"),
    ((63,), "memory was remapped"),
    ((66, 67), "an illegal access by the driver"),
    ((92,), "many single-bit memory errors"),
    ((93,), "the wear limit of the InfoROM"),
    ((106, 107), "a test message"),
    ((121,), "a corrected error of the link to the CPU"),
    ((137,), "an illegal access over NVLink"),
    ((141,), "an error of CUDA's fast path"),
    ((152, 153), "an error of the DLA"),
    ((157,), "a resource could not be retired"),
    ((160, 161), "a channel was retired, or could not be"),
)
_OF_A_PROGRAM: Final = (
    ((8,), "the program's work stopped"),
    ((11, 25, 32), "a corrupted stream of commands"),
    ((13,), "an exception in a kernel"),
    ((31,), "an illegal memory access"),
    ((39, 40, 41, 70, 71, 72, 75, 76, 77, 85, *range(126, 136)), "a copy engine's error"),
    ((60,), "a video processor's exception"),
    ((68, 83, 84, 88, 89, 96, 97, 98), "a video decoder's error"),
    ((69,), "a wrong class of commands"),
    ((80,), "corrupted data were sent to the card"),
    ((82, *range(99, 106)), "an image decoder's error"),
    ((86, 139), "an optical flow engine's error"),
    ((94,), "an uncorrectable memory error, contained to one program"),
)
_OF_A_CARD: Final = (
    ((46,), "the card stopped"),
    ((62,), "its micro-controller halted"),
    ((64,), "memory could not be remapped"),
    ((95,), "an uncorrectable memory error, not contained"),
    ((109,), "a context switch that did not end"),
    ((110,), "a security fault"),
    ((119, 120), "its system processor failed"),
    ((136,), "the training of a link failed"),
    ((140,), "an unrecovered memory error"),
    ((143,), "it could not be initialised"),
    ((155,), "an NVLink went down"),
    ((156,), "a resource was retired"),
    ((158,), "a fatal timeout"),
)
_OTHERWISE: Final = (
    XidKind(43, Reach.STAGE, "the program was stopped", "IGNORE; the application must terminate"),
    XidKind(45, Reach.IGNORE, "the clean-up after another error", "logged when a program aborts"),
    XidKind(48, Reach.DEVICE, "an uncorrectable memory error", "a GPU reset or reboot is needed"),
    XidKind(54, Reach.DEVICE, "its power is not connected", "CHECK_MECHANICALS"),
    XidKind(74, Reach.DEVICE, "an NVLink's error", "a GPU reset or reboot is needed"),
    XidKind(78, Reach.IGNORE, "a virtual card did not start", "UPDATE_SWFW: nothing runs there"),
    # What is on the machine's other cards goes on; to have this one back it is started again.
    XidKind(79, Reach.DEVICE, "it has fallen off the bus", "RESTART_BM"),
    *(
        # Which of them are fatal is in a sub-code that NVML does not tell; 48, 94, 95 follow those.
        XidKind(xid, Reach.IGNORE, "an NVLink's event", "WORKFLOW_NVLINK5_ERR, by the sub-code")
        for xid in range(144, 151)
    ),
    XidKind(151, Reach.HOST, "the rotation of keys failed", "RESTART_VM"),
    XidKind(154, Reach.IGNORE, "sums up another error", "informational, regarding another Xid"),
    XidKind(171, Reach.IGNORE, "details of 48", "additional to Xid 48"),
    XidKind(172, Reach.IGNORE, "details of 48", "additional to Xid 48"),
)

XIDS: Final = {it.xid: it for it in _lines()}

_UNLISTED_SAYS: Final = "not in the table"


def xid_kind(xid: int) -> XidKind:
    """Return the line of an error."""
    return XIDS.get(xid) or XidKind(xid, Reach.IGNORE, "an unlisted error", _UNLISTED_SAYS)


def is_listed(xid: int) -> bool:
    return xid in XIDS
