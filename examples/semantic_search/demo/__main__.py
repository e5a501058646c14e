"""`make demo`: a model that goes on answering while its supervisor and its agents are killed.

Decided here: what is asked, and where the passages' vectors are kept: in the user's cache, so that
only the first run builds them. The rest is `run`, which knows nothing of this model.

Run as `python -m examples.semantic_search.demo` from the repository's root. What takes long to
import is imported in `main`, where a Ctrl-C is as quiet as later.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from stagekeeper.client import Client

EXAMPLE: Final = Path(__file__).parents[1]
QUESTIONS: Final = (
    "How do I leave a loop early?",
    "What is the difference between == and is?",
    "How can a function take any number of arguments?",
    "When does the finally block run?",
    "What does + do with objects of my own class?",
    "How do I make a generator?",
)
SHOWN_CHARACTERS: Final = 300


def main() -> int:
    """Run the demo; return its exit code."""
    from .run import run_demo
    from .scene import Scene

    cache = cache_folder()
    return run_demo(
        Scene(
            write_spec=lambda directory: write_spec(directory, cache),
            pythonpath=EXAMPLE.parent,
            ask=ask,
            tell=tell,
            questions=QUESTIONS,
            last_word=f"The passages' vectors stay in {cache}: the next run starts in seconds."
            if cache
            else "",
        )
    )


async def ask(client: Client, question: str, timeout: float, /) -> list[dict[str, Any]]:
    """Search; of the scores, the digits that any replica on any run agrees on."""
    found = await client.call("semantic-search", "search", question, k=2, timeout=timeout)
    return [{**passage, "score": round(passage["score"], 3)} for passage in found]


def tell(answer: Sequence[dict[str, Any]]) -> list[str]:
    best = answer[0]
    text = " ".join(best["passage"].split())
    if len(text) > SHOWN_CHARACTERS:
        text = text[:SHOWN_CHARACTERS].rsplit(" ", 1)[0] + " …"
    lines = [f"{best['title']} ({best['score']:.2f}): {text}"]
    return lines + [f"also: {other['title']} ({other['score']:.2f})" for other in answer[1:]]


def write_spec(directory: Path, cache: Path | None) -> Path:
    """Write the example's spec into `directory`, with the vectors kept in `cache`.

    Without it they would go with the worker's state, which lasts as long as the demo.
    """
    import yaml

    spec = yaml.safe_load((EXAMPLE / "spec.yaml").read_text())
    if cache is not None:
        (index,) = (stage for stage in spec["stages"] if stage["name"] == "index")
        index["args"] = {**index.get("args", {}), "cache_dir": str(cache)}
    path = directory / "spec.yaml"
    path.write_text(yaml.safe_dump(spec, sort_keys=False))
    return path


def cache_folder() -> Path | None:
    """Return the folder for the vectors; None where there is no place that can be written."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    try:
        # The XDG base directory specification has relative paths ignored.
        root = Path(base) if os.path.isabs(base) else Path.home() / ".cache"
        folder = root / "stagekeeper" / "semantic_search"
        folder.mkdir(parents=True, exist_ok=True)
    except (OSError, RuntimeError):
        return None
    return folder if os.access(folder, os.W_OK | os.X_OK) else None


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:  # before anything was started
        sys.exit(130)
