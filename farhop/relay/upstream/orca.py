"""The load that an engine reports in an answer's head, if asked for: ORCA's `endpoint-load-metrics`.

As text (`TEXT a=1, named_metrics.b=0.5`) or JSON, as vLLM and Triton write them. Invariants: bounded, and a value
outside its domain counts as not reported. Never asks, and never decides what it means.
"""

from __future__ import annotations

from typing import Any

import msgspec

from farhop.balance.machine import EngineLoad

HEADER = b"endpoint-load-metrics"
ASK = b"endpoint-load-metrics-format"
ASKING = ASK + b": TEXT\r\n"
BYTES_MAX = 2048
COUNT_MAX = 1_000_000_000
_NAMED = "named_metrics."
_WAITING = ("num_requests_waiting", "num_waiting_requests")
_RUNNING = ("num_requests_running",)
_KV_USAGE = ("kv_cache_usage_perc", "kv_cache_utilization", "kv_cache_usage")


def read(value: bytes) -> EngineLoad | None:
    """The load in an ORCA header; None if it holds nothing usable."""
    if len(value) > BYTES_MAX:
        return None
    kind, _, rest = value.partition(b" ")
    try:
        loads = _json(rest) if kind.upper() == b"JSON" else _text(rest) if kind.upper() == b"TEXT" else {}
    except (ValueError, RecursionError):
        return None
    waiting, running = _count(loads, _WAITING), _count(loads, _RUNNING)
    kv_usage = next((loads[name] for name in _KV_USAGE if name in loads), None)
    if kv_usage is not None and not 0.0 <= kv_usage <= 1.0:
        kv_usage = None
    if waiting is None and running is None and kv_usage is None:
        return None
    return EngineLoad(waiting, running, kv_usage)


def _text(rest: bytes) -> dict[str, float]:
    loads: dict[str, float] = {}
    for pair in rest.decode("ascii").split(","):
        name, mark, number = pair.strip().partition("=")
        if mark:
            loads[name.removeprefix(_NAMED)] = float(number)
    return loads


def _json(rest: bytes) -> dict[str, float]:
    document: Any = msgspec.json.decode(rest)
    if not isinstance(document, dict):
        return {}
    named = document.get("named_metrics")
    flat = {**document, **(named if isinstance(named, dict) else {})}
    return {
        name: float(value)  # not all that JSON may count to has one
        for name, value in flat.items()
        if isinstance(value, (int, float)) and 0 <= value <= COUNT_MAX
    }


def _count(loads: dict[str, float], names: tuple[str, ...]) -> int | None:
    value = next((loads[name] for name in names if name in loads), None)
    return int(value) if value is not None and 0.0 <= value <= COUNT_MAX else None
