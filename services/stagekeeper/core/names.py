"""What a name may be: of deployments, stages and workers; and how texts are quoted and cut.

Decided here: the one rule that specs, reports and commands share. Names are compared exactly and
never parsed, so `llama-2`, `a-rep1` and names in any script are just names.

Invariant: what is said about a text quotes a bounded part of it, however long it is.
"""

from __future__ import annotations

import unicodedata

from stagekeeper.core.limits import LONGEST_NAME, LONGEST_REASON

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
            return f"{shown(text)} contains the control character {character!r}"
    return ""


def shown(text: str) -> str:
    """Quote a text that may be of any length."""
    return repr(text) if len(text) <= LONGEST_NAME else f"{text[:LONGEST_NAME]!r}…"


def cut(text: str, longest: int = LONGEST_REASON) -> str:
    """Keep the beginning of a sentence for people."""
    return text if len(text) <= longest else text[: longest - 2] + " …"
