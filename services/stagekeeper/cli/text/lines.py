"""Text of others inside a line of ours: one line of it, not too much, and nothing but text.

Decided here: how much, and how control characters are shown: a stage's log or exception must not
move a terminal's cursor, or colour what we say. Who wants the rest has `--debug`.
"""

from __future__ import annotations

import re
from typing import Final

_CONTROL: Final = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]")
"""All but tabs and line ends; what turns the direction of writing is one, too."""

LONGEST_QUOTE: Final = 500
LONGEST_LINE: Final = 800
"""Of a whole line of ours: a quotation, and what is said of it."""


def visible(text: str) -> str:
    """Write control characters as text: `\\x1b`; tabs and line ends are kept."""
    return _CONTROL.sub(lambda found: ascii(found[0])[1:-1], text)


def first_line(text: str, limit: int = LONGEST_QUOTE) -> str:
    """Return the first line of a text, as far in as it stands; `…` stands for what is left out."""
    lines = text.strip("\r\n").splitlines() or [""]
    first = visible(lines[0].rstrip())
    if len(first) > limit:
        return first[:limit].rstrip() + "…"
    return first if len(lines) == 1 else f"{first} …"
