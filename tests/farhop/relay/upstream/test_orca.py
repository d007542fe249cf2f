"""Whatever an engine writes of its load is read or left out, and never more than numbers."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from farhop.balance.machine import EngineLoad
from farhop.relay.upstream import orca


@pytest.mark.parametrize(
    ("value", "load"),
    [
        (
            b"TEXT named_metrics.kv_cache_usage_perc=0.25, named_metrics.num_requests_waiting=3",
            EngineLoad(3, None, 0.25),
        ),
        (b"TEXT cpu_utilization=0.3, kv_cache_usage_perc=1", EngineLoad(None, None, 1.0)),
        (b'JSON {"cpu_utilization":0.3,"named_metrics":{"kv_cache_utilization":0.5}}', EngineLoad(None, None, 0.5)),
        (b"TEXT num_requests_waiting=-1, num_requests_running=2", EngineLoad(None, 2, None)),
        (b"TEXT kv_cache_usage_perc=1.5, num_requests_waiting=0", EngineLoad(0, None, None)),
        (b"TEXT kv_cache_usage_perc=nan", None),
        (b'JSON {"num_requests_waiting":%b,"num_requests_running":2}' % (b"9" * 400), EngineLoad(None, 2, None)),
        (b"TEXT num_requests_waiting=inf", None),
        (b"TEXT cpu_utilization=0.3", None),
        (b"TEXT a=b", None),
        (b"JSON []", None),
        (b"JSON " + b"[" * 1000, None),
        (b"BIN AAAA", None),
        (b"TEXT num_requests_waiting=1," + b"a=1," * 1000, None),
    ],
)
def test_a_load_report_is_read_in_each_of_its_formats(value: bytes, load: EngineLoad | None) -> None:
    assert orca.read(value) == load


@given(st.sampled_from([b"TEXT ", b"JSON ", b""]), st.binary(max_size=200))
def test_no_load_report_raises(kind: bytes, rest: bytes) -> None:
    load = orca.read(kind + rest)
    assert load is None or load.kv_usage is None or 0.0 <= load.kv_usage <= 1.0
