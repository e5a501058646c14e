"""One process of an actor tree started by hand, as an owner would start it, with a known token.

And the connection of an owner to it, frame by frame: what is sent is what the test says.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc

from stagekeeper.host.proc_launch import LaunchedProc, launch, own_pythonpath
from stagekeeper.host.proc_line import ProcLaunch
from stagekeeper.host.process import boot_id
from stagekeeper.v1 import actor_service_pb2 as actor_pb
from stagekeeper.v1 import stage_service_pb2 as pb
from stagekeeper.v1.actor_service_pb2_grpc import ActorServiceStub
from stagekeeper.v1.stage_service_pb2_grpc import StageServiceStub
from stagekeeper.v1.types_pb2 import Payload
from stagekeeper.wire.payload import decode, encode_arguments

TOKEN = "a secret of the test"
LIMIT_S = 20.0
_OPTIONS = (
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.max_receive_message_length", 32 * 1024 * 1024),
    ("grpc.max_send_message_length", 64 * 1024 * 1024),
)


class TreeProcess:
    """A process that hosts actors. Used as `async with tree_process() as it`."""

    def __init__(
        self, launched: Any, log: Any, channel: grpc.aio.Channel, instance_id: str = ""
    ) -> None:
        self.launched: LaunchedProc = launched
        self.instance_id = instance_id or launched.instance_id
        self.channel = channel
        self.actors: Any = ActorServiceStub(channel)
        self.stages: Any = StageServiceStub(channel)
        self._log: Path = log

    @property
    def output(self) -> str:
        return self._log.read_text(errors="replace")

    @property
    def is_alive(self) -> bool:
        return not self.launched.handle.has_exited

    def hello(self, session_id: str = "owner", **fields: Any) -> pb.Hello:
        sound: dict[str, Any] = {
            "token": TOKEN,
            "instance_id": "the test",
            "peer_instance_id": self.instance_id,
            "session_id": session_id,
            "lease_s": 600.0,
            "beat_s": 150.0,
            "boot_id": boot_id(),
        }
        return pb.Hello(**{**sound, **fields})

    def spawn_request(self, session_id: str, entrypoint: str, **fields: Any) -> Any:
        sound: dict[str, Any] = {
            "token": TOKEN,
            "instance_id": self.instance_id,
            "session_id": session_id,
            "actor_id": str(uuid.uuid4()),
            "entrypoint": entrypoint,
            "arguments": encode_arguments([], {}),
            "mesh_id": str(uuid.uuid4()),
            "mesh_name": "workers",
            "size": 1,
            "incarnation": 1,
            "owner_path": ["root"],
        }
        return actor_pb.SpawnActorRequest(**{**sound, **fields})

    async def spawn(self, session_id: str, entrypoint: str, **fields: Any) -> str:
        """Make an actor; return its id."""
        request = self.spawn_request(session_id, entrypoint, **fields)
        answer = await self.actors.SpawnActor(request, timeout=LIMIT_S)
        assert not answer.HasField("failure"), answer.failure.message
        return str(request.actor_id)

    @asynccontextmanager
    async def connected(self, session_id: str = "owner", **fields: Any) -> AsyncIterator[Frames]:
        async with connected_to(self.channel, self.hello(session_id, **fields)) as frames:
            yield frames


@asynccontextmanager
async def connected_to(channel: grpc.aio.Channel, hello: pb.Hello) -> AsyncIterator[Frames]:
    """Connect to a process, and read its hello."""
    stream: Any = StageServiceStub(channel).Connect()
    frames = Frames(stream)
    try:
        await frames.send(pb.Frame(hello=hello))
        frames.answer = (await frames.read()).hello
        yield frames
    finally:
        stream.cancel()


class Frames:
    """One connection, by hand. Calls are made one after the other.

    Attributes:
        answer: the hello of the other end.
        news: failures that it told of.
        stray: errors that are no call's.
    """

    def __init__(self, stream: Any) -> None:
        self.answer = pb.Hello()
        self.news: list[pb.RankFailed] = []
        self.stray: list[pb.CallError] = []
        self._stream = stream
        self._waiting: list[pb.Frame] = []
        self._last_id = 0

    async def send(self, *frames: pb.Frame) -> None:
        await self._stream.write(pb.ConnectRequest(frames=frames))

    async def read(self) -> pb.Frame:
        while not self._waiting:
            response = await asyncio.wait_for(self._stream.read(), LIMIT_S)
            if response is grpc.aio.EOF:
                raise EOFError("the other end has closed the connection")
            self._waiting += response.frames
        return self._waiting.pop(0)

    async def call(self, target_id: str, endpoint: str, *args: Any, **fields: Any) -> pb.Frame:
        """Return the frame that answers a call: a reply or an error."""
        self._last_id += 1
        call = pb.CallFrame(
            target_id=target_id, endpoint=endpoint, payload=encode_arguments(args, {}), **fields
        )
        await self.send(pb.Frame(frame_id=self._last_id, call=call))
        return await self.answered(self._last_id)

    async def answered(self, frame_id: int) -> pb.Frame:
        while True:
            frame = await self.read()
            if frame.frame_id == frame_id and frame.frame_id:
                return frame
            self._keep(frame)

    async def value(self, target_id: str, endpoint: str, *args: Any) -> Any:
        frame = await self.call(target_id, endpoint, *args)
        assert frame.HasField("reply"), frame.error.message
        return decode(frame.reply.payload)

    async def others(self) -> int:
        """Ask how many actors there are of other sessions."""
        await self.send(pb.Frame(beat=pb.Beat()))
        while True:
            frame = await self.read()
            if frame.HasField("beat"):
                return frame.beat.other_actor_count
            self._keep(frame)

    def _keep(self, frame: pb.Frame) -> None:
        if frame.HasField("failure"):
            self.news.append(frame.failure)
        elif frame.HasField("error") and not frame.frame_id:
            self.stray.append(frame.error)


def cast(target_id: str, endpoint: str, payload: Payload | None = None) -> pb.Frame:
    call = pb.CallFrame(target_id=target_id, endpoint=endpoint, payload=payload, is_cast=True)
    return pb.Frame(call=call)


@asynccontextmanager
async def tree_process(**fields: Any) -> AsyncIterator[TreeProcess]:
    """Start a process of a tree of its own; nothing of it is left at the end."""
    folder = Path(tempfile.mkdtemp(prefix="sk-tp-"))
    instance_id = str(uuid.uuid4())
    sound: dict[str, Any] = {
        "instance_id": instance_id,
        "name": "workers",
        "tree_path": f"{uuid.uuid4()}/{instance_id}",
        "token": TOKEN,
        "listen_host": "127.0.0.1",
        "lease_s": 600.0,
        "boot_id": boot_id(),
        "owner": "a test",
        "pythonpath": own_pythonpath(),
    }
    log = folder / "log"
    launched = await launch(
        ProcLaunch(**{**sound, **fields}),
        env=os.environ,
        cwd=folder,
        log_path=log,
        start_timeout_s=60,
    )
    try:
        async with grpc.aio.insecure_channel(launched.address, options=_OPTIONS) as channel:
            yield TreeProcess(launched, log, channel)
    finally:
        launched.kill()
        await launched.gone()
        shutil.rmtree(folder, ignore_errors=True)
