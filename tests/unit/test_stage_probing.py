"""What a look at a program reads: answers of HTTP in their forms, metrics, lines of output."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator

import pytest

from stagekeeper.core.command_stage import HTTP, CommandSpec, Probe
from stagekeeper.stage.http_look import HttpAnswer, NotHttp, http_look
from stagekeeper.stage.probing import Looks, Output, metric_sum

HOST = "127.0.0.1"


async def asked(answer: bytes, path: str = "/", body: str = "") -> tuple[HttpAnswer, bytes]:
    """Ask a server that gives this answer; return what came of it, and what it was asked."""
    heard = b""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal heard
        heard = await reader.readuntil(b"\r\n\r\n") + await reader.readexactly(len(body))
        writer.write(answer)
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, HOST, 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        return await http_look(HOST, port, path, body=body), heard


@pytest.mark.parametrize(
    ("answer", "status", "text"),
    [
        (b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nhi, and more", 200, "hi"),
        (b"HTTP/1.0 503 Busy\r\n\r\nto the end", 503, "to the end"),
        (
            b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
            b"2;x=y\r\nhi\r\n3\r\n \xc3\xa9\r\n0\r\n\r\n",
            200,
            "hi é",
        ),
        (b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 204 No\r\n\r\n", 204, ""),
    ],
)
async def test_an_answer_is_read_in_every_form(answer: bytes, status: int, text: str) -> None:
    found, _ = await asked(answer)
    assert found == HttpAnswer(status, text)


async def test_a_body_is_posted_as_json() -> None:
    _, heard = await asked(b"HTTP/1.1 200 OK\r\n\r\n", "/v1/x?y=1", '{"a": "é"}')
    head = heard.decode()
    assert head.startswith("POST /v1/x?y=1 HTTP/1.1\r\nHost: 127.0.0.1:")
    assert "Content-Type: application/json\r\nContent-Length: 11\r\n" in head


@pytest.mark.parametrize(
    "answer",
    [b"", b"SSH-2.0-x\r\n", b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nhi", b"x" * 70_000],
)
async def test_what_is_no_answer_is_said_to_be_none(answer: bytes) -> None:
    with pytest.raises(NotHttp):
        await asked(answer)


async def test_a_server_that_never_answers_is_left_when_the_time_is_over() -> None:
    async def silence(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    server = await asyncio.start_server(silence, HOST, 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        looks = Looks(HOST, CommandSpec(("a",), ("p",)), {"p": port}, Output())
        said = await looks.look(Probe(HTTP, "/"), 0.05)
    assert said == f"127.0.0.1 port {port} has not answered http within 0.05 s"


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("running 3\n", 3.0),
        ('running{a="x y}"} 2 1395066363000\nrunning{a="z"} 1e0\n', 3.0),
        ("# running 9\nrunning_total 9\nnot_running 9\n", None),
        ("running what\n", None),
        ("", None),
    ],
)
def test_all_series_of_a_metric_are_summed(text: str, value: float | None) -> None:
    assert metric_sum(text, "running") == value


@pytest.fixture
def written(tmp_path, monkeypatch) -> Iterator[int]:
    """A file in the place of stdout; yields a descriptor to write to it."""
    descriptor = os.open(tmp_path / "log", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    os.write(descriptor, b"ready, says an earlier line\n")
    opened = os.open
    monkeypatch.setattr(os, "open", lambda path, flags: opened(tmp_path / "log", flags))
    yield descriptor
    os.close(descriptor)


def test_output_is_looked_at_from_its_beginning_on_also_in_pieces(written: int) -> None:
    output = Output()
    output.watch_for("ready")
    os.write(written, b"loading\n2026-11-30 01:40:59,123 INFO stagekeeper.stage: ready\nstill rea")
    output.read()
    assert (output.was_seen, output.last_line) == (False, "still rea")
    os.write(written, b"dy\n")
    output.read()
    assert (output.was_seen, output.last_line) == (True, "still ready")
    output.close()
