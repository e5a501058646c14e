"""What a process of an actor tree is told when it starts, and what it answers: one JSON line each.

The launch line goes over stdin and not over the command line or the environment, since it holds the
tree's token. Both ends are of one version, so nothing here is lenient.

Invariant: the tree path of a process is the tree's id and the instance ids of the processes that
own it, down to its own, joined by "/". Whatever it starts inherits it in its environment.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field


@dataclass(frozen=True, slots=True)
class ProcLaunch:
    """What one process of an actor tree is told.

    Attributes:
        instance_id: a UUID, new for every process that is started.
        name: for people.
        tree_path: the value of `tree_sweep.TREE_ENV`; ends with the instance id.
        token: of the tree; every call has to carry it.
        listen_host: the address that its server binds, with a port of the kernel's choice.
        lease_s: how long its owner may be silent.
        boot_id: of this boot of the host.
        owner: who started it, for people.
        pythonpath: folders that come before all others where it looks for modules, so that
            `module:qualname` means what it means to its owner.
        extra: what the owner and the process agree on besides.
    """

    instance_id: str
    name: str
    tree_path: str
    token: str = field(repr=False)
    listen_host: str
    lease_s: float
    boot_id: str
    owner: str
    pythonpath: list[str] = field(default_factory=list)
    extra: dict[str, str] = field(default_factory=dict)

    def to_line(self) -> bytes:
        return json.dumps(asdict(self)).encode() + b"\n"

    @classmethod
    def from_line(cls, line: bytes) -> ProcLaunch:
        """Read what `to_line` wrote.

        Raises:
            ValueError: it is no launch line.
        """
        try:
            return cls(**json.loads(line))
        except TypeError as error:
            raise ValueError(f"no launch line: {error}") from None


@dataclass(frozen=True, slots=True)
class ProcReport:
    """The answer of a process that was started: where it listens, or why it cannot go on."""

    address: str = ""
    problem: str = ""

    def to_line(self) -> bytes:
        return json.dumps(asdict(self)).encode() + b"\n"

    @classmethod
    def from_line(cls, line: bytes) -> ProcReport:
        """Read what `to_line` wrote.

        Raises:
            ValueError: it is no report.
        """
        try:
            return cls(**json.loads(line))
        except TypeError as error:
            raise ValueError(f"no report: {error}") from None
