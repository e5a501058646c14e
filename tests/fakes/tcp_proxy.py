"""A TCP proxy that can swallow: flows stay open and nothing passes, as behind a dead router."""

from __future__ import annotations

import asyncio
import contextlib


class TcpProxy:
    """Forwards to `target` (`host:port`) until `swallow_established` or `refuse` is called."""

    def __init__(self, target: str) -> None:
        self._host, _, self._port = target.rpartition(":")
        self._flows: list[dict] = []
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task] = set()
        self.url = ""
        self.connection_count = 0
        self.swallows_new = False

    async def start(self) -> TcpProxy:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.url = f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def stop(self) -> None:
        if self._server is not None:
            self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def swallow_established(self) -> None:
        """Let nothing through on the flows of now; no FIN, no RST."""
        for flow in self._flows:
            flow["passes"] = False

    async def _accept(self, reader, writer) -> None:
        self.connection_count += 1
        flow = {"passes": not self.swallows_new}
        self._flows.append(flow)
        try:
            there_reader, there_writer = await asyncio.open_connection(self._host, int(self._port))
        except OSError:
            writer.close()
            return
        for source, sink in ((reader, there_writer), (there_reader, writer)):
            task = asyncio.create_task(self._pump(source, sink, flow))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _pump(self, source, sink, flow) -> None:
        with contextlib.suppress(OSError):
            while data := await source.read(65536):
                if flow["passes"]:
                    sink.write(data)
                    await sink.drain()
        if flow["passes"]:
            sink.close()
