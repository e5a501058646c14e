"""Text of others inside a line of ours: one line of it, and not too much.

Decided here: how much. Who wants the rest has `--debug`.
"""

from __future__ import annotations

from typing import Final

LONGEST_QUOTE: Final = 500
LONGEST_LINE: Final = 800
"""Of a whole line of ours: a quotation, and what is said of it."""


def first_line(text: str, limit: int = LONGEST_QUOTE) -> str:
    """Return the first line of a text, as far in as it stands; `…` stands for what is left out."""
    lines = text.strip("\r\n").splitlines() or [""]
    first = lines[0].rstrip()
    if len(first) > limit:
        return first[:limit].rstrip() + "…"
    return first if len(lines) == 1 else f"{first} …"
