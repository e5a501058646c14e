"""`stagekeeper up`: everything on one machine, for as long as it runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from stagekeeper.cli import flags
from stagekeeper.wire.stable_endpoint import DEFAULT_ENDPOINT


def up(
    files: Annotated[
        list[Path] | None, flags.Argument(metavar="[FILE…]", help="Specs to deploy.")
    ] = None,
    agents: Annotated[int, flags.Option(min=1, metavar="N", help="How many agents.")] = 1,
    devices: flags.Devices = None,
    pythonpath: flags.PythonPath = None,
    endpoint: flags.Endpoint = DEFAULT_ENDPOINT,
    state_dir: flags.StateDir = None,
    lock_dir: flags.LockDir = None,
    keep: Annotated[
        bool,
        flags.Option(
            "--keep",
            help="Leave the stages running at the end; the next `up` takes over.",
            show_default=False,
        ),
    ] = False,
    allow: flags.Allow = None,
    worker_prefix: Annotated[
        str, flags.Option(metavar="NAME", help="Agents are NAME-0, NAME-1, …")
    ] = "agent",
    cluster: flags.ClusterFlag = "default",
    heartbeat_s: Annotated[
        float, flags.Option(metavar="SECONDS", help="Between two heartbeats of a worker.")
    ] = 2.0,
    insecure: flags.Insecure = False,
    log_level: flags.LogLevelFlag = flags.LogLevel.INFO,
) -> None:
    """Run a supervisor and agents here, and deploy.

    Both are started again when they die; stages go on meanwhile. Ctrl-C or SIGTERM deletes what the
    files deployed and ends supervisor and agents; a second one kills. What was deployed from
    elsewhere goes on, and so does everything when `up` itself is killed: the next `up` takes over.
    --devices are those of each agent. Without any, each has all NVIDIA cards of this machine; where
    there are none, each has two slices of RAM, three quarters of it in all.
    """
    from stagekeeper.agent.host_lock import default_lock_dir
    from stagekeeper.cli.asking import check_endpoint
    from stagekeeper.cli.places import absolute, import_folders, make_state_dir, state_dir_path
    from stagekeeper.cli.spec_files import read_specs
    from stagekeeper.cli.up.allowing import allowance
    from stagekeeper.cli.up.default_devices import default_devices, may_have_gpus, ram_bytes
    from stagekeeper.cli.up.plane import PlaneOptions
    from stagekeeper.cli.up.preflight import check_flags
    from stagekeeper.cli.up.session import run_up

    specs = read_specs(files or ())
    check_endpoint(endpoint, insecure=insecure)
    named = {allowance(stage) for loaded in specs for stage in loaded.spec.stages}
    options = PlaneOptions(
        endpoint=endpoint,
        state_dir=state_dir_path(state_dir),
        lock_dir=absolute(lock_dir) if lock_dir else default_lock_dir(),
        agents=tuple(f"{worker_prefix}-{n}" for n in range(agents)),
        devices=tuple(devices or default_devices(agents, ram_bytes(), has_gpus=may_have_gpus())),
        pythonpath=import_folders(pythonpath),
        # Without a file nothing is known of what will be deployed, and everything is allowed.
        allow=(*sorted(named), *(allow or ())),
        heartbeat_s=heartbeat_s,
        more=(
            f"--cluster={cluster}",
            f"--log-level={log_level}",
            *(["--insecure"] if insecure else []),
        ),
    )
    check_flags(options, cluster=cluster, insecure=insecure)
    make_state_dir(state_dir)
    code = run_up(options, specs, keep=keep)
    if code:
        import typer

        raise typer.Exit(code)
