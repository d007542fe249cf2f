"""Where a token is sent: over TLS to a proven certificate, or to this machine; nowhere else."""

import ssl

import pytest

from farhop_cli.access import NO_ACCESS, Access, AdminError

TOKEN = "t" * 32


@pytest.mark.parametrize(
    "base", ["https://10.1.0.7:8082", "http://127.0.0.1:8082", "http://[::1]:1", "http://localhost:1"]
)
def test_a_token_goes_over_tls_or_to_this_machine(base):
    assert Access(TOKEN).headers(base) == {"Authorization": f"Bearer {TOKEN}"}
    assert NO_ACCESS.headers(base) == {}


@pytest.mark.parametrize(
    "base", ["http://10.1.0.7:8082", "http://localhost.example:1", "http://127.0.0.1.example", "http://"]
)
def test_a_token_does_not_travel_in_plaintext(base):
    with pytest.raises(AdminError, match="does not travel in plaintext") as caught:
        Access(TOKEN).headers(base)
    assert TOKEN not in str(caught.value)


def test_the_token_is_not_sent_to_an_unproven_address():
    found = "https://10.1.0.7:8082"
    with pytest.raises(AdminError, match="found in etcd"):
        Access(TOKEN, barred={found: "it was found in etcd"}).headers(found)


def test_a_token_is_not_shown_and_a_client_believes_the_systems_authorities():
    assert TOKEN not in repr(Access(TOKEN))
    assert NO_ACCESS.as_client().verify_mode is ssl.CERT_REQUIRED
    with pytest.raises(OSError, match="No such file"):
        Access(ca_file="/nowhere.pem").as_client()
