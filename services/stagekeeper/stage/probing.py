"""Looks at a program from outside: HTTP, gRPC health, a TCP connection, a line of its output.

Decided here: when one look has succeeded, and what is said when it has not. Not decided here: how
often is looked, and what follows (`command_stage`). Invariant: a look ends within its time and
leaves no connection.
"""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Mapping
from typing import Any, Final

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from stagekeeper.core.command_stage import GRPC, HTTP, LOG, CommandSpec, Probe
from stagekeeper.core.names import shown
from stagekeeper.stage.http_look import HttpAnswer, NotHttp, http_look
from stagekeeper.wire.error_details import is_own_cancellation
from stagekeeper.wire.transport import CLIENT_OPTIONS

_SHOWN_CHARS: Final = 200
_READ_BYTES: Final = 256 * 1024
_LONGEST_LINE_BYTES: Final = 64 * 1024


_OWN_LINE: Final = re.compile(rb"[0-9-]{10} [0-9:,]+ [A-Z]+ stagekeeper[.\w]*: ")
"""A line of this process's own log, which goes to the same file."""

_Echo = tuple[re.Pattern[bytes], ...]
"""What a line holds, all of it, that only says that the program was looked at."""

_LINE_END: Final = re.compile(rb"[\r\n]+")
"""A bar that is drawn over itself ends each time with a carriage return."""


class Output:
    """What the program writes to the file that is this process's stdout, from now on.

    `news` counts what it said of its own accord: an access log has a line of each look at it, and
    that it was looked at is no sign that it gets on.
    """

    def __init__(self) -> None:
        self._descriptor = os.open("/proc/self/fd/1", os.O_RDONLY | os.O_CLOEXEC)
        self._offset = os.fstat(self._descriptor).st_size
        self._rest = b""
        self._wanted = b""
        self._was_seen = False
        self._echoes: tuple[_Echo, ...] = ()
        self.last_line = ""
        self.news = 0

    def watch_for(self, text: str) -> None:
        """Look for a text in each line from now on; what was read before is not looked at again."""
        self._wanted = text.encode()

    def expect_echo(self, probe: Probe) -> None:
        """Know from now on what a log says of being looked at by this probe."""
        self._echoes = _echoes_of(probe)

    @property
    def was_seen(self) -> bool:
        """Whether a line held the text that is watched for."""
        return self._was_seen

    def read(self) -> bool:
        """Read on, a block at most; return whether there may be more.

        A program can write faster than anybody reads. So where no line is waited for, only the end
        of what it wrote is looked at.
        """
        size = os.fstat(self._descriptor).st_size
        if size < self._offset:
            self._offset, self._rest = 0, b""  # somebody emptied the file, as `> /dev/stdout` does
        is_waiting = bool(self._wanted) and not self._was_seen
        if not is_waiting and size - self._offset > _READ_BYTES:
            self._offset, self._rest = size - _READ_BYTES, b""
        data = os.pread(self._descriptor, _READ_BYTES, self._offset)
        self._offset += len(data)
        self._take(data)
        return len(data) == _READ_BYTES and is_waiting

    def _take(self, data: bytes) -> None:
        was_begun = bool(self._rest)
        *lines, rest = _LINE_END.split(self._rest + data)
        self._rest = rest[-_LONGEST_LINE_BYTES:]
        theirs = [line for line in lines if line.strip() and not _OWN_LINE.match(line)]
        # What is not ended by a newline counts as well: a prompt, for one. Not as news at first,
        # since nobody knows yet what line it will be.
        if rest.strip() and not _OWN_LINE.match(rest):
            self._was_seen |= bool(self._wanted) and self._wanted in rest
            self.last_line = _shown(rest)
        if was_begun and not lines:
            self.news += bool(data)
        self._was_seen |= bool(self._wanted) and any(self._wanted in it for it in theirs)
        told = [line for line in theirs if not self._is_echo(line)]
        self.news += len(told)
        if told and not rest.strip():
            self.last_line = _shown(told[-1])

    def _is_echo(self, line: bytes) -> bool:
        return any(all(it.search(line) for it in echo) for echo in self._echoes)

    def close(self) -> None:
        os.close(self._descriptor)


def _shown(line: bytes) -> str:
    return line.decode(errors="replace").strip()[:_SHOWN_CHARS]


def _echoes_of(probe: Probe) -> tuple[_Echo, ...]:
    """Return the forms of a line that is of a look by this probe."""
    if probe.look == GRPC:
        return ((re.compile(rb"grpc\.health\.v1"),),)
    if probe.look != HTTP:
        return ()
    path = re.escape(probe.target.partition("?")[0].encode())
    before = rb"(?<![\w./:-])" if path == b"/" else b""
    method = b"POST" if probe.body else b"GET"
    request = (
        re.compile(rb"\b" + method + rb"\b"),
        re.compile(before + path + rb"(?![\w/.-])"),
    )
    return request, (re.compile(rb"\bcode [3-5]\d\d, message "),)  # Python's own http.server


class Looks:
    """Looks at one program.

    Args:
        host: where it listens, without brackets.
        command: names its ports.
        ports: their numbers.
        output: what it writes.
    """

    def __init__(
        self, host: str, command: CommandSpec, ports: Mapping[str, int], output: Output
    ) -> None:
        self._host = host
        self._command = command
        self._ports = ports
        self._output = output

    def port(self, name: str) -> int:
        """Return the number of a port; the first one's for an empty name."""
        return self._ports[name or self._command.ports[0]]

    async def look(self, probe: Probe, timeout_s: float) -> str:
        """Look once; return what is wrong, and nothing when all is well."""
        if probe.look == LOG:
            return "" if self._output.was_seen else f"no line with {shown(probe.target)} yet"
        where = f"{self._host} port {self.port(probe.port)}"
        try:
            async with asyncio.timeout(timeout_s):
                if probe.look == HTTP:
                    return await self._look_http(probe)
                if probe.look == GRPC:
                    return await self._look_grpc(probe)
                return await self._look_tcp(probe)
        except TimeoutError:
            return f"{where} has not answered {probe.look} within {timeout_s:g} s"
        except OSError as error:
            return f"{where}: {os.strerror(error.errno) if error.errno else error}"
        except NotHttp as error:
            return f"{where}: {error}"

    async def http(self, port: str, path: str, timeout_s: float) -> HttpAnswer:
        """Ask for one path.

        Raises:
            OSError, NotHttp, TimeoutError: there was no answer.
        """
        async with asyncio.timeout(timeout_s):
            return await http_look(self._host, self.port(port), path)

    async def _look_http(self, probe: Probe) -> str:
        port = self.port(probe.port)
        answer = await http_look(self._host, port, probe.target, body=probe.body)
        asked = f"{'POST' if probe.body else 'GET'} {probe.target}"
        if not 200 <= answer.status < 300:
            where = f", to {shown(answer.location[:_SHOWN_CHARS])}" if answer.location else ""
            return f"{asked} answered {answer.status}{where}: {shown(answer.text[:_SHOWN_CHARS])}"
        if probe.contains not in answer.text:
            return (
                f"{asked} answered without {shown(probe.contains)}: "
                f"{shown(answer.text[:_SHOWN_CHARS])}"
            )
        return ""

    async def _look_grpc(self, probe: Probe) -> str:
        host = f"[{self._host}]" if ":" in self._host else self._host
        target = f"{host}:{self.port(probe.port)}"
        what = f"grpc.health.v1 of {shown(probe.target) if probe.target else 'the server'}"
        async with grpc.aio.insecure_channel(target, options=CLIENT_OPTIONS) as channel:
            stub: Any = health_pb2_grpc.HealthStub(channel)
            try:
                answer = await stub.Check(health_pb2.HealthCheckRequest(service=probe.target))
            except grpc.aio.AioRpcError as error:
                return f"{what} answered {error.code().name}: {error.details()}"
            except asyncio.CancelledError:
                if is_own_cancellation():
                    raise
                return f"{what}: the call was ended from the other side"
        if answer.status == health_pb2.HealthCheckResponse.SERVING:
            return ""
        return f"{what} is {health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)}"

    async def _look_tcp(self, probe: Probe) -> str:
        _, writer = await asyncio.open_connection(self._host, self.port(probe.port))
        writer.close()
        return ""


def metric_sum(text: str, name: str) -> float | None:
    """Sum all series of a metric in Prometheus's text format; None when there is none."""
    total: float | None = None
    for line in text.splitlines():
        if not line.startswith(name) or line[len(name) : len(name) + 1] not in ("{", " ", "\t"):
            continue
        # A label's value may hold anything, braces and blanks included; the number stands behind.
        values = line.rpartition("}")[2] if "}" in line else line[len(name) :]
        try:
            total = (total or 0.0) + float(values.split()[0])
        except (ValueError, IndexError):
            continue
    return total
