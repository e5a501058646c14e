"""Deploying and deleting as a user sees it: progress while it goes, a sentence at the end.

Decided here: what is printed. `deploy`, `delete` and `up` share it. Invariant: whoever leaves early
is told that it goes on without him.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections import Counter
from collections.abc import AsyncIterator, Coroutine
from dataclasses import dataclass
from typing import Any, Final

from stagekeeper.cli.exits import CliError, ExitCode
from stagekeeper.cli.stdout import say
from stagekeeper.cli.text import states
from stagekeeper.cli.text.amounts import count, seconds
from stagekeeper.cli.text.failures import failure_lines, remote_tracebacks
from stagekeeper.cli.text.progress_view import progress_view
from stagekeeper.cli.text.status import awaited_names, own_reason
from stagekeeper.client import (
    Client,
    DeployFailed,
    LoadedSpec,
    NotFound,
    StagekeeperError,
)
from stagekeeper.core.counted import noun
from stagekeeper.v1.deployment_service_pb2 import (
    CreationAccepted,
    Deployment,
    ListWorkersResponse,
)
from stagekeeper.v1.types_pb2 import (
    HOLD_REASON_RECOVERING,
    WORKER_STATE_LOST,
    DeploymentSpec,
    StageProgress,
)

DEFAULT_STOP_BUDGET_S: Final = 10.0
DELETE_SLACK_S: Final = 60.0
"""What a deletion may take beside the stop budgets: a recovering supervisor waits for its workers
first, and a start under way is undone before."""

_LOOK_AGAIN_S: Final = 0.5
_SILENT_FOR_S: Final = 1.0
_AT_MOST: Final = re.compile(r"waited for, (\d+) s at most")
_AFTER_FAILURE: Final = (
    "mend the cause and deploy again (`stagekeeper logs {name}` has more); what runs is left alone"
)
_CAUSE_IS_OVER: Final = "its agent was asked to end"
"""An agent's reason for undoing a start with which nothing was wrong."""


@dataclass(slots=True)
class Creation:
    """What is known of a creation while it goes on; None until it was accepted."""

    name: str
    accepted: CreationAccepted | None = None

    @property
    def is_new_work(self) -> bool:
        """Whether it started anything."""
        return self.accepted is not None and bool(self.accepted.starting_replicas)


async def deploy_shown(
    client: Client,
    loaded: LoadedSpec,
    creation: Creation,
    *,
    plan_id: str = "",
    timeout: float | None = None,
    after_failure: str = "",
) -> Deployment:
    """Deploy with progress on stdout; `creation` is filled in on the way.

    Args:
        plan_id: start what this plan showed, or nothing; empty: whatever fits.
        after_failure: what to do when it fails, for the error's line; empty: what suits `deploy`.

    Raises:
        CliError: not every replica came up; every one that did not is listed.
        StagekeeperError: it was refused.
    """
    with progress_view() as view:

        def show(event: CreationAccepted | StageProgress) -> None:
            if isinstance(event, CreationAccepted):
                creation.accepted = event
                if creation.is_new_work:
                    say(_accepted(event))
            else:
                view.show(event)

        try:
            async with _beside(_tell_who_is_awaited(client, creation)):
                deployment = await client.deploy(
                    loaded, plan_id=plan_id, on_progress=show, timeout=timeout
                )
        except DeployFailed as error:
            raise deploy_failed(error, after_failure or _AFTER_FAILURE) from error
        except NotFound as error:
            raise CliError(ExitCode.FAILED, f"{error.message}: {error.next_move}") from error
    ready = count(len(deployment.replicas), "replica")
    if creation.is_new_work:
        say(f"{deployment.name}: READY, {ready}, in {seconds(view.elapsed_s)}")
    else:
        say(f"{deployment.name}: READY, {ready}: nothing to do")
    return deployment


async def _tell_who_is_awaited(client: Client, creation: Creation) -> None:
    """Say once why nothing begins, where the supervisor waits for its former workers first."""
    while True:
        await asyncio.sleep(_SILENT_FOR_S)
        if creation.accepted is not None:
            return
        try:
            line = awaited_line(await client.workers())
        except StagekeeperError:
            continue  # whoever deploys is told what is wrong
        if line and creation.accepted is None:
            say(f"{creation.name}: {line}")
            return


def awaited_line(workers: ListWorkersResponse) -> str:
    """Say for whom a supervisor waits before it starts anything; empty when for nobody."""
    if workers.hold_reason != HOLD_REASON_RECOVERING:
        return ""
    names = awaited_names(workers)
    line = "waiting for workers that were here before the supervisor's start"
    line += f": {names}" if names else ""
    # The bound is told in the reason alone; a supervisor that words it otherwise costs the number.
    reasons = (it.reason for it in workers.workers if not it.incarnation)
    found = next(filter(None, map(_AT_MOST.search, reasons)), None)
    return f"{line} (at most {found[1]} s)" if found else line


@contextlib.asynccontextmanager
async def _beside(telling: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """Tell something while the `with` lasts."""
    task = asyncio.create_task(telling, name="tell what goes on")
    try:
        yield
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


def _accepted(event: CreationAccepted) -> str:
    replicas = ", ".join(map(str, event.starting_replicas))
    what = noun(len(event.starting_replicas), "replica")
    kept = "" if event.durable else "; not kept on disk: it is forgotten with the supervisor"
    return f"{event.deployment}: starting {what} {replicas}{kept}"


def deploy_failed(error: DeployFailed, what_to_do: str) -> CliError:
    """Build the error of a creation of which not everything came up."""
    deployment = error.deployment
    state = states.deployment_state(deployment.state)
    details = failure_lines(error.failures) or [
        f"replica {replica.replica_index} is {states.replica_state(replica.state)}: "
        f"{replica.reason or 'no reason was given'}"
        for replica in deployment.replicas
        if replica.reason
    ]
    why = f" ({own_reason(deployment)})" if deployment.reason and not error.failures else ""
    if error.failures and all(_CAUSE_IS_OVER in failure.message for failure in error.failures):
        what_to_do = what_to_do.removeprefix("mend the cause and ")
    return CliError(
        ExitCode.FAILED,
        f"{deployment.name!r} did not come up and is {state}{why}: "
        + what_to_do.format(name=deployment.name),
        details=details,
        debug=remote_tracebacks(error.failures),
    )


async def delete_shown(client: Client, name: str, *, timeout: float | None = None) -> None:
    """Delete a deployment, wait until it is gone, and print what is left of it meanwhile.

    Args:
        timeout: seconds; None fits it to the stop budgets.

    Raises:
        NotFound: there is no such deployment.
        DeadlineExceeded: it is not gone yet, and goes on.
    """
    before = await client.get(name)
    if timeout is None:
        timeout = delete_timeout_s(before.spec)
    async with _beside(_tell_what_is_left(client, name)):
        await client.delete(name, timeout=timeout)
    for line in await _what_may_run_on(client, before):
        say(f"{name}: {line}")
    say(f"{name}: deleted")


async def _what_may_run_on(client: Client, before: Deployment) -> list[str]:
    """Say which workers had some of a deployment and are given up on: nobody was told there."""
    counts = Counter(shard.worker_id for replica in before.replicas for shard in replica.shards)
    try:
        workers = (await client.workers()).workers if counts else ()
    except StagekeeperError:
        return []
    return [
        f"{count(counts[it.worker_id], 'stage')} may run on: worker {it.worker_id} is LOST; they "
        "are stopped when it is back, or by `stagekeeper stages --local` there"
        for it in workers
        if it.worker_id in counts and it.state == WORKER_STATE_LOST
    ]


def delete_timeout_s(spec: DeploymentSpec) -> float:
    """Return how long a deletion may take: its stages may be stopped one after another."""
    budgets = (
        stage.stop_budget_s if stage.HasField("stop_budget_s") else DEFAULT_STOP_BUDGET_S
        for stage in spec.stages
    )
    return sum(budgets) + DELETE_SLACK_S


async def _tell_what_is_left(client: Client, name: str) -> None:
    told = -1
    while True:
        try:
            deployment = await client.get(name)
        except NotFound:
            return
        except StagekeeperError:
            # Whoever deletes is told what is wrong; here it only means that nothing can be said.
            await asyncio.sleep(_LOOK_AGAIN_S)
            continue
        left = sum(len(replica.shards) for replica in deployment.replicas)
        if left and left != told:
            say(f"{name}: stopping, {count(left, 'stage')} left")
            told = left
        await asyncio.sleep(_LOOK_AGAIN_S)
