"""`python -m tests.fakes.agent_program SETTINGS`: an agent that loads what the product loads."""

from __future__ import annotations

from stagekeeper.cli.light_start import all_is_loaded, collecting_nothing, load_structlog

with collecting_nothing():
    load_structlog()
    from tests.fakes.agents import main

    all_is_loaded()

if __name__ == "__main__":
    main()
