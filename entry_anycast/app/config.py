"""An announcer's configuration file, checked whole. Never opens a connection."""

from __future__ import annotations

from ipaddress import IPv4Address, ip_address
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import AfterValidator, Field, model_validator

from entry_anycast.announcing.budget import BudgetConfig
from entry_anycast.announcing.machine import LastSite, MachineConfig
from entry_anycast.speakers import bird, exabgp
from entry_anycast.speakers.speaker import family, network
from farhop.config import ConfigError, FromOutside, Part, Seconds, Secret, rule
from farhop.service.config.process import Member
from topology.problems import did_you_mean, quoted

if TYPE_CHECKING:
    from collections.abc import Iterator

    from topology.model import Topology


def _prefix(text: str) -> str:
    return str(network(text))


def _address(text: str) -> str:
    return str(ip_address(text))


def _router(text: str) -> str:
    return str(IPv4Address(text))


Prefix = Annotated[str, AfterValidator(_prefix)]
Address = Annotated[str, AfterValidator(_address)]
Asn = Annotated[int, Field(ge=1, le=4_294_967_294)]
FilePath = Annotated[str, Field(pattern=r'^/[^\x00-\x1f"]{1,4095}$')]


class Peer(Part):
    """A BGP neighbour. It gets the prefixes of its address's family. `local_address` may be env:NAME, for a value that
    each node has of its own.
    """

    address: Address
    asn: Asn
    local_address: Annotated[Address, FromOutside]
    port: Annotated[int, Field(ge=1, le=65535)] = 179
    password: Secret | None = None
    multihop: Annotated[int, Field(ge=0, le=255)] = 0
    drain: Literal["community", "prepend"] = "community"

    @rule
    def _one_family(self) -> Iterator[str]:
        if ip_address(self.address).version != ip_address(self.local_address).version:
            yield "local_address: is of another family than address; give one of the same"
        text = self.password.get_secret_value() if self.password else ""
        if not text.isprintable() or not text.isascii() or any(sign in text for sign in '"\\;{} '):
            yield "password: must hold no space, quote, backslash, semicolon or brace"


class ExaBgp(Part):
    """ExaBGP 5, run by us (`pip install 'farhop[anycast]'`). `hold_s`: neighbours drop a session after this silence."""

    local_as: Asn
    router_id: Annotated[str, AfterValidator(_router), FromOutside]
    peers: Annotated[list[Peer], Field(min_length=1, max_length=64)]
    hold_s: Annotated[int, Field(ge=3, le=65535)] = 9
    prepend: Annotated[int, Field(ge=1, le=16)] = 3


class Bird(Part):
    """BIRD 2, run by the operator, whose configuration includes `file`. `prepend` 0: drains by the community."""

    socket: FilePath = "/run/bird/bird.ctl"
    file: FilePath
    local_as: Annotated[int, Field(ge=0, le=4_294_967_294)] = 0
    prepend: Annotated[int, Field(ge=0, le=16)] = 0

    @rule
    def _prepends_itself(self) -> Iterator[str]:
        if self.prepend and not self.local_as:
            yield "local_as: is what is prepended; give it, or leave out prepend"


class SpeakerConfig(Part):
    """Which of the two; exactly one."""

    exabgp: ExaBgp | None = None
    bird: Bird | None = None

    @model_validator(mode="after")
    def _one(self) -> SpeakerConfig:
        if (self.exabgp is None) == (self.bird is None):
            raise ValueError("give either exabgp or bird")
        return self


class Probe(Part):
    """How the entry is probed: `rise` and `fall` are answers in a row. `ca_file` and `server_name` are the authority
    and the name of its certificate, if these are not a public authority and the URL's host.

    An entry that is silent for `timeout_s` is dead at once: a hung one is withdrawn within every_s + timeout_s = 1.9 s,
    as a hung Farhop must not stay announced for more than 2. An entry that is merely slow is probed on.
    """

    url: Annotated[str, Field(pattern=r"^https?://[A-Za-z0-9.\-\[\]:]+(/[!-~]*)?$", max_length=512)]
    every_s: Seconds = 0.4
    timeout_s: Seconds = 1.5
    ca_file: FilePath | None = None
    server_name: Annotated[str, Field(max_length=253)] = ""
    rise: Annotated[int, Field(ge=1, le=100)] = 3
    fall: Annotated[int, Field(ge=1, le=100)] = 3


class Budget(Part):
    """How often neighbours may get changes; see entry_anycast/announcing/budget.py. Seconds."""

    window_s: Seconds = 900.0
    hold_s: Seconds = 900.0
    hold_max_s: Seconds = 14_400.0
    changes: Annotated[int, Field(ge=0, le=100)] = 2

    @model_validator(mode="after")
    def _holds(self) -> Budget:
        if not self.window_s <= self.hold_s <= self.hold_max_s:
            raise ValueError("hold_s: must be window_s or more, and hold_max_s or less")
        return self


class AnycastConfig(Member):
    """One announcer. `entry` is the map's; `prefixes` without any are the entry's addresses, as /32 and /128.

    `drain_s`: how long neighbours have to go elsewhere before the withdrawal; `settle_s`: how long the withdrawal has
    before this process ends. `watchdog_s`: how long this process may be silent before its announcement is ended.
    """

    entry: Annotated[str, Field(min_length=1, max_length=128)]
    prefixes: Annotated[list[Prefix], Field(max_length=64)] = Field(default_factory=list)
    speaker: SpeakerConfig
    probe: Probe
    drain_s: Annotated[float, Field(ge=0, le=3600)] = 30.0
    settle_s: Annotated[float, Field(ge=0, le=600)] = 2.0
    ack_s: Annotated[float, Field(gt=0, le=60)] = 1.0
    observe_s: Annotated[float, Field(gt=0, le=60)] = 1.0
    watchdog_s: Annotated[float, Field(ge=0.2, le=60)] = 1.5
    last_site: LastSite = "keep"
    budget: Budget = Budget()

    def machine(self) -> MachineConfig:
        """For the state machine."""
        return MachineConfig(
            rise=self.probe.rise, fall=self.probe.fall, drain_s=self.drain_s, settle_s=self.settle_s, ack_s=self.ack_s,
            last_site=self.last_site, budget=BudgetConfig(**self.budget.model_dump()),
        )  # fmt: skip

    def announced(self, topology: Topology) -> tuple[str, ...]:
        """The prefixes. ConfigError if the map has no such entry, or a prefix has no neighbour of its family."""
        entry = topology.entries.get(self.entry)
        if entry is None:
            known = sorted(topology.entries)
            remedy = did_you_mean(self.entry, known, f"there are: {', '.join(known[:16])}" if known else "it has none")
            raise ConfigError("entry", [f"{quoted(self.entry)} is no entry of topology {topology.name!r}; {remedy}"])
        if entry.region != self.region:
            raise ConfigError("entry", [f"{quoted(self.entry)} is in region {entry.region}, not in {self.region}"])
        prefixes = tuple(self.prefixes) or tuple(str(network(one)) for one in (*entry.ipv4, *entry.ipv6))
        if self.speaker.exabgp is not None:
            families = {ip_address(peer.address).version for peer in self.speaker.exabgp.peers}
            if lacking := [prefix for prefix in prefixes if family(prefix) not in families]:
                raise ConfigError("speaker.exabgp.peers", [f"none has an address of the family of {lacking[0]}"])
        return prefixes

    def exabgp_made(self) -> exabgp.ExaBgpConfig | None:
        """For the speaker, with its secrets; None if it is the other one."""
        given = self.speaker.exabgp
        if given is None:
            return None
        peers = tuple(
            exabgp.Peer(
                peer.address, peer.asn, peer.local_address, peer.port,
                peer.password.get_secret_value() if peer.password else "", peer.multihop, peer.drain,
            )
            for peer in given.peers
        )  # fmt: skip
        return exabgp.ExaBgpConfig(given.local_as, given.router_id, peers, given.hold_s, given.prepend)

    def bird_made(self) -> bird.BirdConfig | None:
        """For the speaker; None if it is the other one."""
        given = self.speaker.bird
        return None if given is None else bird.BirdConfig(given.socket, given.file, given.local_as, given.prepend)
