"""Planning as a user sees it: the picture on stdout, and an exit code that says whether it fits.

Decided here: what to do about each ground for a refusal, in the words of the command line.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from stagekeeper.cli.exits import CliError, ExitCode
from stagekeeper.cli.text.amounts import count
from stagekeeper.cli.text.plan import plan_text
from stagekeeper.cli.text.plan_json import plan_json
from stagekeeper.cli.text.plan_view import write_plan
from stagekeeper.client import Client, LoadedSpec
from stagekeeper.v1.deployment_service_pb2 import PlanDeploymentResponse

_WHAT_TO_DO: Final[Mapping[str, str]] = {
    "DEPLOYMENT_EXISTS": "`stagekeeper delete {name}`, then plan again",
    "REPLICA_DRAINING": "plan again when it is gone",
    "SUPERVISOR_RECOVERING": "plan again when its workers are back (`stagekeeper status`)",
    "ADMISSION_REFUSED": "free memory on a card (`stagekeeper delete NAME`), ask for less, or add "
    "a worker",
}
"""The reason that a creation would meet first → what to do."""


async def plan_shown(
    client: Client, loaded: LoadedSpec, file: Path, *, as_json: bool
) -> PlanDeploymentResponse:
    """Ask for a plan and print it.

    Raises:
        CliError: a creation would be refused now; the plan is printed all the same.
    """
    plan = await client.plan(loaded)
    name = loaded.spec.name
    if as_json:
        document = plan_json(client.endpoint, name, plan)
        print(json.dumps(document, indent=2, ensure_ascii=False))
    else:
        write_plan(plan_text(name, plan))
    if plan.refusals:
        said = f"{name!r} would be refused now, for {count(len(plan.refusals), 'reason')}"
        raise CliError(ExitCode.FAILED, f"{said}: {_what_to_do(name, plan)}")
    if plan.replicas and not as_json:
        print(f"\nto start just this: stagekeeper deploy {file} --plan-id {plan.plan_id}")
    return plan


def _what_to_do(name: str, plan: PlanDeploymentResponse) -> str:
    reason = plan.refusals[0].reason
    if reason == "ADMISSION_REFUSED" and not plan.devices:
        return "see why, above"  # no worker can take it: each has a reason of its own
    return _WHAT_TO_DO.get(reason, "see why, above").format(name=name)
