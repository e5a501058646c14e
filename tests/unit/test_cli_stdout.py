"""Stdout that is closed, has no letters for what is printed, or is not read any more."""

from __future__ import annotations

import asyncio
import io
import json
import os
import subprocess
import sys
from contextlib import contextmanager

import pytest

from stagekeeper.cli.reader import while_read
from stagekeeper.cli.stdout import escape_what_has_no_letter

SAYING = "from stagekeeper.cli.main import main; import sys; sys.argv[1:] = ['--version']; main()"


@pytest.mark.parametrize("closed", [0, 1, 2])
def test_a_descriptor_that_is_closed_at_the_start_is_no_bug(closed):
    done = subprocess.run(
        ["sh", "-c", f'exec "$0" -c "$1" {closed}>&-', sys.executable, SAYING],
        capture_output=True,
        text=True,
        timeout=60,
    )

    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("stagekeeper ") or closed == 1


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
def test_text_without_letters_is_escaped_as_json_reads_it(monkeypatch, encoding):
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding=encoding))
    escape_what_has_no_letter()
    texts = ["é", "中", "🙂", "\udcff"]

    print(json.dumps(texts, ensure_ascii=False), flush=True)

    assert json.loads(written.getvalue().decode(encoding)) == texts


@contextmanager
def piped(monkeypatch):
    """Stdout as a pipe; the test closes the end that is read."""
    read, write = os.pipe()
    with os.fdopen(write, "w") as stdout, os.fdopen(read) as reader:
        monkeypatch.setattr(sys, "stdout", stdout)
        yield reader


async def test_what_waits_ends_when_its_reader_has_left(monkeypatch):
    ended = asyncio.Event()

    async def work() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    with piped(monkeypatch) as reader:
        following = asyncio.create_task(while_read(work()))
        await asyncio.sleep(0)
        reader.close()
        with pytest.raises(BrokenPipeError):
            await asyncio.wait_for(following, 10)
    assert ended.is_set()


async def test_what_is_read_goes_on_to_its_end_or_its_cancellation(monkeypatch):
    with piped(monkeypatch):
        assert await while_read(asyncio.sleep(0, "done")) == "done"

        following = asyncio.create_task(while_read(asyncio.Event().wait()))
        await asyncio.sleep(0)
        following.cancel()
        with pytest.raises(asyncio.CancelledError):
            await following
