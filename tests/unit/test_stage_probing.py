"""What a look at a program reads: answers of HTTP in their forms, metrics, lines of output."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator

import pytest

from stagekeeper.core.command_stage import GRPC, HTTP, TCP, CommandSpec, Probe
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


async def test_an_answer_without_content_is_not_waited_for_behind_its_head() -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 204 No Content\r\nConnection: keep-alive\r\n\r\n")
        await reader.read()  # until the other end leaves
        writer.close()

    server = await asyncio.start_server(serve, HOST, 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        looks = Looks(HOST, CommandSpec(("a",), ("p",)), {"p": port}, Output())
        assert await looks.look(Probe(HTTP, "/"), 20) == ""


async def test_where_a_redirect_leads_is_said() -> None:
    head = b"HTTP/1.1 307 Temporary Redirect\r\nLocation: /health/\r\nContent-Length: 0\r\n\r\n"

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(head)
        writer.close()

    server = await asyncio.start_server(serve, HOST, 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        looks = Looks(HOST, CommandSpec(("a",), ("p",)), {"p": port}, Output())
        said = await looks.look(Probe(HTTP, "/health"), 20)
    assert said.startswith("GET /health answered 307, to '/health/'")


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


HEALTH = Probe(HTTP, "/health")


@pytest.mark.parametrize(
    ("probe", "line", "is_news"),
    [
        (HEALTH, b'127.0.0.1 - - [30/Nov/2026 05:27:30] "GET /health HTTP/1.1" 503 -\n', False),
        (HEALTH, b'INFO:     127.0.0.1:40000 - "GET /health HTTP/1.1" 503\n', False),
        (HEALTH, b'[GIN] | 503 | 1ms | 127.0.0.1 | GET      "/health"\n', False),
        (HEALTH, b'{"path": "/health", "method": "GET", "status": 503}\n', False),
        (HEALTH, b"127.0.0.1 - - [30/Nov/2026] code 503, message Service Unavailable\n", False),
        (HEALTH, b'"GET /healthy HTTP/1.1" 200\n', True),
        (HEALTH, b'"POST /health HTTP/1.1" 200\n', True),
        (HEALTH, b"GET weights from /models/1 of 8\n", True),
        (Probe(HTTP, "/health?full=1"), b'"GET /health?full=1 HTTP/1.1" 503\n', False),
        (Probe(HTTP, "/"), b'"GET / HTTP/1.1" 503\n', False),
        (Probe(HTTP, "/"), b"GET weights from /models/1 of 8\n", True),
        (Probe(HTTP, "/v1", body="{}"), b'"POST /v1 HTTP/1.1" 503\n', False),
        (Probe(GRPC), b"INFO /grpc.health.v1.Health/Check UNAVAILABLE\n", False),
        (Probe(TCP), b'"GET /health HTTP/1.1" 503\n', True),
        (HEALTH, b"2026-11-30 01:40:59,123 INFO stagekeeper.stage: it has started\n", False),
    ],
)
def test_what_a_log_says_of_the_looks_at_it_is_no_news(
    written: int, probe: Probe, line: bytes, is_news: bool
) -> None:
    output = Output()
    output.expect_echo(probe)
    os.write(written, line[:12])
    output.read()
    os.write(written, line[12:])  # a line that is seen in halves
    output.read()
    assert bool(output.news) is is_news
    output.close()


def test_a_bar_is_news_each_time_and_its_last_drawing_is_shown(written: int) -> None:
    output = Output()
    counts = []
    for done in (10, 20, 30):
        os.write(written, b"\rloading %d%%" % done)
        output.read()
        counts.append(output.news)
    assert counts[0] < counts[1] < counts[2]
    assert output.last_line == "loading 30%"
    output.close()


def test_however_much_is_written_a_read_takes_a_block_and_a_line_is_found(written: int) -> None:
    os.write(written, b"earlier\n")
    output, waiting = Output(), Output()
    waiting.watch_for("at last")
    for _ in range(100):
        os.write(written, b"on and on\n" * 10_000)
    os.write(written, b"ready at last\n")

    assert output.read() is False
    assert (output.news > 0, output.last_line) == (True, "ready at last")
    blocks = 1
    while waiting.read():
        blocks += 1
    assert blocks > 30 and waiting.was_seen
    output.close()
    waiting.close()


def test_output_is_read_on_where_somebody_emptied_the_file(written: int) -> None:
    output = Output()
    output.watch_for("ready")
    os.write(written, b"loading the weights, all of them\n")
    output.read()
    os.ftruncate(written, 0)
    os.write(written, b"ready\n")
    output.read()
    assert output.was_seen
    output.close()
