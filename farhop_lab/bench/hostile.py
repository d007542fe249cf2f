"""What a hostile body costs beside a plain one of the same size, and how four senders of it delay another client.

Both tiers run as shipped. Each crafted megabyte is sent several times, one after another, and so is a plain prompt in
the same run: what counts is the processes' CPU time, whether the body is served or refused. Then an innocent client
sends small requests at a fixed rate, alone and beside four clients without a pause. Two bounds, `COST_MAX` and
`DELAY_MAX`, are relative to the plain prompt. Last come bodies near the size limit, and how late the tiers' event loops
were meanwhile, by their own measurement.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import re
import shutil
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import msgspec

from farhop_lab.bench import bodies, tiers, usage
from farhop_lab.bench.harness import BenchError, Running, engines, open_files

BYTES = 1 << 20
HUGE_BYTES = 15 << 20
COST_MAX = 3.0  # times the plain prompt
DELAY_MAX = 2.0  # times the innocent client's p99 beside four senders of plain prompts
CLIENTS = 4
_TIMEOUT_S = 60.0
_INTERVAL_S = 0.01
_REMEMBERED_S = 16.0  # farhop.service.process.loop_lag
_LAG = re.compile(r"^farhop_loop_lag_seconds(?:\{.*\})? ([0-9.e+-]+)$", re.M)


class Row(msgspec.Struct, frozen=True):
    """One crafted body: CPU ms per request, and the answer's status."""

    what: str
    cpu_ms: float
    status: int


class HostileReport(msgspec.Struct, frozen=True):
    """All of them, the plain one first; and an innocent client's p99 in ms: alone, beside plain prompts, beside the
    worst.

    `quiet_lag_ms`, `huge_lag_ms`: the longest lag of an event loop beside small requests, beside the largest bodies.
    """

    rows: list[Row]
    alone_ms: float
    beside_plain_ms: float
    beside_worst_ms: float
    quiet_lag_ms: float = 0.0
    huge_lag_ms: float = 0.0

    @property
    def worst(self) -> Row:
        """The most expensive."""
        return max(self.rows[1:], key=lambda row: row.cpu_ms)

    @property
    def holds(self) -> bool:
        """Whether both are within their bounds."""
        dear = self.worst.cpu_ms > COST_MAX * self.rows[0].cpu_ms
        return not dear and self.beside_worst_ms <= DELAY_MAX * self.beside_plain_ms


def crafted(size: int) -> dict[str, tuple[str, bytes]]:
    """The path and a body of about `size` bytes, by name. Pure; the plain prompt comes first."""

    def chat(content: bytes, more: bytes = b"") -> tuple[str, bytes]:
        text = b'{"model":"bench","max_tokens":8%b,"messages":[{"role":"user","content":%b}]}' % (more, content)
        return bodies.PATH, text

    def many(item: bytes, most: int = 1 << 40) -> bytes:
        return b"[" + b",".join([item] * min(most, size // (len(item) + 1))) + b"]"

    def prompt(value: bytes) -> tuple[str, bytes]:
        return "/v1/completions", b'{"model":"bench","max_tokens":8,"prompt":%b}' % value

    def padded(item: bytes, most: int) -> bytes:
        """As many items as are allowed, and a text that fills the rest."""
        return many(item, most)[:-1] + b',{"type":"text","text":"%b"}]' % (b"a" * max(0, size - most * len(item)))

    rng = random.Random(1)
    words = b" ".join(b"word%d" % rng.randrange(50_000) for _ in range(size // 10))
    ids = b"[" + b",".join(b"%d" % rng.randrange(128_000) for _ in range(size // 7)) + b"]"
    members = b",".join(b'"k%d":1' % i for i in range(size // 12))
    return {
        "plain prompt": chat(b'"%b"' % words),
        "code": chat(b'"%b"' % (b'if (a[i] == \\"{\\") { b[i] = [0, 1, 2]; }\\n' * (size // 48))),
        "objects": chat(many(b"{}")),
        "objects that pass": chat(padded(b"{}", 2000)),
        "parts that pass": chat(padded(b'{"type":"text","text":""}', 5000)),
        "pictures that pass": chat(many(b'{"type":"image_url","image_url":{"url":"data:,"}}', 2000)),
        "pictures": chat(many(b'{"type":"image_url","image_url":{"url":"data:,"}}', 4000)),
        "lists": chat(many(b"[]")),
        "messages": (bodies.PATH, b'{"model":"bench","messages":%b}' % many(b'{"role":"u","content":""}')),
        "messages that pass": (
            bodies.PATH,
            b'{"model":"bench","messages":%b}' % many(b'{"role":"u","content":""}', 5400),
        ),
        "calls that pass": (
            bodies.PATH,
            b'{"model":"bench","messages":%b}' % many(b'{"role":"a","tool_calls":[{"id":""}]}', 3200),
        ),
        "tools": chat(b'"x"', b',"tools":' + many(b"{}")),
        "documents": ("/v1/rerank", b'{"model":"bench","query":"q","documents":%b}' % many(b'""')),
        "documents that pass": (
            "/v1/rerank",
            b'{"model":"bench","query":"q","documents":%b}' % many(b'"' + b"d" * 60 + b'"', 16_000),
        ),
        "token ids": prompt(ids),
        "small token ids": prompt(many(b"1")),
        "large token ids": prompt(many(b"2147483647")),
        "large integers": chat(b'"x"', b',"tools":' + many(b"1" * 4000, 60)),
        "numbers elsewhere": chat(b'"x"', b',"tools":' + many(b"1")),
        "members": chat(b'"x"', b"," + members),
        "members of a part": chat(b'[{"type":"image_url",%b}]' % b",".join(members.split(b",")[:16_000])),
        "fractions that pass": chat(b'"x"', b',"tools":[' + many(b"9e307", 8000) + b"]"),
        "lists of an id that pass": ("/v1/completions", b'{"model":"bench","prompt":%b}' % many(b"[10000]", 8000)),
        "nesting": chat(b'"x"', b',"tools":' + b"[" * (size // 2) + b"]" * (size // 2)),
        "nesting unread": chat(b'"x"', b',"x":' + b'{"a":' * (size // 6) + b"1" + b"}" * (size // 6)),
        "one key again and again": chat(b'"x"', b',"x":1' * (size // 6)),
        "line ends": chat(b'"%b"' % (b"\\n" * (size // 2))),
        "escapes": chat(b'"%b"' % (b"\\u00e9" * (size // 6))),
        "escaped quotes": chat(b'"%b"' % (b'\\"' * (size // 2))),
        "backslashes and quotes": chat(b'"%b"' % (b'\\\\\\"' * (size // 4))),
        "one wide character": chat(b'"%b"' % (b"a" * size + "😀".encode())),
        "blanks": chat(b'"x"', b" " * size),
        "a number without end": chat(b'"x"', b',"seed":' + b"1" * size),
        "no JSON": (bodies.PATH, b"{" + b'"' * size),
    }


def wire_of(path: str, body: bytes, host: str, *, chunk: int = 0) -> bytes:
    head = f"POST {path} HTTP/1.1\r\nhost: {host}\r\nauthorization: Bearer {bodies.KEY}\r\n"
    head += "content-type: application/json\r\n"
    if not chunk:
        return f"{head}content-length: {len(body)}\r\n\r\n".encode() + body
    pieces = (body[at : at + chunk] for at in range(0, len(body), chunk))
    chunks = b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces)
    return f"{head}transfer-encoding: chunked\r\n\r\n".encode() + chunks + b"0\r\n\r\n"


async def _ask(proxy: Running, wire: bytes) -> int:
    """The status of its answer; 0 where there was none."""
    async with asyncio.timeout(_TIMEOUT_S):
        reader, writer = await asyncio.open_connection(proxy.host, proxy.port)
        try:
            writer.write(wire)
            line = await reader.readline()
            with contextlib.suppress(ConnectionError):
                await writer.drain()
            return int(line.split()[1]) if line else 0
        except ConnectionError:
            return 0
        finally:
            writer.transport.abort()


async def _cost(proxy: Running, what: str, wire: bytes, rounds: int) -> Row:
    """The minimum of three: other load on the machine only adds."""
    pids, spent, status = usage.tree(proxy.pids), [], 0
    for _ in range(3):
        before = usage.cpu_s(pids)
        for _ in range(rounds):
            status = await _ask(proxy, wire)
        spent.append((usage.cpu_s(pids) - before) / rounds * 1e3)
    return Row(what, min(spent), status)


async def _p99(proxy: Running, seconds: float, wire: bytes | None) -> float:
    """An innocent client's p99 in ms, alone or beside clients that send `wire` without a pause."""
    small = wire_of(bodies.PATH, bodies.plain(1024, 1)[0], proxy.host)
    over = asyncio.Event()

    async def crowd() -> None:
        while not over.is_set() and wire is not None:
            await _ask(proxy, wire)

    others = [asyncio.create_task(crowd()) for _ in range(CLIENTS if wire is not None else 0)]
    took: list[float] = []
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        began = time.monotonic()
        if await _ask(proxy, small) != 200:
            raise BenchError("an innocent's request was not served")
        took.append(time.monotonic() - began)
        await asyncio.sleep(_INTERVAL_S)
    over.set()
    await asyncio.gather(*others, return_exceptions=True)
    return sorted(took)[int(len(took) * 0.99)] * 1e3


@asynccontextmanager
async def _running() -> AsyncIterator[Running]:
    folder = Path(tempfile.mkdtemp(prefix="farhop-bench-"))
    try:
        async with engines(folder, open_files(), None) as environment, tiers.both(environment) as proxy:
            yield proxy
    finally:
        shutil.rmtree(folder, ignore_errors=True)


async def measure(*, quick: bool = False, progress: Callable[[str], None] = lambda _text: None) -> HostileReport:
    """Measure everything. BenchError if it cannot run."""
    why = tiers.Tiers("both", tiers.both).missing()
    if why is not None:
        raise BenchError(why)
    rounds, seconds = (3, 2.0) if quick else (10, 8.0)
    async with _running() as proxy:
        wires = {what: wire_of(path, body, proxy.host) for what, (path, body) in crafted(BYTES).items()}
        plain = next(iter(wires.values()))
        path, body = crafted(BYTES // 8)["plain prompt"]
        wires["chunks of two bytes"] = wire_of(path, body, proxy.host, chunk=2)
        wires["chunks of 1 and 2 bytes"] = mixed_wire(path, body, proxy.host)
        for _ in range(rounds):
            await _ask(proxy, plain)  # connections and code that are needed once
        rows: list[Row] = []
        for what, wire in wires.items():
            rows.append(await _cost(proxy, what, wire, rounds))
            progress(f"{what}: {rows[-1].cpu_ms:.1f} ms, {rows[-1].status}")
        worst = max(rows[1:], key=lambda row: row.cpu_ms)
        alone_ms, plain_ms, worst_ms = [await _p99(proxy, seconds, wire) for wire in (None, plain, wires[worst.what])]
        await asyncio.sleep(_REMEMBERED_S)
        await _p99(proxy, seconds, None)
        quiet_lag_ms = await _lag_ms(proxy)
        huge = [wire_of(path, body, proxy.host) for path, body in crafted(HUGE_BYTES).values()]
        huge_lag_ms = 0.0
        for wire in huge:
            for _ in range(rounds):
                await _ask(proxy, wire)
            huge_lag_ms = max(huge_lag_ms, await _lag_ms(proxy))
        progress(
            f"loops late by {quiet_lag_ms:.1f} ms at most beside small requests, {huge_lag_ms:.1f} beside the largest"
        )
    return HostileReport(rows, alone_ms, plain_ms, worst_ms, quiet_lag_ms, huge_lag_ms)


async def _lag_ms(proxy: Running) -> float:
    """The longest lag of a tier's event loop in the last 15 s."""
    worst = 0.0
    async with aiohttp.ClientSession() as session:
        for port in proxy.admins:
            async with session.get(f"http://{proxy.host}:{port}/metrics") as answer:
                page = await answer.text()
            worst = max(worst, *(float(found) for found in _LAG.findall(page)))
    return worst * 1e3


def mixed_wire(path: str, body: bytes, host: str) -> bytes:
    head, _, _ = wire_of(path, b"", host, chunk=1).partition(b"0\r\n\r\n")
    return head + b"".join(
        b"1\r\n%b\r\n2\r\n%b\r\n" % (body[i : i + 1], body[i + 1 : i + 3]) for i in range(0, 99_999, 3)
    )
