"""The table of client networks: bounded, of the public internet alone, and of nothing that was not measured."""

from __future__ import annotations

from ipaddress import ip_address, ip_network

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from farhop.balance.estimate.network_latencies import LENGTHS, RTT_MS_MAX, WINDOW_S, NetworkLatencies, parse

V4 = st.integers(0, 2**32 - 1).map(lambda n: str(ip_address(n)))
NEAR = st.integers(0, 4000).map(lambda n: str(ip_address((203 << 24) + n * 64)))  # so that many share a network
V6 = st.integers(0, 2**128 - 1).map(lambda n: str(ip_address(n)))
LOCAL = st.sampled_from(
    [
        "127.0.0.1",
        "10.1.2.3",
        "192.168.1.1",
        "169.254.0.9",
        "::1",
        "fe80::1%eth0",
        "fd00::1",
        "::ffff:10.0.0.1",
        "::ffff:8.8.8.8",
        "100.64.0.1",
        "0.0.0.0",
        "224.0.0.9",
        "x",
    ]
)
SAMPLES = st.lists(
    st.tuples(V4 | NEAR | V6 | LOCAL, st.integers(-5, 20_000_000), st.floats(0, 3 * WINDOW_S)), max_size=40
)


@settings(max_examples=60)
@given(SAMPLES, st.integers(1, 20), st.integers(1, 3))
def test_only_public_networks_with_measured_values_are_reported_within_the_bound(
    samples, most: int, at_least: int
) -> None:
    table = NetworkLatencies(most)
    samples = sorted(samples, key=lambda one: one[2])
    for host, rtt_us, now in samples:
        table.take(host, rtt_us, now)
        assert len(table) <= most
    now = samples[-1][2] if samples else 0.0
    content = table.read(now, most // 2 + 1, at_least)
    assert len(content) <= most // 2 + 1
    for text, one in content.items():
        network = parse(text)
        assert network.prefixlen == LENGTHS[network.version]
        assert network.is_global
        inside = [us for host, us, at in samples if now - at < 2 * WINDOW_S and _in(host, network)]
        assert any(round(us / 1e3, 1) == one.ms for us in inside), "a figure that was measured in it"
        assert at_least / 2 < one.samples <= len(inside)
        assert one.samples & (one.samples - 1) == 0


def _in(host: str, network) -> bool:
    try:
        address = ip_address(host.partition("%")[0])
    except ValueError:
        return False
    mapped = getattr(address, "ipv4_mapped", None)
    return (mapped or address) in network


def test_the_least_counts_until_it_is_two_windows_old() -> None:
    table = NetworkLatencies(10)
    table.take("8.8.8.8", 20_000, 10.0)
    table.take("8.8.8.9", 50_000, WINDOW_S + 1.0)
    assert table.read(WINDOW_S + 2.0, 10, 1)["8.8.8.0/24"].ms == 20.0
    table.take("8.8.8.9", 50_000, 2 * WINDOW_S + 1.0)
    assert table.read(2 * WINDOW_S + 2.0, 10, 1)["8.8.8.0/24"].ms == 50.0
    assert table.read(4 * WINDOW_S, 10, 1) == {}


def test_few_connections_are_not_reported_and_the_oldest_measurement_is_evicted_first() -> None:
    table = NetworkLatencies(2)
    for host in ("8.8.8.8", "9.9.9.9", "8.8.8.8", "2600::1"):
        table.take(host, 10_000, 1.0)
    assert table.read(1.0, 10, 2) == {"8.8.8.0/24": table.read(1.0, 10, 1)["8.8.8.0/24"]}
    assert set(table.read(1.0, 10, 1)) == {"8.8.8.0/24", "2600::/48"}
    table.clear()
    assert table.read(1.0, 10, 1) == {}


@pytest.mark.parametrize("text", ["8.8.8.0/23", "8.8.8.1/24", "10.0.0.0/24", "2600::/47", "::1/128", "x", "fd00::/48"])
def test_a_text_that_is_no_client_network_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        parse(text)
    assert parse("8.8.8.0/24") == ip_network("8.8.8.0/24")


def test_a_round_trip_time_out_of_range_is_ignored() -> None:
    table = NetworkLatencies(2)
    for rtt_us in (0, -1, int(RTT_MS_MAX * 1e3) + 1):
        table.take("8.8.8.8", rtt_us, 0.0)
    assert len(table) == 0
