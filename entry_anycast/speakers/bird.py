"""BIRD (2.x), which the operator runs and configures: a file that its configuration includes, and its control socket.

We write static routes into the file, with the community of a drain, and make BIRD read it (`configure`, which keeps
sessions up; `disable` would tear them down). BIRD's configuration decides which of the routes its BGP protocols export.
The watchdog empties the file. If this process and the watchdog are killed at once, the file stays: let the service
manager empty it (`ExecStopPost=farhop anycast withdraw`).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from entry_anycast.announcing.machine import Phase
from entry_anycast.speakers.guarded import Guarded
from entry_anycast.speakers.speaker import GRACEFUL_SHUTDOWN, SpeakerError, SpeakerState, family, phase_of
from entry_anycast.speakers.watchdog import NOTHING, TAKEN

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

ASKED_S = 5.0
_PREFIX = re.compile(r"^([0-9a-fA-F.:]+/[0-9]+) ")
_PROTOCOL = re.compile(r"^(\S+)\s+BGP\s+\S+\s+\S+\s+\S+\s*(.*)$")


@dataclass(frozen=True, slots=True)
class BirdConfig:
    """Where its control socket is, and the file that its configuration includes. `prepend` 0: drains by community."""

    socket: str
    file: str
    local_as: int = 0
    prepend: int = 0


class Bird:
    """See `entry_anycast.speakers.speaker.Speaker`."""

    def __init__(
        self, config: BirdConfig, prefixes: Sequence[str], silence_s: float, lost: Callable[[str], None]
    ) -> None:
        self.name = "bird"
        self._config, self._prefixes, self._silence_s, self._lost = config, tuple(prefixes), silence_s, lost
        self._guarded: Guarded | None = None
        self._way: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        self._one = asyncio.Lock()

    async def start(self) -> None:
        """See Speaker."""
        try:
            async with asyncio.timeout(ASKED_S):
                self._way = await asyncio.open_unix_connection(self._config.socket)
                await self._answer()
        except (OSError, TimeoutError) as error:
            why = error.strerror if isinstance(error, OSError) and error.strerror else "no answer"
            raise SpeakerError(
                f"bird: {self._config.socket}: {why}; start bird, or name its control socket in speaker.bird.socket"
            ) from None
        guarded = self._guarded = Guarded(self._silence_s, lambda: self._ended(guarded))
        await guarded.start(["bird", self._config.socket, self._config.file])
        await self.update(Phase.WITHDRAWN)

    def _ended(self, which: Guarded) -> None:
        if which is self._guarded:
            self._lost("bird's watchdog ended")

    async def update(self, phase: Phase) -> None:
        """See Speaker."""
        text = written(self._prefixes, phase, self._config)
        try:
            replace_file(Path(self._config.file), text)
        except OSError as error:
            why = f"cannot write {self._config.file}: {error.strerror}"
            raise SpeakerError(
                f"bird: {why}; give a path in a folder that is there and ours (speaker.bird.file)"
            ) from None
        for line in await self._ask("configure"):
            if line.startswith(TAKEN):
                return
        raise SpeakerError("bird: did not take its configuration; `birdc configure check` says why")

    async def observe(self) -> SpeakerState:
        """See Speaker."""
        found: dict[str, bool] = {}
        for version in sorted({family(prefix) for prefix in self._prefixes}):
            at = ""
            for line in await self._ask(f"show route protocol farhop{version} all", empty=("8001", "9001")):
                text = line[5:] if line[:4].isdigit() else line.strip()
                if (match := _PREFIX.match(text)) is not None:
                    at = match[1]
                    found[at] = False
                elif at and (("BGP.community" in text and "(65535,0)" in text) or "BGP.as_path" in text):
                    found[at] = True
        rows = (
            _PROTOCOL.match(line[5:] if line[:4].isdigit() else line.strip())
            for line in await self._ask("show protocols")
        )
        sessions = {row[1]: "Established" in row[2] for row in rows if row is not None}
        return SpeakerState(phase_of(set(found.items()), set(self._prefixes)), sessions)

    async def _ask(self, command: str, empty: tuple[str, ...] = ()) -> list[str]:
        """BIRD's answer; nothing for a code in `empty`. Raises SpeakerError."""
        async with self._one:
            if self._way is None:
                raise SpeakerError("bird: is not connected")
            try:
                async with asyncio.timeout(ASKED_S):
                    self._way[1].write(command.encode() + b"\n")
                    lines = await self._answer()
            except (OSError, TimeoutError, ValueError, EOFError):
                raise SpeakerError(f"bird: does not answer `{command}`") from None
        code = lines[-1][:4] if lines else "9999"
        if code in empty:
            return []
        if code[0] in "89":
            raise SpeakerError(f"bird: {lines[-1][5:].strip()[:200]} (`{command}`)")
        return lines

    async def _answer(self) -> list[str]:
        """The lines of one answer: a code and a dash for more to come, a code and a space for the last."""
        assert self._way is not None
        lines: list[str] = []
        while True:
            line = (await self._way[0].readline()).decode("utf-8", "replace").rstrip("\n")
            if not line:
                raise EOFError
            lines.append(line)
            if line[:4].isdigit() and line[4:5] == " ":
                return lines

    async def kill(self) -> None:
        """See Speaker. The watchdog empties the file and has it read; BIRD itself is not ours to end."""
        way, self._way = self._way, None
        guarded, self._guarded = self._guarded, None
        if guarded is not None:
            await guarded.end()
        if way is not None:
            way[1].close()
            with contextlib.suppress(OSError):
                await way[1].wait_closed()


def written(prefixes: Sequence[str], phase: Phase, config: BirdConfig) -> str:
    """The file's text. A protocol for each family, so that what BIRD exports can name it: farhop4, farhop6."""
    if phase is Phase.WITHDRAWN:
        return NOTHING
    attributes = ""
    if phase is Phase.DRAINING:
        community = f"bgp_community.add(({GRACEFUL_SHUTDOWN[0]}, {GRACEFUL_SHUTDOWN[1]}));"
        attributes = f"bgp_path.prepend({config.local_as}); " * config.prepend if config.prepend else community
    blocks = ["# Written by farhop anycast, and written over."]
    for version in (4, 6):
        own = [prefix for prefix in prefixes if family(prefix) == version]
        if own:
            routes = "\n".join(
                f'  route {prefix} via "lo"{f" {{ {attributes} }}" if attributes else ""};' for prefix in own
            )
            blocks.append(f"protocol static farhop{version} {{\n  ipv{version};\n{routes}\n}}")
    return "\n".join(blocks) + "\n"


def replace_file(path: Path, text: str) -> None:
    """Whole or not at all: BIRD may read it at any time."""
    beside = path.with_name(f".{path.name}.new")
    with contextlib.suppress(FileNotFoundError):
        beside.unlink()
    with beside.open("x") as file:  # never through a link that somebody put there meanwhile
        file.write(text)
    beside.chmod(0o644)  # BIRD runs as another user, and the file holds only prefixes
    os.replace(beside, path)
