"""A path that is not named does not exist, and none that passes can be read as another."""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from urllib.parse import unquote_to_bytes, urlsplit

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from farhop.balance import outcome
from farhop.relay.formats.paths import (
    _PATHS,
    Kind,
    PathRefusal,
    advised,
    asks_readiness,
    classify,
    model_asked_about,
    model_in,
)
from farhop.relay.http import head

RUN = settings(max_examples=500, deadline=None, derandomize=True)
GET = (Kind.MODELS, Kind.VERSION)
POST = {
    "/v1/chat/completions": Kind.CHAT,
    "/v1/completions": Kind.COMPLETION,
    "/v1/messages": Kind.MESSAGES,
    "/v1/messages/count_tokens": Kind.COUNT_TOKENS,
    "/v1/responses": Kind.RESPONSES,
    "/v1/chat/completions/batch": Kind.CHAT_BATCH,
    "/generative_scoring": Kind.GENERATIVE_SCORE,
    "/v1/embeddings": Kind.EMBEDDINGS,
    "/v1/rerank": Kind.RERANK,
    "/v2/rerank": Kind.RERANK,
    "/rerank": Kind.RERANK,
    "/v1/score": Kind.SCORE,
    "/score": Kind.SCORE,
    "/v1/audio/transcriptions": Kind.TRANSCRIPTION,
    "/v1/audio/translations": Kind.TRANSLATION,
    "/tokenize": Kind.TOKENIZE,
    "/detokenize": Kind.DETOKENIZE,
    "/v2/models/m/infer": Kind.INFER,
    "/v2/models/llama-3.1-8b/versions/1/infer": Kind.INFER,
    "/v2/models/m/generate": Kind.GENERATE,
    "/v2/models/m/generate_stream": Kind.GENERATE_STREAM,
    "/v2/models/m/versions/2/generate_stream": Kind.GENERATE_STREAM,
}


@pytest.mark.parametrize(("path", "kind"), POST.items())
def test_inference_paths_are_allowed(path: str, kind: Kind) -> None:
    assert classify(b"POST", path.encode()) is kind
    assert classify(b"GET", b"/v1/models") is Kind.MODELS


@pytest.mark.parametrize(
    ("asked", "model"), [(b"", ""), (b"/m-1.5:x@y", "m-1.5:x@y"), (b"/org%2Fm", "org/m"), (b"/org/m", "org/m")]
)
def test_one_model_may_be_asked_about(asked: bytes, model: str) -> None:
    assert classify(b"GET", b"/v1/models" + asked) is Kind.MODELS
    assert isinstance(classify(b"POST", b"/v1/models" + asked), PathRefusal)
    assert model_asked_about(b"/v1/models" + asked) == model


@pytest.mark.parametrize("path", [b"/v2/models/m-1.5/ready", b"/v2/models/m-1.5/versions/1/ready"])
def test_whether_a_model_is_ready_may_be_asked(path: bytes) -> None:
    assert classify(b"GET", path) is classify(b"HEAD", path) is Kind.MODELS
    assert isinstance(classify(b"POST", path), PathRefusal)
    assert model_asked_about(path) == "m-1.5"
    assert asks_readiness(path)
    assert not asks_readiness(b"/v1/models/ready")


@pytest.mark.parametrize(
    ("path", "meant"),
    [
        (b"/chat/completions", "/v1/chat/completions"),
        (b"/v1/v1/messages", "/v1/messages"),
        (b"/v1/tokenize", "/tokenize"),
        (b"/v1/responses/", "/v1/responses"),
    ],
)
def test_refusal_for_a_wrong_base_url_names_the_right_path(path: bytes, meant: str) -> None:
    refusal = classify(b"POST", path)
    assert isinstance(refusal, PathRefusal)
    assert refusal.detail.startswith(f"this path is not served, but `{meant}` is: check the client's base URL")


@pytest.mark.parametrize("path", [b"/v1/responses/input_tokens", b"/v1/responses/compact"])
def test_a_path_that_keeps_no_state_is_not_refused_as_stateful(path: bytes) -> None:
    refusal = classify(b"POST", path)
    assert isinstance(refusal, PathRefusal)
    assert "stateful" not in refusal.detail


MISWRITTEN = (
    b"/",
    b"",
    b"/v1",
    b"/v1/chat/completions/",
    b"//v1/chat/completions",
    b"/V1/chat/completions",
    b"/v1/models/../x",
    b"/v1/models/",
    b"/v1/models/.x",
    b"/v1/models/x y",
    b"/v1/models/\xff",
    b"/v1/models/" + b"x" * 385,
    b"/v1/%63hat/completions",
    b"/v1/chat/completions;x=1",
    b"/v1/chat/completions\n",
    b"/v1/embeddings#/v1/chat/completions",
    b"/v1/audio/speech",
)
OF_ENGINES = (  # vLLM, SGLang, TGI
    b"/flush_cache",
    b"/update_weights",
    b"/v1/load_lora_adapter",
    b"/sleep",
    b"/wake_up",
    b"/reset_prefix_cache",
    b"/collective_rpc",
    b"/pause",
    b"/metrics",
    b"/health",
    b"/ready",
    b"/v1/messages/",
    b"/server_info",
    b"/tokenizer_info",
    b"/generate",
    b"/generate_stream",
    b"/invocations",
    b"/pooling",
)
OF_TRITON = (
    b"/v2",
    b"/v2/health/ready",
    b"/v2/repository/index",
    b"/v2/repository/models/m/load",
    b"/v2/repository/models/m/unload",
    b"/v2/systemsharedmemory/region/x/register",
    b"/v2/cudasharedmemory/region/x/register",
    b"/v2/trace/setting",
    b"/v2/logging",
    b"/v2/models/m",
    b"/v2/models/m/config",
    b"/v2/models/m/stats",
    b"/v2/models/m/trace/setting",
    b"/v2/models/../infer",
    b"/v2/models/./infer",
    b"/v2/models//infer",
    b"/v2/models/a%2fb/infer",
    b"/v2/models/a/b/infer",
    b"/v2/models/m;x/infer",
    b"/v2/models/m/versions//infer",
    b"/v2/models/m/versions/../infer",
    b"/v2/models/m/versions/../../../repository/models/m/infer",
    b"/v2/models/m/infer/",
    b"/v2/models/m/Infer",
    b"/v2/models/m/infer\n",
    b"/v2/models/" + b"m" * 129 + b"/infer",
)


@pytest.mark.parametrize("paths", [MISWRITTEN, OF_ENGINES, OF_TRITON], ids=["miswritten", "of engines", "of Triton"])
@pytest.mark.parametrize("method", [b"GET", b"POST"])
def test_every_other_path_is_refused_and_the_remedy_named(paths: tuple[bytes, ...], method: bytes) -> None:
    for path in paths:
        refusal = classify(method, path)
        assert isinstance(refusal, PathRefusal)
        assert refusal.outcome is outcome.PATH_NOT_ALLOWED
        assert "/v1/chat/completions" in refusal.detail, "the remedy is named"
        assert "/v2/models/MODEL" in refusal.detail


def lax(target: bytes) -> bytes:
    """The path that the most obliging of servers would read: decoded twice, without parameters, folded, joined."""
    path = target.split(b"?")[0].split(b"#")[0]
    for _ in range(2):
        path = unquote_to_bytes(path)
    path = b"/".join(segment.split(b";")[0] for segment in path.replace(b"\\", b"/").split(b"/"))
    folded = posixpath.normpath(re.sub(rb"/+", b"/", path.strip(b" \t\r\n\0"))).lower()
    return re.sub(rb"/+", b"/", folded)


def twisted(paths: list[str]) -> st.SearchStrategy[bytes]:
    """Allowed paths, with something done to them that some server undoes."""
    twist = st.sampled_from(
        [b"/", b"//", b"/./", b"/../", b"/x/../", b"%2f", b"%2F", b"%2e%2e", b"%63", b"%", b"%00", b"\0", b";a=b",
         b"?x", b"#x", b"\\", b"..", b"v1", b"infer", b"\xc0\xaf", b".", b"%252e"]
    )  # fmt: skip
    return st.builds(
        lambda path, at, what, drop: path[: at % (len(path) + 1)] + what + path[at % (len(path) + 1) + drop :],
        st.sampled_from([p.encode() for p in paths]), st.integers(0, 200), twist | st.just(b""), st.integers(0, 3),
    )  # fmt: skip


SPELLED = [*POST, "/v1/models", "/v2/repository/models/m/load", "/flush_cache"]


@given(
    twisted(SPELLED)
    | st.sampled_from(SPELLED).map(lambda p: p.upper().encode())
    | st.lists(st.sampled_from([p.encode() for s in SPELLED for p in s.split("/")]), max_size=8).map(b"/".join),
    st.sampled_from([b"", b"?", b"?a=1", b"?/../../flush_cache", b"?%2e%2e/#"]),
)
@RUN
def test_no_target_that_passes_can_be_read_as_another(path: bytes, query: bytes) -> None:
    try:
        seen = head.read(b"POST " + path + query + b" HTTP/1.1\r\nhost: x", 100)
    except head.HeadError:
        return
    kinds = {method: classify(method, seen.path) for method in (b"GET", b"POST")}
    if all(isinstance(kind, PathRefusal) and kind.outcome is outcome.PATH_NOT_ALLOWED for kind in kinds.values()):
        return
    assert lax(seen.target) == seen.path.lower()
    assert urlsplit(seen.target).path == seen.path
    for letter_case in (seen.path.upper(), seen.path.swapcase()):
        assert isinstance(classify(b"POST", letter_case), PathRefusal)


def test_the_model_is_read_from_the_path() -> None:
    assert model_in(b"/v2/models/Llama_3.1-8b/versions/1/infer") == "Llama_3.1-8b"
    assert model_in(b"/v2/models/versions/versions/1/generate") == "versions"
    assert model_in(b"/v1/chat/completions") == ""


@pytest.mark.parametrize(
    "path",
    [
        b"/v1/files",
        b"/v1/batches/1",
        b"/v1/responses/r1",
        b"/v1/messages/batches",
        b"/v1/threads/a/runs",
        b"/v1/uploads",
    ],
)
def test_state_is_refused_with_its_reason(path: bytes) -> None:
    refusal = classify(b"POST", path)
    assert isinstance(refusal, PathRefusal)
    assert "stateful" in refusal.detail


@pytest.mark.parametrize(
    ("method", "path", "allow"),
    [
        (b"GET", b"/v1/completions", "POST"),
        (b"HEAD", b"/v1/completions", "POST"),
        (b"DELETE", b"/v1/models", "GET, HEAD"),
        (b"GET", b"/v2/models/m/infer", "POST"),
        (b"PUT", b"/v1/embeddings", "POST"),
    ],
)
def test_a_wrong_method_names_the_right_one(method: bytes, path: bytes, allow: str) -> None:
    refusal = classify(method, path)
    assert isinstance(refusal, PathRefusal)
    assert (refusal.outcome, refusal.allow) == (outcome.METHOD_NOT_ALLOWED, allow)
    assert f"answers {allow} only" in refusal.detail


@pytest.mark.parametrize("path", [b"/v1/models", b"/v1/models/m", b"/version"])
def test_head_is_where_get_is(path: bytes) -> None:
    assert classify(b"HEAD", path) is classify(b"GET", path)


def test_the_table_in_the_docs_is_the_allow_list() -> None:
    text = (Path(__file__).parents[4] / "docs" / "reference" / "paths.md").read_text()
    rows = [line.split("|") for line in text.splitlines() if line.startswith("| `")]
    written = {path.encode() for row in rows for path in re.findall(r"`(/[^`]+)`", row[1])}
    of_models = {path for path in written if b"{" in path}
    assert written - of_models == set(_PATHS)
    fields = {path.replace(b"{model}", b"m").replace(b"{version}", b"1") for path in of_models}
    one_model = {b"/v1/models/m", b"/v2/models/m/ready", b"/v2/models/m/versions/1/ready"}
    assert {classify(b"GET", path) for path in one_model} == {Kind.MODELS}
    asked = {classify(b"POST", path) for path in fields - one_model}
    assert asked == {Kind.INFER, Kind.GENERATE, Kind.GENERATE_STREAM}
    assert one_model <= fields
    assert {row[2].strip() for row in rows} == {f"`{kind}`" for kind in Kind if kind not in GET} | {"–"}


@pytest.mark.parametrize(
    ("path", "asked"),
    [
        (b"/v1/route", b"/v1/chat/completions"),
        (b"/v1/route/v1/completions", b"/v1/completions"),
        (b"/v1/route/", b"/"),
        (b"/v1/routes", None),
        (b"/v1/route/../flush_cache", b"/../flush_cache"),
        (b"/v1/chat/completions", None),
        (b"/V1/route", None),
    ],
)
def test_the_path_a_decision_is_asked_for_is_what_follows(path: bytes, asked: bytes | None) -> None:
    assert advised(path) == asked
