"""What a name may be: of deployments, stages and workers.

Decided here: the one rule that specs and reports share. Names are compared exactly and never
parsed, so `llama-2`, `a-rep1` and names in any script are just names.
"""

from __future__ import annotations

import unicodedata

LONGEST_NAME = 63
_UNPRINTABLE = frozenset({"Cc", "Cs", "Zl", "Zp"})


def name_problem(name: str) -> str:
    """Say what is wrong with a name; empty when it is sound."""
    if not 1 <= len(name) <= LONGEST_NAME:
        return f"is {len(name)} characters long, not 1 to {LONGEST_NAME}"
    if "/" in name:
        return f"{name!r} contains '/'"
    return text_problem(name)


def text_problem(text: str) -> str:
    """Say which character of a text cannot be shown on one line; empty when all can."""
    if text.isascii() and text.isprintable():
        return ""
    for character in text:
        if unicodedata.category(character) in _UNPRINTABLE:
            return f"{text!r} contains the control character {character!r}"
    return ""
