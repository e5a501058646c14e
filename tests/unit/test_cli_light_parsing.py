"""The light reader against typer: the same arguments, or none."""

from __future__ import annotations

import functools
import inspect
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stagekeeper.cli.full_parsing import command
from stagekeeper.cli.light_parsing import plain_arguments
from stagekeeper.cli.verbs import LONG_LIVED


def typers_arguments(verb: str, words: list[str]) -> dict[str, Any]:
    """Return what typer calls the verb's function with."""
    seen: dict[str, Any] = {}

    @functools.wraps(LONG_LIVED[verb])
    def capture(**arguments: Any) -> None:
        seen.update(arguments)

    command([capture]).main([verb, *words], standalone_mode=False)
    return seen


def with_defaults(verb: str, found: dict[str, Any]) -> dict[str, Any]:
    signature = inspect.signature(LONG_LIVED[verb])
    return {name: parameter.default for name, parameter in signature.parameters.items()} | found


FLAGS = {
    "agent": {
        "--endpoint": ["127.0.0.1:1", "h:2"],
        "--worker-id": ["node-1", "ü x"],
        "--devices": ["cpu:0=1GiB", "cpu:1=2GiB"],
        "--pythonpath": ["a b", "/c"],
        "--allow": ["m.*"],
        "--max-wait": ["3", "0.5"],
        "--operation-lease-s": ["7"],
        "--log-level": ["debug", "error"],
        "--die-with": ["12"],
        "--state-dir": ["/x=y"],
        "--cluster": [""],
    },
    "supervisor": {
        "--endpoint": ["127.0.0.1:1"],
        "--listen": ["127.0.0.1:0"],
        "--heartbeat-s": ["0.5", "3"],
        "--state-dir": ["s"],
        "--log-level": ["info"],
        "--die-with": ["1"],
    },
}
SWITCHES = {"agent": ["--insecure"], "supervisor": ["--insecure", "--no-store"]}


@st.composite
def command_lines(draw: st.DrawFn) -> tuple[str, list[str]]:
    verb = draw(st.sampled_from(sorted(FLAGS)))
    words: list[str] = []
    for _ in range(draw(st.integers(0, 6))):
        if draw(st.booleans()):
            words.append(draw(st.sampled_from(SWITCHES[verb])))
            continue
        flag = draw(st.sampled_from(sorted(FLAGS[verb])))
        value = draw(st.sampled_from(FLAGS[verb][flag]))
        words += [f"{flag}={value}"] if draw(st.booleans()) else [flag, value]
    return verb, words


@settings(deadline=None, max_examples=60)
@given(command_lines())
def test_plain_command_lines_are_read_as_typer_reads_them(line: tuple[str, list[str]]) -> None:
    verb, words = line

    found = plain_arguments(LONG_LIVED[verb], words, env={})

    assert found is not None
    assert with_defaults(verb, found) == typers_arguments(verb, words)


@pytest.mark.parametrize(
    "words",
    [
        ["--help"],
        ["-h"],
        ["--no-such-flag"],
        ["--endpoint"],
        ["--endpoint", "--insecure"],
        ["--insecure=yes"],
        ["--max-wait=soon"],
        ["--die-with=1.5"],
        ["--log-level=loud"],
        ["a-word"],
        ["--end=127.0.0.1:1"],
        ["--", "x"],
    ],
)
def test_what_is_not_plain_is_left_to_typer(words: list[str]) -> None:
    assert plain_arguments(LONG_LIVED["agent"], words, env={}) is None


def test_environment_counts_and_a_flag_wins_over_it() -> None:
    env = {"STAGEKEEPER_ENDPOINT": "127.0.0.1:5"}
    agent = LONG_LIVED["agent"]

    assert plain_arguments(agent, [], env=env) == {"endpoint": "127.0.0.1:5"}
    assert plain_arguments(agent, ["--endpoint=127.0.0.1:6"], env=env) == {
        "endpoint": "127.0.0.1:6"
    }
    assert plain_arguments(agent, [], env={"STAGEKEEPER_ENDPOINT": ""}) == {}


def test_verb_with_arguments_is_left_to_typer() -> None:
    from stagekeeper.cli.verbs.deploy import deploy

    assert plain_arguments(deploy, ["spec.yaml"], env={}) is None
