"""What is an address: of a server, and of an endpoint that is dialled."""

from __future__ import annotations

import pytest

from stagekeeper.host.server import split_address
from stagekeeper.wire.stable_endpoint import endpoint_problem


@pytest.mark.parametrize(
    ("address", "parts"),
    [
        ("127.0.0.1:7070", ("127.0.0.1", 7070)),
        ("[::1]:0", ("::1", 0)),
        ("dns://127.0.0.1:53/supervisor.test:7070", ("dns://127.0.0.1:53/supervisor.test", 7070)),
    ],
)
def test_address_has_a_host_and_a_port(address, parts):
    assert split_address(address) == parts
    assert not endpoint_problem(address.replace(":0", ":1"))


@pytest.mark.parametrize("address", ["", "host", ":1", "h:", "h:70000", "h:٧٠", "http://h:7070"])
def test_what_is_no_address_is_told_as_such(address):
    with pytest.raises(ValueError, match="is not host:port"):
        split_address(address)
    assert "write it as 127.0.0.1:7070" in endpoint_problem(address)
