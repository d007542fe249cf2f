"""A signed document is valid only under the key it was signed for and by an allowed signer."""

from __future__ import annotations

import json

import pytest
from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1, generate_private_key
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat
from hypothesis import given, settings
from hypothesis import strategies as st

from farhop.store import envelope
from farhop.store.contract import (
    LAW_KEY,
    issued_key,
    limit_key,
    override_key,
    pick_key,
    report_key,
    route_key,
    split_key,
)
from farhop.store.documents.overrides import bias_key, pin_key
from farhop.store.envelope import NO_KEYS, EnvelopeError, Keys, Signer, bare, key_named, kind_of, public_key

PRIVATE = Ed25519PrivateKey.from_private_bytes(bytes(range(32)))
PEM = PRIVATE.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
OPS = Signer("ops", PEM)
DOCUMENT = b'{"epoch": 3, "why": "caf\xc3\xa9"}'


def keys(*may: str) -> Keys:
    return Keys({"ops": (public_key(OPS.public), may)})


def why(known: Keys, place: str, value: bytes) -> str:
    with pytest.raises(EnvelopeError) as caught:
        known.open(place, value)
    return caught.value.reason


def test_a_signed_document_stays_readable_and_opens_unchanged() -> None:
    value = OPS.seal(LAW_KEY, DOCUMENT)
    assert json.loads(value)["document"] == json.loads(DOCUMENT)
    opened = keys("law").open(LAW_KEY, value)
    assert (opened.document, opened.key) == (DOCUMENT, "ops")
    assert (bare(value), key_named(value)) == (DOCUMENT, "ops")
    assert (bare(DOCUMENT), key_named(DOCUMENT)) == (DOCUMENT, "")
    assert NO_KEYS.open(LAW_KEY, value) == envelope.Opened(DOCUMENT, "")


def test_each_kind_of_document_and_whose_it_is() -> None:
    places = [
        LAW_KEY, override_key("tokyo"), bias_key("tokyo"), pin_key("acme", ""), pick_key("tokyo"), split_key("tokyo"),
        route_key("tokyo"), issued_key("k1"), limit_key("acme"), report_key("tokyo", "r1"),
    ]  # fmt: skip
    assert [kind_of(place)[0] for place in places] == list(envelope.KINDS)
    assert {kind_of(place)[1] for place in places} == {"", "tokyo"}
    assert kind_of(f"{LAW_KEY}s") == ("", "")
    for kind in envelope.KINDS:
        envelope.check_right(kind)
    envelope.check_right("report/tokyo")
    for wrong in ("laws", "law/tokyo", "pin/tokyo", "drain/", ""):
        with pytest.raises(ValueError, match="may: "):
            envelope.check_right(wrong)


def test_a_key_may_sign_what_it_is_configured_for_and_one_regions_alone() -> None:
    tokyo, paris = override_key("tokyo"), override_key("paris")
    mine = keys("drain/tokyo")
    assert mine.open(tokyo, OPS.seal(tokyo, DOCUMENT)).key == "ops"
    assert why(mine, paris, OPS.seal(paris, DOCUMENT)) == "not_allowed"
    assert why(mine, paris, DOCUMENT) == "unsigned"
    assert why(mine, paris, OPS.seal(tokyo, DOCUMENT)) == "not_allowed"
    assert why(keys("drain"), paris, OPS.seal(tokyo, DOCUMENT)) == "bad_signature"  # signed for another key
    assert mine.open(LAW_KEY, DOCUMENT) == envelope.Opened(DOCUMENT, "")  # the configured keys do not cover it
    assert [mine.asks(place) for place in (tokyo, paris, LAW_KEY)] == [True, True, False]
    assert (
        why(Keys({"other": (public_key(OPS.public), ["law"])}), LAW_KEY, OPS.seal(LAW_KEY, DOCUMENT)) == "unknown_key"
    )


@settings(max_examples=150, deadline=None, derandomize=True)
@given(st.data())
def test_a_signed_document_with_a_changed_byte_is_refused(data: st.DataObject) -> None:
    value = bytearray(OPS.seal(LAW_KEY, DOCUMENT))
    at = data.draw(st.integers(0, len(value) - 1))
    value[at] ^= data.draw(st.integers(1, 255))
    try:
        opened = keys("law").open(LAW_KEY, bytes(value))
    except EnvelopeError:
        return
    assert opened.document == DOCUMENT  # a byte of the frame without meaning, such as one of its version


@pytest.mark.parametrize("value", [
    b'{"envelope":1,', b'{"envelope":1,"key":"ops","signature":"","document":{},"more":1}', b'{"envelope":1,"key":7}',
    b'{"envelope":1,"key":"ops","signature":"not base64!","document":{}}', b'{"envelope":1,\xff',
    b'{"envelope":1,' + b'"document":' + b"[" * 100_000,
])  # fmt: skip
def test_a_malformed_envelope_is_refused_under_any_configuration(value: bytes) -> None:
    assert why(keys("law"), LAW_KEY, value) in ("malformed", "bad_signature")
    assert isinstance(bare(value), bytes)


def test_keys_are_read_as_pem_or_base64_and_others_are_refused_with_the_remedy() -> None:
    pem = PRIVATE.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo).decode()
    assert public_key(pem).public_bytes_raw() == public_key(OPS.public).public_bytes_raw()
    curve = generate_private_key(SECP256R1())
    wrong = curve.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo).decode()
    for text in (wrong, "AAAA", "not base64!", "-----BEGIN PUBLIC KEY-----\n", "A" * 5000):
        with pytest.raises(ValueError, match="give an Ed25519 public key"):
            public_key(text)
    sealed = curve.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    for private in (sealed, b"", b"-----BEGIN PRIVATE KEY-----\n", PEM[:60]):
        with pytest.raises(ValueError, match="openssl genpkey"):
            Signer("ops", private)
    with pytest.raises(ValueError, match="is not a name"):
        Signer("o/ps", PEM)
