"""Discovery against a DNS server of our own on UDP and TCP: its answers and its failures."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from random import Random

import dns.flags
import dns.message
import dns.rcode
import dns.rdatatype
import dns.rrset
import pytest
from inprocess import until
from sources import following

from farhop_lab.world.ports import free_ports
from regional_lb.engines.config import DnsSource
from regional_lb.engines.discovery.dns import DnsNames

SRV, HOST = "_vllm._tcp.gpus.example.", "gpus.example."
SOA = "ns.example. admin.example. 1 60 60 60 {}"


class Server(asyncio.DatagramProtocol):
    """`records`: texts by name and type. `rcode`: what it says instead. `silent`: nothing at all."""

    def __init__(self) -> None:
        self.records: dict[tuple[str, str], list[str]] = {}
        self.ttl_s, self.rcode, self.silent, self.negative_ttl_s = 0, dns.rcode.NOERROR, False, None
        self.udp = self.tcp = 0

    def connection_made(self, transport) -> None:
        self.transport = transport

    def datagram_received(self, data: bytes, source) -> None:
        self.udp += 1
        if self.silent:
            return
        answer = self.answer(data)
        if len(answer.to_wire(max_size=65535)) > 1232:
            answer.answer.clear()
            answer.flags |= dns.flags.TC
        self.transport.sendto(answer.to_wire(), source)

    async def stream(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError):
            data = await reader.readexactly(int.from_bytes(await reader.readexactly(2), "big"))
            self.tcp += 1
            wire = self.answer(data).to_wire(max_size=65535)
            writer.write(len(wire).to_bytes(2, "big") + wire)
            await writer.drain()
        writer.close()

    def answer(self, data: bytes) -> dns.message.Message:
        query = dns.message.from_wire(data)
        answer = dns.message.make_response(query)
        answer.flags |= dns.flags.RA
        name, kind = query.question[0].name.to_text(), dns.rdatatype.to_text(query.question[0].rdtype)
        answer.set_rcode(self.rcode)
        texts = self.records.get((name, kind))
        if self.rcode == dns.rcode.NOERROR and texts:
            answer.answer.append(dns.rrset.from_text(name, self.ttl_s, "IN", kind, *texts))
        elif self.rcode == dns.rcode.NOERROR and name not in {known for known, _ in self.records}:
            answer.set_rcode(dns.rcode.NXDOMAIN)
        if not answer.answer and self.negative_ttl_s is not None:
            text = SOA.format(self.negative_ttl_s)
            answer.authority.append(dns.rrset.from_text("example.", 3600, "IN", "SOA", text))
        return answer


@contextlib.asynccontextmanager
async def serving() -> AsyncIterator[tuple[Server, str]]:
    """A server, and where it is: one port for both."""
    server, loop = Server(), asyncio.get_running_loop()
    (port,) = free_ports(1)  # one that the system lends for TCP may be another's for UDP
    tcp = await asyncio.start_server(server.stream, "127.0.0.1", port)
    udp, _ = await loop.create_datagram_endpoint(lambda: server, local_addr=("127.0.0.1", port))
    try:
        yield server, f"127.0.0.1:{port}"
    finally:
        udp.close()
        tcp.close()
        await tcp.wait_closed()


def source(nameserver: str, host: str = SRV, **more: object) -> DnsNames:
    fields = {
        "kind": "dns", "host": host, "nameservers": [nameserver],
        "ttl_floor_s": 0.02, "ttl_ceiling_s": 0.04, "timeout_s": 3.0, "replica": {"models": ["m"]}, **more,
    }  # fmt: skip
    return DnsNames(DnsSource.model_validate(fields), Random(1))


async def test_srv_gives_hosts_and_ports_of_the_first_in_line() -> None:
    async with serving() as (server, nameserver):
        server.records[SRV, "SRV"] = ["0 5 8000 a.example.", "0 1 8001 b.example.", "10 1 8000 spare.example."]
        async with following(source(nameserver)) as found:
            await found.come("a.example:8000", "b.example:8001")
            assert found.draining() == []
            server.records[SRV, "SRV"] = ["0 5 8000 a.example.", "0 0 8001 b.example."]
            await until(lambda: found.draining() == ["b.example:8001"])  # weight 0 beside others: it gets no new work
            server.records[SRV, "SRV"] = ["0 0 8000 a.example.", "0 0 8001 b.example."]
            await until(lambda: found.draining() == [])
            server.records[SRV, "SRV"] = ["10 1 8000 spare.example."]
            await found.come("spare.example:8000")
            server.records[SRV, "SRV"] = ["0 0 0 ."]  # definitely not there
            await found.come()
            assert found.failures == []


async def test_addresses_are_those_of_both_kinds_on_one_port() -> None:
    async with serving() as (server, nameserver):
        server.records = {(HOST, "A"): ["10.0.0.2", "10.0.0.1"], (HOST, "AAAA"): ["fd00::1"]}
        async with following(source(nameserver, HOST, record="address", port=8000)) as found:
            await found.come("10.0.0.1:8000", "10.0.0.2:8000", "[fd00::1]:8000")
            del server.records[HOST, "AAAA"]  # "no such record" is an answer
            await found.come("10.0.0.1:8000", "10.0.0.2:8000")


@pytest.mark.parametrize("how", ["SERVFAIL", "REFUSED", "silence"])
async def test_a_failing_dns_server_does_not_empty_the_list(how: str) -> None:
    async with serving() as (server, nameserver):
        server.records[SRV, "SRV"] = ["0 1 8000 a.example."]
        async with following(source(nameserver, timeout_s=0.2)) as found:
            await found.come("a.example:8000")
            server.silent = how == "silence"
            server.rcode = dns.rcode.NOERROR if server.silent else dns.rcode.from_text(how)
            await until(lambda: len(found.failures) >= 2)
            assert found.labels == ["a.example:8000"]
            assert isinstance(found.failures[0], str)
            assert "check the name and its servers" in found.failures[0]
            server.silent, server.rcode = False, dns.rcode.NOERROR
            server.records[SRV, "SRV"] = ["0 1 8000 b.example."]
            await found.come("b.example:8000")


@pytest.mark.parametrize("how", ["no such name", "no such record"])
@pytest.mark.parametrize("soa", [True, False])
async def test_an_empty_list_is_an_answer(how: str, soa: bool) -> None:
    async with serving() as (server, nameserver):
        server.negative_ttl_s = 0 if soa else None
        server.records[SRV, "SRV"] = ["0 1 8000 a.example."]
        async with following(source(nameserver)) as found:
            await found.come("a.example:8000")
            server.records = {} if how == "no such name" else {(SRV, "TXT"): ["x"]}
            await found.come()
            assert found.failures == []


async def test_a_long_answer_comes_by_tcp() -> None:
    hosts = [f"gpu-{number:03}.a-rather-long-name.example" for number in range(100)]
    async with serving() as (server, nameserver):
        server.records[SRV, "SRV"] = [f"0 1 8000 {host}." for host in hosts]
        async with following(source(nameserver)) as found:
            await found.come(*(f"{host}:8000" for host in hosts))
            assert server.udp
            assert server.tcp


async def test_an_answer_holds_for_its_ttl_within_floor_and_ceiling() -> None:
    async with serving() as (server, nameserver):
        server.ttl_s = 60
        server.records[SRV, "SRV"] = ["0 1 8000 a.example."]
        for more in ({"ttl_ceiling_s": 60.0}, {"ttl_floor_s": 50.0, "ttl_ceiling_s": 60.0}):
            server.udp, server.ttl_s = 0, 60 if len(more) == 1 else 0
            async with following(source(nameserver, **more)) as found, following(source(nameserver)) as often:
                await until(lambda often=often: len(often.steps) >= 5)  # the ceiling is shorter than the TTL
                assert len(found.steps) == 1


async def test_a_nonsensical_target_is_named_and_the_others_stand() -> None:
    async with serving() as (server, nameserver):
        server.records[SRV, "SRV"] = ["0 1 0 a.example.", "0 1 8000 b.example."]
        async with following(source(nameserver)) as found:
            await found.come("b.example:8000")
            assert found.found is not None
            assert "a.example:0.url: must look like" in found.found.problems[0]
