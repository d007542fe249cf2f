"""The configuration of how regions are watched (not of the connections to them). Never opens anything."""

from __future__ import annotations

from farhop.config import Part, Seconds
from farhop.service.config.process import Process
from farhop.service.config.region_connections import RegionConnections


class Watch(Part):
    """Timing of how regions are watched, in seconds."""

    ping_s: Seconds = 1.0
    ping_timeout_s: Seconds = 0.5
    report_age_s: Seconds = 3.0


class LinksConfig(Process, RegionConnections):
    """A process that watches regions and sends to them."""

    watch: Watch = Watch()
