"""The interface of a host that the other hosts of a job reach."""

import pytest

from megatron_grpo.launch import network
from megatron_grpo.launch.network import GLOO_VARIABLE, choose_interface, interface_towards

# Destinations and masks as Linux writes them: 0002A8C0 is 192.168.2.0.
ROUTES = """Iface Destination Gateway Flags RefCnt Use Metric Mask MTU Window IRTT
eth0 00000000 0102A8C0 0003 0 0 100 00000000 0 0 0
eth0 0002A8C0 00000000 0001 0 0 100 00FFFFFF 0 0 0
eth1 00000000 0102A8C0 0003 0 0 50 00000000 0 0 0
ib0 0000000A 00000000 0001 0 0 0 000000FF 0 0 0
"""


@pytest.mark.parametrize(
    ("address", "interface"),
    [("192.168.2.7", "eth0"), ("10.4.0.1", "ib0"), ("8.8.8.8", "eth1"), ("127.0.0.1", "lo")],
)
def test_interface_towards_an_address_has_the_longest_prefix_and_least_metric(
    address, interface, tmp_path
):
    table = tmp_path / "route"
    table.write_text(ROUTES)
    assert interface_towards(address, table) == interface


def test_interface_towards_an_address_without_a_route_is_loopback(tmp_path):
    table = tmp_path / "route"
    table.write_text(ROUTES.splitlines()[0])
    assert interface_towards("10.4.0.1", table) == "lo"


def test_choose_interface_refuses_a_name_that_other_hosts_do_not_reach(monkeypatch):
    monkeypatch.setattr(network, "address_of", lambda _: "127.0.1.1")
    with pytest.raises(ValueError, match=r"alpha is 127\.0\.1\.1 .*give --master-addr"):
        choose_interface({}, "alpha")
    choose_interface(chosen := {GLOO_VARIABLE: "ib0"}, "alpha")
    assert chosen == {GLOO_VARIABLE: "ib0"}
