"""One demo from the first process to the last, and its exit code.

Decided here: how the demo is kept apart from everything else on the machine, and how it ends. Not
decided here: what happens in between (`course`). Invariant: whatever happens, Ctrl-C at any
moment included, nothing that was started here is left running, and the exit code is 0 only when
every promise was kept.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
import signal
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from stagekeeper.client import StagekeeperError, load_spec

from .course import Course
from .scene import Scene
from .screen import Screen
from .up import Up
from .waiting import DemoFailed

DONE: Final = 0
BROKEN: Final = 1
INTERRUPTED: Final = 130


def run_demo(scene: Scene) -> int:
    """Run the demo in this process and return its exit code."""
    # The client says that its supervisor is away, for programs that know no other way to see it.
    logging.getLogger("stagekeeper.client").addHandler(logging.NullHandler())
    return asyncio.run(_run(scene, Screen()))


async def _run(scene: Scene, screen: Screen) -> int:
    began = time.monotonic()
    directory = Path(tempfile.mkdtemp(prefix="sk-demo-"))
    spec = scene.write_spec(directory)
    up = Up(_words(scene, spec, directory), directory, screen)
    end_request = _EndRequest(up)
    broken: list[str] = []
    try:
        await Course(scene, load_spec(spec).spec.name, up, screen, broken).run()
    except DemoFailed as failure:
        broken.append(str(failure))
    except StagekeeperError as error:
        broken.append(f"{type(error).__name__}: {error}")
    except asyncio.CancelledError:
        if not end_request.is_made:
            raise
    finally:
        end_request.shield()
        screen.say()
        broken += await up.end()
        if not broken:
            shutil.rmtree(directory, ignore_errors=True)
    return _verdict(screen, broken, directory, scene, began, is_interrupted=end_request.is_made)


def _verdict(
    screen: Screen,
    broken: Sequence[str],
    directory: Path,
    scene: Scene,
    began: float,
    *,
    is_interrupted: bool,
) -> int:
    if is_interrupted and not broken:
        screen.say("Interrupted. Nothing is left running.")
        return INTERRUPTED
    if broken:
        for sentence in broken:
            screen.say(f"demo: BROKEN: {sentence}", "bold red")
        screen.say(f"The logs are kept in {directory}")
        return BROKEN
    took_s = time.monotonic() - began
    screen.say(f"Every promise was kept, and nothing is left running. It took {took_s:.0f} s.")
    if scene.last_word:
        screen.say(scene.last_word)
    return DONE


def _words(scene: Scene, spec: Path, directory: Path) -> list[str]:
    """Everything that is private to this run lies in its own folder, and ports are the system's:
    another Stagekeeper of this machine, or another demo, notices nothing."""
    return [
        str(spec),
        f"--agents={scene.agents}",
        *(f"--devices={device}" for device in scene.devices),
        f"--pythonpath={scene.pythonpath}",
        "--endpoint=127.0.0.1:0",
        f"--state-dir={directory}",
        f"--lock-dir={directory / 'locks'}",
    ]


class _EndRequest:
    """Ctrl-C, SIGTERM and a closed terminal: the first ends in order, a second one kills."""

    def __init__(self, up: Up) -> None:
        self.is_made = False
        self._up = up
        self._task = asyncio.current_task()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(number, self._received)

    def shield(self) -> None:
        """Cancel nothing from now on: the end is under way."""
        self._task = None

    def _received(self) -> None:
        self.is_made = True
        self._up.ask_to_end()
        if self._task is not None:
            self._task.cancel()
            self._task = None
