"""Engine failures recognised by the engines' own error texts; no other text counts as one."""

from __future__ import annotations

import time
from typing import Any

import msgspec
import pytest
from engine_pages import LLAMA, VLLM, Page, pages
from hypothesis import given, settings
from hypothesis import strategies as st
from relay_wire import AS_TARGET_0, SSE, Line, chunk, plain, post, until

from farhop.balance import outcome
from farhop.balance.outcome import Outcome
from farhop.relay.upstream import engine_faults
from farhop.relay.upstream.engine_faults import (
    FaultTap,
    PageTap,
    RefusalTap,
    in_event,
    in_text,
    is_too_long,
    is_unsupported,
    lacks_model,
    refuses_salt,
)
from farhop.relay.upstream.tap import StreamTap

OOM, BROKEN = outcome.ENGINE_OUT_OF_MEMORY, outcome.ENGINE_BROKEN
# From issues of the engines: vLLM, TGI, Triton, TensorRT-LLM, PyTorch on ROCm.
WORDS: list[tuple[bytes, Outcome | None]] = [
    (b'{"object":"error","message":"CUDA out of memory. Tried to allocate 20.00 MiB (GPU 0; 23 GiB total)"}', OOM),
    (b'{"error":"Request failed during generation: Server error: CUDA out of memory.","error_type":"generation"}', OOM),
    (b"torch.OutOfMemoryError: HIP out of memory. Tried to allocate 2 GiB", OOM),
    (b'{"error":"CUDA runtime error in cudaMalloc(): out of memory"}', OOM),
    (b"RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate(handle)", OOM),
    (b"CUDA error: an illegal memory access was encountered", BROKEN),
    (b"RuntimeError: CUDA error: device-side assert triggered", BROKEN),
    (b"NCCL error: unhandled cuda error", BROKEN),
    (b"EngineCore encountered an issue. See stack trace (above) for the root cause.", BROKEN),
    (b"AsyncEngineDeadError: Background loop is not running", BROKEN),
    (b'{"error":{"message":"Internal server error","type":"InternalServerError","code":500}}', None),
    (b"upstream connect error or disconnect", None),
    (b"", None),
]


@pytest.mark.parametrize(("text", "expected"), WORDS)
def test_error_texts_of_engines(text: bytes, expected: Outcome | None) -> None:
    assert in_text(text) is expected
    made = FaultTap()
    assert b"".join(made.feed(text[at : at + 7]) for at in range(0, len(text), 7)) == b""
    assert made.finish() == (b"" if made.unfit else text)
    assert made.unfit == (not text.startswith(b"{"))
    assert made.says_nothing == (made.unfit and expected is None)
    assert made.fault is expected
    assert made.usage is None


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (b"GPU " + b"x" * 199 + b" out of memory", OOM),
        (b"GPU " + b"x" * 300 + b" out of memory", None),
        (b"GPU\nout of memory", None),
        (b'"GPU" out of memory', None),
        (b"GPUs are out of memory", None),
        (b"a host is out of memory; so is XPU: out of memory", OOM),
    ],
)
def test_a_gpu_that_has_no_room_is_named_near_by(text: bytes, expected: Outcome | None) -> None:
    assert in_text(text) is expected


@pytest.mark.parametrize("word", [b"GPU ", b"HIP ", b"nccl ", b"GPU out of memor ", b'GPU" out of memory '])
def test_no_error_takes_long_to_read(word: bytes) -> None:
    """16 KiB of a GPU's name took 20 ms."""
    text, took = word * (engine_faults.BODY_BYTES_MAX // len(word)), list[float]()
    for _ in range(5):
        began = time.process_time()
        in_text(text)
        took.append(time.process_time() - began)
    assert min(took) < 4e-3


def test_only_the_last_of_many_error_events_are_parsed(monkeypatch: pytest.MonkeyPatch) -> None:
    """An error is a stream's last event but for `[DONE]`: each of 16 KiB of them was read, for 15 ms."""
    read = list[bytes]()
    monkeypatch.setattr(engine_faults, "in_event", lambda event: read.append(event) or in_event(event))
    made = StreamTap(hide_usage=False)
    made.feed(b'data: {"error":{"code":400}}\n\n' * 200 + b'data: {"error":{"code":500}}\n\ndata: [DONE]\n\n')
    made.finish()
    assert made.fault is outcome.ENGINE_ERROR
    assert len(read) < 5


def test_of_a_failure_without_end_only_the_beginning_is_kept() -> None:
    made = FaultTap()
    for _ in range(100):
        assert made.feed(b"x" * 1000) == b""
        assert len(made.held) <= engine_faults.BODY_BYTES_MAX
    assert made.over_bound
    made.feed(b"CUDA out of memory")
    made.finish()
    assert made.fault is None
    assert made.held == b""


@pytest.mark.parametrize(
    ("document", "expected"),
    [
        ({"error": {"message": "CUDA out of memory", "code": 500}}, OOM),
        ({"error": "CUDA error: unspecified launch failure"}, BROKEN),
        ({"error": {"message": "no", "code": 500}}, outcome.ENGINE_ERROR),
        ({"error": {"message": "too long", "type": "BadRequestError", "code": 400}}, None),
        ({"error": {"message": "no"}}, None),
        ({"error": None, "choices": []}, None),
        ({"choices": [{"delta": {"content": '{"error":"CUDA out of memory"}'}}]}, None),
        ({"choices": [{"delta": {"tool": {"error": "CUDA out of memory"}}}]}, None),
        ([{"error": "CUDA out of memory"}], None),
    ],
)
def test_an_event_counts_only_if_it_is_an_error(document: Any, expected: Outcome | None) -> None:
    event = b"data: " + msgspec.json.encode(document)
    assert in_event(event) is expected
    for end in (b"\n\n", b"\r\n\r\n"):
        stream = b'data: {"choices":[]}' + end + event + end + b"data: [DONE]" + end
        made = StreamTap(hide_usage=False)
        assert made.feed(stream) + made.finish() == stream
        assert made.fault is expected


def test_an_error_is_found_however_the_stream_was_cut() -> None:
    stream = b'data: {"choices":[]}\n\ndata: {"error":"CUDA out of memory"}\n\ndata: [DONE]\n\n'
    for first in range(1, len(stream)):
        for second in range(first + 1, len(stream)):
            made = StreamTap(hide_usage=False)
            out = b"".join(made.feed(part) for part in (stream[:first], stream[first:second], stream[second:]))
            assert out + made.finish() == stream
            assert made.fault is OOM, (first, second)


@given(st.binary(max_size=200))
@settings(max_examples=200, deadline=None, derandomize=True)
def test_no_bytes_break_it(data: bytes) -> None:
    in_text(data)
    in_event(b'data: {"error"' + data)
    made = StreamTap(hide_usage=True)
    made.feed(b'data: {"error":' + data)
    made.finish()


@pytest.mark.parametrize("split", [False, True])
async def test_an_error_that_ends_a_stream_is_reported_to_the_machine(stage: Any, split: bool) -> None:
    s = await stage()
    error = b'data: {"error":{"message":"CUDA out of memory","code":500}}\n\n'

    async def script(line: Line) -> None:
        await s.upstream.request(line)
        await line.send(SSE + chunk(b"data: 1\n\n"))
        await until(lambda: s.flow.event_names().count("AttemptBegan"))
        pieces = (error[:20], error[20:], b"data: [DONE]\n\n") if split else (error + b"data: [DONE]\n\n",)
        for piece in pieces[:-1]:
            await line.send(chunk(piece))
        await line.send(chunk(pieces[-1]) + b"0\r\n\r\n")
        await s.upstream.request(line)

    s.upstream.script = script
    c = await s.client()
    await c.send(post())
    assert error.strip() in await c.reader.readuntil(b"0\r\n\r\n")  # it is passed on unchanged
    await until(lambda: s.tier.concluded_with)
    ended = s.flow.events[-1]
    assert (ended.status, ended.fault) == (200, OOM)
    assert s.tier.attempts == [(1, "engine_out_of_memory")]


@pytest.mark.parametrize(("status", "expected"), [(500, OOM), (424, OOM), (400, None), (200, None)])
async def test_only_a_failures_body_is_looked_at(stage: Any, status: int, expected: Outcome | None) -> None:
    s = await stage()
    body = b'{"error":"CUDA out of memory"}'
    s.upstream.answer = lambda _m: plain(body, status=f"{status} X")
    answer = await s.ask(post())
    assert (answer.status, answer.body) == (status, body)
    await until(lambda: s.tier.concluded_with)
    assert s.flow.events[-1].fault is expected


@pytest.mark.parametrize(
    ("body", "asked"),
    [
        (b"<html>Bad Gateway</html>", 2),
        (b"CUDA out of memory", 1),
        (b'Traceback (most recent call last):\n  File "a.py", line 1, in <module>\nValueError: no\n', 1),
    ],
)
async def test_a_502_in_an_engine_s_own_words_is_asked_for_nowhere_else(stage: Any, body: bytes, asked: int) -> None:
    s = await stage()
    s.flow.addresses = [s.upstream.address] * 2
    s.upstream.answer = lambda _m: plain(body, status="502 X")
    assert (await s.ask(post())).status == 502
    assert len(s.upstream.asked) == asked


async def test_engine_faults_relayed_by_the_tier_below_are_not_judged_again(stage: Any) -> None:
    s = await stage(over_tier=True)
    s.upstream.answer = lambda _m: plain(b'{"error":"CUDA out of memory"}', status="500 X", headers=AS_TARGET_0)
    await s.ask(post())
    await until(lambda: s.tier.concluded_with)
    assert s.flow.events[-1].fault is None


# -- as real engines say it (tests/pages)

NOWHERE = {"error-no-such-path", "error-no-such-path-get", "error-wrong-method"}
UNSUPPORTED = {(engine, name) for engine in (VLLM, LLAMA) for name in (*NOWHERE, "error-not-an-embedder")}
REFUSED = [page for page in pages() if page.status >= 400]


@pytest.mark.parametrize("page", REFUSED, ids=lambda page: f"{page.engine}-{page.name}")
def test_a_refusal_by_a_real_engine_does_not_count_as_its_failure(page: Page) -> None:
    assert in_text(page.body) is None
    assert in_event(b"data: " + page.body) in (None, outcome.ENGINE_ERROR)
    if page.status not in (404, 405, 501):
        assert (page.engine, page.name) not in UNSUPPORTED
        return
    made = RefusalTap(is_unsupported, outcome.PATH_UNSUPPORTED)
    passed = b"".join(made.feed(page.body[at : at + 7]) for at in range(0, len(page.body), 7)) + made.finish()
    assert (made.reason is not None) == ((page.engine, page.name) in UNSUPPORTED)
    assert passed == (b"" if made.reason is not None else page.body)


def test_the_page_of_a_web_server_is_no_engine_s() -> None:
    assert is_unsupported(b"\r\n<html>\r\n<head><title>404 Not Found</title></head>")
    assert not is_unsupported(b"model < 3 not found")


@pytest.mark.parametrize("size", [1, 7, 9000])
def test_html_is_no_answer_and_what_is_only_called_so_is_one(size: int) -> None:
    def passed(body: bytes) -> tuple[bytes, Outcome | None]:
        made = PageTap()
        given = b""
        for at in range(0, len(body), size):
            given += made.feed(body[at : at + size])
            assert made.held_bytes <= max(size, engine_faults.REFUSAL_BYTES_MAX)
        given += made.finish()
        assert made.held_bytes == 0
        return given, made.reason

    assert passed(b"\r\n <!doctype html>" + b"x" * 6000) == (b"", outcome.NO_ENGINE_THERE)
    for body in (b'\n{"choices":[{"text":"<html>"}]}', b"", b" " * 9000 + b"<html>"):
        assert passed(body) == (body, None)


@pytest.mark.parametrize(
    "said",
    [
        # vLLM, of several years
        "This model's maximum context length is 4096 tokens. However, you requested 5000 tokens.",
        "The decoder prompt (length 9000) is longer than the maximum model length of 4096.",
        "You passed 4000 input tokens and requested 500 output tokens. However, the model's context length is only 4.",
        # SGLang
        "The input (9000 tokens) is longer than the model's context length (8192 tokens).",
        "Requested token count exceeds the model's maximum context length of 8192 tokens.",
        "Input length (9000 tokens) exceeds the maximum allowed length (8000 tokens). Use a shorter input.",
        # TGI
        "Input validation error: `inputs` must have less than 1024 tokens. Given: 2000",
        "Input validation error: `inputs` tokens + `max_new_tokens` must be <= 2048. Given: 2000 and 100",
        # llama.cpp, TensorRT-LLM
        "request (9000 tokens) exceeds the available context size (4096 tokens), try increasing it",
        "Prompt length (9000) exceeds maximum input length (4096).",
    ],
)
def test_refusals_for_length_of_all_engines_are_recognised(said: str) -> None:
    made = RefusalTap(is_too_long, outcome.TOO_LONG)
    assert made.feed(b'{"error":{"message":"' + said.encode() + b'"}}') + made.finish() == b""
    assert made.reason is outcome.TOO_LONG


def test_other_refusals_pass_as_they_are_and_so_do_long_ones() -> None:
    for body in (b'{"error":{"message":"temperature must be non-negative"}}', b"x" * 5000 + b"maximum context length"):
        made = RefusalTap(is_too_long, outcome.TOO_LONG)
        assert b"".join(made.feed(body[at : at + 999]) for at in range(0, len(body), 999)) + made.finish() == body
        assert made.reason is None


@pytest.mark.parametrize("page", REFUSED, ids=lambda page: f"{page.engine}-{page.name}")
def test_length_refusals_are_told_from_other_errors_in_real_engines_pages(page: Page) -> None:
    assert is_too_long(page.body) == ("too-long" in page.name or "context" in page.name)


@pytest.mark.parametrize(
    "said",
    [
        '{"object":"error","message":"The model `m/x-3.1` does not exist.","type":"NotFoundError","code":404}',
        '{"error":{"message":"model \\"m:8b\\" not found, try pulling it first","type":"api_error","code":null}}',
        '{"error":{"message":"Model not found: m","type":"not_found"}}',
        '{"detail":"Unknown model: m"}',
        '{"error":"Request for unknown model: \'m\' is not found"}',
        '{"error":{"message":"The model `m` does not exist or you have no access to it.","code":"model_not_found"}}',
    ],
)
def test_an_engine_that_lacks_the_model_is_recognised(said: str) -> None:
    assert lacks_model(said.encode())
    assert not is_unsupported(said.encode())


@pytest.mark.parametrize("page", [page for page in REFUSED if page.status == 404], ids=lambda page: page.name)
def test_a_missing_model_is_told_from_other_404s_in_real_engines_pages(page: Page) -> None:
    assert lacks_model(page.body) == (page.name in ("error-no-such-model", "error-no-such-adapter"))


def test_the_pages_have_every_kind_of_refusal() -> None:
    fields = {(page.engine, page.status) for page in REFUSED}
    assert fields == {(VLLM, 400), (VLLM, 404), (VLLM, 405), (LLAMA, 400), (LLAMA, 404), (LLAMA, 500), (LLAMA, 501)}


@pytest.mark.parametrize(
    "body",
    [
        b"""{"detail":"Unexpected fields in the request: {'cache_salt'}"}""",  # transformers 5.24
        b"""{"detail":"Unexpected fields in the request: {'foo', 'cache_salt'}"}""",
        b'{"detail":[{"type":"extra_forbidden","loc":["body","cache_salt"],"msg":"Extra inputs are not permitted"}]}',
        b"""{"object":"error","message":"[{'type': 'extra_forbidden', 'loc': ('body', 'cache_salt'), 'msg': 'Extra"}""",
        b'{"error":{"message":"Unrecognized request argument supplied: cache_salt","type":"invalid_request_error"}}',
        b"""{"error":{"message":"Unknown parameter: 'cache_salt'.","param":"cache_salt","code":"unknown_parameter"}}""",
        b"""{"error":{"message":"property 'cache_salt' is unsupported"}}""",
        b'{"error":{"message":"json: unknown field \\"cache_salt\\""}}',
        b"Failed to deserialize the JSON body into the target type: unknown field `cache_salt`, expected `model`",
    ],
)  # fmt: skip
def test_refusals_of_cache_salt_by_all_engines_are_recognised(body: bytes) -> None:
    assert refuses_salt(body)


@pytest.mark.parametrize(
    "body",
    [
        b'{"error":{"message":"1 validation error: input_value=\'Unknown parameter: cache_salt\'"}}',
        b'{"error":{"message":"unknown field `cache_salt`, expected `json_schema`"}}',  # of a client's grammar
        b'{"detail":[{"type":"string_type","loc":["body","cache_salt"],"msg":"Input should be a valid string"}]}',
        b'{"detail":[{"type":"extra_forbidden","loc":["body","tools",0,"cache_salt"]}]}',
        b"""{"message":"[{'type': 'float_parsing', 'loc': ('body', 'temperature'), 'input': \\"[{'type': 'extra_forbidden', 'loc': ('body', 'cache_salt')\\"}]"}""",  # noqa: E501
        b'{"error":{"message":"Unknown parameter: cache_salts"}}',
        b"", b"[]", b"null", b"7", b'{"detail":[]}', b'{"error":{"error":null}}', b"\xff\xfe", b"[" * 4000,
    ],
)  # fmt: skip
def test_other_refusals_are_not_taken_for_a_refused_salt(body: bytes) -> None:
    assert not refuses_salt(body)
