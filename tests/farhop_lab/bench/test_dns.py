from __future__ import annotations

import os
import shutil
from random import Random

import dns.message
import pytest

from entry_dns.answers.message import read
from farhop_lab.bench import dns as bench
from farhop_lab.bench.harness import BenchError


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


def test_there_are_as_many_networks_as_requested() -> None:
    atlas = bench.atlas(1000, Random(1))
    assert 1000 < len(atlas.spaces[4].starts) < 2100


BROKEN = """#!/bin/sh
for last; do :; done
sed -n 's/.*ip-address: .*@//p' "$last" > {folder}/mute
echo it cannot be
"""
# Without an answer dnsperf uses a whole core for its 5 s: it is not started while no server is there.
DNSPERF = """#!/bin/sh
case " $* " in
  *" -p $(cat {folder}/mute) "*) echo "  Queries completed:    0 (0.00%)" ;;
  *) exec {dnsperf} "$@" ;;
esac
"""


def found(monkeypatch: pytest.MonkeyPatch, **peers: str | None) -> bench.Found:
    """What one short round shows where these peers, by name, are what they are here."""
    which = shutil.which
    monkeypatch.setattr(shutil, "which", lambda name: peers.get(name, which(name)))
    monkeypatch.setattr(bench, "ROUNDS", 1)
    return bench.run(1000, 0.1)


@pytest.mark.skipif(shutil.which("dnsperf") is None, reason="no dnsperf here")
def test_a_server_that_does_not_answer_is_left_out_with_the_reason(tmp_path, monkeypatch) -> None:
    """The other peer, if it is here, has a row beside ours; if not, it is said so."""
    broken = tmp_path / "nsd"
    for name, text in (("nsd", BROKEN), ("dnsperf", DNSPERF)):
        (tmp_path / name).write_text(text.format(folder=tmp_path, dnsperf=shutil.which("dnsperf")))
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    gdnsd = shutil.which("gdnsd")
    one = found(monkeypatch, nsd=str(broken), gdnsd=gdnsd)
    assert [row.name for row in one.rows] == ["echo", "farhop", *(["gdnsd"] if gdnsd else [])]
    assert all(row.cpu_us > 0.0 and row.qps > 0.0 for row in one.rows)
    why = {"nsd": "dnsperf got no answer; it said: it cannot be", "gdnsd": "is not installed (Debian: gdnsd)"}
    assert one.left_out == {name: said for name, said in why.items() if name == "nsd" or not gdnsd}


def test_a_missing_server_is_named_with_the_remedy(monkeypatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None if name == "nsd" else f"/usr/sbin/{name}")
    assert bench.absent() == {"nsd": "is not installed (Debian: nsd)"}


def test_missing_dnsperf_is_reported(monkeypatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda _name: None)
    with pytest.raises(BenchError, match="install it"):
        bench.run(1, 1.0)
