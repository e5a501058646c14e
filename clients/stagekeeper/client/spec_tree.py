"""A spec as a tree of values that know where they stand, read strictly from YAML or from a dict.

Decided here: what YAML means (its 1.2 core: true, false, null, decimal numbers, text), and that a
key stands once. YAML 1.1, which PyYAML speaks by itself, makes `no` false, `1:30` ninety and `010`
eight. Not decided here: which keys there are (spec_file.py). Invariant: every problem found carries
the path and the line at which it stands.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import yaml
from yaml.reader import ReaderError

MAX_DEPTH: Final = 50
MAX_NODES: Final = 100_000
LONGEST_QUOTE: Final = 40
_LONGEST_PATH: Final = 40


@dataclass(frozen=True, slots=True)
class SpecProblem:
    """One thing that is wrong: where, and what; lines count from 1, 0 means that there is none."""

    path: str
    problem: str
    line: int = 0

    def __str__(self) -> str:
        where = f"line {self.line}: " if self.line else ""
        return f"{where}{self.path}: {self.problem}" if self.path else f"{where}{self.problem}"


@dataclass(frozen=True, slots=True)
class Scalar:
    """Text, a number, a truth value or None."""

    value: str | int | float | bool | None
    line: int = 0


@dataclass(frozen=True, slots=True)
class Items:
    """A list."""

    items: tuple[Tree, ...]
    line: int = 0


@dataclass(frozen=True, slots=True)
class Mappings:
    """Keys, in their order, with the line at which each stands."""

    entries: dict[str, Tree]
    key_lines: dict[str, int] = field(default_factory=dict)
    line: int = 0


Tree = Scalar | Items | Mappings


def key_path(parent: str, key: str) -> str:
    """Return the path of a key: `stages[1].memory`."""
    return f"{parent}.{key}" if parent else key


def did_you_mean(word: str, known: Collection[str]) -> str:
    """Return ` (did you mean …?)` for the nearest known word; empty when none is near."""
    near = difflib.get_close_matches(word.lower(), list(known), n=1, cutoff=0.6)
    return f" (did you mean {near[0]}?)" if near else ""


def tree_of_yaml(text: str) -> tuple[Tree | None, list[SpecProblem]]:
    """Read one YAML document; a tree and problems can come together."""
    try:
        root = yaml.compose(text, Loader=_Loader)
    except _TooDeep as error:
        return None, [SpecProblem("", f"nested more than {MAX_DEPTH} levels deep", error.line)]
    except ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        return None, [SpecProblem("", f"not YAML: it holds {_named(error.character)}", line)]
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        what = " ".join(part for part in (error.context, error.problem) if part)
        return None, [SpecProblem("", f"not YAML: {what}", mark.line + 1 if mark else 0)]
    except yaml.YAMLError as error:
        return None, [SpecProblem("", f"not YAML: {error}")]
    if root is None:
        return None, [SpecProblem("", "the file is empty")]
    reader = _Reader()
    return reader.read(root, "", 0), reader.problems


def tree_of_value(value: object) -> tuple[Tree, list[SpecProblem]]:
    """Take a Python value as YAML would have read it: dicts, lists, text, numbers, None."""
    problems: list[SpecProblem] = []
    return _from_python(value, "", 0, problems), problems


def plain(tree: Tree) -> object:
    """Return a tree as plain Python values."""
    if isinstance(tree, Scalar):
        return tree.value
    if isinstance(tree, Items):
        return [plain(item) for item in tree.items]
    return {key: plain(value) for key, value in tree.entries.items()}


def _named(character: int | str) -> str:
    number = character if isinstance(character, int) else ord(character)
    return f"the character U+{number:04X}, which no text file has" + (
        " (a NUL byte: is this the right file?)" if not number else ""
    )


class _TooDeep(Exception):
    def __init__(self, line: int) -> None:
        super().__init__(line)
        self.line = line


class _Loader(yaml.SafeLoader):
    """SafeLoader with the scalars of YAML 1.2's core schema.

    It counts levels, since PyYAML composes each in a call of its own: a deep file would end in a
    RecursionError, which knows no line.
    """

    def __init__(self, stream: str) -> None:
        super().__init__(stream)
        self._depth = 0

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        if self._depth > MAX_DEPTH:
            event = self.peek_event()  # type: ignore[no-untyped-call]
            raise _TooDeep(event.start_mark.line + 1)
        self._depth += 1
        try:
            return super().compose_node(parent, index)
        finally:
            self._depth -= 1


_Loader.yaml_implicit_resolvers = {}
for _tag, _pattern, _first in (
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("bool", r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    ("int", r"[-+]?(0|[1-9][0-9]*)", list("-+0123456789")),
    (
        "float",
        r"[-+]?(\.[0-9]+|(0|[1-9][0-9]*)(\.[0-9]*)?)([eE][-+]?[0-9]+)?"
        r"|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
        list("-+.0123456789"),
    ),
):
    _Loader.add_implicit_resolver(
        f"tag:yaml.org,2002:{_tag}", re.compile(rf"^(?:{_pattern})$"), _first
    )


class _Reader:
    """Turns PyYAML's nodes into a tree, collecting problems on the way."""

    def __init__(self) -> None:
        self.problems: list[SpecProblem] = []
        self._nodes = 0
        self._is_full = False

    def read(self, node: yaml.Node, path: str, depth: int) -> Tree:
        line = node.start_mark.line + 1
        self._nodes += 1
        if depth > MAX_DEPTH or self._nodes > MAX_NODES:
            # Aliases make a small file large, and one that holds itself endless.
            if not self._is_full:
                self._is_full = True
                self._problem(
                    _short(path), "too deep or too much; aliases count as what they stand for", line
                )
            return Scalar(None, line)
        if isinstance(node, yaml.MappingNode) and node.tag == "tag:yaml.org,2002:map":
            return self._mapping(node, path, depth, line)
        if isinstance(node, yaml.SequenceNode) and node.tag == "tag:yaml.org,2002:seq":
            items = [
                self.read(item, f"{path}[{index}]", depth + 1)
                for index, item in enumerate(node.value)
            ]
            return Items(tuple(items), line)
        return self._scalar(node, path, line)

    def _mapping(self, node: yaml.MappingNode, path: str, depth: int, line: int) -> Mappings:
        entries: dict[str, Tree] = {}
        lines: dict[str, int] = {}
        for key_node, value_node in node.value:
            key_line = key_node.start_mark.line + 1
            key = self._scalar(key_node, path, key_line).value
            if not isinstance(key, str):
                self._problem(path, f"the key {key_node.value!r} is not text: quote it", key_line)
                continue
            here = key_path(path, key)
            if key in entries:
                self._problem(here, f"stands twice, first on line {lines[key]}", key_line)
                continue
            entries[key] = self.read(value_node, here, depth + 1)
            lines[key] = key_line
        return Mappings(entries, lines, line)

    def _scalar(self, node: yaml.Node, path: str, line: int) -> Scalar:
        kind = node.tag.removeprefix("tag:yaml.org,2002:")
        if isinstance(node, yaml.ScalarNode):
            text: str = node.value
            try:
                if kind == "str":
                    return self._text(text, path, line)
                if kind == "null":
                    return Scalar(None, line)
                if kind == "bool":
                    return Scalar(text.lower() == "true", line)
                if kind == "int":
                    return Scalar(int(text), line)
                if kind == "float":
                    return self._number(text, path, line)
            except ValueError:
                self._problem(path, f"{_cut(text)!r} is not of the kind that its tag says", line)
                return Scalar(None, line)
        self._problem(path, f"tags like {node.tag!r} are not read: write the value itself", line)
        return Scalar(None, line)

    def _text(self, text: str, path: str, line: int) -> Scalar:
        if text.isascii() or not any("\ud800" <= letter <= "\udfff" for letter in text):
            return Scalar(text, line)
        self._problem(path, f"{_cut(text)!a} holds half a character: write it whole", line)
        return Scalar(None, line)

    def _number(self, text: str, path: str, line: int) -> Scalar:
        # The core schema writes what `float` does not read: .inf, .nan.
        number = float(
            text.replace(".i", "i").replace(".I", "I").replace(".n", "n").replace(".N", "N")
        )
        if not math.isfinite(number):
            self._problem(path, _not_finite(_cut(text)), line)
        return Scalar(number, line)

    def _problem(self, path: str, problem: str, line: int) -> None:
        self.problems.append(SpecProblem(path, problem, line))


def _not_finite(text: str) -> str:
    return f"{text} is no finite number, and only those can be sent: quote it if it is a text"


def _short(path: str) -> str:
    """Cut the path of what holds itself, which is as long as it is deep, after a few steps."""
    if len(path) <= _LONGEST_PATH:
        return path
    head = path[:_LONGEST_PATH]
    return head[: max(head.rfind("["), head.rfind("."), 1)] + "…"


def _cut(text: str) -> str:
    return text if len(text) <= LONGEST_QUOTE else text[:LONGEST_QUOTE] + "…"


def _from_python(value: object, path: str, depth: int, problems: list[SpecProblem]) -> Tree:
    if depth > MAX_DEPTH:
        problems.append(SpecProblem(_short(path), "too deep"))
        return Scalar(None)
    if isinstance(value, float) and not math.isfinite(value):
        problems.append(SpecProblem(path, _not_finite(str(value))))
    if value is None or isinstance(value, (str, int, float, bool)):
        return Scalar(value)
    if isinstance(value, Mapping):
        entries: dict[str, Tree] = {}
        for key, child in value.items():
            if isinstance(key, str):
                entries[key] = _from_python(child, key_path(path, key), depth + 1, problems)
            else:
                problems.append(SpecProblem(path, f"the key {key!r} is not text"))
        return Mappings(entries)
    if isinstance(value, Sequence) and not isinstance(value, (bytes, bytearray)):
        return Items(
            tuple(
                _from_python(child, f"{path}[{index}]", depth + 1, problems)
                for index, child in enumerate(value)
            )
        )
    problems.append(SpecProblem(path, f"a {type(value).__qualname__} is not text, number or list"))
    return Scalar(None)
