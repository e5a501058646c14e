"""How much of anything a connection between processes takes, and why not more.

The numbers of what the processes of actor trees, and deployed stages over Connect, say to each
other; both ends keep to them. They stand here since no side of a call may import the other's: the
services' own table (`core.limits`) is not for programs that only call. Not decided here: how a
value is checked (`actor.hosting.message_check`).

Invariant: `docs/limits.md` has every number of this module with its reason; a test compares them.
"""

from __future__ import annotations

from typing import Final

# --- texts, in characters

LONGEST_PEER_ID: Final = 255
"""Of ids that a program mints (actors, meshes, processes, sessions), of names and senders."""

LONGEST_PEER_PATH: Final = 4_096
"""Of a script's path: what Linux takes."""

LONGEST_ACTOR_CLASS: Final = 1_000
"""Of `module:Class`."""

# --- numbers

LONGEST_PEER_LEASE_S: Final = 3_600.0
"""Whoever is away for longer has no use for what his actors knew."""

LONGEST_PEER_WAIT_S: Final = 31_536_000.0
"""Of a budget or a time-out: a year. Beyond it somebody meant another unit, or none at all."""

MOST_MESH_RANKS: Final = 65_536
LARGEST_INCARNATION: Final = 2**62
MOST_OWNERS: Final = 255
"""Of an actor, up to the root: each is one more process, or one more actor, that waits for it."""

# --- a connection

MOST_FRAMES: Final = 1_024
"""In one message; our own end puts 64 into one at most. More end the connection, unread."""

MOST_CONNECTION_CALLS: Final = 65_536
"""Calls and messages of one connection that wait or run; more are refused with TOO_MANY_CALLS."""

MOST_UNREAD_FRAMES: Final = 16_384
"""Answers that wait because the other end reads slowly. With more nothing further is read from it;
with half as many an endpoint that yields waits."""

MOST_UNREAD_BYTES: Final = 128 * 1024 * 1024
"""Of the payloads of such answers: four of the largest."""

STREAM_WINDOW: Final = 16
"""Values of one call that are on their way or unread. Enough to hide the way there and back; more
would only be memory of the reader's, and work that is lost when it leaves early."""

MOST_CONNECTIONS: Final = 4_096
"""Of one process at once, with the sessions whose connection may come back. More are refused with
TOO_MANY_CALLS."""

# --- a process

MOST_ACTORS: Final = 10_000
"""In one process at once; each may have a thread. More are refused with ADMISSION_REFUSED."""

MOST_REPLACED_PROCS: Final = 1_024
"""Of one request for new processes."""

LARGEST_TOLD_FAILURE_BYTES: Final = 524_288
"""Of a failure with its causes, as another process tells it; our own end cuts it to half."""

LARGEST_SPAWN_BYTES: Final = 30 * 1024 * 1024 + 65_536
"""Of what makes an actor: a payload, and the words around it."""

LARGEST_PEER_REQUEST_BYTES: Final = 1024 * 1024
"""Of any other request between processes of a tree: twice a failure."""
