"""Which address reaches the other hosts."""

from __future__ import annotations

import ipaddress

import pytest

from hvkeras.errors import UsageError
from hvkeras.host import network


def test_a_shared_network_is_found_among_several():
    own = ["192.168.3.5/24", "10.1.0.5/16"]
    assert network.shared_address(own, [["10.1.7.9/16"], ["172.20.0.1/24", "10.1.0.6/16"]]) == "10.1.0.5"


def test_a_bridge_with_the_same_address_everywhere_joins_nobody():
    assert network.shared_address(["172.17.0.1/16", "10.0.0.1/24"], [["172.17.0.1/16", "10.0.0.2/24"]]) == "10.0.0.1"


def test_no_shared_network_is_no_address():
    assert network.shared_address(["192.168.3.5/24"], [["10.0.0.1/24"]]) == ""


def test_own_networks_leave_the_loopback_out():
    assert all(not ipaddress.ip_interface(text).ip.is_loopback for text in network.own_networks())


def test_an_unknown_interface_lists_those_that_are_there():
    with pytest.raises(UsageError, match=r"the interfaces here are .*lo.*Received|Received.*the interfaces here are"):
        network.interface_address(["no-such-card"])
    assert network.interface_address(["no-such-card", "lo"]) == "127.0.0.1"


@pytest.mark.parametrize(("text", "parts"), [("host:22", ("host", 22)), ("[fe80::1]:22", ("fe80::1", 22))])
def test_addresses_are_split(text, parts):
    assert network.split_address(text) == parts


def test_the_loopback_is_local_and_an_unknown_name_is_not():
    assert network.is_local("localhost") and network.is_local("127.0.0.1")
    assert not network.is_local("no-such-host.invalid")
