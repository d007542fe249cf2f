from __future__ import annotations

import asyncio

import dns.message
import dns.name
import dns.rcode
import dns.tsig
import pytest
from pydantic import ValidationError

from entry_dns.answers.responder import packed, wire
from entry_dns.answers.snapshot import Records
from entry_dns.links.updates import Publish, UpdateError, Updates

SECRET = "c2VjcmV0IG9mIHRoZSB0ZXN0cw=="
GOOD = {"server": "127.0.0.1", "zone": "example.com", "key_name": "farhop.", "secret": "env:TSIG"}
CHANGES = {(wire("api.example.com"), 1): Records(30, (packed("192.0.2.1"),)), (wire("eu.example.com"), 28): None}


@pytest.fixture(autouse=True)
def secret(monkeypatch) -> None:
    monkeypatch.setenv("TSIG", SECRET)


async def write(server_secret: bytes, rcode: int = 0, changes=CHANGES) -> dns.message.Message:
    """What a server that knows this secret was sent."""
    came: list[dns.message.Message] = []
    key = dns.tsig.Key("farhop.", server_secret, dns.tsig.HMAC_SHA256)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        data = await reader.readexactly(int.from_bytes(await reader.readexactly(2), "big"))
        try:
            update = dns.message.from_wire(data, keyring={key.name: key})
        except dns.tsig.BadSignature:
            update = dns.message.from_wire(data, keyring=False)
            answer = dns.message.make_response(dns.message.from_wire(data, keyring=False))
            answer.set_rcode(dns.rcode.NOTAUTH)
            answer.use_tsig(key, tsig_error=dns.rcode.BADSIG)
            found = answer.to_wire()
        else:
            came.append(update)
            answer = dns.message.make_response(update)
            answer.set_rcode(rcode)
            found = answer.to_wire()
        writer.write(len(found).to_bytes(2, "big") + found)
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        port = server.sockets[0].getsockname()[1]
        await Updates(Publish(**GOOD, port=port)).write(changes)
    finally:
        server.close()
    return came[0]


async def test_an_update_is_signed_and_replaces_sets() -> None:
    update = await write(b"secret of the tests")
    assert update.had_tsig
    assert {str(one.name) for one in update.sections[2]} == {"api.example.com.", "eu.example.com."}
    added = [rdata.to_text() for one in update.sections[2] if one.deleting is None for rdata in one]
    assert added == ["192.0.2.1"]


async def test_a_wrong_tsig_secret_is_reported_in_one_line() -> None:
    with pytest.raises(UpdateError, match=r"does not take the TSIG key 'farhop.'"):
        await write(b"another one")


async def test_an_update_without_the_right_is_refused() -> None:
    with pytest.raises(UpdateError, match=r"answers REFUSED; let key 'farhop.' update zone example.com"):
        await write(b"secret of the tests", dns.rcode.REFUSED)


@pytest.mark.parametrize(
    ("rcode", "message"),
    [
        (dns.rcode.SERVFAIL, r"answers SERVFAIL; it could not write zone example.com, or forward"),
        (dns.rcode.NOTAUTH, r"answers NOTAUTH; it is not the primary of zone example.com, or knows no key 'farhop.'"),
        (dns.rcode.NOTIMP, r"answers NOTIMP; it takes no dynamic updates"),
        (dns.rcode.NOTZONE, r"answers NOTZONE; its log says why"),
    ],
)
async def test_each_refusal_has_its_own_remedy(rcode: dns.rcode.Rcode, message: str) -> None:
    with pytest.raises(UpdateError, match=message):
        await write(b"secret of the tests", rcode)


async def test_a_name_outside_and_a_server_that_is_not_there() -> None:
    with pytest.raises(UpdateError, match=r"www.elsewhere. is outside of zone example.com"):
        await write(b"secret of the tests", changes={(wire("www.elsewhere"), 1): None})
    with pytest.raises(UpdateError, match=r"127.0.0.1:1 cannot be updated"):
        await Updates(Publish(**GOOD, port=1)).write(CHANGES)


@pytest.mark.parametrize(("fault", "message"), [({"server": "ns1.example"}, "server: is no address")])
def test_a_destination_that_cannot_be_published_to_is_refused(fault, message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        Publish(**{**GOOD, **fault})


def test_a_secret_that_is_not_base64(monkeypatch) -> None:
    monkeypatch.setenv("TSIG", "not base64!")
    with pytest.raises(ValidationError, match="secret: is not base64"):
        Publish(**GOOD)
