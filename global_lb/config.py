"""The global balancer's configuration file, checked whole. Never opens a connection."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from farhop.shell.config import Listen, Part, Process, Seconds


class Watch(Part):
    """How regions are watched. Seconds."""

    ping_s: Seconds = 1.0
    ping_timeout_s: Seconds = 1.0
    report_age_s: Seconds = 3.0


class GlobalConfig(Process):
    """One global balancer. `trie_bytes` is the prompt text mirrored per region, not memory."""

    listen: Listen
    watch: Watch = Watch()
    trie_bytes: Annotated[int, Field(ge=0, le=1 << 50)] = 256 * 1024 * 1024

    @property
    def balancer(self) -> str:
        """The name under which regions count what this balancer sends: unlike `instance`, unique in the fleet."""
        return f"{self.region}/{self.instance}"
