"""What is kept, traced and logged of callers: no keys, nothing of strangers, at a bounded rate."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import time
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "flows"))

from farhop.balance.machine import Request
from farhop.identity.api_keys import Keyring, Principal
from farhop.relay.formats.bodies import BodyError
from farhop.relay.http import head
from farhop.service.admin.server import AdminServer, ExplainError
from farhop.service.observability.decisions import Decisions
from farhop.service.observability.request_telemetry import RequestTelemetry
from farhop.telemetry import context as trace_context
from farhop.telemetry.metrics import TierMetrics
from farhop.telemetry.spans import Tracing

SAMPLED = b"00-" + b"a" * 32 + b"-" + b"b" * 16 + b"-01"


@pytest.fixture(autouse=True)
def surroundings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("OTEL_")]:
        monkeypatch.delenv(name)


class _Clock:
    def __init__(self) -> None:
        self.at = 100.0

    def now(self) -> float:
        return self.at

    def wall_ns(self, at: float) -> int:
        return int(at * 1e9)


def _telemetry(clock: _Clock, per_s: float) -> RequestTelemetry:
    tracing, metrics = Tracing("farhop-global", "paris", "g1"), TierMetrics("global", "paris", "g1")
    reasons: Any = SimpleNamespace()
    return RequestTelemetry(
        "farhop.global",
        "d",
        tracing=tracing,
        metrics=metrics,
        decisions=Decisions(),
        clock=clock,  # type: ignore[arg-type]
        rng=Random(1),
        reasons=reasons,  # type: ignore[arg-type]
        traced_per_s_max=per_s,
    )


def _asks(telemetry: RequestTelemetry, *, outside: bool = True) -> bool:
    context = telemetry.begin()
    assert context.trace.traceparent == b""  # nothing of a stranger is traced
    raw = b"POST / HTTP/1.1\r\nhost: a\r\ntraceparent: " + SAMPLED
    telemetry.admitted(context, head.read(raw, 10), outside=outside)
    assert context.trace.traceparent[3:35] == SAMPLED[3:35]  # its trace continues, recorded or not
    return trace_context.asks(context.trace.traceparent)


def test_traces_on_request_are_limited_in_rate() -> None:
    clock = _Clock()
    telemetry = _telemetry(clock, 5.0)
    assert [_asks(telemetry) for _ in range(8)] == [True] * 5 + [False] * 3
    clock.at += 0.4
    assert [_asks(telemetry) for _ in range(4)] == [True] * 2 + [False] * 2
    assert all(_asks(telemetry, outside=False) for _ in range(20))  # the tier above has checked it


def test_no_key_stands_in_memory_in_the_clear() -> None:
    ring = Keyring(lambda _digest: (SimpleNamespace(name="acme"), SimpleNamespace(name="k", within=())))  # type: ignore[arg-type,return-value]
    for _ in range(2):
        assert ring.identify(b"Bearer sk-secret-key") == Principal("acme", "k")
    assert b"secret" not in repr(ring.memo).encode()


class _Desk:
    """Counts who asks at a time; its questions are composed off the loop."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.under_way = self.most = 0
        self.release = False

    def compose(self, question: Any) -> Request:
        with pytest.raises(RuntimeError):
            asyncio.get_running_loop()  # a thread
        self.under_way += 1
        self.most = max(self.most, self.under_way)
        while not self.release:
            time.sleep(0.001)
        self.under_way -= 1
        if question.tenant == "none":
            raise ExplainError("nobody")
        return Request("r", "t", "m", 0, 0, (), 0.0)

    def explain(self, _request: Request, _drained: str = "") -> dict[str, Any]:
        return {"ok": True}


async def _post(port: int, wire: bytes) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(wire)
    try:
        async with asyncio.timeout(60.0):
            return await reader.read(300)
    finally:
        writer.transport.abort()


async def test_explain_does_not_block_the_event_loop_and_is_bounded() -> None:
    tier_admin = _Desk()
    admin = AdminServer(tier_admin, TierMetrics("global", "paris", "g1"), Decisions())  # type: ignore[arg-type]
    port = await admin.open("127.0.0.1", 0)
    try:
        body = b'{"body":{},"tenant":"t"}'
        wire = b"POST /explain HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)
        asked = [asyncio.create_task(_post(port, wire)) for _ in range(6)]
        await asyncio.wait(asked, timeout=10.0, return_when=asyncio.FIRST_COMPLETED)  # the loop continues
        tier_admin.release = True
        statuses = sorted(answer[9:12] for answer in await asyncio.gather(*asked))
        assert statuses == [b"200"] * 4 + [b"503"] * 2
        assert tier_admin.most == 1
    finally:
        tier_admin.release = True
        await admin.close()


async def test_a_malformed_admin_request_leaves_nothing_of_itself_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    admin = AdminServer(SimpleNamespace(), TierMetrics("global", "paris", "g1"), Decisions())  # type: ignore[arg-type]
    port = await admin.open("127.0.0.1", 0)
    try:
        with caplog.at_level(logging.DEBUG):
            for wire in (
                b"SECRET-PROMPT nonsense\r\n\r\n",
                b"POST /explain HTTP/1.1\r\nHost: a\r\nX SECRET: 1\r\n\r\n",
            ):
                assert await _post(port, wire)
        assert "SECRET" not in caplog.text
    finally:
        await admin.close()


def test_refusals_name_fields_and_not_contents() -> None:
    from farhop.relay.formats import bodies
    from farhop.relay.formats.paths import Kind

    with pytest.raises(BodyError) as caught:
        bodies.read(Kind.CHAT, b'{"model":"m","messages":[{"role":"u","content":{"SECRET":1}}]}')
    assert "SECRET" not in caught.value.detail
