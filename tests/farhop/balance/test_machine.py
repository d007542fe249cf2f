"""The words of the state machine: frozen, each naming its request, and nothing but words."""

import msgspec
import pytest

from farhop.balance import machine
from farhop.balance.machine import Address, Command, Event, LawChanged, Request, Usage

WORDS = [
    word
    for word in vars(machine).values()
    if isinstance(word, type) and issubclass(word, Event | Command) and word not in (Event, Command)
]


def test_there_are_events_and_commands() -> None:
    assert {"RequestArrived", "Forward", "Cancel"} <= {word.__name__ for word in WORDS}


@pytest.mark.parametrize("word", WORDS, ids=lambda word: word.__name__)
def test_every_event_and_command_is_frozen_and_names_its_request(word: type[msgspec.Struct]) -> None:
    assert word.__struct_config__.frozen
    names = word.__struct_fields__
    assert "id" in names or "request" in names or word is LawChanged
    assert word.__doc__


def test_a_request_needs_only_what_every_request_has() -> None:
    request = Request("r", "t", "m", prompt_bytes=1, body_bytes=2, chain=(1,), deadline=3.0)
    assert request.lawful is None  # no token: not "nowhere"
    assert (request.narrow, request.promised_ttft_ms, request.priority) == ((), None, 0)
    with pytest.raises(AttributeError):
        request.tenant = "other"  # type: ignore[misc]


@pytest.mark.parametrize(
    ("told", "limit", "believes"),
    [
        (Usage(11, 3), None, Usage(11, 3)),
        (Usage(300_000, 3, 300_000), None, Usage(262_344, 3, 262_344)),
        (Usage(11, 4_000_000, None, 3_000_000), None, Usage(11, 2 * 1_048_576 + 1024, None, 2 * 1_048_576 + 1024)),
        (Usage(11, 1064), 10, Usage(11, 1064)),
        (Usage(11, 50_000), 0, Usage(11, 50_000)),
        (Usage(2**31, 2**31, 2**31, 5), 10, Usage(262_344, 1064, 262_344, 5)),
        (None, 10, None),
    ],
)
def test_reported_usage_is_clipped_to_what_the_request_can_have_used(
    told: Usage | None, limit: int | None, believes: Usage | None
) -> None:
    """Of a body of 200 bytes, which asks for two answers."""
    request = Request("r", "t", "m", 1, 200, (1,), 3.0, max_tokens=limit, answers=2)
    assert machine.plausible(told, request) == believes


@pytest.mark.parametrize(
    ("host", "text"), [("10.0.0.1", "10.0.0.1:80"), ("gpu.example", "gpu.example:80"), ("::1", "[::1]:80")]
)
def test_an_address_reads_as_an_authority(host: str, text: str) -> None:
    assert str(Address(host, 80)) == text
