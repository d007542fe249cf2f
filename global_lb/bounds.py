"""What one global balancer's machine is held to. Never changes while it runs."""

from __future__ import annotations

import msgspec

from farhop.balance.guard import GuardConfig
from farhop.balance.health import LivenessConfig


class Spill(msgspec.Struct, frozen=True):
    """When a region counts as hot, and what that costs it in every score."""

    guard: GuardConfig = GuardConfig()
    penalty_ms: float = 300.0


class FlowConfig(msgspec.Struct, frozen=True):
    """Bounds of one global balancer. `trie_bytes` is the prompt text mirrored per region, not memory; `https_only`:
    its clients come by TLS, and are not redirected to anything less."""

    region: str
    trie_bytes: int = 256 * 1024 * 1024
    held_max: int = 1024
    liveness: LivenessConfig = LivenessConfig()
    spill: Spill = Spill()
    https_only: bool = False
