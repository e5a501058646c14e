"""A machine with NVIDIA cards, as far as NVML tells: the fake library, and the file that it reads.

The real nvidia-ml-py finds the library by `LD_LIBRARY_PATH`, and loads it once a process: so it is
always another process that sees the cards, started with `env`.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from dataclasses import dataclass, field
from pathlib import Path

SOURCE = Path(__file__).parent / "nvml" / "fake_nvml.c"
LIBRARY = "libnvidia-ml.so.1"
GIB = 2**30

LIB_RM_VERSION_MISMATCH = 18
NOT_SUPPORTED = 3
GPU_IS_LOST = 15
UNKNOWN = 999


def build_library(directory: Path) -> Path:
    """Build the fake NVML with the C compiler; return the folder that it is in."""
    compiler = shutil.which("cc")
    assert compiler is not None, (
        "the tests of NVIDIA cards build a fake libnvidia-ml.so.1 and need a C compiler: install "
        "one that is called cc (on Debian: apt-get install gcc libc6-dev)"
    )
    command = [compiler, "-Wall", "-Wextra", "-Werror", "-O1", "-shared", "-fPIC"]
    command += [f"-Wl,-soname,{LIBRARY}", "-o", str(directory / LIBRARY), str(SOURCE)]
    built = subprocess.run(command, capture_output=True, text=True)
    assert built.returncode == 0, f"{SOURCE} does not compile:\n{built.stderr}"
    return directory


@dataclass
class FakeNvml:
    """The cards of a machine; `facts` are lines as the library reads them, `card` puts one.

    What is changed here is seen by processes that run already, at their next call.
    """

    built_in: Path
    directory: Path
    facts: list[str] = field(default_factory=list)
    more_env: dict[str, str] = field(default_factory=dict)

    @property
    def env(self) -> dict[str, str]:
        """What a process needs in its environment to see these cards."""
        return {
            **self.more_env,
            "LD_LIBRARY_PATH": str(self.built_in),
            "FAKE_NVML": str(self._file),
            "FAKE_NVML_CALLS": str(self._calls),
        }

    @property
    def _file(self) -> Path:
        return self.directory / "nvml.txt"

    @property
    def _calls(self) -> Path:
        return self.directory / "calls.txt"

    @property
    def calls(self) -> list[str]:
        """The names of all calls so far."""
        return self._calls.read_text().split() if self._calls.exists() else []

    def card(
        self, uuid: str, total_bytes: int = 80 * GIB, used_bytes: int = 0, name: str = "NVIDIA H200"
    ) -> None:
        """Add a card, or have it say something else from now on, in one step."""
        fact = f"card {uuid} {total_bytes} {used_bytes} {name}"
        known = [number for number, it in enumerate(self.facts) if it.startswith(f"card {uuid} ")]
        if not known:
            self.says(fact)
            return
        self.facts[known[0]] = fact
        self.write()

    def says(self, *facts: str) -> None:
        """Add facts."""
        self.facts += facts
        self.write()

    def says_no_more(self, *beginnings: str) -> None:
        """Take back all facts that begin so."""
        self.facts = [fact for fact in self.facts if not fact.startswith(beginnings)]
        self.write()

    def unload(self) -> None:
        """Be a machine whose driver is not loaded."""
        self._file.unlink(missing_ok=True)

    def write(self) -> None:
        new = self._file.with_suffix(".new")
        new.write_text("".join(f"{fact}\n" for fact in self.facts))
        os.replace(new, self._file)
