"""The root's side of the warden of its tree: start one, hear of its end, let it do its work.

Decided here: what the warden holds of the root, which is the read end of a pipe and nothing else:
no output of the root's, no folder, next to nothing of its environment. Not decided here: that there
always is one; whoever owns it waits for `ended` and starts another.

Invariant: the warden never carries the tree's variable itself, so no sweep of the tree ends it.
"""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path
from typing import Final

from stagekeeper.host import warden_program
from stagekeeper.host.process import ProcessHandle, ProcessIdentity, identity_of, spawn
from stagekeeper.host.warden_program import ALL_GONE

WARDEN_ENV: Final = "STAGEKEEPER_WARDEN"
"""Names the place that a warden watches over, for people."""

_PASSED_ON: Final = ("LD_LIBRARY_PATH",)  # the interpreter itself may need it


class Warden:
    """A warden that runs. Made by `start_warden`.

    It ends when this process does, however that is, or once `release` or `close` was called; in
    either case all that belongs to its place is ended first.
    """

    def __init__(self, handle: ProcessHandle, pipe: int) -> None:
        self._handle = handle
        self._pipe = pipe

    @property
    def identity(self) -> ProcessIdentity:
        return self._handle.identity

    async def ended(self) -> bool:
        """Return when the warden has ended, asked or not.

        Returns:
            Whether it did its work and nothing is left; False when it was ended before.
        """
        await self._handle.wait()
        status = self._handle.reap()
        return status is not None and status.code == ALL_GONE

    def release(self) -> None:
        """Let the warden end what is left of its place, and itself, without waiting for it."""
        if self._pipe >= 0:
            try:
                os.write(self._pipe, b"\n")  # a forked copy of this process may hold it open
            except BrokenPipeError:
                pass  # it has ended
            os.close(self._pipe)
            self._pipe = -1

    async def close(self, limit_s: float) -> bool:
        """Let the warden end what is left of its place, and wait for it. Repeats change nothing.

        Returns:
            Whether nothing is left. After `limit_s` it is False, and the warden goes on by itself.
        """
        self.release()
        try:
            is_done = await asyncio.wait_for(self.ended(), limit_s)
        except TimeoutError:
            return False
        self._handle.close()
        return is_done


def start_warden(tree_path: str) -> Warden:
    """Start a warden over all that is at or below a place in a tree of this process.

    Nothing has to be waited for: it holds the pipe from the start, and looks at it when it is up.

    Raises:
        OSError: it could not be started; nothing was.
    """
    own = identity_of(os.getpid())
    assert own is not None
    program = str(Path(warden_program.__file__).resolve())
    passed_on = {name: os.environ[name] for name in _PASSED_ON if name in os.environ}
    waiting = spawn(
        [sys.executable, "-I", "-S", program, tree_path, str(own.pid), str(own.start_ticks)],
        env={**passed_on, WARDEN_ENV: tree_path},
        cwd=Path("/"),
        log_path=Path(os.devnull),
    )
    return Warden(waiting.handle, waiting.take_pipe())
