"""The crafted bodies are of one size; the bounds are against the plain one."""

from __future__ import annotations

import pytest

from farhop_lab.bench import hostile
from farhop_lab.bench.harness import BenchError
from farhop_lab.bench.hostile import HostileReport, Row


def test_bodies_are_of_one_size_and_the_plain_one_is_first() -> None:
    made = hostile.crafted(1 << 16)
    assert next(iter(made)) == "plain prompt"
    for what, (path, body) in made.items():
        assert path.startswith("/v1/")
        assert 0.5 * (1 << 16) < len(body) < 3 * (1 << 16), what


def test_the_hostile_report_holds_only_within_its_bounds() -> None:
    rows = [Row("plain prompt", 2.0, 200), Row("a", 5.0, 400), Row("b", 6.0, 200)]
    assert HostileReport(rows, 1.0, 10.0, 20.0).worst.what == "b"
    assert HostileReport(rows, 1.0, 10.0, 20.0).holds
    assert not HostileReport(rows, 1.0, 10.0, 20.1).holds
    assert not HostileReport([*rows, Row("c", 6.1, 200)], 1.0, 10.0, 20.0).holds


def test_chunks_have_the_requested_form() -> None:
    assert hostile.wire_of("/x", b"abc", "h", chunk=2).endswith(b"\r\n\r\n2\r\nab\r\n1\r\nc\r\n0\r\n\r\n")
    assert hostile.mixed_wire("/x", b"abcdef", "h").count(b"transfer-encoding") == 1


async def test_missing_tools_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hostile.tiers.Tiers, "missing", lambda _self: "no etcd binary: install one")
    with pytest.raises(BenchError, match="no etcd binary"):
        await hostile.measure()
