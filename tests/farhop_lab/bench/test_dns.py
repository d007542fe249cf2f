from __future__ import annotations

import shutil
from random import Random

import dns.message
import pytest

from entry_dns.answers.message import read
from farhop_lab.bench import dns as bench


def test_every_question_carries_a_subnet_and_a_cookie(tmp_path) -> None:
    bench.questions(tmp_path / "questions", Random(1))
    data = (tmp_path / "questions").read_bytes()
    length = int.from_bytes(data[:2], "big")
    query = read(data[2 : 2 + length])
    assert query.ecs is not None
    assert query.ecs[1] == 24
    assert len(query.cookie or b"") == 24
    assert dns.message.from_wire(data[2 : 2 + length]).question[0].name.to_text() == f"{bench.NAME}."
    assert len(data) == bench.QUESTIONS * (length + 2)


def test_the_networks_are_as_many_as_were_asked_for() -> None:
    atlas = bench.atlas(1000, Random(1))
    assert 1000 < len(atlas.spaces[4].starts) < 2100


def with_only(monkeypatch, gdnsd: str) -> None:
    """No NSD, and this as gdnsd."""
    which = shutil.which
    monkeypatch.setattr(shutil, "which", lambda name: {"nsd": None, "gdnsd": gdnsd}.get(name, which(name)))


@pytest.mark.skipif(shutil.which("dnsperf") is None, reason="no dnsperf here")
def test_who_does_not_answer_is_left_out_with_what_he_answered(tmp_path, monkeypatch) -> None:
    broken = tmp_path / "gdnsd"
    broken.write_text("#!/bin/sh\necho it cannot be >&2\n")
    broken.chmod(0o755)
    with_only(monkeypatch, str(broken))
    found = bench.run(1000, 0.2)
    assert [row.name for row in found.rows] == ["echo", "farhop"]
    assert found.left_out == {
        "nsd": "is not installed (Debian: nsd)",
        "gdnsd": "dnsperf got no answer; it said: it cannot be",
    }


@pytest.mark.skipif(not (shutil.which("dnsperf") and shutil.which("gdnsd")), reason="no dnsperf or gdnsd here")
def test_gdnsd_is_a_row(monkeypatch) -> None:
    with_only(monkeypatch, str(shutil.which("gdnsd")))
    found = bench.run(1000, 0.2)
    assert [row.name for row in found.rows] == ["echo", "farhop", "gdnsd"]
    assert all(row.cpu_us > 0.0 and row.qps > 0.0 for row in found.rows)


def test_without_dnsperf_it_says_so(monkeypatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda _name: None)
    with pytest.raises(bench.BenchError, match="install it"):
        bench.run(1, 1.0)
