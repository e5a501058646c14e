"""`stagekeeper stages --local`: what runs on this host without an agent, listed or stopped."""

from __future__ import annotations

from typing import Annotated

from stagekeeper.cli import flags


def stages(
    local: Annotated[
        bool,
        flags.Option(
            "--local", help="Of this host, read from its state directory.", show_default=False
        ),
    ] = False,
    stop: Annotated[
        list[str] | None,
        flags.Option(
            metavar="NAME[/REPLICA[/STAGE]]",
            help="Stop these, while no agent runs; may be given several times.",
            show_default=False,
        ),
    ] = None,
    stop_all: Annotated[
        bool,
        flags.Option(
            "--stop-all", help="Stop all of them, while no agent runs.", show_default=False
        ),
    ] = False,
    worker_id: Annotated[
        str | None,
        flags.Option(metavar="NAME", help="Of one worker [default: all].", show_default=False),
    ] = None,
    stop_budget_s: Annotated[
        float | None,
        flags.Option(
            metavar="SECONDS",
            help="From the request to end to SIGKILL; 0 kills at once [default: each stage's own].",
            show_default=False,
        ),
    ] = None,
    state_dir: flags.StateDir = None,
    output: flags.OutputFormat = flags.Output.TEXT,
) -> None:
    """List or stop the stages of this host when no agent runs.

    They outlive their agent, and the next one takes them over. This is for a host on which none
    runs, or none will: it needs no supervisor either. A stage is known by the records that its
    agent kept, and is alive if pid and start time both say so.

    A stop asks a stage to end, kills all that belongs to it when its budget is over, and leaves
    records as an agent would.
    """
    from stagekeeper.cli.exits import usage
    from stagekeeper.cli.local_listing import list_shown
    from stagekeeper.cli.local_stopping import choices_from, stop_shown
    from stagekeeper.cli.log_output import configure_logs
    from stagekeeper.cli.places import state_dir_path

    if not local:
        raise usage(
            "`stagekeeper stages` needs --local: it reads this host's state directory. What a "
            "supervisor knows is shown by `stagekeeper status`"
        )
    choices = choices_from(stop or (), stop_all=stop_all, budget_s=stop_budget_s)
    folder, is_json = state_dir_path(state_dir), output is flags.Output.JSON
    if not choices:
        configure_logs("critical")  # what there is to say is in the list
        list_shown(folder, worker_id, is_json=is_json)
        return
    configure_logs("warning")
    stop_shown(folder, worker_id, choices, budget_s=stop_budget_s, is_json=is_json)
