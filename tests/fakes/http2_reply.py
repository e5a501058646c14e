"""How one reply is taken out of an HTTP/2 connection that goes on.

Dropping the bytes of a reply would tear the header compression and the flow control of the whole
connection, and the next call would fail for a reason that no network has. So a reply's frames are
readdressed to a stream that nobody opened: its receiver decodes and ignores them, as it must for
streams that it has cancelled (RFC 9113 §5.1), and whoever asked hears nothing.

Invariant: what passes is a sequence of whole frames, in their order.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from enum import Enum

HEADERS = 0x1
PING = 0x6
GOAWAY = 0x7
_DATA, _CONTINUATION = 0x0, 0x9

_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_HEADER_BYTES = 9
_NOBODYS_STREAM = 0x7FFF_FFFF


class Direction(Enum):
    UP = "client to server"
    DOWN = "server to client"


class ReplySwallower:
    """How many replies are still to be swallowed, and how many were, over all flows of a proxy.

    `frames` counts what came by, by direction and type.
    """

    def __init__(self) -> None:
        self.wanted = 0
        self.swallowed = 0
        self.frames: Counter[tuple[Direction, int]] = Counter()

    def flow(self) -> FlowReplies:
        return FlowReplies(self)


class FlowReplies:
    """The frames of one flow. One that is not HTTP/2 passes as it is."""

    def __init__(self, swallower: ReplySwallower) -> None:
        self._swallower = swallower
        self._is_http2: bool | None = None
        self._up = bytearray()
        self._down = bytearray()
        self._mute: set[int] = set()
        self._begun: set[int] = set()

    def passed(self, way: Direction, data: bytes) -> bytes:
        """Return what of these bytes, and of those held before, goes on now."""
        if self._is_http2 is False:
            return data
        if way is Direction.UP:
            return self._passed_up(data)
        if self._is_http2 is None and data[3:4] != b"\x04":  # the server speaks first: SETTINGS?
            self._is_http2 = False
            return data
        self._down += data
        return b"".join(self._readdressed(frame) for frame in _taken(self._down))

    def _passed_up(self, data: bytes) -> bytes:
        if self._is_http2 is None:
            start = bytes(self._up) + data
            if not start.startswith(_PREFACE):
                if _PREFACE.startswith(start):
                    self._up = bytearray(start)
                    return b""
                self._is_http2 = False
                return start
            self._is_http2 = True
            self._up = bytearray(start[len(_PREFACE) :])
            return _PREFACE + b"".join(self._noted(frame) for frame in _taken(self._up))
        self._up += data
        return b"".join(self._noted(frame) for frame in _taken(self._up))

    def _noted(self, frame: bytes) -> bytes:
        """See whether a request begins here whose reply is to be swallowed."""
        self._swallower.frames[Direction.UP, frame[3]] += 1
        stream = _stream(frame)
        if frame[3] == HEADERS and stream not in self._begun:
            self._begun.add(stream)
            if self._swallower.wanted > 0:
                self._swallower.wanted -= 1
                self._mute.add(stream)
        return frame

    def _readdressed(self, frame: bytes) -> bytes:
        self._swallower.frames[Direction.DOWN, frame[3]] += 1
        stream = _stream(frame)
        if stream not in self._mute:
            return frame
        if frame[3] == HEADERS and frame[4] & 0x1:  # END_STREAM: the reply is whole
            self._swallower.swallowed += 1
        if frame[3] not in (_DATA, HEADERS, _CONTINUATION):
            return b""  # a reset of the stream would be an answer
        return frame[:5] + _NOBODYS_STREAM.to_bytes(4, "big") + frame[_HEADER_BYTES:]


def _stream(frame: bytes) -> int:
    return int.from_bytes(frame[5:_HEADER_BYTES], "big") & 0x7FFF_FFFF


def _taken(held: bytearray) -> Iterator[bytes]:
    """Take the whole frames off the front."""
    while len(held) >= _HEADER_BYTES:
        end = _HEADER_BYTES + int.from_bytes(held[:3], "big")
        if len(held) < end:
            return
        frame = bytes(held[:end])
        del held[:end]
        yield frame
