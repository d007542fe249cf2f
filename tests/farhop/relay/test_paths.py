"""A path that is not named does not exist."""

from __future__ import annotations

import pytest

from farhop.balance import outcome
from farhop.relay.paths import Kind, PathRefusal, classify


@pytest.mark.parametrize(
    ("method", "path", "kind"),
    [
        (b"POST", b"/v1/chat/completions", Kind.CHAT),
        (b"POST", b"/v1/completions", Kind.COMPLETION),
        (b"GET", b"/v1/models", Kind.MODELS),
    ],
)
def test_inference_passes(method: bytes, path: bytes, kind: Kind) -> None:
    assert classify(method, path) is kind


@pytest.mark.parametrize(
    "path",
    [
        b"/",
        b"",
        b"/v1",
        b"/v1/chat/completions/",
        b"//v1/chat/completions",
        b"/V1/chat/completions",
        b"/v1/models/../x",
        b"/v1/%63hat/completions",
        b"/flush_cache",
        b"/update_weights",
        b"/v1/load_lora_adapter",
        b"/sleep",
        b"/metrics",
        b"/health",
        b"/v1/embeddings#/v1/chat/completions",
    ],
)
@pytest.mark.parametrize("method", [b"GET", b"POST"])
def test_nothing_else_does(method: bytes, path: bytes) -> None:
    refusal = classify(method, path)
    assert isinstance(refusal, PathRefusal)
    assert refusal.outcome is outcome.PATH_NOT_ALLOWED
    assert "/v1/chat/completions" in refusal.detail, "the remedy is named"


@pytest.mark.parametrize("path", [b"/v1/files", b"/v1/batches/1", b"/v1/responses", b"/v1/threads/a/runs"])
def test_state_is_refused_with_its_reason(path: bytes) -> None:
    refusal = classify(b"POST", path)
    assert isinstance(refusal, PathRefusal)
    assert "stateful" in refusal.detail


@pytest.mark.parametrize(
    ("method", "path", "allow"),
    [(b"GET", b"/v1/completions", "POST"), (b"HEAD", b"/v1/models", "GET"), (b"DELETE", b"/v1/models", "GET")],
)
def test_a_wrong_method_names_the_right_one(method: bytes, path: bytes, allow: str) -> None:
    refusal = classify(method, path)
    assert isinstance(refusal, PathRefusal)
    assert (refusal.outcome, refusal.allow) == (outcome.METHOD_NOT_ALLOWED, allow)
    assert allow in refusal.detail
