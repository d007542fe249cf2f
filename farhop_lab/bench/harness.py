"""The harness that every benchmark runs in: ports, a folder, the engines, and processes that are stopped at its end.

The engines are one process that listens on sixteen loopback addresses, so that a balancer sees sixteen replicas.
Children die with this process (farhop_lab.world.child). Never leaves anything running.
"""

from __future__ import annotations

import asyncio
import contextlib
import resource
import ssl
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import msgspec

from farhop_lab.bench import bodies, configs, upstream
from farhop_lab.world.certs import Pair
from farhop_lab.world.child import Child, ChildError, bound_to_parent
from farhop_lab.world.ports import free_ports

HOST = "127.0.0.1"
REPLICAS = 16
HOSTS = tuple(f"127.0.0.{2 + i}" for i in range(REPLICAS))
REGIONS = tuple(f"region-{i:02}" for i in range(12))
_AT = dict(zip(HOSTS, REGIONS, strict=False))  # which of them each host stands for, where a global balancer asks it
_FILES_WANTED = 65_536  # two connections for each of 10,000 streams, and some
READY_S = 20.0
_STEADY = 3  # good answers in a row before a proxy counts as ready


class BenchError(Exception):
    """A benchmark that cannot be run; the text names the remedy."""


@dataclass(frozen=True, slots=True)
class ProxyEnvironment:
    """The environment of a proxy: a folder for its files, its upstreams, and how many `files` a process may open.

    With a `pair` (a certificate and its key) the proxy serves clients over TLS.
    """

    folder: Path
    targets: tuple[tuple[str, int], ...]
    files: int
    pair: Pair | None = None


@dataclass(frozen=True, slots=True)
class Running:
    """A running proxy: the address for clients, the processes that are measured, the admin ports of ours."""

    port: int
    pids: tuple[int, ...]
    host: str = HOST
    tls: bool = False
    admins: tuple[int, ...] = ()


class Subject(Protocol):
    """A proxy that can be measured."""

    @property
    def name(self) -> str:
        """Its name in the table."""

    @property
    def tls(self) -> bool:
        """Whether it can serve clients over TLS here."""

    def missing(self) -> str | None:
        """Why it cannot be run here, if so."""

    def run(self, environment: ProxyEnvironment) -> AbstractAsyncContextManager[Running]:
        """Run it over these targets. Raises BenchError."""


def open_files() -> int:
    """Raise this process's limit of open files, and so its children's, as far as the system allows."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = max(most, _FILES_WANTED)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, wanted))  # a higher hard limit takes privileges
    except (ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
        return most
    return wanted


def module(name: str, job: msgspec.Struct) -> tuple[list[str], list[str]]:
    """The program and arguments of one of this package's own programs."""
    return [sys.executable, "-m", f"farhop_lab.bench.{name}"], [msgspec.json.encode(job).decode()]


@asynccontextmanager
async def engines(folder: Path, files: int, nginx: str | None) -> AsyncIterator[ProxyEnvironment]:
    """The upstream, until the end of the block: nginx's fixed answers if it is given, otherwise the uvloop one."""
    (port,) = free_ports(1)
    if nginx is not None:
        config = folder / "engines.conf"
        config.write_text(configs.nginx_engines(folder, HOSTS, port, files, _AT))
        program, arguments = [nginx], ["-c", str(config), "-p", str(folder)]
    else:
        program, arguments = module("upstream", upstream.Job(port, list(HOSTS), regions=_AT))
    child = Child("the benchmark's upstream", arguments, folder / "engines.log", {}, program)
    async with started(child, HOSTS[0], port):
        yield ProxyEnvironment(folder, tuple((host, port) for host in HOSTS), files)


@asynccontextmanager
async def started(
    child: Child, host: str, port: int, *, model: str = bodies.MODEL, tls: bool = False, ready_s: float = READY_S
) -> AsyncIterator[Running]:
    """The child until the end of the block, from when it answers inference requests. Raises BenchError."""
    steady = 0

    async def ready() -> bool:
        nonlocal steady
        steady = steady + 1 if await answers(host, port, model=model, tls=tls) else 0
        return steady >= _STEADY

    try:
        await child.start_until(ready, ready_s)
        assert child.pid is not None
        yield Running(port, (child.pid,), host, tls)
    except ChildError as error:
        raise BenchError(f"{error}; its log was {child.log.name}") from None
    finally:
        await child.stop(2.0)


def unverified_tls() -> ssl.SSLContext:
    """For the load alone, which does not verify the proxy's certificate: this run has made it."""
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context


async def answers(host: str, port: int, body: bytes = b"", *, model: str = bodies.MODEL, tls: bool = False) -> bool:
    """Whether a small request is answered with 200."""
    request = bodies.request(body or bodies.plain(512, 1, model)[0], host)
    with contextlib.suppress(OSError, TimeoutError):
        async with asyncio.timeout(2.0):
            reader, writer = await asyncio.open_connection(host, port, ssl=unverified_tls() if tls else None)
            try:
                writer.write(request)
                return b" 200 " in await reader.readline()
            finally:
                writer.close()
    return False


async def output(program: Sequence[str], timeout_s: float) -> str:
    """What a program prints on stdout until it ends; killed when the time is over or the caller is cancelled.

    Raises BenchError if it fails.
    """
    process = await asyncio.create_subprocess_exec(
        *program,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        start_new_session=True,
        preexec_fn=bound_to_parent(),
    )
    try:
        async with asyncio.timeout(timeout_s):
            output, complained = await process.communicate()
    except TimeoutError:
        raise BenchError(f"{program[0]} did not end within {timeout_s:g} s; is the machine too busy?") from None
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode:
        last = complained.decode(errors="replace").strip().splitlines()[-1:]
        raise BenchError(f"{' '.join(program[:3])} failed: {''.join(last)[:300] or process.returncode}")
    return output.decode(errors="replace")
