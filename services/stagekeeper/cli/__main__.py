"""`python -m stagekeeper.cli`: `stagekeeper` for who has an interpreter and no path."""

from __future__ import annotations

from stagekeeper.cli.main import main

if __name__ == "__main__":
    main()
