"""Settings are refused as a whole, with everything that is wrong with them."""

from __future__ import annotations

import pytest

from stagekeeper.core.settings import RegistrySettings
from stagekeeper.supervisor.settings import SettingsRefused, SupervisorSettings


def test_defaults_can_be_run():
    settings = SupervisorSettings()
    assert settings.endpoint == "127.0.0.1:7070"
    assert 0 < settings.tick_interval_s <= 0.5


def test_every_problem_is_told_at_once():
    with pytest.raises(SettingsRefused) as caught:
        SupervisorSettings(cluster="", endpoint="0.0.0.0:1", listen="nowhere", bookmark_s=0)
    assert [problem.split()[0] for problem in caught.value.problems] == [
        "cluster",
        "endpoint:",
        "listen:",
        "bookmark_s",
    ]


def test_address_beyond_loopback_needs_insecure():
    with pytest.raises(SettingsRefused, match="--insecure"):
        SupervisorSettings(endpoint="10.0.0.1:7070")
    assert SupervisorSettings(endpoint="10.0.0.1:7070", insecure=True)


def test_stable_endpoint_is_the_endpoint_unless_it_is_named():
    assert SupervisorSettings(endpoint="127.0.0.1:1").stable == "127.0.0.1:1"
    settings = SupervisorSettings(endpoint="127.0.0.1:1", stable_endpoint="127.0.0.1:2")
    assert (settings.endpoint, settings.stable) == ("127.0.0.1:1", "127.0.0.1:2")


@pytest.mark.parametrize("address", ["nowhere", "127.0.0.1:0", "supervisor.example:7070"])
def test_stable_endpoint_that_nobody_could_or_should_dial_is_refused(address):
    with pytest.raises(SettingsRefused, match=r"^stable_endpoint: "):
        SupervisorSettings(stable_endpoint=address)


def test_wildcard_needs_an_address_that_agents_can_be_told():
    with pytest.raises(SettingsRefused, match="--advertise"):
        SupervisorSettings(listen="0.0.0.0:0", insecure=True)
    assert SupervisorSettings(listen="0.0.0.0:0", advertise="node-1:0", insecure=True)


def test_tick_longer_than_a_heartbeat_is_refused():
    registry = RegistrySettings(heartbeat_s=0.5, lease_s=2, lost_s=10)
    with pytest.raises(SettingsRefused, match="tick_s"):
        SupervisorSettings(registry=registry, tick_s=0.6)
    assert SupervisorSettings(registry=registry).tick_interval_s == 0.125
