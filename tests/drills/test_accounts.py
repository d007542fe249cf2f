"""Usage and audit of real balancers that are killed under load: whole, once, and provable afterwards."""

from __future__ import annotations

import asyncio
import contextlib
import json
import resource
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from inprocess import HOP, HOP_KEY, MODEL, Engine, chat, head, send, streaming
from processes import Process

from farhop.accounts import segments
from farhop.accounts.audit import Files
from farhop.accounts.usage import Reading
from farhop_lab.world.etcd_cluster import EtcdCluster

KEY = Ed25519PrivateKey.from_private_bytes(bytes(range(32)))
PEM = KEY.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


@asynccontextmanager
async def fleet(folder: Path, on_full: str = "serve") -> AsyncIterator[Process]:
    """An engine, a region's balancer and a global one, the last of which writes everything down."""
    (folder / "key.pem").write_bytes(PEM)
    async with Engine().running() as engine, EtcdCluster(1, folder / "etcd") as etcd:
        common = {"region": "virginia", "admin": {"port": 0}, "hop": HOP, "etcd": {"endpoints": etcd.endpoints},
                  "limits": {"drain_s": 0.5}}  # fmt: skip
        replica = {"url": f"http://{engine.address}", "models": [MODEL], "name": "one"}
        below = Process("regional", folder, {
            **common, "instance": "r1", "tier": {"port": 0}, "control": {"port": 0}, "replicas": [replica],
        })  # fmt: skip
        above = Process("global", folder, {
            **common, "instance": "g1", "listen": {"port": 0},
            "usage": {"dir": str(folder / "usage"), "sync": "never", "on_full": on_full},
            "audit": {"dir": str(folder / "audit"), "key": f"file:{folder / 'key.pem'}", "on_full": on_full},
        })  # fmt: skip
        try:
            await below.start()
            await above.start()
            yield above
        finally:
            for one in (above, below):
                await one.end(signal.SIGKILL)


def waited_s(pid: int) -> float:
    """How long that of a process's threads which waited most could have run and others had the cores."""
    with contextlib.suppress(FileNotFoundError):
        return max(int(one.read_text().split()[1]) / 1e9 for one in Path(f"/proc/{pid}/task").glob("*/schedstat"))
    return 0.0


async def asked(balancer: Process, until_s: float, answers: list[tuple[float, float, str]]) -> None:
    """Ask one after the other; each answer's moment, how long the balancer was kept waiting by then, its decision."""
    while time.monotonic() < until_s:
        with contextlib.suppress(OSError, IndexError, ValueError):
            answer = await send(balancer.port, chat(body=streaming()))
            if answer.status == 200 and answer.body.endswith(b"data: [DONE]\n\n"):
                assert balancer.child.pid is not None
                answers.append((time.monotonic(), waited_s(balancer.child.pid), answer.headers["x-farhop-decision"]))


async def test_usage_and_audit_records_survive_a_balancer_killed_under_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FARHOP_TEST_HOP", HOP_KEY)
    log = Files(tmp_path / "audit" / "virginia" / "g1", "farhop.internal/fleet/virginia/g1", KEY.public_key())
    async with fleet(tmp_path) as balancer:
        answers: list[tuple[float, float, str]] = []
        begun = time.monotonic()
        asking = [asyncio.create_task(asked(balancer, begun + 90.0, answers)) for _ in range(4)]

        def before(for_s: float, at: float, late_s: float) -> bool:
            """Whether the balancer had so long for it until it was killed: with a core of its own."""
            return killed_at - at - (killed_late_s - late_s) > for_s

        assert balancer.child.pid is not None
        killed_at = killed_late_s = 0.0
        async with asyncio.timeout(90.0):
            while len(answers) <= 60 or not before(2.0, *answers[0][:2]):
                await asyncio.sleep(0.05)
                killed_at, killed_late_s = time.monotonic(), waited_s(balancer.child.pid)
        await balancer.end(signal.SIGKILL)
        for task in asking:
            task.cancel()
        await asyncio.gather(*asking, return_exceptions=True)
        checkpoint, _ = log.verify()
        signed = {json.loads(one).get("id") for one in log.entries(checkpoint.size)}
        assert len(answers) > 50
        assert {name for at, late_s, name in answers if before(1.5, at, late_s)} <= signed
        # A killed process may lose the records of its last tenth of a second: on a busy machine a little more.
        kept = {name for at, late_s, name in answers if before(0.5, at, late_s)}
        seen = (log.folder / "checkpoint").read_bytes()
        await balancer.start()
        again: list[tuple[float, float, str]] = []
        while not again:
            await asked(balancer, time.monotonic() + 0.3, again)
        kept |= {name for _, _, name in again}
        await balancer.end(signal.SIGTERM)
    checkpoint, beside = log.verify([seen])
    found = [json.loads(one) for one in log.entries(checkpoint.size)]
    assert beside == []
    assert [one["clean"] for one in found if one["kind"] == "start"] == [True, False]
    decided = {one["id"]: one for one in found if one["kind"] == "decision"}
    reading = Reading()
    used = {one.id.rpartition("-")[0]: one for one in reading.events(line for _, line in segments.read(tmp_path))}
    assert kept <= decided.keys()
    assert kept <= used.keys()
    assert (reading.doubles, reading.unreadable) == (0, 0)
    for name in kept:
        assert (decided[name]["served"], decided[name]["epoch"]) == ("virginia", 1)
        assert (used[name].data.input_tokens, used[name].data.output_tokens) == (11, 3)


@pytest.mark.parametrize("on_full", ["refuse", "serve"])
async def test_usage_and_audit_records_are_complete_after_the_disk_was_full(
    on_full: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No file of the process may grow any more, and later it may again: what was served meanwhile is all there."""
    monkeypatch.setenv("FARHOP_TEST_HOP", HOP_KEY)
    log = Files(tmp_path / "audit" / "virginia" / "g1", "farhop.internal/fleet/virginia/g1", KEY.public_key())
    served = list[str]()

    async def ask() -> tuple[int, str]:
        answer = await send(balancer.port, chat(body=streaming()))
        if answer.status == 200:
            served.append(answer.headers["x-farhop-decision"])
        return answer.status, "" if answer.status == 200 else answer.code

    async def troubles() -> list[bool]:
        status = (await send(balancer.ports[1], head("GET", "/status"))).json["accounts"]
        return [bool(status[part]["trouble"]) for part in ("usage", "audit")]

    async with fleet(tmp_path, on_full) as balancer:
        async with asyncio.timeout(30.0):
            while (await ask())[0] != 200:
                await asyncio.sleep(0.05)
        pid, (_, hard) = balancer.child.pid, resource.getrlimit(resource.RLIMIT_FSIZE)
        assert pid is not None
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (1, hard))
        async with asyncio.timeout(30.0):
            while not all(await troubles()):
                await ask()  # the records that it has to write reveal it
                await asyncio.sleep(0.05)
        found = [await ask() for _ in range(5)]
        assert found == [(503, "accounts_not_writable") if on_full == "refuse" else (200, "")] * 5
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (hard, hard))
        async with asyncio.timeout(30.0):
            while any(await troubles()):
                await asyncio.sleep(0.05)
        assert (await ask())[0] == 200
        await balancer.end(signal.SIGTERM)
    checkpoint, beside = log.verify()
    decided = {json.loads(one).get("id") for one in log.entries(checkpoint.size)}
    reading = Reading()
    used = {one.id.rpartition("-")[0] for one in reading.events(line for _, line in segments.read(tmp_path))}
    assert beside == []
    assert set(served) <= decided
    assert set(served) <= used
    assert (reading.doubles, reading.unreadable) == (0, 0)
