"""Where a supervisor is when nobody says otherwise: the same for its servers, agents and clients.

Nothing is imported here, since the command line reads it before it knows what it is to do.
"""

from __future__ import annotations

from typing import Final

DEFAULT_ENDPOINT: Final = "127.0.0.1:7070"
ENDPOINT_ENV: Final = "STAGEKEEPER_ENDPOINT"
