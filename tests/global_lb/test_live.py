from __future__ import annotations

from farhop.balance import outcome
from farhop.balance.machine import Request
from global_lb.live import LOOK_AGAIN_S, Live


def _live(deadline: float) -> Live:
    request = Request(id="1", tenant="t", model="m", prompt_bytes=1, body_bytes=1, chain=(), deadline=deadline)
    return Live(request, frozenset(("a", "b")))


def test_an_attempt_that_has_not_begun_is_looked_at_soon_and_one_that_has_at_its_deadline() -> None:
    live = _live(100.0)
    assert live.look_again(10.0) == 10.0 + LOOK_AGAIN_S
    assert live.look_again(99.9) == 100.0
    live.started = True
    assert live.look_again(10.0) == 100.0


def test_it_tells_what_became_of_it() -> None:
    live = _live(100.0)
    live.refusals["a"] = outcome.QUEUE_FULL
    assert "a: queue_full" in live.told()
