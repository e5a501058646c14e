"""What every process that an agent starts is given of the agent's own environment.

Decided here: a list of variables, never the whole, and the folders that modules are imported from.
Not decided here: what a spec or a request adds, and what is an agent's word alone.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Final

_PASSED_ON: Final = (
    "PATH",
    "HOME",
    "USER",
    "LOGNAME",
    "LANG",
    "LANGUAGE",
    "LC_ALL",
    "LC_CTYPE",
    "TZ",
    "TMPDIR",
    "LD_LIBRARY_PATH",
    "VIRTUAL_ENV",
    "XDG_CACHE_HOME",
    "SSL_CERT_FILE",
    "SSL_CERT_DIR",
)

RUN_DIR_ENV: Final = "STAGEKEEPER_RUN_DIR"
"""Tells the folder of the instance, to all that it starts and to people who look at them."""


def listed() -> dict[str, str]:
    """Return what a program begins with that is not of this Python environment; a new dict."""
    env = {name: os.environ[name] for name in _PASSED_ON if name in os.environ}
    return env | {"PYTHONUNBUFFERED": "1"}


def passed_on(pythonpath: Sequence[Path]) -> dict[str, str]:
    """Return what a new process begins with; a new dict each time.

    Args:
        pythonpath: folders that come before those of the agent's own `PYTHONPATH`.
    """
    env = listed()
    folders = [str(folder.absolute()) for folder in pythonpath]
    if own_path := os.environ.get("PYTHONPATH"):
        folders.append(own_path)  # part of the environment that things are imported from
    if folders:
        env["PYTHONPATH"] = os.pathsep.join(folders)
    return env
