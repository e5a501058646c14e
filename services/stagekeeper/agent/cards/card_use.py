"""What of one card is spoken for: what is reserved of it, and what is measured to be used besides.

Decided here: the sums, as plain functions of what was found. Not decided here: whose a process is
(`card_owners`), what is claimed (`ledger`), what is admitted (`core.planner`).

Invariants: a claim counts with what it reserved, or with what it uses where that is more; whatever
else is used counts too, by pid where there is one, and where nobody can tell as one sum. So all of
it together is never below what is used, and what is not known is never nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from stagekeeper.core.model import ForeignHolder

OTHERS: Final = "others (pids unknown)"
ENDED: Final = "ended"
_NAMED: Final = 3


@dataclass(frozen=True, slots=True)
class CardClaim:
    """What one stage claims of the card; `may_use` once a process of it was started."""

    reserved_bytes: int
    may_use: bool = True


@dataclass(frozen=True, slots=True)
class SeenProcess:
    """A process that the driver lists on the card.

    Attributes:
        used_bytes: None where the driver does not tell.
        claim: whose it is, as the place in the list of claims; None for a stranger.
        name: of the program; empty when no process here has that pid. Then it has ended, or, where
            no claim's process is found either, the numbers are those of another pid namespace.
    """

    pid: int
    used_bytes: int | None
    claim: int | None = None
    name: str = ""


@dataclass(frozen=True, slots=True)
class CardUse:
    """`claim_bytes` has what counts for each claim, in their order; `foreign` is all the rest."""

    claim_bytes: tuple[int, ...]
    foreign: tuple[ForeignHolder, ...] = ()


def card_use(
    claims: Sequence[CardClaim],
    used_bytes: int | None,
    processes: Sequence[SeenProcess] | None,
) -> CardUse:
    """Tell what counts on a card, and for whom.

    What is used without a pid that means anything here (the driver's own, a container's, or all of
    it where the driver lists nobody) may be that of claims whose processes were not found in the
    list: as much as they reserved is taken for theirs, the rest for others'.

    Args:
        used_bytes: by anybody, the driver included; None where that is not known.
        processes: who is on the card; None where nobody can tell.
    """
    seen = processes or ()
    measured = _measured(len(claims), seen)
    finds_claims = any(it.is_found for it in measured)
    pids_mean_something = finds_claims or all(it.name for it in seen)
    strangers = [it for it in seen if it.claim is None and it.used_bytes]
    named = strangers if pids_mean_something else []
    found_bytes = sum(it.known_bytes for it in measured)
    found_bytes += sum(it.used_bytes or 0 for it in named)
    if used_bytes is not None:
        rest_bytes = max(0, used_bytes - found_bytes)
    else:
        rest_bytes = 0 if named else sum(it.used_bytes or 0 for it in strangers)
    for claim, use in zip(claims, measured, strict=True):
        if claim.may_use and (use.is_partial or not finds_claims):
            rest_bytes -= max(0, claim.reserved_bytes - use.known_bytes)
    foreign = [ForeignHolder(it.pid, _name(it), it.used_bytes or 0) for it in named]
    if rest_bytes > 0:
        silent = [it for it in seen if it.claim is None and it.name and it.used_bytes is None]
        foreign.append(_rest(rest_bytes, silent if pids_mean_something else []))
    return CardUse(
        tuple(
            max(claim.reserved_bytes, use.known_bytes)
            for claim, use in zip(claims, measured, strict=True)
        ),
        tuple(foreign),
    )


def _name(seen: SeenProcess) -> str:
    return seen.name or (ENDED if seen.pid else OTHERS)


@dataclass(slots=True)
class _Measured:
    """What the processes of one claim use: `is_partial` where one of them is not known."""

    known_bytes: int = 0
    is_found: bool = False
    is_partial: bool = False


def _measured(count: int, seen: Iterable[SeenProcess]) -> list[_Measured]:
    found = [_Measured() for _ in range(count)]
    for it in seen:
        if it.claim is not None:
            found[it.claim].is_found = True
            found[it.claim].known_bytes += it.used_bytes or 0
            found[it.claim].is_partial |= it.used_bytes is None
    return found


def _rest(memory_bytes: int, silent: Sequence[SeenProcess]) -> ForeignHolder:
    """Name what is left: by those of whom the driver says that they are there, and no more."""
    if not silent:
        return ForeignHolder(0, OTHERS, memory_bytes)
    if len(silent) == 1:
        return ForeignHolder(silent[0].pid, f"{silent[0].name}, and others", memory_bytes)
    listed = ", ".join(f"pid {it.pid} ({it.name})" for it in silent[:_NAMED])
    return ForeignHolder(0, f"{listed} and others", memory_bytes)


def bounded(holders: Sequence[ForeignHolder], most: int) -> tuple[ForeignHolder, ...]:
    """Keep the largest, and make one entry of the rest; those of other workers are kept apart."""
    ordered = sorted(holders, key=lambda it: (-it.memory_bytes, it.pid, it.name))
    if len(ordered) <= most:
        return tuple(ordered)
    shown, rest = ordered[: most - 1], ordered[most - 1 :]
    total_bytes = sum(it.memory_bytes for it in rest if not it.worker_id)
    count = sum(not it.worker_id for it in rest)
    # Of a worker that the supervisor knows nothing may count twice, so theirs is never summed up.
    kept = [it for it in rest if it.worker_id]
    more = [ForeignHolder(0, f"{count} more", total_bytes)] if count else []
    return (*shown, *more, *kept)
