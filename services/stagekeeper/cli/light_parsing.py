"""Reading a plain command line without what typer loads to read one.

typer validates with pydantic, which is 14 MB and a fifth of a second in a process that then runs
for months, or is wanted back at once. Decided here: the plain cases, read off the same signatures
that typer reads: `--flag value`, `--flag=value`, switches. Invariant: what is not plain (help, an
unknown flag, a value that does not fit) is not judged here: the answer is None, and typer is asked.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, get_args, get_origin, get_type_hints

from stagekeeper.cli.flags import Option


class _NotPlain(Exception):
    """Something that typer has to look at."""


@dataclass(frozen=True, slots=True)
class _Option:
    """One option of a verb: where its value goes, and what makes a value of a word."""

    parameter: str
    read: Callable[[str], Any]
    is_switch: bool
    is_list: bool
    env: str


def plain_arguments(
    verb: Callable[..., object], words: Sequence[str], env: Mapping[str, str] = os.environ
) -> dict[str, Any] | None:
    """Return the keyword arguments that typer would call `verb` with; None: ask typer."""
    try:
        options = dict(_options(verb))
        found = _from_environment(options, env)
        found.update(_from_words(options, words))
    except _NotPlain:
        return None
    return found


def _options(verb: Callable[..., object]) -> Iterator[tuple[str, _Option]]:
    hints = get_type_hints(verb, include_extras=True)
    for name in inspect.signature(verb).parameters:
        hint = hints[name]
        info = next((it for it in get_args(hint)[1:] if isinstance(it, Option)), None)
        if get_origin(hint) is not Annotated or info is None:
            raise _NotPlain
        value_type, is_list = _value_type(get_args(hint)[0])
        option = _Option(
            name,
            read=_reader(value_type),
            is_switch=value_type is bool,
            is_list=is_list,
            env=info.settings.get("envvar", ""),
        )
        for flag in _flags(name, info):
            yield flag, option


def _flags(name: str, info: Option) -> Sequence[str]:
    return info.names or [f"--{name.replace('_', '-')}"]


def _value_type(hint: Any) -> tuple[Any, bool]:
    """Return the type of one value, and whether there may be several; `| None` is left out."""
    choices = [it for it in get_args(hint) if it is not NoneType] if _is_union(hint) else [hint]
    if len(choices) != 1:
        raise _NotPlain
    if get_origin(choices[0]) is list:
        return get_args(choices[0])[0], True
    return choices[0], False


def _is_union(hint: Any) -> bool:
    return NoneType in get_args(hint)


def _reader(value_type: Any) -> Callable[[str], Any]:
    if value_type not in (bool, float, int, str, Path) and not issubclass(value_type, Enum):
        raise _NotPlain

    def read(word: str) -> Any:
        if value_type is Path and not word:
            raise _NotPlain  # it would mean the folder that one happens to be in
        try:
            return value_type(word)
        except ValueError:
            raise _NotPlain from None

    return read


def _from_environment(options: Mapping[str, _Option], env: Mapping[str, str]) -> dict[str, Any]:
    return {
        option.parameter: option.read(env[option.env])
        for option in options.values()
        if option.env and env.get(option.env)
    }


def _from_words(options: Mapping[str, _Option], words: Sequence[str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    rest = iter(words)
    for word in rest:
        flag, has_value, value = word.partition("=")
        option = options.get(flag)
        if option is None or (option.is_switch and has_value):
            raise _NotPlain
        if option.is_switch:
            found[option.parameter] = True
            continue
        if not has_value:
            value = next(rest, "-")
            if value.startswith("-"):
                raise _NotPlain
        if option.is_list:
            found.setdefault(option.parameter, []).append(option.read(value))
        else:
            found[option.parameter] = option.read(value)
    return found
