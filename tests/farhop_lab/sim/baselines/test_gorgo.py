from __future__ import annotations

import pytest
from gorgo.policy.base import ReplicaSnapshot, RouteContext
from gorgo.policy.gorgo import route_gorgo_2d
from gorgo.radix_trie import RadixTrie
from hypothesis import given, settings
from hypothesis import strategies as st

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
@pytest.mark.parametrize("rate", [1.0, 0.5])
def test_the_central_score_adds_up_wire_prefill_and_queue(weights: Weights, rate: float) -> None:
    picker, seen = Central(weights, calibrated=rate != 1.0), central()
    picker.sent(ask(b"a" * 4000), "eu/0", seen, 0.0)
    seen.sent(ask(b"x" * 8000, name="other"), "us/0")
    expected = {
        "us/0": weights.rtt * 1.0 + rate * 1100 + rate * weights.queue * 2000,
        "eu/0": weights.rtt * 91.0 + rate * 100,
        "asia/0": weights.rtt * 166.0 + rate * 1100,
    }
    asked = ask(b"a" * 4000 + b"b" * 400)
    assert picker.score(asked, seen.engines, seen) == pytest.approx(expected)
    assert picker.choose(asked, seen.engines, seen, 0.0) == "eu/0"
    seen.began("other")  # a request is a load until it is over, not until its first byte
    assert picker.score(asked, seen.engines, seen) == pytest.approx(expected)
    seen.over("other")
    assert picker.score(asked, seen.engines, seen)["us/0"] == pytest.approx(weights.rtt + rate * 1100)


REQUESTS = st.lists(
    st.tuples(st.lists(st.integers(0, 2), min_size=1, max_size=12), st.sampled_from(["go", "began", "over"])),
    min_size=1,
    max_size=15,
)


@settings(max_examples=80)
@given(REQUESTS, st.sampled_from([WILDCHAT, LONG_CONTEXT]), st.booleans(), st.tuples(*[st.floats(0.001, 0.4)] * 3))
def test_scores_and_choices_are_those_of_its_authors_package(
    requests: list[tuple[list[int], str]], weights: Weights, calibrated: bool, wires_s: tuple[float, float, float]
) -> None:
    picker, seen = Central(weights, calibrated=calibrated), central()
    seen.rtt_ms.update(zip(RTT, (1e3 * wire_s for wire_s in wires_s), strict=True))
    trie, queued, sent = RadixTrie(), dict.fromkeys(seen.engines, 0), []
    rate = 0.5 if calibrated else 1.0
    store = {
        "defaults": {"rtt_weight": weights.rtt, "queue_weight": weights.queue, "prefill_rate": rate, "queue_rate": rate}
    }
    probes = {
        name: ReplicaSnapshot(
            num_running_reqs=0, num_queue_reqs=0, num_used_tokens=0, latency=9.0,
            network_rtt=seen.rtt_ms[seen.targets[name].region] / 1e3,
        )
        for name in seen.engines
    }  # fmt: skip
    for number, (tokens, then) in enumerate(requests):
        request = ask(b"".join(b"tok%d" % token for token in tokens), name=str(number))
        decision = route_gorgo_2d(
            RouteContext(
                replica_urls=seen.engines, metrics=probes, endpoints_queued_tokens=queued,
                endpoints_queued_uncached_tokens={}, endpoints_inflight_requests={}, radix_trie=trie,
                token_ids=tokens, request_tokens=len(tokens), hyperparameters=store,
            )
        )  # fmt: skip
        assert picker.score(request, seen.engines, seen) == pytest.approx(decision.scores)
        chosen = picker.choose(request, seen.engines, seen, 0.0)
        assert decision.scores[chosen] == pytest.approx(min(decision.scores.values()))
        picker.sent(request, chosen, seen, 0.0)
        seen.sent(request, chosen)
        trie.insert(tokens, chosen)
        queued[chosen] += len(tokens)
        sent.append((request.id, chosen, len(tokens)))
        if then == "began":
            seen.began(sent[0][0])
        elif then == "over":
            name, region, length = sent.pop(0)
            seen.over(name)
            queued[region] -= length


def test_the_distributed_variant_counts_requests_at_home_but_not_at_peers() -> None:
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


def test_state_sent_by_a_peer_is_kept() -> None:
    seen = distributed()
    assert HomeAndPeers().candidates(ask(), seen, 0.0) == ["us/0", "us/1", "eu", "asia"]
    assert HomeAndPeers().candidates(ask(issuer="eu"), seen, 0.0) == ["us/0", "us/1"]
