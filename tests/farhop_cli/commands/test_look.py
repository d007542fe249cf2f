"""Whatever asks balancers takes the same options for which fleet is meant; what reads files takes none of them."""

import pytest

FLEET = {"--context", "--config", "--etcd", "--admin", "--world", "--json"}


@pytest.mark.parametrize("name", ["status", "console", "top", "explain", "bundle", "record", "log-level"])
def test_a_fleet_is_named_alike(wired, options, name):
    assert options(wired(name).commands[name] if hasattr(wired(name), "commands") else wired(name)) >= FLEET


def test_recorded_data_is_read_without_a_fleet(wired, options):
    assert not options(wired("usage")) & (FLEET - {"--json"})
    assert set(wired("audit").commands) == {"verify", "prove", "export"}
