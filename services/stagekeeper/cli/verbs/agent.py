"""`stagekeeper agent`: flags into settings, and an agent run until it is asked to end."""

from __future__ import annotations

from typing import Annotated

from stagekeeper.cli import flags
from stagekeeper.wire.stable_endpoint import DEFAULT_ENDPOINT


def agent(
    endpoint: flags.Endpoint = DEFAULT_ENDPOINT,
    worker_id: Annotated[
        str | None,
        flags.Option(metavar="NAME", help="[default: the host's name]", show_default=False),
    ] = None,
    devices: flags.Devices = None,
    pythonpath: flags.PythonPath = None,
    allow: flags.Allow = None,
    listen: Annotated[
        str,
        flags.Option(metavar="HOST:PORT", help="Where this agent serves; port 0 takes any."),
    ] = "127.0.0.1:0",
    advertise: Annotated[
        str,
        flags.Option(
            metavar="HOST[:PORT]",
            help="What others are told to dial [default: --listen with its real port].",
        ),
    ] = "",
    cluster: flags.ClusterFlag = "default",
    state_dir: flags.StateDir = None,
    lock_dir: flags.LockDir = None,
    max_wait: Annotated[
        float | None,
        flags.Option(
            metavar="SECONDS",
            help="End when no supervisor was found for so long [default: wait for ever].",
            show_default=False,
        ),
    ] = None,
    operation_lease_s: Annotated[
        float,
        flags.Option(
            metavar="SECONDS", help="A start that no supervisor asks for that long is undone."
        ),
    ] = 60.0,
    stop_budget_s: Annotated[
        float,
        flags.Option(metavar="SECONDS", help="From SIGTERM to SIGKILL, for stages that name none."),
    ] = 10.0,
    max_loads: Annotated[
        int | None,
        flags.Option(
            metavar="N",
            help="Stages that load their weights at once, at most [default: no limit].",
            show_default=False,
        ),
    ] = None,
    lock_limit_s: Annotated[
        float,
        flags.Option(
            metavar="SECONDS",
            help="A stage fails that waits for its cards while their user makes no progress.",
        ),
    ] = 600.0,
    ports: Annotated[
        str,
        flags.Option(
            metavar="FIRST-LAST",
            help="For programs that are stages [default: 200 that no other agent here has].",
        ),
    ] = "",
    busy_after_s: Annotated[
        float,
        flags.Option(metavar="SECONDS", help="Without progress in a call or a phase: BUSY."),
    ] = 5.0,
    stall_after_s: Annotated[
        float, flags.Option(metavar="SECONDS", help="Without any sign of life: STALLED.")
    ] = 30.0,
    device_deadline_s: Annotated[
        float,
        flags.Option(
            metavar="SECONDS", help="A call of the cards' driver that takes longer has failed."
        ),
    ] = 3.0,
    device_interval_s: Annotated[
        float, flags.Option(metavar="SECONDS", help="Between two readings of the cards.")
    ] = 5.0,
    insecure: flags.Insecure = False,
    log_level: flags.LogLevelFlag = flags.LogLevel.INFO,
    die_with: flags.DieWithParent = 0,
) -> None:
    """Run the agent of this host.

    It starts stages, watches them, and reports them to the supervisor. Without --devices it takes
    all NVIDIA cards of this host, and none where there are none.

    SIGTERM and Ctrl-C undo starts that are under way and leave everything else running: stages
    outlive their agent, and the next one with the same state directory and worker id takes over.
    """
    from stagekeeper.agent.host_lock import default_lock_dir
    from stagekeeper.agent.settings import AgentSettings, default_worker_id
    from stagekeeper.cli.places import absolute, import_folders, make_state_dir
    from stagekeeper.cli.serving import allowed_entrypoints, serve_agent
    from stagekeeper.core.ids import ClusterName, WorkerId

    settings = AgentSettings(
        cluster=ClusterName(cluster),
        worker_id=default_worker_id() if worker_id is None else WorkerId(worker_id),
        endpoint=endpoint,
        listen=listen,
        advertise=advertise,
        state_dir=make_state_dir(state_dir),
        lock_dir=absolute(lock_dir) if lock_dir else default_lock_dir(),
        devices=tuple(devices or ()),
        pythonpath=import_folders(pythonpath),
        # Without --insecure the settings refuse such addresses altogether.
        allow=allowed_entrypoints(allow or (), (listen, advertise or listen) if insecure else ()),
        max_wait_s=max_wait,
        operation_lease_s=operation_lease_s,
        stop_budget_s=stop_budget_s,
        max_loads=max_loads,
        lock_limit_s=lock_limit_s,
        ports=ports,
        busy_after_s=busy_after_s,
        stall_after_s=stall_after_s,
        device_deadline_s=device_deadline_s,
        device_interval_s=device_interval_s,
        insecure=insecure,
    )
    settings.check()
    serve_agent(settings, log_level=log_level, parent_pid=die_with)
