"""How much of anything is taken, and why not more: the one table that every server checks by.

Decided here: the numbers of specs, reports and commands. Those of payloads and of messages as a
whole stand with both ends of a call (`wire.transport`, `wire.payload`, `wire.tensors`). Not decided
here: how a value is checked (`spec_check`, `report_check`, `command_check`).

Invariant: what a user may ask for fits into what an agent may report of it, and that into one
message. `docs/limits.md` has every number of this module with its reason; a test compares them.
"""

from __future__ import annotations

from typing import Final

# --- texts, in characters

LONGEST_NAME: Final = 63
"""Of deployments, stages and workers; the length of a DNS label, and short enough for a table."""

LONGEST_ID: Final = 255
"""Of ids that others mint (hosts, devices, instances, failures, supervisors), and of addresses."""

LONGEST_OPERATION_ID: Final = 128
"""Of operations, each of which is a file of its agent's."""

LONGEST_TEXT: Final = 255
"""Of a line that describes something: a model, a version, an ability, a device."""

LONGEST_REASON: Final = 1_000
"""Of a sentence for people. What comes longer in a command is cut; nothing is decided by it."""

LONGEST_MESSAGE: Final = 8_192
"""Of what a failure or an operation says; agents cut theirs to it."""

LONGEST_FAILURE_LINE: Final = 2_000
"""Of a line of a log in a failure; agents cut theirs to it."""

LONGEST_TRACEBACK: Final = 65_536
"""Of a traceback in a failure; its end is kept."""

LONGEST_ENTRYPOINT: Final = 1_000
LONGEST_DIGEST_BYTES: Final = 64

# --- numbers

LARGEST_NUMBER: Final = 2**63 - 1
"""What a store can hold: SQLite's integers are signed."""

LARGEST_BYTES: Final = LARGEST_NUMBER
"""Of memory."""

LARGEST_MINTED: Final = 2**62
"""No reign, generation, incarnation or spec revision is believed above it, unless it is one that is
known already: one at the end of what can be stored could never be followed by another."""

LONGEST_SECONDS: Final = 31_536_000.0
"""Of any limit, budget or age: a year. Beyond it somebody meant another unit, or none at all."""

# --- a deployment

MOST_REPLICAS: Final = 1_000
MOST_STAGES: Final = 64
MOST_DEVICES: Final = 64
"""Cards of one stage."""

LARGEST_DEVICE: Final = 255
"""Number of a card of the replica."""

MOST_REPLICA_WORKERS: Final = 64
"""Shards of one stage, each on a worker of its own: so many of every stage are as many peers as a
stage can be told of."""

MOST_IN_FLIGHT: Final = 65_536
MOST_ABILITIES: Final = 64
"""Each shard's record repeats them, in every report."""

MOST_LIST_ENTRIES: Final = 1_000
"""Of a placement's workers and of its device pool."""

MOST_ENV: Final = 1_000
LARGEST_ENV_VALUE_BYTES: Final = 65_536
"""Of one variable. Linux starts no process with a longer string than 128 KiB."""

LARGEST_ENV_BYTES: Final = 524_288
"""Of all variables of a stage. Linux starts no process with more than a quarter of its stack's
limit, 2 MiB as it mostly is, for environment and arguments together."""

DEEPEST_ARGS: Final = 100
"""Containers inside containers in `args_json`: what every reader of JSON can take."""

LARGEST_SPEC_CHARACTERS: Final = 1_048_576
"""Of a whole spec. It is kept, compared and sent in every step of a start."""

MOST_ARGUMENTS: Final = 1_000
"""Of a command stage's program."""

LARGEST_ARGUMENT_BYTES: Final = 65_536
"""Of one of them. Linux starts no process with a longer string than 128 KiB."""

MOST_PORTS: Final = 16
"""Of one command stage. Its agent leases them from a range that all its stages share."""

MOST_PROBE_FAILURES: Final = 100
"""In a row, before a probe counts as failed."""

MOST_PEERS: Final = 4_096
"""Shards of one replica, as a stage is told of them."""

# --- a worker's report

MOST_SHARDS: Final = 20_000
"""One registration of so many takes the supervisor a few seconds and 64 MiB."""

MOST_OPERATIONS: Final = 1_000
"""Each that is not wanted is cancelled by a call of its own."""

MOST_FAILURES: Final = 10_000
MOST_WORKER_DEVICES: Final = 1_000
MOST_FOREIGN: Final = 64
"""Holders of one device beside its agent's stages; an agent sends fewer."""

MOST_NOTES: Final = 20
"""Sentences for its operator; more are left out, longer ones than LONGEST_REASON are cut."""

MOST_REPORTED_STAGES: Final = 1_000
"""More than a spec may have: what runs is shown, also when it is of a later release."""

MOST_SHARDS_OF_STAGE: Final = 1_000
MOST_REPORTED_REPLICAS: Final = 100_000
MOST_RESTART_AGES: Final = 1_000
LARGEST_SHARD_BYTES: Final = 262_144
"""Of one record; a spec at all its limits, with 64 cards and a thousand endpoints, stays below."""

MOST_LOG_LINES: Final = 20
"""In a failure."""

DEEPEST_CAUSES: Final = 16
"""Failures inside failures: protobuf reads no message that is nested a hundred deep, and a failure
travels inside others."""

MOST_CAUSES: Final = 64
"""Failures inside one failure, at any depth."""

MOST_HOPS: Final = 64
"""Owners that a failure passed."""

LARGEST_FAILURE_BYTES: Final = 524_288
"""Of a failure with all of its causes: a thousand are kept. Twenty lines, a traceback and a message
of the longest kind, in any script, stay below."""

LARGEST_OPERATION_BYTES: Final = 786_432
"""Of an operation's record with its failure and its rollback."""

# --- processes for actors

MOST_PROCS: Final = 64
"""Of one request."""

MOST_AGENT_PROCS: Final = 1_024
"""Of one agent at once. Each has a pipe, a pidfd and an interpreter of some 50 MB."""

LONGEST_PROC_LEASE_S: Final = 3_600.0
"""Whoever is away for longer has no use for what his actors knew."""

# --- reads and messages

MOST_LINES_READ: Final = 10_000
"""Of a log at once; more are read as so many."""

LARGEST_LOG_BYTES: Final = 512 * 1024 * 1024
"""Of a stage's log on the disk: several times what is ever read of it at once. The beginning of a
longer one is given up."""

MOST_EVENTS: Final = 10_000
"""Of the newest events, in the snapshot of a watch."""

LARGEST_REQUEST_BYTES: Final = 8 * 1024 * 1024
"""Of a request that is neither a registration nor a call: twice what a spec can take."""

LARGEST_REPORT_BYTES: Final = 30 * 1024 * 1024
"""Of a registration: below the limit of a message, so that a refusal can say why."""
