"""The list of models, as the SDKs of OpenAI and of Anthropic read it."""

from __future__ import annotations

import msgspec
import pytest

from farhop.balance.model_facts import UNKNOWN_FACTS, ModelFacts
from farhop.relay.formats.model_list import listed, ready

MODELS = {"large": ModelFacts(max_model_len=4096), "small": UNKNOWN_FACTS}
ASKED = b"accept: */*\r\nanthropic-version: 2023-06-01\r\n"


def test_model_list_contains_what_engines_report_of_a_model() -> None:
    document = msgspec.json.decode(listed(MODELS, b"x-anthropic-version: 1\r\n"))
    one = {"object": "model", "created": 0, "owned_by": "farhop"}
    assert document == {
        "object": "list",
        "data": [{"id": "large", **one, "max_model_len": 4096}, {"id": "small", **one}],
    }


@pytest.mark.parametrize("lines", [ASKED, ASKED.partition(b"\r\n")[2]])
def test_anthropics_sdk_finds_its_members_beside(lines: bytes) -> None:
    document = msgspec.json.decode(listed(MODELS, lines))
    assert (document["has_more"], document["first_id"], document["last_id"]) == (False, "large", "small")
    assert [(one["type"], one["display_name"]) for one in document["data"]] == [("model", "large"), ("model", "small")]
    nothing = msgspec.json.decode(listed({}, lines))
    assert (nothing["data"], nothing["first_id"], nothing["last_id"]) == ([], None, None)


def test_a_model_that_is_ready_is_named() -> None:
    assert msgspec.json.decode(ready("small")) == {"name": "small", "ready": True}
