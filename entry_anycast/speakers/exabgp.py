"""ExaBGP (5.x) as a child process: its configuration, its text API, its acknowledgements.

ExaBGP restarts a helper of ours that ends, and never lets a route expire, so a route could outlive its helper for ever.
Therefore ExaBGP runs under the watchdog, and ends at the first irregularity. Graceful restart is never offered, or
neighbours would keep the route when the session falls.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import pwd
import re
import shlex
import shutil
import sys
import tempfile
from dataclasses import dataclass
from importlib import metadata
from ipaddress import ip_address
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from entry_anycast.announcing.machine import Phase
from entry_anycast.speakers import pipe
from entry_anycast.speakers.guarded import Guarded
from entry_anycast.speakers.speaker import GRACEFUL_SHUTDOWN, SpeakerError, SpeakerState, family, phase_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

MAJOR = "5"  # 6 speaks JSON only
STARTED_S = 15.0
LINES_MAX = 100_000
_INSTALL = "install it with: pip install 'farhop[anycast]'"
_ENVIRONMENT = {
    "exabgp_api_ack": "true",
    "exabgp_api_cli": "false",
    "exabgp_daemon_drop": "false",
    "exabgp_daemon_daemonize": "false",
    "exabgp_log_destination": "stderr",
    "exabgp_log_level": "ERROR",
    "exabgp_log_short": "true",
    "exabgp_tcp_bind": "",  # it connects to its neighbours and listens nowhere
}
_ROUTE = re.compile(r"^neighbor (\S+) .* unicast (\S+) next-hop (.*)$")
_SUMMARY = re.compile(r"^(\S+)\s+\d+\s+\S+\s+(\S+)")


@dataclass(frozen=True, slots=True)
class Peer:
    """A neighbour. `drain`: how a drain is announced to it, by the community of RFC 8326 or by a longer AS path."""

    address: str
    asn: int
    local_address: str
    port: int = 179
    password: str = ""
    multihop: int = 0
    drain: Literal["community", "prepend"] = "community"


@dataclass(frozen=True, slots=True)
class ExaBgpConfig:
    """Who we are. `hold_s`: after how long without a message a neighbour drops the session; `prepend`: how often."""

    local_as: int
    router_id: str
    peers: tuple[Peer, ...]
    hold_s: int = 9
    prepend: int = 3


class ExaBgp:
    """See `entry_anycast.speakers.speaker.Speaker`. `lost` is called when ExaBGP has ended, for whatever reason."""

    def __init__(
        self, config: ExaBgpConfig, prefixes: Sequence[str], silence_s: float, lost: Callable[[str], None]
    ) -> None:
        self.name = "exabgp"
        self._config, self._prefixes, self._silence_s, self._lost = config, tuple(prefixes), silence_s, lost
        self.guarded: Guarded | None = None
        self._folder: Path | None = None
        self._server: asyncio.Server | None = None
        self._helper: asyncio.Future[tuple[asyncio.StreamReader, asyncio.StreamWriter]] | None = None
        self._one = asyncio.Lock()

    async def start(self) -> None:
        """See Speaker."""
        check_installed()
        self._folder = Path(tempfile.mkdtemp(prefix="farhop-anycast-"))  # 0700
        socket_path = self._folder / "api"
        self._helper = asyncio.get_running_loop().create_future()
        self._server = await asyncio.start_unix_server(self._met, socket_path)
        file = self._folder / "exabgp.conf"
        file.touch(0o600)
        file.write_text(
            written(self._config, shlex.join([sys.executable, "-I", str(Path(pipe.__file__)), str(socket_path)]))
        )
        guarded = self.guarded = Guarded(self._silence_s, lambda: self._ended(guarded))
        environment = {**_ENVIRONMENT, "exabgp_daemon_user": _user()}
        await guarded.start(["exec", sys.executable, "-I", "-m", "exabgp", "server", str(file)], environment)
        try:
            async with asyncio.timeout(STARTED_S):
                await self._helper
            lines = await self.ask("version")
        except TimeoutError:
            raise SpeakerError(f"exabgp: did not start within {STARTED_S:g} s; its log is above") from None
        if not lines or not lines[0].startswith(f"exabgp {MAJOR}."):
            raise SpeakerError(f"exabgp: {' '.join(lines)[:80]!r} is not version {MAJOR}; {_INSTALL}")

    def _ended(self, which: Guarded) -> None:
        if which is self.guarded:
            self._lost("exabgp ended")

    async def _met(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._helper is None or self._helper.done():
            # ExaBGP has restarted its helper. The earlier helper's questions stay unanswered: end all of it.
            writer.close()
            self._lost("exabgp's helper ended")
            return
        self._helper.set_result((reader, writer))

    async def update(self, phase: Phase) -> None:
        """See Speaker. A neighbour gets the prefixes of its own family."""
        lines = [f"neighbor {peer.address} {self._announcement(phase, peer, prefix)}" for peer, prefix in self._pairs()]
        for line in lines:
            await self.ask(line)

    def _pairs(self) -> list[tuple[Peer, str]]:
        return [
            (peer, prefix)
            for peer in self._config.peers
            for prefix in self._prefixes
            if ip_address(peer.address).version == family(prefix)
        ]

    def _announcement(self, phase: Phase, peer: Peer, prefix: str) -> str:
        route = f"route {prefix} next-hop self"
        if phase is Phase.WITHDRAWN:
            return f"withdraw {route}"
        if phase is Phase.ANNOUNCED:
            return f"announce {route}"
        if peer.drain == "community":
            return f"announce {route} community [{GRACEFUL_SHUTDOWN[0]}:{GRACEFUL_SHUTDOWN[1]}]"
        path = " ".join([str(self._config.local_as)] * (1 + self._config.prepend))
        return f"announce {route} as-path [ {path} ]"

    async def observe(self) -> SpeakerState:
        """See Speaker."""
        found: set[tuple[str, bool]] = set()
        for line in await self.ask("show adj-rib out extensive"):
            match = _ROUTE.match(line)
            if match is not None:
                longer = match[3].count(str(self._config.local_as)) > 1 and "as-path" in match[3]
                found.add((f"{match[1]} {match[2]}", "65535:0" in match[3] or longer))
        sessions = {peer.address: False for peer in self._config.peers}
        for line in await self.ask("show neighbor summary"):
            if (row := _SUMMARY.match(line)) is not None and row[1] in sessions:
                sessions[row[1]] = row[2] == "established"
        return SpeakerState(phase_of(found, {f"{peer.address} {prefix}" for peer, prefix in self._pairs()}), sessions)

    async def ask(self, line: str) -> list[str]:
        """ExaBGP's answer, up to its acknowledgement. Raises SpeakerError."""
        async with self._one:
            if self._helper is None or not self._helper.done():
                raise SpeakerError("exabgp: is not running")
            reader, writer = self._helper.result()
            lines: list[str] = []
            try:
                writer.write(line.encode() + b"\n")
                await writer.drain()
                while len(lines) < LINES_MAX:
                    answer = (await reader.readline()).decode("ascii", "replace").rstrip("\n")
                    if answer == "done":
                        return lines
                    if answer == "error":
                        raise SpeakerError(f"exabgp: refused {line!r}; its log says why")
                    if answer in ("", "shutdown"):
                        break
                    lines.append(answer)
            except (OSError, ValueError):
                # A connection reset, or a line longer than its buffer: the caller treats both as the end of the stream.
                # Of what was answered none is of use, since the acknowledgement behind it never comes.
                pass
            raise SpeakerError("exabgp: ended, or its helper did")

    async def kill(self) -> None:
        """See Speaker."""
        guarded, self.guarded = self.guarded, None
        if guarded is not None:
            await guarded.end()
        if self._helper is not None and self._helper.done() and not self._helper.cancelled():
            writer = self._helper.result()[1]
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()
        self._helper = None
        if self._server is not None:
            self._server.close()
            await self._server.wait_closed()
        if self._folder is not None:
            with contextlib.suppress(OSError):
                shutil.rmtree(self._folder)
        self._server = self._folder = None


def _user() -> str:
    """The user that ExaBGP runs as: this process's. Started as root it would switch to `nobody`, and a change of user
    undoes PR_SET_PDEATHSIG."""
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        return str(os.getuid())  # nobody's name, and no root's: it then changes nothing


def check_installed() -> None:
    """Raises SpeakerError."""
    try:
        version = metadata.version("exabgp")
    except metadata.PackageNotFoundError:
        raise SpeakerError(f"speaker: exabgp is not installed; {_INSTALL}, or use bird") from None
    if version.partition(".")[0] != MAJOR:
        raise SpeakerError(f"speaker: exabgp {version} is not version {MAJOR}; {_INSTALL}")


def written(config: ExaBgpConfig, helper: str) -> str:
    """Its configuration. Nothing is announced by it."""
    parts = [f"process farhop {{ run {helper}; encoder text; respawn false; }}"]
    for peer in config.peers:
        lines = [
            f"router-id {config.router_id}", f"local-address {peer.local_address}", f"local-as {config.local_as}",
            f"peer-as {peer.asn}", f"hold-time {config.hold_s}", f"connect {peer.port}",
            f"family {{ ipv{ip_address(peer.address).version} unicast; }}", "api { processes [ farhop ]; }",
        ]  # fmt: skip
        if peer.multihop:
            lines.append(f"outgoing-ttl {peer.multihop}")
        if peer.password:
            lines.append(f'md5-password "{peer.password}"')
        body = " ".join(line if line.endswith("}") else f"{line};" for line in lines)
        parts.append(f"neighbor {peer.address} {{ {body} }}")
    return "\n".join(parts) + "\n"
