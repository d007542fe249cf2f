"""Which streams can be continued, and what of their requests is kept for it."""

from __future__ import annotations

import contextlib
import sys
import tracemalloc
from typing import Any

import msgspec
import pytest

from farhop.relay.formats.resumption import CHAT, TARGET, Plan, Unresumable, plan

ASKED = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 9, "stream": True}


def planned(path: bytes = CHAT, **more: Any) -> Plan:
    return plan(path, msgspec.json.encode({**ASKED, **more}))


def test_a_plan_is_small_whatever_it_is_made_of() -> None:
    """It stands as long as its stream, and nobody counts it: 234 KiB of stop strings made one of 3.4 MB."""
    biases = dict.fromkeys(map(str, range(20_000)), 1)
    for more in ({"stop": ["a"] * 60_000}, {"logit_bias": biases}, {"stop": ["a"] * 64}):
        encoded = msgspec.json.encode({**ASKED, **more})
        tracemalloc.start()
        with contextlib.suppress(Unresumable):
            made = plan(CHAT, encoded)
            assert made.stops
        kept, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert kept < 32_768


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ({"n": 2}, "answers"),
        ({"best_of": 3}, "answers"),
        ({"use_beam_search": True}, "answers"),
        ({"response_format": {"type": "json_object"}}, "structured"),
        ({"structured_outputs": {"json": {}}, "guided_json": {"type": "object"}}, "structured"),
        ({"presence_penalty": 0.1}, "penalties"),
        ({"repetition_penalty": 1.1}, "penalties"),
        ({"bad_words": ["x"]}, "penalties"),
        ({"logprobs": True}, "logprobs"),
        ({"top_logprobs": 3}, "logprobs"),
        ({"logprobs": 0}, "logprobs"),
        ({"prompt_logprobs": 0}, "logprobs"),
        ({"stop": "x" * 1025}, "stop_strings"),
        ({"stop": ["a", ""]}, "stop_strings"),
        ({"stop": ["a"] * 65}, "stop_strings"),
        ({"stop": ["x" * 1000] * 9}, "stop_strings"),
        ({"logit_bias": dict.fromkeys(map(str, range(2000)), 1)}, "too_long"),
        ({"stop": ["a", 3]}, "unreadable"),
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"include_reasoning": False}, "tools_or_reasoning"),
        ({"include_reasoning": "no"}, "tools_or_reasoning"),
        ({"echo": True}, "echo"),
        ({"kv_transfer_params": {"do_remote_decode": True}}, "divided"),
        ({"return_token_ids": False}, "asks_for_ids"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, "media"),
        ({"messages": [{"role": "user", "content": "x" * 300_000}]}, "too_long"),
    ],
)
def test_a_request_that_cannot_be_continued_exactly_is_refused_by_its_reason(more: dict[str, Any], reason: str) -> None:
    with pytest.raises(Unresumable, match=f"^{reason}$"):
        planned(**more)


def test_other_paths_and_what_is_no_json() -> None:
    for path, body, reason in (
        (b"/v1/messages", b"{}", "path"),
        (CHAT, b"{", "unreadable"),
        (CHAT, b"[1]", "unreadable"),
        (TARGET, b'{"prompt": ["a", "b"]}', "answers"),
        (TARGET, b'{"prompt": [[1], [2]]}', "answers"),
    ):
        with pytest.raises(Unresumable, match=f"^{reason}$"):
            plan(path, body)


@pytest.mark.parametrize(
    "more",
    [
        {"presence_penalty": 0, "frequency_penalty": 0.0, "repetition_penalty": 1.0, "n": 1, "stop": [], "tools": None},
        {"response_format": {"type": "text"}, "logprobs": False, "echo": None, "bad_words": []},
        {"logprobs": None, "top_logprobs": 0, "include_reasoning": True},
    ],
)
def test_fields_with_their_default_do_not_prevent_resumption(more: dict[str, Any]) -> None:
    assert planned(**more).max_tokens == 9


def test_a_continuation_keeps_the_clients_seed_and_adds_none() -> None:
    assert b"seed" not in planned().members
    assert msgspec.json.decode(planned(seed=7).members)["seed"] == 7


def test_a_resumption_plan_does_not_keep_the_request_body_alive() -> None:
    body = msgspec.json.encode({**ASKED, "temperature": 0.5, "seed": 7})
    before = sys.getrefcount(body)
    made = plan(CHAT, body)
    assert sys.getrefcount(body) == before
    assert msgspec.json.decode(made.members).keys() == {"model", "temperature", "seed"}
