"""Balancers as processes of their own, to be killed."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path
from typing import Any

import yaml

from farhop_lab.world.child import Child
from tests.conftest import NO_CERTIFICATES


class Process:
    """A balancer; `ports` are those of its line, `port` the first: clients or the tier above come to that.

    It is forked, as those of a world are, with what they have of the environment: by the same server.
    """

    def __init__(self, tier: str, folder: Path, config: dict[str, Any]) -> None:
        path = folder / f"{tier}-{config['instance']}.yaml"
        path.write_text(yaml.safe_dump(config))
        # Its log is discarded: no file of its own may grow where a disk is full.
        self.child = Child(path.stem, [tier, "--config", str(path)], Path(os.devnull), NO_CERTIFICATES)
        self.ports: list[int] = []

    @property
    def port(self) -> int:
        """See above."""
        return self.ports[0]

    async def start(self) -> None:
        """Until it has said where it listens."""
        line = await self.child.start(60.0)
        self.ports = [int(port) for port in re.findall(r"127\.0\.0\.1:(\d+)", line)]

    async def end(self, how: signal.Signals) -> None:
        """By this signal, if it still is."""
        await (self.child.kill() if how is signal.SIGKILL else self.child.stop(60.0))
