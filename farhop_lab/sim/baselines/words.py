"""What a baseline router hears and keeps: its targets, what they last said, and what it sent them itself.

Invariants: `Board` counts every request that was sent once, as queued until its first byte and as running from then on,
and forgets it once; only the router writes it, a rule reads. Tokens are the emulated engine's, 4 bytes of text.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import msgspec
import xxhash

from farhop.balance.machine import Event, Request
from farhop_lab.engine.text import token_count

if TYPE_CHECKING:
    from collections.abc import Sequence

KEY_BYTES = 100  # without a session, requests whose first characters are equal belong together


class Target(msgspec.Struct, frozen=True):
    """Where a router may send: an engine (`tokyo/gpu-0`), or with `balancer` the router of another region (`tokyo`)."""

    name: str
    region: str
    prefill_ms_per_token: float = 0.0
    balancer: bool = False


class Sample(msgspec.Struct, frozen=True):
    """What an engine's metrics say: requests waiting and running, share of its KV cache in use (0..1)."""

    waiting: int
    running: int
    usage: float


class EnginesSeen(Event, frozen=True):
    """A region's engines answered a probe, by name; None where nobody is at home."""

    region: str
    samples: dict[str, Sample] | None


class BalancerSeen(Event, frozen=True):
    """Another region's router answered a probe: its line, and whether it has an available replica; `up` False: gone."""

    target: str
    line: int
    available: bool
    up: bool = True


class WireMeasured(Event, frozen=True):
    """A ping to a region came back."""

    region: str
    rtt_ms: float


def text_of(request: Request) -> bytes:
    """The prompt: a router of this kind reads the body itself."""
    return request.tokens.ids if request.tokens is not None else b""


def key_of(request: Request) -> int:
    """What a hash router hashes: the session if the client names one, else the prompt's first characters."""
    return request.session or xxhash.xxh64_intdigest(text_of(request)[:KEY_BYTES])


def forwarded(request: Request) -> bool:
    """Whether another router sent it: it is never sent on again."""
    return bool(request.issuer)


class Board:
    """See the module's head. `rtt_ms` by region is what the operator was told, until a ping says otherwise."""

    def __init__(self, here: str, targets: Sequence[Target], rtt_ms: dict[str, float]) -> None:
        self.here, self.rtt_ms = here, rtt_ms
        self.targets = {target.name: target for target in targets}
        self.engines = [target.name for target in targets if not target.balancer]
        self.local = [name for name in self.engines if self.targets[name].region == here]
        self.peers = [target.name for target in targets if target.balancer]
        self.by_region: dict[str, list[str]] = {}
        for name in self.engines:
            self.by_region.setdefault(self.targets[name].region, []).append(name)
        self.in_flight: Counter[str] = Counter(dict.fromkeys(self.targets, 0))
        self.queued_tokens: Counter[str] = Counter(dict.fromkeys(self.targets, 0))
        self.running_tokens: Counter[str] = Counter(dict.fromkeys(self.targets, 0))
        self.seen: dict[str, tuple[Sample, float]] = {}
        self.said: dict[str, BalancerSeen] = {}
        self.gone: set[str] = set()
        self.line = 0
        self._sent: dict[str, tuple[str, int, bool]] = {}

    # -- what was heard

    def hear_engines(self, event: EnginesSeen, now: float) -> None:
        """Take in a probe's answer."""
        names = self.by_region[event.region]
        if event.samples is None:
            self.gone.update(names)
            return
        self.gone.difference_update(names)
        self.seen.update((name, (sample, now)) for name, sample in event.samples.items())

    def hear_balancer(self, event: BalancerSeen) -> None:
        """Take in a probe's answer."""
        self.said[event.target] = event
        if event.up:
            self.gone.discard(event.target)
        else:
            self.gone.add(event.target)

    def serving(self, names: Sequence[str]) -> list[str]:
        """Those of them that are not known to be gone, in order."""
        return [name for name in names if name not in self.gone] if self.gone else list(names)

    def pending(self, name: str) -> int:
        """Requests that waited at an engine when it was last seen; 0 before that."""
        known = self.seen.get(name)
        return known[0].waiting if known is not None else 0

    # -- what was sent

    def sent(self, request: Request, target: str) -> None:
        """A request goes there now."""
        tokens = token_count(text_of(request))
        self._sent[request.id] = (target, tokens, False)
        self.in_flight[target] += 1
        self.queued_tokens[target] += tokens

    def began(self, request_id: str) -> None:
        """Its first byte is here. Harmless for what is over."""
        known = self._sent.get(request_id)
        if known is not None and not known[2]:
            target, tokens, _ = known
            self._sent[request_id] = (target, tokens, True)
            self.queued_tokens[target] -= tokens
            self.running_tokens[target] += tokens

    def over(self, request_id: str) -> bool:
        """It ended, one way or another. Whether it was anywhere."""
        known = self._sent.pop(request_id, None)
        if known is None:
            return False
        target, tokens, begun = known
        self.in_flight[target] -= 1
        (self.running_tokens if begun else self.queued_tokens)[target] -= tokens
        return True

    def begun(self, request_id: str) -> bool:
        """Whether its first byte is here."""
        return request_id in self._sent and self._sent[request_id][2]
