"""What is refused, how much of it, and until when."""

from __future__ import annotations

from random import Random

from regional_lb.scheduler.refusals import OrderedRefusal, Refusals


def test_a_share_is_refused_of_a_model_or_of_any() -> None:
    rng, found = (
        Random(1),
        {"": OrderedRefusal(0.25, 10.0, "a drill", "ann"), "m": OrderedRefusal(0.5, 5.0, "a drill", "ann")},
    )
    refusals = Refusals(found)
    share = {name: sum(bool(refusals.of(name, 0.0, rng)) for _ in range(4000)) / 4000 for name in ("m", "other")}
    assert abs(share["m"] - 0.625) < 0.03  # each waiting request draws for itself
    assert abs(share["other"] - 0.25) < 0.03
    assert not any(refusals.of("m", 10.0, rng) for _ in range(100))
    told = Refusals({"": OrderedRefusal(1.0, 1.0, "globex's leak", "ann@bastion")}).of("m", 0.0, rng)
    assert told == "an operator has this region refuse new work", "who said so, and why, is not for clients"
