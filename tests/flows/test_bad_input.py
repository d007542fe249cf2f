"""A process of either tier with an unusable configuration or environment, and when it is stopped."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

import pytest
import yaml
from inprocess import HOP, HOP_KEY

from farhop_lab.world import fork_server
from farhop_lab.world.etcd import EmbeddedEtcd
from farhop_lab.world.ports import free_ports
from tests.conftest import NO_CERTIFICATES

START_S = 5.0  # the time it may take to report the error, with its imports done
STOP_S = 4.0
HUNG_S = 60.0
NOBODY = "127.0.0.1:9"  # the discard port
STOPPED = ["stopping", "stopped"]  # all that a process logs that comes up and is told to stop


@pytest.fixture(scope="module")
def etcd() -> Iterator[str]:
    """One etcd for this module's processes, which do not meet: each has its own instance name."""
    loop = asyncio.new_event_loop()
    embedded = EmbeddedEtcd()
    try:
        loop.run_until_complete(embedded.start())
        yield embedded.endpoint
    finally:
        loop.run_until_complete(embedded.stop())
        loop.close()


def document(of: str, endpoint: str, **more: Any) -> dict[str, Any]:
    own: dict[str, Any] = {"listen": {"port": 0}}
    if of == "regional":
        replica = {"url": f"http://{NOBODY}", "models": ["m"]}
        own = {"tier": {"port": 0}, "control": {"port": 0}, "client": {"port": 0}, "replicas": [replica]}
        own["watch"] = {"probe_s": 600.0}  # the log reports it as gone once three probes have failed
    return {
        "region": "virginia",
        "instance": f"{of}-1",
        "admin": {"port": 0},
        "etcd": {"endpoints": [endpoint]},
        "hop": HOP,
        "limits": {"drain_s": 1.0, "connections_max": 1000},
        **own,
        **more,
    }


def written(folder: Path, content: dict[str, Any] | str) -> Path:
    path = folder / "config.yaml"
    path.write_text(content if isinstance(content, str) else yaml.safe_dump(content))
    return path


def environment(**more: str) -> dict[str, str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("OTEL_")}
    return {**clean, **NO_CERTIFICATES, "FARHOP_TEST_HOP": HOP_KEY, **more}


class Started:
    """A tier's process and what it says, all of which is there once it has ended."""

    def __init__(self, process: fork_server.Process, err: int) -> None:
        self.process, self._err = process, err
        assert process.stdout is not None
        self.out = process.stdout

    async def ended(self) -> fork_server.Ended:
        """Wait for its end; it is killed after HUNG_S."""
        try:
            async with asyncio.timeout(HUNG_S):
                await self.process.wait()
        except TimeoutError:
            self.process.send_signal(signal.SIGKILL)
            await self.process.wait()
        assert self.process.ended is not None
        return self.process.ended

    def err(self) -> str:
        """What it has said on stderr."""
        return os.pread(self._err, 1 << 20, 0).decode()


@asynccontextmanager
async def started(tier: str, path: Path, **more: str) -> AsyncIterator[Started]:
    """The process of a tier, begun. Killed at the end if it still runs."""
    with TemporaryFile() as err:
        arguments = [tier, "--config", str(path)]
        process = await fork_server.start(
            "farhop_cli", arguments, environment(**more), stdout=None, stderr=err.fileno(), limit=1 << 20
        )
        try:
            yield Started(process, err.fileno())
        finally:
            process.send_signal(signal.SIGKILL)
            await process.wait()


async def refused(tier: str, path: Path, **more: str) -> list[str]:
    """Run a tier's process, expecting it not to start; the lines it says."""
    async with started(tier, path, **more) as one:
        began = time.monotonic()
        ended = await one.ended()
        took_s = time.monotonic() - began - ended.run_queue_s
        assert (ended.code, await one.out.read()) == (2, b""), one.err()
        assert "Traceback" not in one.err()
        assert took_s < START_S
        return one.err().splitlines()


@contextmanager
def taken_port() -> Iterator[int]:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        held.listen()
        yield held.getsockname()[1]


async def test_missing_configuration_file_is_reported(tmp_path: Path) -> None:
    (line,) = await refused("global", tmp_path / "nowhere.yaml")
    assert line.startswith(f"global: {tmp_path}/nowhere.yaml: cannot be read")


async def test_every_configuration_error_is_reported_on_its_own_line(tmp_path: Path) -> None:
    wrong = document("regional", NOBODY, instance="", admin={"port": "x"}, log_level="loud", surprise=1)
    lines = await refused("regional", written(tmp_path, wrong))
    assert len(lines) == 4
    for field in ("instance", "admin.port", "log_level", "surprise"):
        assert [line for line in lines if f": {field}: " in line]


@pytest.mark.parametrize(
    ("tier", "more", "words"),
    [
        ("global", {"topology": "no-such-world"}, "no ready-made world of that name"),
        ("regional", {"region": "atlantis"}, "region: 'atlantis' is not in topology 'three-regions'; it has frankfurt"),
        ("global", {"etcd": {}}, "etcd.endpoints: none given, and hub 'main' of the topology has none"),
        ("regional", {"etcd": {"endpoints": [NOBODY], "ca_file": "/nowhere/ca.pem"}}, "/nowhere/ca.pem"),
        ("regional", {"hop": {"keys": {"k1": "env:FARHOP_TEST_SHORT"}, "active": "k1"}}, "at least 16 are needed"),
    ],
)
async def test_unsuitable_environment_is_reported_in_one_line(
    tier: str, more: dict[str, Any], words: str, tmp_path: Path
) -> None:
    (line,) = await refused(tier, written(tmp_path, document(tier, NOBODY, **more)), FARHOP_TEST_SHORT="hunter2")
    assert line.startswith(f"{tier}: ")
    assert words in line
    assert "hunter2" not in line


async def test_a_bad_topology_is_reported_with_all_its_problems(tmp_path: Path) -> None:
    (tmp_path / "world.yaml").write_text("name: x\nepoch: -1\nregions: []\n")
    path = written(tmp_path, document("global", NOBODY, topology=str(tmp_path / "world.yaml")))
    lines = await refused("global", path)
    assert "problems" in lines[0]
    assert [line for line in lines if "epoch" in line]


@pytest.mark.parametrize(
    ("tier", "port"),
    [("global", "listen"), ("global", "admin"), ("regional", "tier"), ("regional", "client")],
)
async def test_a_port_that_is_taken_is_one_line(tier: str, port: str, tmp_path: Path, etcd: str) -> None:
    with taken_port() as number:
        (line,) = await refused(tier, written(tmp_path, document(tier, etcd, **{port: {"port": number}})))
    assert line.startswith(f"{tier}: {port}: cannot listen on 127.0.0.1:{number}")
    assert line.endswith("; choose another port")


async def test_two_balancers_cannot_share_a_port(tmp_path: Path, etcd: str) -> None:
    """By default gRPC would share its port in silence, and each would get half of the pings."""
    (number,) = free_ports(1)
    first = written(tmp_path, document("regional", etcd, control={"port": number}))
    async with started("regional", first) as one:
        assert b"region virginia" in await one.out.readline()
        (found,) = await refused("regional", first)
    assert found.startswith(f"regional: control: cannot listen on 127.0.0.1:{number}")


@pytest.mark.parametrize(("tier", "number"), [("global", signal.SIGINT), ("regional", signal.SIGTERM)])
async def test_balancer_stops_in_order_on_a_signal(
    tier: str, number: signal.Signals, tmp_path: Path, etcd: str
) -> None:
    """At rest at once, and with a client that stays when the drain of 1 s is over."""
    path = written(tmp_path, document(tier, etcd))
    for stays in (False, True):
        took_s, waited_s = await _stopped(tier, path, number, stays=stays)
        assert took_s - waited_s < STOP_S
        assert took_s > 0.9 * stays


async def _stopped(tier: str, path: Path, number: signal.Signals, *, stays: bool) -> tuple[float, float]:
    """How long a balancer took to end in order once it was told to, and for how much of it others had the cores.

    `stays`: a client of it did.
    """
    async with started(tier, path) as one:
        line = (await one.out.readline()).decode()
        assert line.startswith(f"{tier}: region virginia: ")
        with ExitStack() as stack:
            if stays:
                port = int(line.split("clients on 127.0.0.1:")[1].split(",")[0])
                client = stack.enter_context(socket.create_connection(("127.0.0.1", port)))
                client.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\n")
            began, waited_s = time.monotonic(), fork_server.run_queue_s(one.process.pid)
            one.process.send_signal(number)
            ended = await one.ended()
            took_s = time.monotonic() - began
        assert (ended.code, _logged(one.err())) == (0, STOPPED)
        return took_s, ended.run_queue_s - waited_s


async def test_balancer_stops_if_signalled_before_it_is_up(tmp_path: Path) -> None:
    """An etcd that takes connections and says nothing holds the start up for 2 s: it does not hold up the stop."""
    with taken_port() as silent:
        path = written(tmp_path, document("regional", f"127.0.0.1:{silent}"))
        async with started("regional", path) as one:
            status = Path(f"/proc/{one.process.pid}/status")
            while not _handles(status, signal.SIGTERM):
                await asyncio.sleep(0.01)
            one.process.send_signal(signal.SIGTERM)
            async with asyncio.timeout(60.0):
                await one.process.wait()
            assert (one.process.returncode, await one.out.read(), _logged(one.err())) == (0, b"", STOPPED)


def _logged(errors: str) -> list[str]:
    """What a process said in its log."""
    return [json.loads(line)["event"] for line in errors.splitlines()]


def _handles(status: Path, number: signal.Signals) -> bool:
    caught = next(line for line in status.read_text().splitlines() if line.startswith("SigCgt:"))
    return bool(int(caught.split()[1], 16) >> (number - 1) & 1)


async def test_balancer_starts_despite_an_invalid_otel_variable(tmp_path: Path, etcd: str) -> None:
    path = written(tmp_path, document("global", etcd))
    async with started("global", path, OTEL_EXPORTER_OTLP_ENDPOINT="nonsense") as one:
        assert (await one.out.readline()).startswith(b"global: region virginia")
        one.process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(60.0):
            assert await one.process.wait() == 0
        found = one.err()
    assert "OTEL_EXPORTER_OTLP_ENDPOINT=nonsense" in found.splitlines()[0]
    assert _logged(found)[1:] == STOPPED
