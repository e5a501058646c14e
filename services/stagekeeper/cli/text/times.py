"""Moments as people read them: their own clock in a terminal, UTC where programs read along."""

from __future__ import annotations

from datetime import UTC, datetime, tzinfo

from google.protobuf.timestamp_pb2 import Timestamp

from stagekeeper.cli.text.amounts import seconds


def utc_text(moment: Timestamp) -> str:
    """Write `2026-11-29T22:48:06.123Z`."""
    return f"{_at(moment, UTC):%Y-%m-%dT%H:%M:%S}.{moment.nanos // 1_000_000:03d}Z"


def clock_text(moment: Timestamp, now: float) -> str:
    """Write `22:48:06` by this machine's clock, with the date before it where it is another day."""
    then, today = _at(moment), datetime.fromtimestamp(now).astimezone()
    return f"{then:%H:%M:%S}" if then.date() == today.date() else f"{then:%Y-%m-%d %H:%M:%S}"


def since_text(moment: Timestamp, now: float) -> str:
    """Write `since 22:48:06 (3 min 20 s)`."""
    return f"since {clock_text(moment, now)} ({age_text(moment, now)})"


def age_text(moment: Timestamp, now: float) -> str:
    """Write how long ago it was. Clocks of two machines differ: the future counts as now."""
    return seconds(max(0.0, now - moment.seconds - moment.nanos / 1e9))


def _at(moment: Timestamp, zone: tzinfo | None = None) -> datetime:
    return datetime.fromtimestamp(moment.seconds, UTC).astimezone(zone)
