"""What is configured reaches what it bounds."""

from __future__ import annotations

from types import SimpleNamespace

import msgspec
import pytest

from farhop.relay.http.connection import ClientLimits
from farhop.relay.upstream.pool import UpstreamLimits
from farhop.service import dataplane
from farhop.service.config import Limits


def test_limits_have_the_defaults_of_what_they_bound() -> None:
    limits = Limits()
    assert dataplane.client_limits(limits) == ClientLimits()
    assert dataplane.upstream_limits(limits) == UpstreamLimits()


# Of the process, or of requests.
NOT_OF_A_CONNECTION = ("buffered_bytes_max", "request_s", "drain_s", "requests_max", "traced_per_s_max")


def test_a_limit_reaches_what_it_bounds() -> None:
    names = [name for name in Limits.model_fields if name not in NOT_OF_A_CONNECTION]
    limits = Limits.model_validate({name: 2000 + i for i, name in enumerate(names)})
    put = [
        *msgspec.structs.astuple(dataplane.client_limits(limits)),
        *msgspec.structs.astuple(dataplane.upstream_limits(limits)),
    ]
    assert {2000 + i for i in range(len(names))} <= set(put)


def test_clients_leave_descriptors_for_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("resource.getrlimit", lambda _which: (10_256, 20_000))
    seen: list[str] = []
    log = SimpleNamespace(warning=lambda _event, problem: seen.append(problem))
    slots = dataplane.slots(aside=2000)
    assert slots.capacity == 4000
    for connections_max in (4000, 4001):
        dataplane.check_descriptors(Limits(connections_max=connections_max), slots, log)  # type: ignore[arg-type]
    (problem,) = seen
    assert problem.startswith("limits.connections_max 4001 does not fit: with 10256 file descriptors at most 4000")
