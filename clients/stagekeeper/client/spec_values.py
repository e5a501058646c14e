"""The vocabulary in which a spec is read: a key, a text, a number, seconds, a size.

Each reader returns the value, or notes what is wrong and returns None (or nothing), so that one
reading finds every problem. Not decided here: which keys a spec has (spec_file.py).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from stagekeeper.client.spec_tree import (
    Items,
    Mappings,
    Scalar,
    SpecProblem,
    Tree,
    did_you_mean,
    key_path,
)

_UNITS: Final = {
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KiB": 2**10,
    "MiB": 2**20,
    "GiB": 2**30,
    "TiB": 2**40,
}
_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?) ?([A-Za-z]+)")

Take = Callable[[Tree, str], None]
"""Takes over the value of one key, which stands at a path."""


def parse_size(text: str) -> int | None:
    """Return the bytes of a size like 12GiB or 1.5 GB; None when it is none."""
    match = _SIZE.fullmatch(text.strip())
    if match is None or match[2] not in _UNITS:
        return None
    whole, _, fraction = match[1].partition(".")
    scale = 10 ** len(fraction)
    total = int(whole + fraction) * _UNITS[match[2]]
    return total // scale if total % scale == 0 else None


class TreeReader:
    """Reads trees, and keeps the problems and the line of each path that it came by."""

    def __init__(self, problems: list[SpecProblem]) -> None:
        self.problems = problems
        self.lines: dict[str, int] = {}

    def keys(
        self,
        tree: Tree,
        path: str,
        takes: Mapping[str, Take],
        *,
        required: Sequence[str] = (),
        later: Mapping[str, str] | None = None,
    ) -> None:
        """Hand each key's value to its taker; refuse unknown keys, and `later` ones with advice."""
        self.lines.setdefault(path, tree.line)
        if not isinstance(tree, Mappings):
            self.problem(path, f"needs keys ({', '.join(takes)})", tree.line)
            return
        later = later or {}
        for key, value in tree.entries.items():
            here = key_path(path, key)
            line = self.lines[here] = tree.key_lines.get(key, 0)
            if key in takes:
                takes[key](value, here)
            elif key in later:
                self.not_yet(here, f"`{key}`", later[key], line)
            else:
                known = [*takes, *later]
                hint = did_you_mean(key, known) or f" (there are: {', '.join(takes)})"
                self.problem(here, f"there is no key `{key}`{hint}", line)
        for key in required:
            if key not in tree.entries:
                self.problem(key_path(path, key), "is missing", tree.line)

    # --- values

    def items(self, tree: Tree, path: str) -> Sequence[Tree]:
        """Read a list; its items are read by the caller."""
        if isinstance(tree, Items):
            for index, item in enumerate(tree.items):
                self.lines[f"{path}[{index}]"] = item.line
            return tree.items
        self.problem(path, "needs a list", tree.line)
        return ()

    def texts(self, tree: Tree, path: str) -> list[str]:
        """Read a list of texts."""
        found = (self.text(item, f"{path}[{i}]") for i, item in enumerate(self.items(tree, path)))
        return [text for text in found if text is not None]

    def text(self, tree: Tree, path: str) -> str | None:
        """Read a text; numbers and truth values are not texts."""
        if isinstance(tree, Scalar) and isinstance(tree.value, str):
            return tree.value
        is_number = isinstance(tree, Scalar) and tree.value is not None
        self.problem(path, "needs text" + (": quote it" if is_number else ""), tree.line)
        return None

    def count(self, tree: Tree, path: str, *, least: int, most: int | None = None) -> int | None:
        """Read a whole number, from `least` to `most`, or to what 32 bits hold."""
        limit = 2**32 - 1 if most is None else most
        value = tree.value if isinstance(tree, Scalar) else None
        if isinstance(value, int) and not isinstance(value, bool) and least <= value <= limit:
            return value
        is_too_large = isinstance(value, int) and value > limit
        upper = f" and at most {limit}" if most is not None or is_too_large else ""
        self.problem(path, f"needs a whole number, at least {least}{upper}", tree.line)
        return None

    def number(self, tree: Tree, path: str) -> float | None:
        """Read a number."""
        value = tree.value if isinstance(tree, Scalar) else None
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            return float(value)
        self.problem(path, "needs a number", tree.line)
        return None

    def seconds(self, tree: Tree, path: str) -> float | None:
        """Read a duration in seconds, above 0."""
        value = tree.value if isinstance(tree, Scalar) else None
        if isinstance(value, (int, float)) and not isinstance(value, bool) and value > 0:
            return float(value)
        self.problem(path, "needs seconds, more than 0", tree.line)
        return None

    def size(self, tree: Tree, path: str) -> int | None:
        """Read bytes: a whole number, or a size with its unit."""
        value = tree.value if isinstance(tree, Scalar) else None
        size = parse_size(value) if isinstance(value, str) else value
        if isinstance(size, int) and not isinstance(size, bool) and 0 <= size < 2**64:
            return size
        self.problem(path, f"needs a size like 12GiB (units: {', '.join(_UNITS)})", tree.line)
        return None

    def flag(self, tree: Tree, path: str) -> bool | None:
        """Read true or false."""
        if isinstance(tree, Scalar) and isinstance(tree.value, bool):
            return tree.value
        self.problem(path, "needs true or false", tree.line)
        return None

    # --- what to say

    def not_yet(self, path: str, what: str, instead: str, line: int) -> None:
        """Note that something comes later, and what to do until then."""
        self.problem(path, f"not yet: {what} comes with a later release; {instead}", line)

    def set(self, message: Any, name: str, value: object) -> None:
        """Set a field of a message, unless the value could not be read."""
        if value is not None:
            setattr(message, name, value)

    def problem(self, path: str, problem: str, line: int) -> None:
        """Note what is wrong at a path."""
        self.problems.append(SpecProblem(path, problem, line))
