"""The table of limits: documented, nested, and every rpc of the contract is sent nonsense."""

from __future__ import annotations

import re
from pathlib import Path

from stagekeeper.actor import failure_wire
from stagekeeper.client import event_reading, spec_file
from stagekeeper.core import limits
from stagekeeper.wire import actor_limits, payload, tensors, transport
from tests.harness.nonsense import FUZZED, services

DOCUMENT = Path(__file__).parents[2] / "docs" / "limits.md"


def documented() -> dict[str, float]:
    rows = re.findall(r"^\| `([A-Z_]+)` \| ([^|]+) \|", DOCUMENT.read_text(), flags=re.M)
    return {name: _number(text) for name, text in rows}


def _number(text: str) -> float:
    text = text.strip().replace(",", "")
    if match := re.fullmatch(r"2\^(\d+)( − 1)?", text):
        return 2 ** int(match[1]) - bool(match[2])
    if match := re.fullmatch(r"([\d,]+) (KiB|MiB)", text):
        return int(match[1].replace(",", "")) * {"KiB": 1 << 10, "MiB": 1 << 20}[match[2]]
    return float(text)


def test_the_document_has_every_limit_with_its_number() -> None:
    in_code = {
        name: value for name, value in (vars(limits) | vars(actor_limits)).items() if name.isupper()
    }
    for module, names in (
        (transport, ("MAX_MESSAGE_BYTES", "MAX_PAYLOAD_BYTES", "MAX_METADATA_BYTES")),
        (payload, ("MAX_DEPTH",)),
        (tensors, ("MAX_DIMENSIONS",)),
    ):
        in_code |= {name: getattr(module, name) for name in names}

    assert documented() == in_code


def test_the_clients_copies_say_the_same() -> None:
    assert spec_file.MOST_REPLICAS == limits.MOST_REPLICAS
    assert event_reading.MOST_EVENTS == limits.MOST_EVENTS


def test_what_may_be_asked_for_fits_into_what_may_carry_it() -> None:
    utf8 = 4  # bytes of a character at most

    assert utf8 * limits.LARGEST_SPEC_CHARACTERS < limits.LARGEST_REQUEST_BYTES
    assert limits.LARGEST_REQUEST_BYTES < limits.LARGEST_REPORT_BYTES < transport.MAX_MESSAGE_BYTES
    assert transport.MAX_PAYLOAD_BYTES < transport.MAX_MESSAGE_BYTES
    a_failure = (
        limits.LONGEST_MESSAGE
        + limits.LONGEST_TRACEBACK
        + limits.MOST_LOG_LINES * limits.LONGEST_FAILURE_LINE
    )
    assert utf8 * a_failure < 0.9 * limits.LARGEST_FAILURE_BYTES
    assert limits.LARGEST_FAILURE_BYTES < limits.LARGEST_OPERATION_BYTES
    a_shard = (
        (limits.MOST_ABILITIES + limits.MOST_DEVICES) * limits.LONGEST_TEXT
        + limits.LONGEST_MESSAGE
        + limits.LONGEST_REASON
    )
    assert utf8 * a_shard < 0.9 * limits.LARGEST_SHARD_BYTES
    assert limits.MOST_STAGES < limits.MOST_REPORTED_STAGES
    assert limits.MOST_REPLICAS < limits.MOST_REPORTED_REPLICAS
    assert limits.LARGEST_MINTED < limits.LARGEST_NUMBER


def test_what_processes_say_to_each_other_fits_into_what_they_take() -> None:
    assert not vars(limits).keys() & {name for name in vars(actor_limits) if name.isupper()}
    assert 2 * failure_wire.MOST_BYTES <= actor_limits.LARGEST_TOLD_FAILURE_BYTES
    assert actor_limits.LARGEST_TOLD_FAILURE_BYTES < actor_limits.LARGEST_PEER_REQUEST_BYTES
    assert (
        transport.MAX_PAYLOAD_BYTES < actor_limits.LARGEST_SPAWN_BYTES < transport.MAX_MESSAGE_BYTES
    )
    assert transport.MAX_PAYLOAD_BYTES < actor_limits.MOST_UNREAD_BYTES
    assert limits.LONGEST_PROC_LEASE_S == actor_limits.LONGEST_PEER_LEASE_S
    assert limits.LARGEST_MINTED == actor_limits.LARGEST_INCARNATION


def test_every_service_of_the_contract_is_sent_nonsense() -> None:
    assert {name for names in FUZZED.values() for name in names} == set(services())
