"""`stagekeeper supervisor`: flags into settings, and a supervisor run until it is asked to end."""

from __future__ import annotations

from typing import Annotated

from stagekeeper.cli import flags
from stagekeeper.wire.stable_endpoint import DEFAULT_ENDPOINT


def supervisor(
    endpoint: flags.Endpoint = DEFAULT_ENDPOINT,
    stable_endpoint: Annotated[
        str,
        flags.Option(
            metavar="HOST:PORT",
            help="The endpoint as everybody dials it: a name, a virtual address, a TCP proxy "
            "[default: --endpoint].",
        ),
    ] = "",
    listen: Annotated[
        str,
        flags.Option(metavar="HOST:PORT", help="Where agents are served; port 0 takes any."),
    ] = "127.0.0.1:0",
    advertise: Annotated[
        str,
        flags.Option(
            metavar="HOST:PORT",
            help="What agents are told to dial [default: --listen with its real port].",
        ),
    ] = "",
    cluster: flags.ClusterFlag = "default",
    state_dir: flags.StateDir = None,
    no_store: Annotated[
        bool,
        flags.Option(
            "--no-store",
            help="Keep nothing on disk: what is wanted is forgotten at the end.",
            show_default=False,
        ),
    ] = False,
    no_standby: Annotated[
        bool,
        flags.Option(
            "--no-standby",
            help="Refuse to start beside a living supervisor, and end before a higher one, instead "
            "of waiting.",
            show_default=False,
        ),
    ] = False,
    look_s: Annotated[
        float,
        flags.Option(metavar="SECONDS", help="Between two looks at the stable endpoint, about."),
    ] = 2.0,
    heartbeat_s: Annotated[
        float, flags.Option(metavar="SECONDS", help="Between two heartbeats of a worker.")
    ] = 2.0,
    lease_s: Annotated[
        float, flags.Option(metavar="SECONDS", help="Silence until a worker is UNREACHABLE.")
    ] = 10.0,
    lost_s: Annotated[
        float, flags.Option(metavar="SECONDS", help="Silence until a worker is LOST.")
    ] = 60.0,
    recovery_window_s: Annotated[
        float,
        flags.Option(
            metavar="SECONDS",
            help="Longest wait, after a start, for the workers that were there before it.",
        ),
    ] = 10.0,
    slow_reader_s: Annotated[
        float,
        flags.Option(
            metavar="SECONDS", help="How long a watcher may take nothing before it is cut."
        ),
    ] = 30.0,
    insecure: flags.Insecure = False,
    log_level: flags.LogLevelFlag = flags.LogLevel.INFO,
    die_with: flags.DieWithParent = 0,
) -> None:
    """Run the supervisor.

    Agents register with it; users deploy, list and watch. Beside a living supervisor of the same
    cluster it stands by, and begins when nobody is at the endpoint any more.

    Its end touches no stage, whether it was asked (SIGTERM, Ctrl-C) or killed.
    """
    from stagekeeper.cli.exits import usage
    from stagekeeper.cli.places import make_state_dir
    from stagekeeper.cli.serving import serve_supervisor
    from stagekeeper.core.settings import RegistrySettings
    from stagekeeper.supervisor.settings import SupervisorSettings

    try:
        registry = RegistrySettings(
            heartbeat_s=heartbeat_s,
            lease_s=lease_s,
            lost_s=lost_s,
            recovery_window_s=recovery_window_s,
        )
    except ValueError as error:
        raise usage(f"these settings cannot work: {error}") from error
    settings = SupervisorSettings(
        cluster=cluster,
        endpoint=endpoint,
        stable_endpoint=stable_endpoint,
        listen=listen,
        advertise=advertise,
        state_dir=None if no_store else make_state_dir(state_dir),
        standby=not no_standby,
        look_s=look_s,
        slow_reader_s=slow_reader_s,
        insecure=insecure,
        registry=registry,
    )
    serve_supervisor(settings, log_level=log_level, parent_pid=die_with)
