from __future__ import annotations

from typing import Any

from farhop.relay.active import ActiveRequest


class Noted:
    """Whoever is called, it is noted."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, tuple[Any, ...]]] = []

    def __getattr__(self, name: str) -> Any:
        return lambda *given: self.calls.append((name, given))


def test_client_events_go_to_the_owner_and_to_the_attempt() -> None:
    owner, attempt = Noted(), Noted()
    active = ActiveRequest(owner, None, None, b"", False, None, 0.0, None)  # type: ignore[arg-type]
    active.pause()  # nothing is sent upstream yet: there is nothing to abort
    active.attempt = attempt  # type: ignore[assignment]
    active.pause()
    active.resume()
    active.client_left()
    active.stopped()
    assert attempt.calls == [("pause", ()), ("resume", ())]
    assert owner.calls == [("client_left", (active,)), ("stopped", (active,))]
