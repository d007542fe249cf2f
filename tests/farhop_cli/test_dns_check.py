from __future__ import annotations

import json
import socket
import threading
from contextlib import contextmanager

import pytest
import typer

from entry_dns.answers.responder import Responder, wire
from entry_dns.answers.signing import ZoneKeys, delegation
from entry_dns.answers.zones import NamePlan, ZonePlan
from entry_dns.app.config import DnsListen
from entry_dns.app.workers import bind
from farhop_cli import dns_check
from farhop_cli.dns_check import run
from tests.entry_dns.answers.test_signing import KEY
from tests.entry_dns.conftest import served


@pytest.fixture
def server():
    with serving(served(Responder(keys={wire("entry.example"): ZoneKeys([KEY])}))) as server:
        yield server


@pytest.fixture
def other():
    """One that has another zone."""
    plan = ZonePlan("other.example", (NamePlan("api.other.example"),), (("ns.other.example", ()),), "nobody.example")
    with serving(served(Responder(), plan=plan)) as server:
        yield server


@contextmanager
def serving(responder):
    """A responder on UDP and TCP, in a thread."""
    (udp,), (tcp,), port = bind(DnsListen(port=0))
    tcp.listen()

    def by_udp() -> None:
        while True:
            data, asker = udp.recvfrom(4096)
            if data == b"end":
                return
            udp.sendto(responder.answer(data, asker[0]) or b"", asker)

    def by_tcp() -> None:
        while True:
            one, asker = tcp.accept()
            with one:
                data = one.recv(4096)
                if not data:
                    return
                answer = responder.answer(data[2:], asker[0], udp=False) or b""
                one.sendall(len(answer).to_bytes(2, "big") + answer)

    threads = [threading.Thread(target=work) for work in (by_udp, by_tcp)]
    for one in threads:
        one.start()
    yield f"127.0.0.1:{port}"
    udp.sendto(b"end", ("127.0.0.1", port))
    socket.create_connection(("127.0.0.1", port)).close()
    for one in threads:
        one.join(30)
    udp.close()
    tcp.close()


def test_a_zone_that_is_well(server, capsys) -> None:
    assert run("entry.example", ["api.entry.example"], "", [server], "203.0.113.0/24", True) == 0
    found = {one["what"]: one["text"] for one in json.loads(capsys.readouterr().out)}
    assert found[f"{server} api.entry.example. A"] == "NOERROR, 192.0.2.3, 192.0.2.2, 192.0.2.1, scope 24"
    assert f"{server} TCP NS" in found
    ds = delegation(wire("entry.example"), KEY.dnskey)
    assert found["DNSSEC entry.example."] == f"its parent needs DS {KEY.tag} 13 2 {ds[4:].hex()}"


def test_control_characters_from_servers_are_not_printed(monkeypatch, capsys) -> None:
    monkeypatch.setattr(dns_check, "_of_server", lambda *_: [dns_check.Finding("a", True, "\x1b[2J")])
    monkeypatch.setattr(dns_check, "_signed", lambda *_: [])
    run("entry.example", [], "", ["127.0.0.1:1"], "", False)
    assert capsys.readouterr().out == "ok   a: \N{REPLACEMENT CHARACTER}[2J\n"


def test_a_zone_that_is_not_served_there_and_a_network_that_the_law_forbids(server, capsys) -> None:
    assert run("other.example", [], "", [server], "", False) == 1
    assert "REFUSED, no record: not authoritative" in capsys.readouterr().out
    assert run("entry.example", ["eu.entry.example"], "", [server], "198.18.0.0/24", False) == 1
    assert "the law leaves this network no entry" in capsys.readouterr().out


def test_a_server_beside_it_that_refuses_is_shown_as_that_and_has_no_other_keys(server, other, capsys) -> None:
    for servers in ([server, other], [other, server]):
        assert run("entry.example", ["api.entry.example"], "", servers, "203.0.113.0/24", True) == 1
        found = {one["what"]: (one["good"], one["text"]) for one in json.loads(capsys.readouterr().out)}
        good, text = found[f"{other} api.entry.example. A"]
        assert not good
        assert text.startswith("REFUSED, no record, scope 0; it does not serve the zone, and some resolvers then ask")
        assert found[f"{server} api.entry.example. A"][0]
        assert found["DNSSEC entry.example."][1].startswith("its parent needs DS")


@pytest.mark.parametrize(
    ("servers", "client", "message"), [(["nowhere"], "", "is no server"), ([], "x", "--client: 'x' is no network")]
)
def test_bad_questions(capsys, servers, client, message) -> None:
    with pytest.raises(typer.Exit):
        run("entry.example", [], "", servers, client, False)
    assert message in capsys.readouterr().err
