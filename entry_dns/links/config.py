"""Configuration of probes and of client networks. Never opens anything."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, field_validator

from entry_dns.fleet.latencies import LearningConfig
from farhop.config import Part, Seconds

PlaceName = Annotated[str, Field(min_length=1, max_length=128)]
HostPort = Annotated[str, Field(pattern=r"^([A-Za-z0-9.-]{1,253}|\[[0-9A-Fa-f:.]{2,45}\]):[0-9]{1,5}$")]


class Probe(Part):
    """How entries are probed for readiness, in the way that a client would reach them.

    `at`: by an entry's name, the address to probe instead of its public addresses, all of which are probed otherwise.
    """

    scheme: Literal["https", "http", "tcp"] = "https"
    path: Annotated[str, Field(pattern=r"^/[!-~]{0,255}$")] = "/ready"
    server_name: Annotated[str, Field(pattern=r"^[A-Za-z0-9.-]{0,253}$")] = ""
    ca_file: str | None = None
    every_s: Seconds = 1.0
    timeout_s: Seconds = 2.0
    up_after: Annotated[int, Field(ge=1, le=100)] = 2
    down_after: Annotated[int, Field(ge=1, le=100)] = 2
    families: tuple[Literal["ipv4", "ipv6"], ...] = ("ipv4", "ipv6")
    at: Annotated[dict[str, HostPort], Field(max_length=1024)] = Field(default_factory=dict)


class Latencies(Part):
    """What is learned from what entries measure of client networks (`client_latencies` of global balancers), and by how
    much it may correct geography.

    `samples_min`: connections of a network that a region must have measured. `far_ms`: how much nearer than by
    geography one region must find it to be believed alone. `age_s`: how long it holds while etcd is out of contact.
    `every_s`: how often answers are prepared by it, if it changed.
    """

    follow: bool = True
    every_s: Seconds = 10.0
    samples_min: Annotated[int, Field(ge=1, le=1_000_000)] = 4
    far_ms: Annotated[float, Field(gt=0, le=1000)] = 30.0
    correction_max_ms: Annotated[float, Field(ge=0, le=1000)] = 200.0
    age_s: Seconds = 21_600.0

    def learning(self) -> LearningConfig:
        """As corrections are made by it."""
        return LearningConfig(self.samples_min, self.far_ms, self.correction_max_ms, self.age_s)


class NetworkList(Part):
    """Networks that are near to a place, or confined to places of the law, or both.

    `cidrs` are listed here, `file` has one a line (`#` begins a comment). `near`: a region, a city, or
    LATITUDE,LONGITUDE. `within`: their clients get entries there alone.
    """

    cidrs: Annotated[list[str], Field(max_length=100_000)] = Field(default_factory=list)
    file: str | None = None
    near: Annotated[str, Field(max_length=128)] = ""
    within: Annotated[list[PlaceName], Field(max_length=64)] = Field(default_factory=list)


class NetworksConfig(Part):
    """The data about client networks. The narrowest network that contains a client decides.

    `database` is the path of a MaxMind database (City or Country), read again when the file changes; `lists` override
    it. `confine`: by a country of the database in two letters, the places of the law that its clients are kept to: a
    registry's country is a hint, and entries enforce the law themselves.

    `without_subnet`: how a question without a client subnet is answered if networks are confined. Its answer may be
    given to all clients of the resolver. `shared`: with entries that are lawful for every network; `resolver`: by the
    resolver's own address, and its clients elsewhere may be led to entries that are not for them.
    """

    database: str | None = None
    lists: Annotated[list[NetworkList], Field(max_length=4096)] = Field(default_factory=list)
    confine: Annotated[dict[str, tuple[PlaceName, ...]], Field(max_length=256)] = Field(default_factory=dict)
    without_subnet: Literal["shared", "resolver"] = "shared"

    @field_validator("confine")
    @classmethod
    def _lower(cls, confine: dict[str, tuple[str, ...]]) -> dict[str, tuple[str, ...]]:
        return {country.lower(): places for country, places in confine.items()}
