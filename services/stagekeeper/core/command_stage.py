"""A server program as a stage: what its spec says, and what the templates in it stand for.

Decided here: the names of templates, how they are spelled, and what each stands for once a place
is known. Not decided here: what is wrong in such a spec (`command_stage_check`), which port a name
gets (the agent leases it), and what is done with a probe (the stage process).

Invariant: one table of names serves the check, the plan and the start, so that what was planned is
what is executed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

HTTP: Final = "http"
GRPC: Final = "grpc"
TCP: Final = "tcp"
LOG: Final = "log"

DEFAULT_FAILURES: Final = 3

PORT: Final = "port"
LEADER_PORT: Final = "leader_port"
PORT_NAMES: Final = frozenset({PORT, LEADER_PORT})
"""Templates that name a port behind a colon."""

CARD_NAMES: Final = frozenset({"device_indexes", "device_uuids", "utilization", "memory_bytes"})
"""Templates that mean something only for a stage with cards."""

PLAIN_NAMES: Final = CARD_NAMES | {
    "host",
    "shard_index",
    "shard_count",
    "leader_host",
    "generation",
    "instance_id",
    "run_dir",
    "cache_dir",
}

# What is no name between braces (JSON, mostly) is no template and stays as it is.
_TEMPLATE: Final = re.compile(
    r"\{\{(?P<quoted>[A-Za-z_]\w*(?::[^{}\s]*)?)\}\}|\{(?P<name>[A-Za-z_]\w*(?::[^{}\s]*)?)\}",
    re.ASCII,
)


_NEARLY: Final = re.compile(
    r"(?<!\{)\{\s*(?P<word>[A-Za-z_]\w*)\s*(?::\s*(?P<port>[\w-]*)\s*)?\}(?!\})", re.ASCII
)
"""A template that blanks were put into, and so is none."""


@dataclass(frozen=True, slots=True)
class Probe:
    """One look at a program from outside.

    `look` is HTTP, GRPC, TCP or LOG, and empty where nothing was said; `target` the path, the
    service, or the text of a line. An empty port is the first one of the stage.
    """

    look: str
    target: str = ""
    port: str = ""
    body: str = ""
    contains: str = ""
    interval_s: float | None = None
    timeout_s: float | None = None
    failures: int = DEFAULT_FAILURES


@dataclass(frozen=True, slots=True)
class DrainSpec:
    """How a program is taken out of service; see the message of that name."""

    settle_s: float = 0.0
    budget_s: float | None = None
    metric: str = ""
    path: str = ""
    port: str = ""


@dataclass(frozen=True, slots=True)
class CommandSpec:
    """A server program: its command line, its ports, and how it is looked at."""

    argv: tuple[str, ...]
    ports: tuple[str, ...] = ()
    ready: Probe | None = None
    live: Probe | None = None
    canary: Probe | None = None
    drain: DrainSpec | None = None

    @property
    def program(self) -> str:
        return self.argv[0] if self.argv else ""

    def protocols(self) -> dict[str, str]:
        """Say what is spoken at each port that others may use: "grpc" or "http".

        A probe says it, else the port's name does when it begins so. Others (for a rendezvous, say)
        are not told to anybody.
        """
        found = {}
        for name in self.ports:
            for protocol in (GRPC, HTTP):
                if name.startswith(protocol):
                    found[name] = protocol
        for probe in (self.ready, self.live, self.canary):
            if probe is not None and probe.look in (GRPC, HTTP) and self.ports:
                found[probe.port or self.ports[0]] = probe.look
        return {name: found[name] for name in self.ports if name in found}


@dataclass(frozen=True, slots=True)
class PortLease:
    """A port, and what the spec calls it."""

    name: str
    port: int


@dataclass(frozen=True, slots=True)
class StagePorts:
    """The ports of one stage's shard, at the host at which they are reached (without brackets)."""

    stage_id: int
    host: str
    ports: tuple[PortLease, ...] = ()


def names_in(text: str) -> Iterator[str]:
    """Yield the templates of a text as they are written there: `port:http`, `host`."""
    for match in _TEMPLATE.finditer(text):
        if match["name"] is not None:
            yield match["name"]


def nearly_in(text: str) -> Iterator[tuple[str, str]]:
    """Yield what blanks keep from being a template: as it is there, and as it would be one."""
    for match in _NEARLY.finditer(text):
        word, port = match["word"], match["port"]
        if match[0] == "".join(match[0].split()):
            continue
        if port is None and word in PLAIN_NAMES:
            yield match[0], f"{{{word}}}"
        elif port is not None and word in PORT_NAMES:
            yield match[0], f"{{{word}:{port}}}"


def fill(text: str, value_of: Callable[[str], str]) -> str:
    """Put what they stand for into a text's templates; a doubled brace stands for itself.

    Args:
        text: as the spec has it.
        value_of: takes a name as `names_in` yields it.
    """

    def one(match: re.Match[str]) -> str:
        quoted = match["quoted"]
        return f"{{{quoted}}}" if quoted is not None else value_of(match["name"])

    return _TEMPLATE.sub(one, text)


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandPlace:
    """Where one shard of a command stage runs, as far as that is settled.

    What is None is settled later, and stands in a plan as `<name>`.
    """

    host: str
    shard_index: int = 0
    shard_count: int = 1
    device_uuids: Sequence[str] = ()
    utilization: float | None = None
    memory_bytes: int | None = None
    ports: Mapping[str, int] | None = None
    leader_host: str | None = None
    leader_ports: Mapping[str, int] | None = None
    generation: str | None = None
    instance_id: str | None = None
    run_dir: str | None = None
    cache_dir: str | None = None

    def fill(self, text: str) -> str:
        return fill(text, self._value)

    def _value(self, name: str) -> str:
        word, _, argument = name.partition(":")
        value: object
        if word == PORT:
            value = None if self.ports is None else self.ports[argument]
        elif word == LEADER_PORT:
            value = None if self.leader_ports is None else self.leader_ports[argument]
        elif word == "device_uuids":
            value = ",".join(self.device_uuids)
        elif word == "device_indexes":
            # As the program counts: it sees its own cards alone, in this order.
            value = ",".join(map(str, range(len(self.device_uuids))))
        elif word == "utilization":
            value = None if self.utilization is None else f"{self.utilization:.6g}"
        else:
            value = getattr(self, word)
        return f"<{name}>" if value is None else str(value)


def share_of(budget_bytes: int, total_bytes: int) -> float:
    """Return bytes as a share of a card, rounded down to what `{utilization}` prints of it."""
    return int(budget_bytes / total_bytes * 1_000_000) / 1_000_000 if total_bytes else 0.0
