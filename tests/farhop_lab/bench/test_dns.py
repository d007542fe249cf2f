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


def test_without_dnsperf_it_says_so(monkeypatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda _name: None)
    with pytest.raises(bench.BenchError, match="install it"):
        bench.run(1, 1.0)
