"""One HTTP request to a program on this host, and the beginning of its answer.

For probes and metrics alone: no TLS, no redirects, no proxy, one connection for one request.
Decided here: how much of an answer is read. Invariant: the caller's timeout bounds all of it, and
nothing is left when it is over.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Final

MOST_READ_BYTES: Final = 4 * 1024 * 1024
"""Metrics of a busy server have some hundred KiB; what is behind this is not looked at."""

_WITHOUT_CONTENT: Final = frozenset({204, 205, 304})
_LINE_BYTES: Final = 64 * 1024
_MOST_HEADERS: Final = 200


class NotHttp(Exception):
    """The answer is none of HTTP; the message says what it is instead."""


@dataclass(frozen=True, slots=True)
class HttpAnswer:
    """A status, and the text behind it as far as it was read.

    `location` is where a redirect leads, which is not followed.
    """

    status: int
    text: str
    location: str = ""


async def http_look(host: str, port: int, path: str, *, body: str = "") -> HttpAnswer:
    """Ask once: GET, or POST with a JSON body.

    Raises:
        OSError: nobody listens there, or the connection broke.
        NotHttp: what came is no answer.
    """
    reader, writer = await asyncio.open_connection(host, port, limit=_LINE_BYTES)
    try:
        data = body.encode()
        where = f"[{host}]" if ":" in host else host
        head = [
            f"{'POST' if data else 'GET'} {path} HTTP/1.1",
            f"Host: {where}:{port}",
            "User-Agent: stagekeeper",
            "Accept: */*",
            "Connection: close",
        ]
        if data:
            head += ["Content-Type: application/json", f"Content-Length: {len(data)}"]
        writer.write("\r\n".join(head).encode() + b"\r\n\r\n" + data)
        await writer.drain()
        return await _answer(reader)
    except (asyncio.IncompleteReadError, ValueError) as error:
        raise NotHttp(f"the answer broke off: {error}") from error
    finally:
        writer.close()


async def _answer(reader: asyncio.StreamReader) -> HttpAnswer:
    status, headers = 100, dict[str, str]()
    while 100 <= status < 200:  # an interim answer comes before the answer
        status = _status_of(await reader.readline())
        headers = await _headers(reader)
    if status in _WITHOUT_CONTENT:
        content = b""  # however long the connection stays open behind it
    elif headers.get("transfer-encoding", "").lower().endswith("chunked"):
        content = await _chunks(reader)
    elif "content-length" in headers:
        content = await reader.readexactly(min(int(headers["content-length"]), MOST_READ_BYTES))
    else:
        content = await _until_end(reader)
    return HttpAnswer(status, content.decode(errors="replace"), headers.get("location", ""))


def _status_of(line: bytes) -> int:
    words = line.split(maxsplit=2)
    if len(words) < 2 or not words[0].startswith(b"HTTP/1.") or not words[1].isdigit():
        raise NotHttp(f"the answer begins with {line[:40]!r}" if line else "there was no answer")
    return int(words[1])


async def _headers(reader: asyncio.StreamReader) -> dict[str, str]:
    headers: dict[str, str] = {}
    for _ in range(_MOST_HEADERS):
        line = (await reader.readline()).decode("latin-1")
        if not line.strip():
            return headers
        name, _, value = line.partition(":")
        headers[name.strip().lower()] = value.strip()
    raise NotHttp(f"the answer has more than {_MOST_HEADERS} headers")


async def _chunks(reader: asyncio.StreamReader) -> bytes:
    content = bytearray()
    while len(content) < MOST_READ_BYTES:
        size = int((await reader.readline()).split(b";")[0], 16)
        if size == 0:
            break
        content += await reader.readexactly(min(size, MOST_READ_BYTES))
        await reader.readline()
    return bytes(content)


async def _until_end(reader: asyncio.StreamReader) -> bytes:
    content = bytearray()
    while len(content) < MOST_READ_BYTES and (some := await reader.read(_LINE_BYTES)):
        content += some
    return bytes(content)
