"""Decisions of Stagekeeper, as plain values and plain functions.

Nothing here awaits, reads a clock, draws a random number, logs, or speaks a protocol: time comes in
as ``now``, facts come in as events, and what must be done goes out as commands.
"""
