"""Rights at an admin port: by token, by certificate, and without authentication."""

import hmac
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import serialization

from farhop.identity import certificate_names, operators
from farhop.identity.operators import Operators, digest_of
from farhop_lab.world.certs import Authority

TOKENS = {"grafana": (digest_of("g" * 16), "metrics"), "oncall": (digest_of("o" * 16), "act")}


@pytest.mark.parametrize(
    ("authorization", "may"),
    [
        (None, ""), ("", ""), ("Bearer", ""), (f"Bearer {'x' * 16}", ""), ("g" * 16, ""), (f"Basic {'g' * 16}", ""),
        (f"Bearer {'g' * 16}", "metrics"), (f"bearer  {'o' * 16} ", "act"), (f"Bearer {'g' * 5000}", ""),
        ("Bearer \udcff", ""),
    ],
)  # fmt: skip
def test_a_token_has_its_right_and_nothing_else_has_one(authorization, may):
    assert Operators(TOKENS).of(authorization, None).may == may


def test_each_right_includes_the_one_before():
    known = Operators(TOKENS)
    grafana, oncall, nobody = (known.of(f"Bearer {c * 16}", None) for c in "gox")
    assert [grafana.may_do(one) for one in operators.RIGHTS] == [True, False, False]
    assert [oncall.may_do(one) for one in operators.RIGHTS] == [True, True, True]
    assert not any(nobody.may_do(one) for one in operators.RIGHTS)
    assert (oncall.name, nobody.name) == ("token oncall", "nobody")


def test_every_token_is_compared_whichever_fits(monkeypatch):
    seen, real = [], hmac.compare_digest

    def compare(known, given):
        seen.append(known)
        return real(known, given)

    monkeypatch.setattr(operators.hmac, "compare_digest", compare)
    known = Operators(TOKENS)
    for character in "gox":
        known.of(f"Bearer {character * 16}", None)
    assert seen == [digest for digest, _ in TOKENS.values()] * 3


def test_without_authentication_every_caller_has_the_configured_right():
    assert Operators().of(None, None).may == "act"
    assert Operators(anonymous="read").of("Bearer nonsense", b"nonsense").may == "read"
    assert not Operators().asks


def _der(cert_file: str) -> bytes:
    return x509.load_pem_x509_certificate(Path(cert_file).read_bytes()).public_bytes(serialization.Encoding.DER)


def test_a_certificate_reads_and_the_operator_it_names_may_more(tmp_path):
    known = Operators(named={"alice": "act"}, trust_domain="ex.org", certified=True)
    authority = Authority(tmp_path)
    uri = certificate_names.operator_uri
    alice, bob, elsewhere = (
        _der(authority.issue(name, (uri(domain, name),)).cert_file)
        for name, domain in (("alice", "ex.org"), ("bob", "ex.org"), ("alice", "other.org"))
    )
    assert [known.of(None, one).may for one in (alice, bob, elsewhere)] == ["act", "read", "read"]
    assert known.of(None, alice).name == "operator alice"
    assert known.of(None, None).may == ""
    assert Operators(TOKENS).of(None, alice).may == ""  # if certificates prove nothing
    assert known.of(None, b"nonsense").may == "read"  # verified, but without a name
    both = Operators(TOKENS, certified=True)
    assert both.of(f"Bearer {'o' * 16}", bob).may == "act"
