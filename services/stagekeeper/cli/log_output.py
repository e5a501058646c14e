"""Logs of the long-running verbs: to stderr, `key=value` in a pipe, coloured in a terminal.

Decided here: the shape of a line. What our libraries log through `logging` takes the same shape, so
that one reader understands all of it. stdout is left alone: it carries answers.
"""

from __future__ import annotations

import logging
import sys

import structlog

_SHARED: tuple[structlog.types.Processor, ...] = (
    structlog.contextvars.merge_contextvars,
    structlog.stdlib.add_log_level,
    structlog.stdlib.ExtraAdder(),
    structlog.processors.TimeStamper(fmt="iso", utc=True),
)


def silence_libraries() -> None:
    """Let libraries log to nobody: verbs that ask say themselves what their user has to know."""
    logging.getLogger().addHandler(logging.NullHandler())


def configure_logs(level: str) -> None:
    """Send everything from `level` up ("debug", "info", …) to stderr. The last call wins."""
    is_terminal = sys.stderr.isatty()
    renderer: structlog.types.Processor
    if is_terminal:
        renderer = structlog.dev.ConsoleRenderer()
    else:
        renderer = structlog.processors.LogfmtRenderer(
            key_order=("timestamp", "level", "event"), drop_missing=True, bool_as_flag=False
        )
    # A console shows exceptions by itself; key=value lines hold them as one more value.
    after = () if is_terminal else (structlog.processors.format_exc_info,)
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=_SHARED,
            processors=[
                structlog.stdlib.ProcessorFormatter.remove_processors_meta,
                *after,
                renderer,
            ],
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    # asyncio reports each selector at DEBUG, and nobody asked.
    logging.getLogger("asyncio").setLevel(max(root.level, logging.INFO))
    structlog.configure(
        processors=[*_SHARED, structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
        wrapper_class=structlog.make_filtering_bound_logger(root.level),
        logger_factory=structlog.stdlib.LoggerFactory(),
        cache_logger_on_first_use=True,
    )
