"""How replicas are chosen, as configured or as written to etcd. Never scores."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field, model_validator

from farhop.shell.config import Part

# Each policy, and the options it takes: regional_lb.policy reads them.
POLICIES: dict[str, tuple[str, ...]] = {
    "predictive": (),
    "prefix": ("load_factor", "prefix_bytes"),
    "least-load": (),
    "least-latency": (),
    "p2c": (),
    "round-robin": (),
    "weighted-round-robin": ("weights",),
    "random": (),
    "weighted-random": ("weights",),
    "consistent-hash": (),
    "session": ("load_factor",),
}


class PolicyConfig(Part):
    """How replicas are chosen: a policy's name alone, or with its options. `weights` go by a replica's name."""

    name: str = "predictive"
    load_factor: Annotated[float, Field(ge=1, le=100)] = 1.25
    prefix_bytes: Annotated[int, Field(ge=256, le=4 * 1024 * 1024)] = 1024
    weights: dict[str, Annotated[float, Field(ge=0.001, le=1e6)]] = Field(default_factory=dict, max_length=4096)

    @model_validator(mode="before")
    @classmethod
    def _known(cls, given: Any) -> Any:
        if isinstance(given, str):
            given = {"name": given}
        if not isinstance(given, dict):
            return given
        name = given.get("name", "predictive")
        if not isinstance(name, str) or name not in POLICIES:
            raise ValueError(f"no policy {str(name)[:64]!r}; known are {', '.join(POLICIES)}")
        for option in given:
            if option != "name" and option not in POLICIES[name]:
                takes = ", ".join(POLICIES[name]) or "none"
                raise ValueError(f"no option {str(option)[:64]!r} of policy {name}; its options: {takes}")
        return given
