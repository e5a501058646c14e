"""What `stagekeeper init` writes: a deployment of two stages that runs on any laptop.

Decided here: the texts. They are read by people who have seen nothing of Stagekeeper yet, so every
line in them is something to change. Invariant: nothing that exists is overwritten.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from stagekeeper.cli.exits import CliError, ExitCode

SPEC_FILE: Final = "spec.yaml"
STAGES_FILE: Final = "hello_stages.py"

SPEC: Final = """\
# What is to be served. `stagekeeper validate spec.yaml` checks it.
name: hello
replicas: 1                     # full copies
entry: greeter                  # the stage that `call` reaches when none is named
stages:
  - name: words
    entrypoint: hello_stages:Words
    args: {language: en}        # keyword arguments of Words.__init__
    devices: [0]                # cards of a replica: stages with the same number share that card
    memory: {bytes: 64MiB}      # or a share of the card: {utilization: 0.5}
  - name: greeter
    entrypoint: hello_stages:Greeter
"""

STAGES: Final = '''\
"""Two stages: `Words` holds the greetings, `Greeter` asks it and answers its callers."""

from stagekeeper.actor import endpoint
from stagekeeper.stage import Stage

GREETINGS = {"de": "Hallo", "en": "Hello", "fr": "Bonjour", "ja": "Konnichiwa"}


class Words(Stage):
    def __init__(self, language: str = "en") -> None:
        self.language = language
        self.word = ""

    def load(self) -> None:
        """Runs once, before the first call: here a model reads its weights."""
        for done, (language, word) in enumerate(GREETINGS.items(), start=1):
            if language == self.language:
                self.word = word
            self.progress(done, len(GREETINGS), "reading words")
        if not self.word:
            raise ValueError(f"no greeting in {self.language!r}; there are {sorted(GREETINGS)}")

    @endpoint(idempotent=True)
    def greeting(self) -> str:
        return self.word


class Greeter(Stage):
    @endpoint(idempotent=True)
    async def greet(self, name: str) -> str:
        word = await self.siblings["words"].greeting.call_one()
        return f"{word}, {name}!"
'''


def write_starter(folder: Path) -> list[Path]:
    """Write the spec and the stages into `folder`, which is made if it is missing.

    Returns:
        The files written.

    Raises:
        CliError: one of them exists already (then neither is written), or cannot be written.
    """
    texts = {folder / SPEC_FILE: SPEC, folder / STAGES_FILE: STAGES}
    existing = [str(path) for path in texts if path.exists() or path.is_symlink()]
    if existing:
        verb, them = ("exists", "it") if len(existing) == 1 else ("exist", "them")
        raise CliError(
            ExitCode.FAILED,
            f"{' and '.join(existing)} {verb} already, and nothing was written: choose another "
            f"folder, or move {them} away",
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for path, text in texts.items():
            with path.open("x", encoding="utf-8") as file:
                file.write(text)
    except OSError as error:
        raise CliError(
            ExitCode.FAILED, f"{error.filename} cannot be written: {error.strerror}"
        ) from error
    return list(texts)
