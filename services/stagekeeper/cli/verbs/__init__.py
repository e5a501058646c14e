"""The verbs, one a module: flags and arguments here, the work elsewhere.

A verb's module imports what it works with inside of its function: `stagekeeper agent` then loads no
client, and every `--help` is quick. This package imports those alone whose processes stay.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from stagekeeper.cli.verbs.agent import agent
from stagekeeper.cli.verbs.supervisor import supervisor

LONG_LIVED: Final[Mapping[str, Callable[..., None]]] = {"supervisor": supervisor, "agent": agent}
"""Verbs whose processes stay, and should carry nothing that only read their command line."""
