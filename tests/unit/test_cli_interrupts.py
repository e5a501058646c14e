"""Ctrl-C before the command line is looked at, and after it was answered."""

from __future__ import annotations

import signal
import subprocess
import sys

# A module that sends SIGINT while it is loaded stands in for one of those that `main` loads.
INTERRUPTED_WHILE_LOADING = """
import os, signal, sys

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == "stagekeeper.cli.later":
            os.kill(os.getpid(), signal.SIGINT)

{before}
sys.meta_path.insert(0, Finder())
from stagekeeper.cli.main import main
print("loaded", signal.getsignal(signal.SIGINT) is signal.default_int_handler)
"""


def load(before=""):
    return subprocess.run(
        [sys.executable, "-c", INTERRUPTED_WHILE_LOADING.format(before=before)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_ctrl_c_while_modules_are_loaded_ends_without_a_word():
    ended = load()

    assert (ended.returncode, ended.stdout, ended.stderr) == (-signal.SIGINT, "", "")


def test_ctrl_c_that_the_caller_ignores_stays_ignored():
    ended = load("signal.signal(signal.SIGINT, signal.SIG_IGN)")

    assert (ended.returncode, ended.stdout) == (0, "loaded False\n")


def test_ctrl_c_raises_again_once_everything_is_loaded():
    nobody = "Finder.find_spec = lambda *_: None"

    assert load(nobody).stdout == "loaded True\n"
