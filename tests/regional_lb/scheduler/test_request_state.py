"""What the machine keeps of a request before and after it is sent."""

from __future__ import annotations

from random import Random

from worlds import law, replica, replicas_of, request

from regional_lb.scheduler.pick import pick
from regional_lb.scheduler.policy import Need, Predictive
from regional_lb.scheduler.request_state import RequestState


def test_a_new_request_has_no_chosen_replica() -> None:
    need = Need(prompt_tokens=256.0, output_tokens=100.0, bytes_per_token=4.0)
    live = RequestState(request("a"), need, "llama", law())
    assert live.chosen is None
    live.pick = pick(need, replicas_of(replica("r1")).whole, (), Predictive(), 0.0, Random(1))
    assert live.chosen is not None
    assert live.chosen.replica == "r1"
