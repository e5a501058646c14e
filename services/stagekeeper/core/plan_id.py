"""The id of a plan: a digest of what it rests on, so that a creation can be held to it.

Decided here: what makes a plan another one: the wish, which replicas start and where they lie, and
the sums on their cards; not who holds what is held, nor how long a start may take. Invariant: an id
depends on nothing but that, so that the next supervisor of the same cluster makes the same one.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import asdict
from typing import Final

from stagekeeper.core.errors import Reason, Refused
from stagekeeper.core.plan import Plan
from stagekeeper.core.spec_check import canonical

PLAN_ID: Final = re.compile(r"[0-9a-f]{8}(?:-[0-9a-f]{8}){2}\Z", re.ASCII)
"""Three parts, each a digest of its own: where an id does not fit, they say why."""

DIGEST_BYTES = 4

_CHANGES: Final = (
    "it was made for another spec",
    "other replicas start, or they go elsewhere",
    "what is held of the cards has changed",
)


def plan_id_of(plan: Plan) -> str:
    """Return the id of a plan. Equal ids are equal plans, their refusals' wording aside."""
    placing = plan.placing
    places = [
        [index, *([it.worker_id, sorted(it.devices.items())] for it in parts)]
        for index, parts in sorted(placing.places.items())
    ]
    refusals = [[it.reason, it.worker_id, it.device_id] for it in plan.refusals]
    cards = [
        [
            it.worker_id,
            it.device.device_id,
            it.device.total_bytes,
            sorted(holding.memory_bytes for holding in it.holdings),
        ]
        for it in placing.sums
    ]
    parts: Sequence[object] = (
        asdict(canonical(plan.spec)),
        [plan.starting, plan.kept, places],
        [cards, refusals],
    )
    return "-".join(map(_digest, parts))


def _digest(value: object) -> str:
    text = json.dumps(value, sort_keys=True, separators=(",", ":"))
    return hashlib.blake2b(text.encode(), digest_size=DIGEST_BYTES).hexdigest()


def check_plan_id(asked: str, plan: Plan) -> None:
    """Compare the id of a plan that somebody looked at with the plan of this moment.

    Raises:
        Refused: PLAN_STALE, saying what is different.
    """
    current = plan_id_of(plan)
    if asked == current:
        return
    if PLAN_ID.match(asked):
        pairs = zip(asked.split("-"), current.split("-"), _CHANGES, strict=True)
        why = "; ".join(change for before, now, change in pairs if before != now)
    else:
        why = "it is the id of no plan"
    raise Refused(
        Reason.PLAN_STALE,
        f"the plan of {plan.spec.name} fits no longer ({why}): plan again, look, then deploy",
    )
