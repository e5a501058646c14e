"""How many of what, in words: the one place that knows singular from plural.

Decided here: that exactly one is singular, and nothing else.
"""

from __future__ import annotations


def noun(number: int, singular: str, plural: str = "") -> str:
    """Return the noun that suits a number; its plural where an `s` makes none is given."""
    return singular if number == 1 else plural or f"{singular}s"


def counted(number: int, singular: str, plural: str = "") -> str:
    """Write `1 replica`, `2 replicas`."""
    return f"{number} {noun(number, singular, plural)}"
