"""The gate: standard names by list, our own by prefix, and nothing that holds what a client or an engine wrote."""

import pytest

from farhop.telemetry import attributes
from farhop.telemetry.attributes import admit

SEMANTIC = "opentelemetry.semconv._incubating.attributes.gen_ai_attributes"


def test_standard_and_own_names_pass():
    given = {
        attributes.REQUEST_MODEL: "llama",
        attributes.INPUT_TOKENS: 12,
        "farhop.anything": 1.5,
        "farhop.spilled": True,
    }
    assert admit(given) == (given, 0)


@pytest.mark.parametrize(
    "name",
    [
        "gen_ai.prompt", "gen_ai.completion", "gen_ai.input.messages", "gen_ai.output.messages",
        "gen_ai.system_instructions", "gen_ai.tool.definitions", "http.request.header.authorization",
        "farhop.prompt", "farhop.request.body", "farhop.Content", "farhop.api.key", "made.up", "", "farhop." + "x" * 64,
    ],
)  # fmt: skip
def test_content_credentials_and_unknown_names_do_not(name):
    assert admit({name: "Dear diary"}) == ({}, 1)


def test_every_gen_ai_name_used_is_one_of_the_conventions():
    module = pytest.importorskip(SEMANTIC)
    known = {value for name, value in vars(module).items() if name.startswith("GEN_AI_") and isinstance(value, str)}
    assert {name for name in attributes.STANDARD if name.startswith("gen_ai.")} <= known


def test_texts_and_lists_are_cut():
    admitted, refused = admit({"farhop.reasons": ["x" * 999] * 99, "farhop.policy": "y" * 999})
    assert admitted["farhop.reasons"] == ("x" * 256,) * 64
    assert admitted["farhop.policy"] == "y" * 256
    assert refused == 0


def test_values_of_other_kinds_are_refused():
    assert admit({"farhop.a": {"nested": 1}, "farhop.b": b"bytes", "farhop.c": None}) == ({}, 3)
