"""Playbooks for a tier's machine, in mitmproxy's manner: what happens, and all that must be done about it.

    play(flow).at(0.0).on(RequestArrived(r)).expect(sent("r", "gpu-1")).at(0.2).on(AttemptFailed(...)).expect(...)

Every event needs its `expect`, an empty one included; a command that is not expected fails, and so does a playbook
that was left unfinished (the `play` fixture sees to that).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from farhop.balance.machine import Answer, Command, Event, Flow, Forward, Hold, SetTimer
from farhop.balance.outcome import Outcome


class Expected:
    """A command of this kind whose named fields have these values; a callable value is asked about the field."""

    def __init__(self, kind: type[Command], **fields: Any) -> None:
        self.kind, self.fields = kind, fields

    def matches(self, command: Command) -> bool:
        return type(command) is self.kind and all(
            wanted(getattr(command, name)) if callable(wanted) else getattr(command, name) == wanted
            for name, wanted in self.fields.items()
        )

    def __repr__(self) -> str:
        return f"{self.kind.__name__}({', '.join(f'{k}={v!r}' for k, v in self.fields.items())})"


Expectation = Expected | tuple["Expectation", ...]


def timer(request_id: str, **fields: Any) -> Expected:
    """SetTimer for the request."""
    return Expected(SetTimer, id=request_id, **fields)


def sent(request_id: str, target: str, **fields: Any) -> Expectation:
    """Forward to the target, and the timer that goes with it."""
    return timer(request_id), Expected(Forward, id=request_id, target=target, **fields)


def held(request_id: str, until: float | None = None) -> Expectation:
    """Hold, with a timer."""
    return Expected(Hold, id=request_id), timer(request_id, **({} if until is None else {"at": until}))


def answered(request_id: str, outcome: Outcome, **fields: Any) -> Expected:
    """Answer with this outcome."""
    return Expected(Answer, id=request_id, outcome=outcome, **fields)


class Playbook:
    """One machine and the story it is told."""

    def __init__(self, flow: Flow) -> None:
        self._flow = flow
        self._now = 0.0
        self._pending: list[Command] | None = None

    def at(self, now: float) -> Playbook:
        """The time from here on."""
        assert now >= self._now, "time does not run backwards"
        self._now = now
        return self

    def on(self, event: Event) -> Playbook:
        """Something happens."""
        self.finished()
        self._pending = self._flow.handle(event, self._now)
        return self

    def expect(self, *expectations: Expectation) -> Playbook:
        """All that is done about it, in this order."""
        assert self._pending is not None, "expect() without on()"
        commands, self._pending = self._pending, None
        wanted = list(_flat(expectations))
        story = f"at {self._now}: wanted {wanted}, got {commands}"
        assert len(commands) == len(wanted), story
        for command, expected in zip(commands, wanted, strict=True):
            assert expected.matches(command), f"{expected} is not {command}; {story}"
        return self

    def finished(self) -> None:
        """Whether the last event was answered for."""
        assert self._pending is None, f"the playbook was left unfinished: nobody expected {self._pending}"


def _flat(expectations: tuple[Expectation, ...]) -> Iterator[Expected]:
    for expectation in expectations:
        if isinstance(expectation, tuple):
            yield from _flat(expectation)
        else:
            yield expectation
