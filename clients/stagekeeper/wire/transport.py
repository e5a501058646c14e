"""The gRPC options of both ends, side by side, since they only work as a pair.

A client that pings faster than its server allows is sent away (GOAWAY "too many pings"), and a
server that allows a lot is no use to a client that never pings. So both lists stand here, made from
the same numbers. Invariant: every server allows pings at least as often as any client sends them.
"""

from __future__ import annotations

from typing import Final

Options = tuple[tuple[str, int], ...]

MAX_MESSAGE_BYTES: Final = 32 * 1024 * 1024
"""What either end receives at most; gRPC's own default of 4 MiB is too small for tensors."""

MAX_PAYLOAD_BYTES: Final = 30 * 1024 * 1024
"""What a payload may hold. Below the limit of a message, so that we can say why we refuse one."""

MAX_METADATA_BYTES: Final = 64 * 1024
"""What our own ends accept as metadata. We send less than 8 KiB, other programs' default limit."""

KEEPALIVE_INTERVAL_MS: Final = 4_000
"""A connection on which nothing was heard for so long is pinged, also when no call is under way."""

KEEPALIVE_TIMEOUT_MS: Final = 4_000
"""A ping that is not answered in this time ends the connection. The transport answers pings by
itself, so a peer that is busy in Python answers in time; a frozen or unreachable one does not."""

RECONNECT_BACKOFF_MIN_MS: Final = 100
RECONNECT_BACKOFF_MAX_MS: Final = 1_000
"""gRPC's own cap is two minutes: a server that is long back would not be noticed."""

CONNECT_TIMEOUT_MS: Final = 2_000
"""How long one attempt to connect may take, for addresses that swallow packets."""

CLIENT_OPTIONS: Final[Options] = (
    # Without a pool of its own a new channel to an old address inherits that address's back-off.
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.initial_reconnect_backoff_ms", RECONNECT_BACKOFF_MIN_MS),
    ("grpc.min_reconnect_backoff_ms", CONNECT_TIMEOUT_MS),
    ("grpc.max_reconnect_backoff_ms", RECONNECT_BACKOFF_MAX_MS),
    ("grpc.keepalive_time_ms", KEEPALIVE_INTERVAL_MS),
    ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_MS),
    # Keepalive alone does not notice a peer that is frozen (SIGSTOP) while its kernel acknowledges.
    ("grpc.http2.ping_timeout_ms", KEEPALIVE_TIMEOUT_MS),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_metadata_size", MAX_METADATA_BYTES),
    ("grpc.absolute_max_metadata_size", 2 * MAX_METADATA_BYTES),
    # Addresses here are literal; a proxy from the environment would only come between.
    ("grpc.enable_http_proxy", 0),
)

PATIENT_PING_TIMEOUT_MS: Final = 30_000

BEATING_CLIENT_OPTIONS: Final[Options] = tuple(
    (name, PATIENT_PING_TIMEOUT_MS if name == "grpc.http2.ping_timeout_ms" else value)
    for name, value in CLIENT_OPTIONS
)
"""For a connection whose user beats, and so finds out by itself that it is dead. A ping waits its
turn behind what is being sent: with the short time-out a message that its link needs a few seconds
for would end its own connection."""

SERVER_OPTIONS: Final[Options] = (
    # On by default, and then two servers share one port without a word.
    ("grpc.so_reuseport", 0),
    ("grpc.http2.min_ping_interval_without_data_ms", KEEPALIVE_INTERVAL_MS // 4),
    ("grpc.http2.max_ping_strikes", 0),
    # Streams of watchers that vanished without a word end by this.
    ("grpc.keepalive_time_ms", 5 * KEEPALIVE_INTERVAL_MS),
    ("grpc.keepalive_timeout_ms", 2 * KEEPALIVE_TIMEOUT_MS),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_metadata_size", MAX_METADATA_BYTES),
    ("grpc.absolute_max_metadata_size", 2 * MAX_METADATA_BYTES),
)
