"""What belongs to later releases, refused with what to do instead, and never ignored.

Looked at before the command line is parsed, so that a flag to come is not called a typing error.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from stagekeeper.cli.exits import CliError, usage

VERBS: Mapping[str, str] = {
    "tree": "`stagekeeper status` shows deployments, replicas and stages",
    "failures": "`stagekeeper status --output json` has the recorded failures, and `stagekeeper "
    "logs NAME --previous` what the stage wrote last",
    "scale": "change `replicas` in the spec, `stagekeeper delete NAME`, then `stagekeeper deploy "
    "FILE`",
    "drain": "`stagekeeper delete NAME` stops what lies on the worker",
    "drill": "kill -9 the supervisor or an agent yourself, and look at `stagekeeper status`",
    "top": "`stagekeeper status` shows the memory of workers and stages",
    "update": "`stagekeeper delete NAME`, then `stagekeeper deploy FILE`",
}
"""Verb → what to use instead."""

FLAGS: Mapping[str, Mapping[str, str]] = {
    "agent": {
        "--drain-on-term": "SIGTERM ends the agent and leaves its stages running; `stagekeeper "
        "delete NAME` stops them",
    },
}
"""Verb → flag → what to do instead."""


def refuse(argv: Sequence[str]) -> None:
    """Raise for a verb or a flag that is not built yet.

    Raises:
        CliError: exit code 2, saying what to do instead.
    """
    verb = next((word for word in argv if not word.startswith("-")), "")
    if verb in VERBS:
        raise _not_yet(f"`stagekeeper {verb}`", VERBS[verb])
    flags = FLAGS.get(verb, {})
    for word in argv:
        if word == "--":
            return
        flag = word.partition("=")[0]
        if flag in flags:
            raise _not_yet(f"`{flag}`", flags[flag])


def _not_yet(what: str, instead: str) -> CliError:
    return usage(f"not yet: {what} comes with a later release; until then: {instead}")
