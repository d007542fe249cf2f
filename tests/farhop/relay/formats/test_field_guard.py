"""Fields that engines get: none that names hosts, files, code, devices or others' state, whatever its spelling."""

from __future__ import annotations

import json
import re
import time
from typing import Any

import pytest

from farhop.balance import outcome
from farhop.relay.formats import bodies, field_guard
from farhop.relay.formats.field_guard import Guard, engine_headers, family_of
from farhop.relay.formats.paths import Kind
from farhop.relay.formats.prompt import BodyError

CHAT = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
# Fields that real engines obey today, and names of the same families that no engine has yet.
HOSTILE = {
    "kv_transfer_params": {"remote_host": "10.0.0.1"},
    "ec_transfer_params": {},
    "disaggregated_params": {"request_type": "generation_only"},
    "bootstrap_host": "10.0.0.1",
    "remote_port": 1,
    "callback_url": "http://169.254.169.254/",
    "webhook": "http://evil",
    "custom_logit_processor": "gASV",
    "logits_processors": ["os.system"],
    "chat_template": "{{ 7*7 }}",
    "lora_path": "/etc/passwd",
    "tokenizer_path": "/etc",
    "prompt_embeds": "gASV",
    "input_embeds": [[0.1]],
    "data_parallel_rank": 0,
    "disagg_prefill_dp_rank": 0,
    "target_device": "cuda:0",
    "backend_instance_id": 7,
    "decode_worker_id": 7,
    "request_id": "chatcmpl-1",
    "rid": "1",
    "session_params": {"id": "1"},
    "extra_key": "5f2c",
    "priority": -9,
    "lora_name": "another",
    "lora_config": [[1]],
    "adapter_id": "another",
    "lora": [{"id": 0, "scale": 1.0}],
    "adapters": "../another",
    "merged_adapters": {"ids": ["another"]},
    "id_slot": 3,
    "previous_response_id": "resp_1",
    "draft_model": "another",
    "models": ["another"],
    "fallbacks": ["another"],
    "context_window_fallbacks": [{"m": ["another"]}],
    "content_policy_fallbacks": [{"m": ["another"]}],
    "context_window_fallback_dict": {"m": "another"},
    "user_config": {"model_list": []},
    "model_list": [{"model_name": "m", "litellm_params": {"model": "another"}}],
    "provider": {"only": ["another"]},
    "custom_llm_provider": "another",
    "api_base": "http://10.0.0.1",
    "backend": "another",
    "model_base_name": "another",
    "tokenizer": "../another",
    "strict_priority": 9,
    "latency_sensitivity": 9.0,
    "session_control": {"session_id": "another's", "action": "close"},
    "token_data": [1, 2, 3],
    "input_ids": [1, 2, 3],
    "migration_request": {"remote_session_id": 7, "remote_block_ids": [1]},
    "ngram_corpus_id": "another tenant's",
    "content_hash": "another tenant's",
    "embed_overrides": [[[0.1]]],
    "item_embed_overrides": [[[0.1]]],
    "embed_override_token_id": 7,
    "previous_input_messages": [{"role": "user", "content": "hi"}],
    "routing_constraints": {"required": ["another"]},
    "web_search_options": {},
}
DATA_URL = "data:image/png;base64,iVBORw0KGgo="


def _read(body: dict[str, Any], kind: Kind = Kind.CHAT, rules: Guard = field_guard.DEFAULT) -> Any:
    return bodies.read(kind, json.dumps(body).encode(), b"/v2/models/m/generate", b"", rules)


def test_a_field_that_no_client_may_set_is_named() -> None:
    for name in HOSTILE:
        for within in ["", "vllm_xargs", "nvext"]:
            hostile = {name: HOSTILE[name]}
            with pytest.raises(BodyError) as caught:
                _read(CHAT | ({within: hostile} if within else hostile))
            assert (caught.value.outcome, caught.value.param) == (outcome.INVALID_FIELD, name)
            unset = {name: None}
            assert _read(CHAT | ({within: unset} if within else unset)).model == "m", (
                "SDKs send null for what is not set"
            )


@pytest.mark.parametrize("spelled", [str.upper, str.title, lambda name: name.replace("k", "\u212a")])
def test_field_names_that_differ_only_in_case_are_refused(spelled: Any) -> None:
    """As Go's encoding/json does: of `model` and `Model` the later one would be read."""
    for name in HOSTILE:
        if (other := spelled(name)) != name:
            for within in ["", "vllm_xargs"]:
                with pytest.raises(BodyError) as caught:
                    _read(CHAT | ({within: {other: 1}} if within else {other: 1}))
                assert caught.value.param == other
    for name in field_guard.KNOWN:
        if (other := spelled(name)) != name:
            with pytest.raises(BodyError, match=f"differs from `{re.escape(name)}` by the case of its letters"):
                _read(CHAT | {other: "another"})
            assert _read(CHAT | {other: None}).model == "m", "Go's readers pass over null"


def test_known_fields_belong_to_no_refused_family_and_pass_while_unknown_ones_do_not() -> None:
    assert [name for name in field_guard.KNOWN if family_of(name)] == []
    rules = Guard(refuse_unknown=True)
    assert _read({**dict.fromkeys(field_guard.KNOWN - {"messages", "model"}), **CHAT}, rules=rules).model == "m"
    with pytest.raises(BodyError) as caught:
        _read(CHAT | {"new": 1}, rules=rules)
    assert caught.value.param == "new"


def test_refused_fields_are_refused_at_any_depth_of_nvext() -> None:
    """`nvext.agent_hints.priority` is its own form of the field."""
    for hints in (
        {"agent_hints": {"priority": 5}},
        {"a": {"b": {"decode_worker_id": 7}}},
        {"agent_hints": [{"rid": 1}]},
    ):
        with pytest.raises(BodyError):
            _read(CHAT | {"nvext": hints})
    assert _read(CHAT | {"nvext": {"agent_hints": {"osl": 256, "priority": None}}}).model == "m"
    with pytest.raises(BodyError, match="sets a priority at the engine"):
        _read(CHAT | {"extra_body": {"nvext": {"agent_hints": {"priority": 5}}}})


@pytest.mark.parametrize("within", ["nvext", "vllm_xargs", "sampling_params", "extra_body"])
def test_a_salt_is_read_in_the_body_alone(within: str) -> None:
    """Dynamo takes `nvext.cache_salt`: a client's own would lead it to caches that another tenant filled."""
    for name in ("cache_salt", "Cache_Salt"):
        with pytest.raises(BodyError, match="must be a member of the body itself"):
            _read(CHAT | {within: {name: "another's"}})
    assert _read(CHAT | {within: {"cache_salt": None}}).model == "m"


@pytest.mark.parametrize(
    "more",
    [
        {"model": "big"}, {"MODEL": "big"}, {"messages": []}, {"max_tokens": 9}, {"n": 9}, {"stream": True},
        {"tools": [{"type": "mcp"}]}, {"metadata": {"mcp_servers": "a"}},
        {"chat_template_kwargs": {"chat_template": "x"}},
        {"extra_body": {"model": "big"}}, {"sampling_params": {"priority": 1}}, {"service_tier": "priority"},
    ],
)  # fmt: skip
def test_extra_body_may_not_hold_fields_that_farhop_reads(more: dict[str, Any]) -> None:
    """LiteLLM's proxy has `extra_body` go over what it sends on: of two `model`s that in it would be the one."""
    with pytest.raises(BodyError):
        _read(CHAT | {"extra_body": more})
    assert _read(CHAT | {"extra_body": {"top_k": 3, **dict.fromkeys(more)}}).model == "m"


def test_tools_that_an_engine_itself_would_run_or_fetch_are_refused() -> None:
    chat, message = CHAT, {**CHAT, "max_tokens": 8}
    function = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
    for kind in ("mcp", "web_search", "web_search_20250305", "web_fetch_20250910", "code_execution_20250825",
                 "code_interpreter", "file_search", "builtin_function", "mcp_toolset", 7):  # fmt: skip
        hosted = {"type": kind, "name": "look", "server_url": "http://10.0.0.1"}
        for body, path in ((chat, Kind.CHAT), (message, Kind.MESSAGES), (message, Kind.COUNT_TOKENS)):
            with pytest.raises(BodyError) as caught:
                _read({**body, "tools": [function | {"name": "look"}, hosted]}, path)
            assert caught.value.param == "tools"
    assert _read({**chat, "tools": [function, {"type": "custom"}, {"function": {"name": "look"}}]}).model == "m"
    run_by_clients = [{"name": "look", "input_schema": {}}, {"type": "bash_20250124", "name": "bash"},
                      {"type": "text_editor_20250728", "name": "edit"}, {"type": "custom", "name": "look"},
                      {"type": "memory_20250818", "name": "memory"}]  # fmt: skip
    assert _read({**message, "tools": run_by_clients}, Kind.MESSAGES).model == "m"


def test_metadata_is_the_clients_but_for_what_localai_runs_by_it() -> None:
    assert _read(CHAT | {"metadata": {"url": "http://a", "priority": "9", "mcp": "x"}}).model == "m"
    for name in ("mcp_servers", "mcp_prompt", "MCP_resources"):
        with pytest.raises(BodyError, match="metadata"):
            _read(CHAT | {"metadata": {name: "a"}})


@pytest.mark.parametrize("name", ["mm_processor_kwargs", "media_io_kwargs"])
def test_multimodal_processor_options_that_name_a_device_are_refused(name: str) -> None:
    with pytest.raises(BodyError, match="device"):
        _read(CHAT | {name: {"device": "cuda:1"}})
    assert _read(CHAT | {name: {"max_pixels": 1024, "video": {"num_frames": 8}}}).model == "m"


@pytest.mark.parametrize("name", ["chat_template", "tokenize"])
def test_chat_template_arguments_that_override_the_request_are_refused(name: str) -> None:
    with pytest.raises(BodyError, match=name):
        _read(CHAT | {"chat_template_kwargs": {"enable_thinking": False, name: "x"}})
    assert _read(CHAT | {"chat_template_kwargs": {"enable_thinking": False}}).model == "m"


def _with(part: dict[str, Any]) -> dict[str, Any]:
    return {"model": "m", "messages": [{"role": "user", "content": [{"type": "text", "text": "what is this:"}, part]}]}


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_url", "image_url": {"url": "http://169.254.169.254/latest"}},
        {"type": "image_url", "image_url": "https://example.com/a.png"},
        {"type": "image_url", "image_url": {"url": "file:///etc/passwd"}},
        {"type": "image_url", "image_url": {"url": " HTTP://10.0.0.1/"}},
        {"type": "image_url", "image_url": {"url": "//10.0.0.1/a"}},
        {"type": "video", "video": ["https://example.com/a.mp4"]},
        {"type": "image", "image": "../../secret.png"},
        {
            "type": "text",
            "text": "x",
            "image_url": "http://10.0.0.1/",
        },  # the engine decides which one it reads
        {"image_url": "s3://bucket/key"},
        {"type": "audio_url", "audio_url": {"url": "/proc/self/environ"}},
        {"type": "audio_url", "audio_url": {"url": "//proc/self/environ"}},
        {"type": "video_url", "video_url": {"url": "videos/secret"}},
        {"type": "video_url", "video_url": {"url": "/dev/stdin"}},
        {"type": "image_embeds", "image_embeds": "gASV"},
        {"type": "prompt_embeds", "data": "gASV"},
        {"type": "image_url", "image_url": {"url": DATA_URL}, "uuid": "another tenant's"},
        {"type": "image_url", "image_url": {"url": DATA_URL, "content_hash": "another tenant's"}},
        {"type": "file", "file": {"file_id": "file-1"}},
    ],
)
def test_media_without_inline_data_are_refused(part: dict[str, Any]) -> None:
    passage = {"content": [part]}
    for kind, body in (
        (Kind.CHAT, _with(part)),
        (Kind.TOKENIZE, _with(part)),
        (Kind.EMBEDDINGS, _with(part)),
        (Kind.RERANK, {"model": "m", "query": passage, "documents": ["a"]}),
        (Kind.SCORE, {"model": "m", "text_1": "a", "text_2": [passage]}),
    ):
        with pytest.raises(BodyError) as caught:
            _read(body, kind)
        assert caught.value.outcome is outcome.INVALID_FIELD


def test_the_remedy_for_media_by_url_is_that_of_either_api() -> None:
    part = {"type": "image", "source": {"type": "url", "url": "https://example.com/a.png"}}
    with pytest.raises(BodyError, match=r"`data:` URL .in Anthropic's API as a source of type base64"):
        _read({**_with(part), "max_tokens": 5}, Kind.MESSAGES)


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_url", "image_url": {"url": DATA_URL, "detail": "low"}},
        {"type": "image_url", "image_url": {"url": "DATA:image/jpeg;base64,/9j/4AAQ"}},
        {"type": "input_audio", "input_audio": {"data": "UklGRg==", "format": "wav"}},
        {"type": "image", "image": "/9j/4AAQSkZJRg=="},
        {"type": "image", "image": "iVBORw0KGgo="},
        {"type": "video", "video": "A" * 4096},  # longer than any path
        {"type": "input_audio", "input_audio": {"data": "//uQxAAA", "format": "mp3"}},
        {"type": "file", "file": {"filename": "a.pdf", "file_data": "data:application/pdf;base64,JVBERi0="}},
        {"type": "text", "text": "see http://example.com/a.png", "cache_control": {"type": "ephemeral"}},
        {"type": "input_text", "text": "https://example.com"},
    ],
)
def test_media_with_their_data_pass(part: dict[str, Any]) -> None:
    assert _read(_with(part)).model == "m"


@pytest.mark.parametrize(
    ("url", "passes"),
    [
        ("https://cdn.example.com/a.png", True),
        ("HTTPS://CDN.EXAMPLE.COM/a.png?b=c", True),
        ("http://cdn.example.com:8080/a.png", True),
        ("http://cdn.example.com:81/a.png", False),
        ("https://cdn.example.com.evil.org/a.png", False),
        ("https://cdn.example.com@evil.org/a.png", False),
        ("https://evil.org#@cdn.example.com/", False),
        ("https://evil.org\\@cdn.example.com/", False),
        ("https://cdn.example.com /a.png", False),
        ("https://[::1/a", False),
        ("ftp://cdn.example.com/a", False),
        ("file://cdn.example.com/etc/passwd", False),
    ],
)
def test_media_by_url_pass_from_configured_hosts_alone(url: str, passes: bool) -> None:
    body = _with({"type": "image_url", "image_url": {"url": url}})
    rules = Guard(["cdn.example.com", "cdn.example.com:8080"])
    if passes:
        assert _read(body, rules=rules).model == "m"
        return
    with pytest.raises(BodyError):
        _read(body, rules=rules)


def test_unknown_fields_are_counted_by_name_and_bounded() -> None:
    rules = Guard()
    for i in range(300):
        _read(CHAT | {f"new_{i}": 1, "x": 2}, rules=rules)
        rules.count(rules.met())
    _read(CHAT | {"a\n# HELP": 1}, rules=rules)
    rules.count(rules.met())
    assert (rules.unknown["x"], len(rules.unknown)) == (300, 257)
    assert rules.unknown[field_guard.OTHER] == 45 + 1, (
        "of 256 names 255 were new; a name that is none counts with the rest"
    )


def test_kserve_requests_may_not_name_shared_memory_or_sequence_ids() -> None:
    shared = {"shared_memory_region": "theirs", "shared_memory_byte_size": 8}
    tensor = {"name": "a", "datatype": "FP32", "shape": [1]}
    for body in (
        {"inputs": [tensor | {"parameters": shared}]},
        {"inputs": [tensor | {"data": [1]}], "outputs": [{"name": "b", "parameters": shared}]},
        {"inputs": [tensor | {"data": [1]}], "parameters": {"sequence_id": 5}},
    ):
        with pytest.raises(BodyError):
            _read(body, Kind.INFER)
    fine = {"inputs": [tensor | {"data": [1]}], "outputs": [{"name": "b", "parameters": {"binary_data": True}}]}
    assert _read(fine, Kind.INFER).model == "m"


@pytest.mark.parametrize(
    ("query", "name"),
    [
        (b"model=other", "model"),
        (b"api-version=1&model=other", "model"),
        (b"a=1;model=other", "model"),
        (b"model", "model"),
        (b"Model=other", "model"),
        (b"%6dode%6C=other", "model"),
        (b"model%5B%5D=other", "model"),
        (b"model[0]=other", "model"),
        (b"max_to%E2%84%AAens=9", "max_tokens"),
        (b"kv_transfer_params=x", "kv_transfer_params"),
        (b"remote+host=x&callback_url=x", "callback_url"),
        (b"a=b&x-farhop-allow=eu", "x-farhop-allow"),
        (b"X%2DFarhop_Allow=eu", "x-farhop_allow"),
    ],
)
def test_no_field_may_be_in_the_query(query: bytes, name: str) -> None:
    """LiteLLM, and whatever has a parameter of that name beside the body, serves the query's model and not the
    body's."""
    with pytest.raises(BodyError) as caught:
        field_guard.query(b"/v1/chat/completions?" + query)
    assert (caught.value.outcome, caught.value.param) == (outcome.INVALID_FIELD, name)


@pytest.mark.parametrize(
    "query", [b"", b"beta=true", b"api-version=2024-01-01", b"trace=%ff&&=model&x=model", b"a=?model=b"]
)
def test_other_parameters_of_a_query_go_on(query: bytes) -> None:
    field_guard.query(b"/v1/messages?" + query)
    field_guard.query(b"/v1/messages")


def test_headers_to_engines_are_an_allow_list() -> None:
    lines = b"accept: a\r\ncookie: secret\r\nx-data-parallel-rank: 3\r\nx-request-id: 7\r\ncontent-type: b\r\n"
    assert engine_headers(lines) == b"accept: a\r\ncontent-type: b\r\n"
    assert engine_headers(b"") == b""


@pytest.mark.parametrize("fields", ["a&", "&", "%41;", "a=1&"])
def test_a_query_of_thousands_of_fields_is_refused_unread(fields: str) -> None:
    """They would stand in a head, which is judged before it is known who asks: 32 KiB of them took 60 ms."""
    with pytest.raises(BodyError, match="too many fields") as caught:
        field_guard.query(b"/v1/chat/completions?" + fields.encode() * 8000)
    assert caught.value.param == "query"
    field_guard.query(b"/v1/chat/completions?" + b"&".join([b"a=1"] * 64))
    with pytest.raises(BodyError, match="`model` is in the query"):
        field_guard.query(b"/v1/chat/completions?" + b"a=1&" * 60 + b"model=m")


@pytest.mark.parametrize("filler", ["_", "host_", "dp_", "x", "\u0130"])
def test_long_field_name_is_classified_by_its_ends(filler: str) -> None:
    """Looked at whole, one of 200,000 underscores held the loop for 150 ms."""
    long = filler * 100_000
    for name in ("host", "callback_url", "weights_path", "prompt_embeds", "data_parallel_rank", "device_ids",
                 "fallbacks", "context_window_fallback_dict", "replica_id", "directory"):  # fmt: skip
        assert family_of(f"{long}_{name}") == family_of(f"a_{name}") is not None
        assert family_of(f"{long}x{name}x") is None
    for name in ("lora", "loras", "pickled", "shared_memory"):
        assert family_of(f"{name}_{long}") == family_of(f"{name}_a") is not None
    took_s = []
    for _ in range(20):
        began = time.process_time()
        assert family_of(long) is None
        took_s.append(time.process_time() - began)
    assert min(took_s) < 0.01
