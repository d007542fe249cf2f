"""Configured limits reach what they bound."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from farhop.relay.http.connection import ClientLimits
from farhop.relay.upstream.pool import UpstreamLimits
from farhop.service.assembly import dataplane
from farhop.service.assembly.dataplane import DataPlane
from farhop.service.config.process import Limits, Requests, ResumeConfig


def test_limits_have_the_defaults_of_what_they_bound() -> None:
    limits = Limits()
    assert dataplane.client_limits(limits) == ClientLimits()
    assert dataplane.upstream_limits(limits) == UpstreamLimits()


# Headers about the process, or about requests.
NOT_OF_A_CONNECTION = ("buffered_bytes_max", "request_s", "drain_s", "requests_max", "traced_per_s_max")


def test_a_limit_reaches_what_it_bounds() -> None:
    names = [name for name in Limits.model_fields if name not in NOT_OF_A_CONNECTION]
    limits = Limits.model_validate({name: 2000 + i for i, name in enumerate(names)})
    put = [
        *msgspec.structs.astuple(dataplane.client_limits(limits)),
        *msgspec.structs.astuple(dataplane.upstream_limits(limits)),
    ]
    assert {2000 + i for i in range(len(names))} <= set(put)


def plane(limits: Limits, aside: int = 0) -> tuple[DataPlane, list[str]]:
    """A process's data plane, and what it warned of."""
    seen: list[str] = []
    log = SimpleNamespace(warning=lambda _event, problem: seen.append(problem))
    metrics = SimpleNamespace(gauge=lambda *_: None)
    config: Any = SimpleNamespace(limits=limits, requests=Requests())
    return DataPlane(config, SimpleNamespace(log=log, logger=log, metrics=metrics), "tls", None, aside), seen  # type: ignore[arg-type]


async def test_the_connection_limit_leaves_file_descriptors_for_other_uses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("resource.getrlimit", lambda _which: (10_256, 20_000))
    problems: list[str] = []
    for connections_max in (4000, 4001):
        made, seen = plane(Limits(connections_max=connections_max), aside=2000)
        assert made.slots.capacity == 4000
        made.open()
        await made.close()
        problems += seen
    (problem,) = problems
    assert problem.startswith("limits.connections_max 4001 does not fit: with 10256 file descriptors at most 4000")


async def test_all_listeners_share_the_bounds_of_now() -> None:
    made, _ = plane(Limits())
    handler: Any = SimpleNamespace()
    one, other = made.listener("one", handler, None), made.listener("other", handler, None, is_hop=True)
    assert (one.is_hop, other.is_hop) == (False, True)
    assert one.slots is other.slots is made.slots
    assert one.requests is other.requests is made.requests
    seen: list[tuple[str, float]] = []
    for listener in (one, other):
        listener.set_limits = lambda limits, name=listener.name: seen.append((name, limits.idle_s))  # type: ignore[method-assign, misc]
    made.relimit(Limits(idle_s=7.0, connect_s=3.0))
    assert (seen, made.pool.limits.connect_s) == ([("one", 7.0), ("other", 7.0)], 3.0)
    await made.drain()
    assert one.stopping
    assert other.stopping
    await made.close()


@pytest.mark.parametrize(
    ("configured", "tenants", "mode"),
    [("text", "exact", "exact"), ("exact", "text", "exact"), ("text", "text", "text"), ("text", "off", "off")],
)
def test_streams_go_on_by_the_stricter_of_configuration_and_tenant(configured: str, tenants: str, mode: str) -> None:
    metrics: Any = SimpleNamespace(gauge=lambda *_: None, counter=lambda *_: None)
    law: Any = SimpleNamespace(topology=SimpleNamespace(tenants={"t": SimpleNamespace(resume=tenants)}))
    config = ResumeConfig.model_validate({"mode": configured})
    made = dataplane.resumption(config, lambda: law, metrics, lambda _target, _model: 0)
    assert made is not None
    assert made.mode("t", "m") == mode
    assert made.mode("nobody", "m") == "off"
    off = ResumeConfig.model_validate({"mode": "off"})
    assert dataplane.resumption(off, lambda: law, metrics, made.context_tokens) is None
