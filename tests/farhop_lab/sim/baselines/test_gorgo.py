from __future__ import annotations

import pytest

from farhop.balance.machine import Request, Tokens
from farhop_lab.sim.baselines.gorgo import LONG_CONTEXT, WILDCHAT, Central, Distributed, HomeAndPeers, Weights
from farhop_lab.sim.baselines.router import RouterState, Target

RTT = {"us": 1.0, "eu": 91.0, "asia": 166.0}


def ask(text: bytes = b"", issuer: str = "", name: str = "r") -> Request:
    return Request(name, "t", "m", len(text), len(text), (), 100.0, issuer=issuer, tokens=Tokens(text))


def central() -> RouterState:
    return RouterState("us", [Target(f"{region}/0", region, 0.5) for region in RTT], dict(RTT))


def distributed() -> RouterState:
    home = [Target("us/0", "us", 0.5), Target("us/1", "us", 0.5)]
    return RouterState("us", [*home, *(Target(name, name, 0.5, balancer=True) for name in ("eu", "asia"))], dict(RTT))


@pytest.mark.parametrize("weights", [WILDCHAT, LONG_CONTEXT])
def test_the_central_score_adds_up_wire_prefill_and_queue(weights: Weights) -> None:
    picker, seen = Central(weights), central()
    picker.sent(ask(b"a" * 4000), "eu/0", seen, 0.0)
    seen.sent(ask(b"x" * 8000, name="other"), "us/0")
    scores = picker.score_ms(ask(b"a" * 4000 + b"b" * 400), seen.engines, seen)
    assert scores == pytest.approx(
        {
            "us/0": weights.rtt * 1.0 + 0.5 * 1100 + 0.5 * weights.queue * 2000,
            "eu/0": weights.rtt * 91.0 + 0.5 * 100,
            "asia/0": weights.rtt * 166.0 + 0.5 * 1100,
        }
    )
    assert picker.choose(ask(b"a" * 4000 + b"b" * 400), seen.engines, seen, 0.0) == "eu/0"
    seen.began("other")
    assert picker.score_ms(ask(b"a"), ["us/0"], seen)["us/0"] == pytest.approx(weights.rtt + 0.5 * 0.25)


def test_the_distributed_one_counts_what_is_at_home_but_not_at_peers() -> None:
    picker, seen = Distributed(), distributed()
    seen.sent(ask(b"x" * 800, name="queued"), "us/0")
    seen.sent(ask(b"x" * 400, name="running"), "us/0")
    seen.began("running")
    seen.sent(ask(b"x" * 80_000, name="abroad"), "eu")
    picker.sent(ask(b"a" * 400), "eu", seen, 0.0)
    costs = picker.cost_ms(ask(b"a" * 800), ["us/0", "us/1", "eu", "asia"], seen)
    assert costs == pytest.approx({"us/0": 0.5 * 500, "us/1": 0.5 * 200, "eu": 91 + 0.5 * 100, "asia": 166 + 0.5 * 200})
    assert picker.choose(ask(b"a" * 800), ["us/0", "us/1", "eu", "asia"], seen, 0.0) == "us/1"
    assert picker.choose(ask(b"a" * 800), ["us/0", "eu", "asia"], seen, 0.0) == "eu"


def test_what_a_peer_sent_stays() -> None:
    seen = distributed()
    assert HomeAndPeers().candidates(ask(), seen, 0.0) == ["us/0", "us/1", "eu", "asia"]
    assert HomeAndPeers().candidates(ask(issuer="eu"), seen, 0.0) == ["us/0", "us/1"]
