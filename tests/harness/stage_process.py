"""One stage process started by hand, as an agent would start it, and its two gRPC doors."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import grpc

from stagekeeper.runtime.launch import (
    INSTANCE_ENV,
    LAUNCH_FILE,
    LOG_FILE,
    START_LINE,
    Launch,
    write_launch,
)
from stagekeeper.v1 import stage_control_service_pb2 as control_pb
from stagekeeper.v1 import stage_service_pb2, types_pb2
from stagekeeper.v1.stage_control_service_pb2_grpc import StageControlServiceStub
from stagekeeper.v1.stage_service_pb2_grpc import StageServiceStub
from stagekeeper.wire.payload import MSGPACK, decode, encode_arguments
from tests.harness.waiting import wait_for

STAGES = Path(__file__).parent.parent / "stages"

State = control_pb.WatchStageResponse

# A socket that is not there yet is looked for every few milliseconds, not after a second.
_IMPATIENT = (
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.initial_reconnect_backoff_ms", 10),
    ("grpc.min_reconnect_backoff_ms", 10),
    ("grpc.max_reconnect_backoff_ms", 10),
    ("grpc.max_receive_message_length", 32 * 1024 * 1024),
    ("grpc.max_send_message_length", 64 * 1024 * 1024),
)


class StageProcess:
    """Used as `async with StageProcess("module:Class", …) as stage`; killed at the end.

    Args:
        entrypoint: found in tests/stages.
        launch: further fields of the launch file.

    Attributes:
        program: what of Python's command line is the program, before the launch file.
    """

    program: Sequence[str] = ("-m", "stagekeeper.stage")

    def __init__(self, entrypoint: str, **launch: Any) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix="sk-st-"))
        fields: dict[str, Any] = {
            "instance_id": str(uuid.uuid4()),
            "deployment": "demo",
            "replica_index": 0,
            "stage_id": 0,
            "stage_name": "one",
            "stage_count": 1,
            "pythonpath": [str(STAGES)],
            "control_socket": str(self.directory / "control"),
            "run_dir": str(self.directory / "run"),
            "cache_dir": str(self.directory / "cache"),
        }
        self.launch = Launch(entrypoint=entrypoint, **{**fields, **launch})
        self.log = self.directory / LOG_FILE
        self._process: subprocess.Popen[bytes] | None = None
        self._control_channel: grpc.aio.Channel | None = None
        self._channel: grpc.aio.Channel | None = None

    async def __aenter__(self) -> Self:
        self.spawn()
        self.go()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for channel in (self._control_channel, self._channel):
            if channel is not None:
                await channel.close()
        self.close()

    def close(self) -> None:
        """SIGKILL all of the process's session, reap, and remove its files."""
        if self._process is not None:
            try:
                os.killpg(self._process.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
            self._process.wait(timeout=10)
            if self._process.stdin is not None:
                self._process.stdin.close()
        shutil.rmtree(self.directory, ignore_errors=True)

    # --- the process

    def spawn(self, *, own_session: bool = True) -> None:
        """Start the process; it waits for `go`."""
        path = self.directory / LAUNCH_FILE
        write_launch(self.launch, path)
        env = {
            **os.environ,
            "PYTHONUNBUFFERED": "1",
            INSTANCE_ENV: self.launch.instance_id,
            "PYTHONPATH": "",
        }
        with self.log.open("ab") as output:
            self._process = subprocess.Popen(
                [sys.executable, *self.program, str(path)],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                env=env,
                start_new_session=own_session,
            )

    def go(self, line: bytes = START_LINE) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(line)
        self.process.stdin.close()

    @property
    def process(self) -> subprocess.Popen[bytes]:
        assert self._process is not None, "not spawned"
        return self._process

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def output(self) -> str:
        return self.log.read_text(errors="replace")

    async def ended(self, *, within_s: float = 20.0) -> int:
        """Wait for the end and return the exit code (negative: a signal)."""
        await wait_for(
            lambda: self.process.poll() is not None, "the stage process ends", within_s=within_s
        )
        assert self.process.returncode is not None
        return self.process.returncode

    # --- the control socket

    @property
    def control_channel(self) -> grpc.aio.Channel:
        if self._control_channel is None:
            self._control_channel = grpc.aio.insecure_channel(
                f"unix:{self.launch.control_socket}", options=_IMPATIENT
            )
        return self._control_channel

    @property
    def control(self) -> Any:
        return StageControlServiceStub(self.control_channel)

    def watch(self) -> Any:
        """Open the watch stream; it waits for the socket to appear."""
        return self.control.WatchStage(
            control_pb.WatchStageRequest(instance_id=self.launch.instance_id), wait_for_ready=True
        )

    async def until(self, condition: Callable[[State], Any]) -> State:
        """Watch until a message fulfils `condition`, and return that message."""
        stream = self.watch()
        last: Any = None
        try:
            async for last in stream:
                if condition(last):
                    return last
        finally:
            stream.cancel()
        raise AssertionError(f"the watch ended first; its last message: {last}")

    async def ready(self) -> State:
        def is_up(state: State) -> bool:
            if state.state == types_pb2.SHARD_STATE_FAILED:
                raise AssertionError(f"the start failed: {state.traceback}\n{self.output}")
            return state.state == types_pb2.SHARD_STATE_READY

        state = await self.until(is_up)
        self._channel = grpc.aio.insecure_channel(state.addresses[0].url, options=_IMPATIENT)
        return state

    async def end(self, budget_s: float = 5.0, instance_id: str | None = None) -> None:
        await self.control.EndStage(
            control_pb.EndStageRequest(
                instance_id=self.launch.instance_id if instance_id is None else instance_id,
                budget_s=budget_s,
                reason="the test asks for it",
            )
        )

    # --- the port

    @property
    def channel(self) -> grpc.aio.Channel:
        assert self._channel is not None, "await ready() first"
        return self._channel

    @property
    def calls(self) -> Any:
        return StageServiceStub(self.channel)

    def request(
        self,
        endpoint: str,
        *args: Any,
        instance_id: str = "",
        content_type: str = MSGPACK,
        **kwargs: Any,
    ) -> stage_service_pb2.CallRequest:
        return stage_service_pb2.CallRequest(
            instance_id=instance_id,
            endpoint=endpoint,
            payload=encode_arguments(args, kwargs, content_type),
        )

    async def call(
        self, endpoint: str, *args: Any, timeout: float | None = 20.0, **kwargs: Any
    ) -> Any:
        """Call and return the decoded answer."""
        request = self.request(endpoint, *args, **kwargs)
        return decode((await self.calls.Call(request, timeout=timeout)).payload)

    def stream(self, endpoint: str, *args: Any, timeout: float | None = 20.0, **kwargs: Any) -> Any:
        """Open a CallStream."""
        request = self.request(endpoint, *args, **kwargs)
        return self.calls.CallStream(
            stage_service_pb2.CallStreamRequest(
                instance_id=request.instance_id,
                endpoint=request.endpoint,
                payload=request.payload,
            ),
            timeout=timeout,
        )
