"""How traffic is split between the versions of a model, as configured or as written to etcd. Never draws a version."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator

from farhop.balance.machine import Mark
from farhop.relay.head import passes
from farhop.shell.config import Part

VERSIONS_MAX = 16
RULES_MAX = 64

Version = Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]{1,64}$")]
_Value = Annotated[str, Field(pattern=r"^[!-~]([ -~]{0,254}[!-~])?$")]


class HeaderMark(Part):
    """A request header of this very value, whatever the case of its name."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")]
    value: _Value

    @field_validator("name")
    @classmethod
    def _comes_here(cls, name: str) -> str:
        if not passes(name.lower().encode()) or name.lower() == "cookie":
            raise ValueError(f"{name} is not passed on between the tiers; name a header of your own, such as x-canary")
        return name.lower()


class CookieMark(Part):
    """A cookie of this very value."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$")]
    value: _Value


class RuleConfig(Part):
    """Requests with this header, or with this cookie, or of this tenant are for this version."""

    version: Version
    header: HeaderMark | None = None
    cookie: CookieMark | None = None
    tenant: Annotated[str, Field(pattern=r"^[!-~]{0,256}$")] = ""

    @model_validator(mode="after")
    def _one(self) -> RuleConfig:
        if sum((self.header is not None, self.cookie is not None, bool(self.tenant))) != 1:
            raise ValueError("a rule looks at one thing: give a header, a cookie or a tenant; rules are tried in order")
        return self

    @property
    def mark(self) -> Mark | None:
        """What it looks for in a request's head; None if it goes by tenant."""
        if self.header is not None:
            return Mark("header", self.header.name, self.header.value)
        return Mark("cookie", self.cookie.name, self.cookie.value) if self.cookie is not None else None


class SplitConfig(Part):
    """One model's split: the first rule that holds, else by `weights`. What is not said in etcd stays as configured."""

    name: Annotated[str, Field(pattern=r"^[!-~]{0,64}$")] = ""
    rules: Annotated[list[RuleConfig], Field(default_factory=list, max_length=RULES_MAX)]
    weights: dict[Version, Annotated[float, Field(ge=0, le=1e6)]] = Field(default_factory=dict, max_length=VERSIONS_MAX)
    sticky: Literal["session", "tenant", "none"] = "session"
    fallback: bool = True
    pinning: bool = False

    @field_validator("weights")
    @classmethod
    def _somebody(cls, weights: dict[str, float]) -> dict[str, float]:
        if weights and not any(weights.values()):
            raise ValueError("all are 0: give some version more, or leave the weights out for no preference")
        return weights

    @property
    def versions(self) -> set[str]:
        """All versions it speaks of."""
        return {*self.weights, *(rule.version for rule in self.rules)}
