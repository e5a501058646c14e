"""Rows of a benchmark: printed as a table, written as JSON, held against their reach."""

from __future__ import annotations

import json
import os
import platform
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

RESULTS = Path(__file__).parent / "results"


@dataclass(frozen=True)
class Row:
    """One number, how it was made, and what it should reach.

    `ratio` is the value over the ceiling of the same run (or the other way round, as `reach` says);
    `is_reached` is None where no reach is set.
    """

    what: str
    value: str
    ceiling: str = ""
    ratio: str = ""
    reach: str = ""
    is_reached: bool | None = None


def show(title: str, how: str, rows: Sequence[Row]) -> None:
    """Print the rows and write them to `benchmarks/results/<title>.json`."""
    table = Table(title=title, caption=how, title_justify="left", caption_justify="left")
    for column in ("what", "value", "ceiling", "ratio", "reach", ""):
        table.add_column(column, justify="left" if column in ("what", "reach") else "right")
    for row in rows:
        mark = {None: "", True: "reached", False: "SHORT"}[row.is_reached]
        table.add_row(row.what, row.value, row.ceiling, row.ratio, row.reach, mark)
    Console(width=150 if not os.isatty(1) else None).print(table)
    RESULTS.mkdir(exist_ok=True)
    content = {
        "title": title,
        "how": how,
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, Python {sys.version.split()[0]}",
        "rows": [asdict(row) for row in rows],
    }
    name = title.replace(" ", "_") + ".json"
    (RESULTS / name).write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n")


def median_of(samples: Sequence[float]) -> float:
    return statistics.median(samples)


def quantile(samples: Sequence[float], share: float) -> float:
    """Return the smallest sample that `share` of all samples do not exceed."""
    ordered = sorted(samples)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]
